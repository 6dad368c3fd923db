"""Export to ONNX: encoder.onnx, decoder.onnx and the tokenizers, written with the package onnx.

encoder.onnx   input_ids (b, s), attention_mask (b, s) → cross_key.i, cross_value.i (b, h, s, d) per layer
decoder.onnx   input_ids (b, t), attention_mask (b, s), cross_*.i, past_key.i, past_value.i (b, h, p, d)
               → logits (b, t, V), present_*.i (b, h, p + t, d), alignment (b, t, s)

At the first step, past_* have length 0; afterwards, they are the present_* from the previous step. Beam
search must reorder their rows.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from regard._util.extras import installed_version, require
from regard._util.files import write_atomic
from regard.models.layers.attention import MultiHeadAttention
from regard.models.layers.blocks import Stack, TransformerConfig
from regard.translation.export.plan import Plan, array, write_json, write_vocabulary

_OPSET = 17
_IR_VERSION = 8
_MASKED = numpy.float32(-1e9)
_GATES = {"reglu": "relu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}
ENCODER, DECODER = "encoder.onnx", "decoder.onnx"


def export_onnx(plan: Plan, folder: Path) -> None:
    """Write two graphs, the tokenizers and config.json with the ids of the special tokens."""
    _check(plan)
    require("onnx", "export --to onnx")
    for name, graph in ((ENCODER, _encoder(plan)), (DECODER, _decoder(plan))):
        write_atomic(folder / name, graph.serialize())
    files = {
        side: write_vocabulary(getattr(plan.tokens, side), folder / side) for side in ("source", "target")
    }
    for side in ("source", "target"):
        pieces = {piece: i for i, piece in enumerate(plan.pieces(side))}
        write_json(folder / f"{side}_vocabulary.json", pieces)
    special, (layer, heads) = plan.tokens.special, plan.alignment()
    source = special.source([])
    first = len(special.source_prefix)
    config = {
        "format": "regard onnx 1",
        "tokenizers": files,
        "source_prefix": source[:first],
        "source_suffix": source[first:],
        "target_start": list(special.target_start),
        "end": special.end,
        "unknown": special.unknown,
        "decoder_layers": plan.configs[1].layers,
        "heads": plan.configs[1].heads,
        "head_width": plan.configs[1].resolved_head_width,
        "alignment": {"layer": layer, "heads": heads, "shift": plan.head.shift},
    }
    write_json(folder / "config.json", config)


def _check(plan: Plan) -> None:
    for config in plan.configs:
        plan.require("positions", config.positions, "sinusoidal", "learned", "t5", "none")
        plan.require("norm", config.norm, "layer", "rms")


class _Graph:
    """Builds an ONNX graph: each method appends a node and returns the name of its output."""

    def __init__(self, name: str) -> None:
        self.onnx: Any = import_module("onnx")
        self.name = name
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self._constants: dict[Any, str] = {}

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Append a node."""
        names = [f"{kind}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def tensor(self, value: Any, name: str | None = None) -> str:
        """Add a constant tensor; small constants are shared."""
        value = numpy.asarray(value)
        key = (value.dtype.str, value.shape, value.tobytes()) if value.size < 64 and name is None else None
        if key in self._constants:
            return self._constants[key]
        name = name or f"constant_{len(self.initializers)}"
        self.initializers.append(self.onnx.numpy_helper.from_array(value, name))
        if key is not None:
            self._constants[key] = name
        return name

    def integers(self, *values: int) -> str:
        """Add a constant vector of integers."""
        return self.tensor(numpy.array(values, numpy.int64))

    def input(self, name: str, shape: Sequence[Any], integer: bool = False) -> str:
        """Declare an input."""
        self.inputs.append(self._value(name, shape, integer))
        return name

    def output(self, value: str, name: str, shape: Sequence[Any]) -> None:
        """Declare an output."""
        self.nodes.append(self.onnx.helper.make_node("Identity", [value], [name]))
        self.outputs.append(self._value(name, shape, False))

    def _value(self, name: str, shape: Sequence[Any], integer: bool) -> Any:
        kinds = self.onnx.TensorProto
        kind = kinds.INT64 if integer else kinds.FLOAT
        return self.onnx.helper.make_tensor_value_info(name, kind, list(shape))

    def size(self, value: str, axis: int) -> str:
        """Return the length of an axis, as a one-element vector."""
        return self.op("Gather", self.op("Shape", value), self.integers(axis), axis=0)

    def serialize(self) -> bytes:
        """Check the model and return it as bytes."""
        helper = self.onnx.helper
        graph = helper.make_graph(self.nodes, self.name, self.inputs, self.outputs, self.initializers)
        opset = [helper.make_opsetid("", _OPSET)]
        model = helper.make_model(graph, opset_imports=opset, producer_name="regard")
        model.ir_version, model.producer_version = _IR_VERSION, installed_version()
        self.onnx.checker.check_model(model)
        return model.SerializeToString()

    def linear(self, x: str, weight: Any, bias: Any) -> str:
        """Apply a linear layer: x Wᵀ + b."""
        result = self.op("MatMul", x, self.tensor(array(weight.T)))
        return result if bias is None else self.op("Add", result, self.tensor(array(bias)))

    def norm(self, x: str, module: nn.Module, eps: float) -> str:
        """Apply layer norm or RMS norm."""
        if isinstance(module, nn.Identity):
            return x
        weight = self.tensor(array(module.weight))  # type: ignore[arg-type]
        if isinstance(module, nn.LayerNorm):
            return self.op(
                "LayerNormalization", x, weight, self.tensor(array(module.bias)), axis=-1, epsilon=eps
            )
        square = self.op("ReduceMean", self.op("Mul", x, x), axes=[-1], keepdims=1)
        scale = self.op("Sqrt", self.op("Add", square, self.tensor(numpy.float32(eps))))
        return self.op("Mul", self.op("Div", x, scale), weight)

    def activation(self, x: str, name: str) -> str:
        """Apply an activation function."""
        if name == "relu":
            return self.op("Relu", x)
        if name == "silu":
            return self.op("Mul", x, self.op("Sigmoid", x))
        half = self.tensor(numpy.float32(0.5))
        one = self.tensor(numpy.float32(1))
        if name == "gelu":
            inner = self.op("Erf", self.op("Mul", x, self.tensor(numpy.float32(0.5**0.5))))
        else:
            cubic = self.op("Mul", self.op("Mul", x, x), x)
            cubic = self.op("Mul", cubic, self.tensor(numpy.float32(0.044715)))
            scale = self.tensor(numpy.float32((2 / numpy.pi) ** 0.5))
            inner = self.op("Tanh", self.op("Mul", self.op("Add", x, cubic), scale))
        return self.op("Mul", self.op("Mul", x, half), self.op("Add", inner, one))

    def feed_forward(self, x: str, module: Any) -> str:
        """Apply a feed-forward layer, gated or not."""
        hidden = self.linear(x, module.in_proj.weight, module.in_proj.bias)
        if module.activation in _GATES:
            gate, hidden = self.op("Split", hidden, axis=-1, outputs=2)
            hidden = self.op("Mul", self.activation(gate, _GATES[module.activation]), hidden)
        else:
            hidden = self.activation(hidden, module.activation)
        return self.linear(hidden, module.out_proj.weight, module.out_proj.bias)

    def heads(self, x: str, attention: MultiHeadAttention) -> str:
        """Split into heads: b n (h d) -> b h n d."""
        shape = self.integers(0, 0, attention.heads, attention.head_width)
        return self.op("Transpose", self.op("Reshape", x, shape), perm=[0, 2, 1, 3])

    def project(self, x: str, attention: MultiHeadAttention, which: int) -> str:
        """Return queries (0), keys (1) or values (2): b h n d."""
        return self.heads(self.linear(x, *attention.projection(which)), attention)

    def attend(
        self, attention: MultiHeadAttention, query: str, key: str, value: str, bias: str
    ) -> tuple[str, str]:
        """Return the output (b, n, m) and the weights (b, h, n, k). `bias` is added to the scores."""
        scores = self.op("MatMul", query, self.op("Transpose", key, perm=[0, 1, 3, 2]))
        if type(attention.score).__name__ == "ScaledDot":
            scores = self.op("Mul", scores, self.tensor(numpy.float32(attention.head_width**-0.5)))
        weights = self.op("Softmax", self.op("Add", scores, bias), axis=-1)
        merged = self.op("Transpose", self.op("MatMul", weights, value), perm=[0, 2, 1, 3])
        merged = self.op("Reshape", merged, self.integers(0, 0, attention.heads * attention.head_width))
        return self.linear(merged, attention.out_proj.weight, attention.out_proj.bias), weights

    def residual(self, module: Any, x: str, sublayer: Any, eps: float) -> str:
        """Apply a residual sublayer: x + f(norm(x)), or norm(x + f(x))."""
        if module.norm_first:
            return self.op("Add", x, sublayer(self.norm(x, module.norm, eps)))
        return self.norm(self.op("Add", x, sublayer(x)), module.norm, eps)

    def embed(self, tokens: str, plan: Plan, side: str, start: str | None) -> str:
        """Embed tokens and add positions, counted from `start`."""
        stack, model = getattr(plan.model, side), plan.model
        config: TransformerConfig = stack.config
        embedding = model.embedding if side == "decoder" else model.source_embedding or model.embedding
        x = self.op("Gather", self.tensor(array(embedding.weight)), tokens)
        if config.scale_embedding:
            x = self.op("Mul", x, self.tensor(numpy.float32(config.width**0.5)))
        if config.positions in ("sinusoidal", "learned"):
            first = start or self.integers(0)
            last = self.op("Add", first, self.size(tokens, 1))
            table = self.tensor(plan.positions(side))
            x = self.op("Add", x, self.op("Slice", table, first, last, self.integers(0)))
        return self.norm(x, stack.embedding_norm, config.eps)

    def source_mask(self) -> str:
        """Return the padding bias, (b, 1, 1, s): 0 for tokens and −1e9 for padding."""
        mask = self.op("Cast", "attention_mask", to=self.onnx.TensorProto.FLOAT)
        mask = self.op("Mul", self.op("Sub", self.tensor(numpy.float32(1)), mask), self.tensor(_MASKED))
        return self.op("Unsqueeze", mask, self.integers(1, 2))

    def distances(self, queries: str, start: str, keys: str) -> str:
        """Return key − query positions, (n, k); `queries` and `keys` are lengths."""
        zero, one = self.tensor(numpy.int64(0)), self.tensor(numpy.int64(1))

        def scalar(x: str) -> str:
            return self.op("Squeeze", x, self.integers(0))

        key = self.op("Range", zero, scalar(keys), one)
        stop = self.op("Add", scalar(start), scalar(queries))
        query = self.op("Range", scalar(start), stop, one)
        query = self.op("Unsqueeze", query, self.integers(1))
        return self.op("Sub", self.op("Unsqueeze", key, self.integers(0)), query)

    def relative_bias(self, stack: Any, distances: str, limit: int) -> str:
        """Look up T5's bias for each distance, (1, h, n, k); distances beyond the limit share a bucket."""
        with torch.no_grad():
            table = array(stack.positions(torch.arange(-limit, limit + 1)))  # (heads, distances)
        bound = self.tensor(numpy.int64(limit))
        low = self.op("Max", distances, self.tensor(numpy.int64(-limit)))
        index = self.op("Add", self.op("Min", low, bound), bound)
        return self.op("Unsqueeze", self.op("Gather", self.tensor(table), index, axis=1), self.integers(0))


def _blocks(stack: Stack) -> list[Any]:
    return list(stack.blocks)


def _encoder(plan: Plan) -> _Graph:
    graph, stack = _Graph("encoder"), plan.model.encoder
    tokens = graph.input("input_ids", ("batch", "source"), integer=True)
    graph.input("attention_mask", ("batch", "source"), integer=True)
    x, bias = graph.embed(tokens, plan, "encoder", None), graph.source_mask()
    if stack.config.positions == "t5":
        length = graph.size(tokens, 1)
        distances = graph.distances(length, graph.integers(0), length)
        bias = graph.op("Add", graph.relative_bias(stack, distances, stack.config.max_distance), bias)
    eps = stack.config.eps
    for block in _blocks(stack):

        def self_attention(y: str, attention: Any = block.attention) -> str:
            query, key, value = (graph.project(y, attention, which) for which in range(3))
            return graph.attend(attention, query, key, value, bias)[0]

        def feed_forward(y: str, module: Any = block.feed_forward) -> str:
            return graph.feed_forward(y, module)

        x = graph.residual(block.attention_residual, x, self_attention, eps)
        x = graph.residual(block.feed_forward_residual, x, feed_forward, eps)
    x = graph.norm(x, stack.norm, eps)
    for i, block in enumerate(_blocks(plan.model.decoder)):
        shape = ("batch", block.cross.heads, "source", block.cross.head_width)
        graph.output(graph.project(x, block.cross, 1), f"cross_key.{i}", shape)
        graph.output(graph.project(x, block.cross, 2), f"cross_value.{i}", shape)
    return graph


def _decoder(plan: Plan) -> _Graph:
    graph, stack = _Graph("decoder"), plan.model.decoder
    tokens = graph.input("input_ids", ("batch", "target"), integer=True)
    graph.input("attention_mask", ("batch", "source"), integer=True)
    for i, block in enumerate(_blocks(stack)):
        heads, width = block.cross.heads, block.cross.head_width
        for name in (f"cross_key.{i}", f"cross_value.{i}"):
            graph.input(name, ("batch", heads, "source", width))
        for name in (f"past_key.{i}", f"past_value.{i}"):
            graph.input(name, ("batch", heads, "past", width))
    past, new = graph.size("past_key.0", 2), graph.size(tokens, 1)
    x, source_bias = graph.embed(tokens, plan, "decoder", past), graph.source_mask()
    distances = graph.distances(new, past, graph.op("Add", past, new))
    future = graph.op("Greater", distances, graph.tensor(numpy.int64(0)))
    bias = graph.op("Where", future, graph.tensor(_MASKED), graph.tensor(numpy.float32(0)))
    if stack.config.positions == "t5":
        bias = graph.op("Add", graph.relative_bias(stack, distances, stack.config.max_distance), bias)
    eps, (aligned, heads) = stack.config.eps, plan.alignment()
    for i, block in enumerate(_blocks(stack)):
        present: list[str] = []

        def self_attention(
            y: str, i: int = i, attention: Any = block.attention, present: Any = present
        ) -> str:
            query = graph.project(y, attention, 0)
            for which, name in ((1, "key"), (2, "value")):
                new = graph.project(y, attention, which)
                present.append(graph.op("Concat", f"past_{name}.{i}", new, axis=2))
            return graph.attend(attention, query, present[0], present[1], bias)[0]

        def cross_attention(y: str, i: int = i, attention: Any = block.cross) -> str:
            query = graph.project(y, attention, 0)
            output, weights = graph.attend(
                attention, query, f"cross_key.{i}", f"cross_value.{i}", source_bias
            )
            if i == aligned:
                selected = graph.op("Gather", weights, graph.integers(*heads), axis=1)
                mean = graph.op("ReduceMean", selected, axes=[1], keepdims=0)
                graph.output(mean, "alignment", ("batch", "target", "source"))
            return output

        def feed_forward(y: str, module: Any = block.feed_forward) -> str:
            return graph.feed_forward(y, module)

        x = graph.residual(block.attention_residual, x, self_attention, eps)
        x = graph.residual(block.cross_residual, x, cross_attention, eps)
        x = graph.residual(block.feed_forward_residual, x, feed_forward, eps)
        shape = ("batch", block.cross.heads, "length", block.cross.head_width)
        for name, value in zip(("key", "value"), present, strict=True):
            graph.output(value, f"present_{name}.{i}", shape)
    x = graph.norm(x, stack.norm, eps)
    if plan.model.output_scale != 1:
        x = graph.op("Mul", x, graph.tensor(numpy.float32(plan.model.output_scale)))
    logits = graph.op("MatMul", x, graph.tensor(array(plan.model.output_weight.T)))
    logits = graph.op("Add", logits, graph.tensor(plan.output_bias()))
    graph.output(logits, "logits", ("batch", "target", len(plan.model.output_weight)))
    return graph
