"""Train the shipped language model on stories of the grammar."""

import argparse
import time

import torch

from regard.app.stories.training import consistency, held_out_loss, train_stories
from regard.models.text_model import load_language_model


def main() -> None:
    """Train, save and evaluate a model."""
    parser = argparse.ArgumentParser(prog="python -m regard.app.stories", description=__doc__)
    parser.add_argument("folder", help="Where to save the model.")
    parser.add_argument("--updates", type=int, default=6000, help="Optimizer updates. [default: 6000]")
    parser.add_argument("--resume", action="store_true", help="Continue from the model in the folder.")
    parser.add_argument("--seed", type=int, default=0, help="Random seed. [default: 0]")
    arguments = parser.parse_args()
    start = time.monotonic()
    initial = load_language_model(arguments.folder) if arguments.resume else None
    model = train_stories(arguments.updates, arguments.seed, initial=initial, progress=True)
    model.save(arguments.folder)
    seconds, threads = time.monotonic() - start, torch.get_num_threads()
    print(f"{model}: {seconds:.0f} s on {threads} threads. Saved in {arguments.folder}.")
    loss, consistent = held_out_loss(model), consistency(model)
    print(f"Stories of another seed: loss {loss:.3f}, {consistent:.1%} without contradiction.")


if __name__ == "__main__":
    main()
