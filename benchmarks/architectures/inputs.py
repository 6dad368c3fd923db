"""Inputs that a model of unknown type may accept, and its first output."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def candidate_inputs(model: Any) -> Iterator[dict[str, Tensor]]:
    """Yield batches of two inputs that the model may accept; the first text is padded."""
    torch.manual_seed(1)
    accepted = inspect.signature(model.forward).parameters
    config = model.config
    ids, target = torch.randint(3, 60, (2, 12)), torch.randint(3, 60, (2, 8))
    mask = torch.ones_like(ids)
    mask[0, 8:] = 0
    text = {"input_ids": ids, "attention_mask": mask}
    size = getattr(config, "image_size", None) or getattr(
        getattr(config, "vision_config", None), "image_size", 32
    )
    size = size if isinstance(size, int) else 32
    channels = getattr(config, "num_channels", 3)
    mels = next(
        (
            getattr(config, n)
            for n in ("num_mel_bins", "feature_size", "input_feat_per_channel")
            if hasattr(config, n)
        ),
        8,
    )
    decoder = {"decoder_input_ids": target} if "decoder_input_ids" in accepted else {}
    batches = [
        {**text, **decoder},
        {"pixel_values": torch.randn(2, channels if isinstance(channels, int) else 3, size, size)},
        {"pixel_values": torch.randn(2, 3, 64, 64)},
        {"pixel_values": torch.randn(2, 3, 224, 224)},
        {"input_values": torch.randn(2, 400), **decoder},
        {"input_values": torch.randn(2, 1600), **decoder},
        {"input_features": torch.randn(2, mels, 24), **decoder},
        {"input_features": torch.randn(2, 24, mels), **decoder},
        {**text, "pixel_values": torch.randn(2, 3, size, size)},
        {"input_ids": ids},
        {"pixel_values": torch.randn(2, 4, 3, size, size)},
        {"pixel_values_videos": torch.randn(2, 4, 3, size, size)},
        {"inputs_embeds": torch.randn(2, 12, 32)},
        {"input_ids": ids, "bbox": torch.zeros(2, 12, 4, dtype=torch.long)},
    ]
    for batch in batches:
        batch = {key: value for key, value in batch.items() if key in accepted or key == "attention_mask"}
        if "attention_mask" not in accepted:
            batch.pop("attention_mask", None)
        if batch and set(batch) != {"attention_mask"}:
            yield batch


def run(model: Any, batch: dict[str, Tensor], **options: Any) -> Any:
    """Run a model with a fixed seed, because some models mask at random."""
    torch.manual_seed(2)
    return model(**batch, **options)


def find_inputs(model: Any) -> dict[str, Tensor]:
    """Return the first batch that the model accepts."""
    errors = []
    for batch in candidate_inputs(model):
        try:
            first_tensor(run(model, batch))
            return batch
        except TimeoutError:
            raise
        except Exception as error:  # a model may raise any exception for a wrong input
            errors.append(f"{', '.join(batch)}: {type(error).__name__}: {error}".replace("\n", " ")[:150])
    raise ValueError(f"no known input: {errors[0] if errors else 'none fits its signature'}")


def first_tensor(output: Any) -> Tensor:
    """Return the first floating-point tensor in an output."""
    values = output.values() if hasattr(output, "values") else output
    for value in [output] if isinstance(output, Tensor) else values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
        if isinstance(value, tuple | list) or hasattr(value, "values"):
            try:
                return first_tensor(value)
            except ValueError:
                continue
    raise ValueError("the model returns no floating-point tensor")
