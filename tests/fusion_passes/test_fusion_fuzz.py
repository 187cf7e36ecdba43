"""Random graphs out of the snippets that fusions look for, most of them spoiled in one place: fused or not, the numbers
must stay.

Each seed draws a chain of blocks (convolution, normalization, activation, residual, attention, feed-forward); a block
may have a wrong axis, scale, mask, permutation, split or affine, and any value may become an output as well.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import fusion_passes
from fusion_passes import DOMAIN
from fusion_passes.lower import fold_bias, layer_norm, linear_add, nhwc_layout, pack_qkv, upsample_nearest
from fusion_passes.operators import bodies
from fusion_passes.pass_ import run_all, totals

NHWC = (nhwc_layout.PASS, fold_bias.PASS, pack_qkv.PASS, linear_add.PASS, upsample_nearest.PASS, layer_norm.PASS)
C = 8  # channels, everywhere
SEEDS = range(12)  # all pass up to 300; more than these take time


class Graph:
    """A graph in ONNX text that grows at its end. `x` is the current value, [B,C,H,W] or tokens [B,L,C]."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.lines: list[str] = []
        self.weights: dict[str, np.ndarray] = {}
        self.values: list[str] = []
        self.x, self.is_image, self.number = "image", True, 0

    def chance(self, probability: float = 0.15) -> bool:
        return bool(self.random.random() < probability)

    def pick(self, *choices: object) -> object:
        return choices[self.random.integers(len(choices))]

    def weight(self, numbers: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = np.asarray(numbers)
        return name

    def vector(self, *shape: int, around: float = 0.0) -> str:
        return self.weight(self.random.normal(around, 0.4, shape).astype(np.float32))

    def scalar(self, number: float) -> str:
        return self.weight(np.array(number, np.float32))

    def ints(self, *numbers: int) -> str:
        return self.weight(np.array(numbers, np.int64))

    def op(self, call: str, outputs: int = 1) -> str:
        """Append a node; its output's name."""
        names = [f"v{self.number + i}" for i in range(outputs)]
        self.number += outputs
        self.lines.append(f"{', '.join(names)} = {call}")
        if not call.startswith("Shape"):
            self.values += names
        return names[0] if outputs == 1 else " ".join(names)

    def product(self, a: str, b: str) -> str:
        return self.op(f"Mul ({a}, {b})" if self.chance(0.5) else f"Mul ({b}, {a})")

    def total(self, a: str, b: str) -> str:
        return self.op(f"Add ({a}, {b})" if self.chance(0.5) else f"Add ({b}, {a})")

    def like(self, value: str) -> str:
        """An image or token tensor to add: an input, or `value` itself."""
        return str(self.pick("residual" if self.is_image else "tokens", value))

    # --- blocks on images

    def conv(self) -> None:
        weight = self.vector(C, C, 1, 1)
        self.x = self.op(f"Conv <kernel_shape = [1, 1]> ({self.x}, {weight}, {self.vector(C)})")

    def residual(self) -> None:
        self.x = self.total(self.x, str(self.pick("residual", "column", self.x, self.vector(1, C, 1, 1))))

    def group_norm(self) -> None:
        if self.chance(0.5):
            scale, shift = self.vector(C, around=1), self.vector(C)
            y = self.op(f"GroupNormalization <num_groups = {self.pick(2, 4)}> ({self.x}, {scale}, {shift})")
        else:
            groups = int(str(self.pick(2, 4)))
            split = self.ints(0, groups, -1)
            ones = self.weight(np.full(groups, 2 if self.chance() else 1, np.float32))
            zeros = self.weight(np.full(groups, 0.5 if self.chance() else 0, np.float32))
            flat = self.op(f"Reshape ({self.x}, {split})")
            normal = self.op(f"InstanceNormalization <epsilon = 0.001> ({flat}, {ones}, {zeros})")
            whole = self.op(f"Reshape ({normal}, {self.op(f'Shape ({self.x})')})")
            affine = self.pick((C, 1, 1), (1, C, 1, 1), (1,), (1, 1, 1))
            y = self.total(self.product(whole, self.vector(*affine)), self.vector(*affine))  # type: ignore[misc]
        if self.chance(0.7):
            gate = self.op(f"Sigmoid ({self.x if self.chance() else y})")
            y = self.product(y, gate)
        self.x = y

    def upsample(self) -> None:
        scales = self.weight(np.array([1, 1, 2, 2], np.float32))
        mode = 'coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"'
        big = self.op(f'Resize <mode = "nearest", {mode}> ({self.x}, , {scales})')
        down = self.vector(C, C, 2, 2)
        self.x = self.op(f"Conv <kernel_shape = [2, 2], strides = [2, 2]> ({big}, {down})")

    def concat(self) -> None:
        both = self.op(f"Concat <axis = {self.pick(1, -3)}> ({self.x}, {self.like(self.x)})")
        self.x = self.op(f"Conv <kernel_shape = [1, 1]> ({both}, {self.vector(C, 2 * C, 1, 1)})")

    def flatten(self) -> None:
        """[B,C,H,W] -> [B,HW,C], in one of two ways; or its rows and columns swapped."""
        if self.chance(0.5):
            order = self.pick("0, 2, 3, 1", "0, 3, 2, 1")
            y = self.op(f"Transpose <perm = [{order}]> ({self.x})")
            self.x = self.op(f"Reshape ({y}, {self.ints(0, -1, C)})")
        else:
            y = self.op(f"Reshape ({self.x}, {self.ints(0, C, -1)})")
            self.x = self.op(f"Transpose <perm = [0, 2, 1]> ({y})")
        self.is_image = False

    # --- blocks on tokens

    def layer_norm(self) -> None:
        total = self.x
        if self.chance(0.7):
            biased = self.total(self.x, self.vector(*self.pick((C,), (1,)))) if self.chance(0.5) else self.x  # type: ignore[misc]
            total = self.total(biased, self.like(self.x))
        gamma, beta = self.vector(C, around=1), self.vector(C)
        self.x = self.op(f"LayerNormalization <axis = -1, epsilon = 0.001> ({total}, {gamma}, {beta})")
        if self.chance():
            self.x = self.total(self.x, total)

    def projection(self, x: str, bias: float = 0.5) -> str:
        y = self.op(f"MatMul ({x}, {self.vector(C, C)})")
        return self.total(y, self.vector(C)) if self.chance(bias) else y

    def attention(self) -> None:
        context = str(self.pick(self.x, self.x, "text"))
        q, k, v = self.projection(self.x), self.projection(context), self.projection(context)
        heads = int(str(self.pick(1, 2, 4)))
        split = self.ints(0, 0, heads, C // heads)
        spoiled = self.chance(0.1)  # heads that are no heads: axes left where they were
        q, k, v = (self.op(f"Reshape ({y}, {split})") for y in (q, k, v))
        if self.chance(0.3):
            q = self.product(q, self.scalar(0.7) if self.chance(0.7) else self.vector(C // heads))
        q = self.op(f"Transpose <perm = [0, 2, 1, 3]> ({q})")
        v = self.op(f"Transpose <perm = [0, 2, 1, 3]> ({v})")
        if self.chance(0.5):
            k = self.op(f"Transpose <perm = [0, 2, 3, 1]> ({k})")
        else:
            k = self.op(f"Transpose <perm = [0, 2, 1, 3]> ({k})")
            k = self.op(f"Transpose <perm = [0, 1, 3, 2]> ({k})")
        scores = self.op(f"MatMul ({q}, {k})")
        if self.chance(0.6):
            scores = self.product(scores, self.scalar(float(self.random.uniform(0.1, 2)) * (-1 if spoiled else 1)))
        elif self.chance(0.5):
            scores = self.op(f"Div ({scores}, {self.scalar(2.0)})")
        if self.chance(0.3):  # a mask a position, a head, a batch, or one for all
            mask = str(self.pick(self.vector(heads, 1, 1), self.vector(1, 1, 1, 1), self.vector(1), "batch_mask"))
            scores = self.total(scores, mask)
        weights = self.op(f"Softmax <axis = {self.pick(-1, -1, -1, 3, 2)}> ({scores})")
        if self.chance():
            weights = self.op(f"Relu ({weights})")
        out = self.op(f"MatMul ({weights}, {v})")
        out = self.op(f"Transpose <perm = [0, 2, 1, 3]> ({out})")
        out = self.op(f"Reshape ({out}, {self.ints(0, 0, C)})")
        self.x = self.total(self.projection(out), self.like(self.x)) if self.chance(0.7) else out

    def feed_forward(self) -> None:
        width = 2 * C
        y = self.op(f"MatMul ({self.x}, {self.vector(C, width)})")
        y = self.total(y, self.vector(width) if self.chance(0.8) else self.vector(1))
        left, right = self.op(f"Split <axis = {self.pick(-1, 2)}> ({y}, {self.ints(C, C)})", 2).split()
        if self.chance():
            left, right = right, left
        if self.chance(0.3):
            half = self.op(f"Erf ({self.op(f'Div ({right}, {self.scalar(2**0.5 if self.chance(0.8) else 1.3)})')})")
            cdf = self.total(half, self.scalar(1.0))
            gelu = self.product(self.product(right, cdf), self.scalar(0.5))
        elif self.chance(0.2):
            gelu = self.product(right, self.op(f"Sigmoid ({self.product(right, self.scalar(1.702))})"))
        else:
            gelu = self.op(f'Gelu <approximate = "{"tanh" if self.chance() else "none"}"> ({right})')
        y = self.product(left, gelu)
        self.x = self.total(self.projection(y, 0.9), self.like(self.x)) if self.chance(0.7) else y

    def unflatten(self) -> None:
        shape = self.op(f"Shape ({self.pick('image', 'residual')})")
        y = self.op(f"Transpose <perm = [0, 2, 1]> ({self.x})")
        self.x = self.op(f"Reshape ({y}, {shape})")
        self.is_image = True

    def build(self) -> onnx.ModelProto:
        for _ in range(3):
            for _ in range(self.random.integers(2, 6)):
                self.pick(self.conv, self.residual, self.group_norm, self.group_norm, self.upsample, self.concat)()  # type: ignore[operator]
            self.flatten()
            for _ in range(self.random.integers(2, 5)):
                self.pick(self.layer_norm, self.attention, self.attention, self.feed_forward)()  # type: ignore[operator]
            self.unflatten()
        seen = [v for v in self.values if self.chance(0.03) and v != self.x]
        outputs = ", ".join(f"float {v}" for v in [*seen, self.x])
        text = f"""<ir_version: 10, opset_import: ["" : 21]>
            g (float[B,{C},H,W] image, float[B,{C},H,W] residual, float[B,{C},1,1] column, float[B,L,{C}] tokens,
               float[B,T,{C}] text, float[B,1,1,1] batch_mask) => ({outputs}) {{
                {chr(10).join(self.lines)}
            }}"""
        model = onnx.parser.parse_model(text)
        model.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in self.weights.items())
        for value in model.graph.output:
            value.type.tensor_type.ClearField("shape")
        return model


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, feeds)


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_stay(seed: int) -> None:
    source = Graph(seed).build()
    random = np.random.default_rng(seed)
    sizes = {"B": 2, "H": 4, "W": 6, "L": 24, "T": 5}
    feeds = {
        v.name: random.normal(0, 1, [d.dim_value or sizes[d.dim_param] for d in v.type.tensor_type.shape.dim]).astype(
            np.float32
        )
        for v in source.graph.input
    }
    expected = run(source, feeds)
    nearby = {name: (a * (1 + 1e-7 * random.normal(size=a.shape))).astype(np.float32) for name, a in feeds.items()}
    # Normalizing what is nearly constant magnifies rounding errors: some graphs do so many times over.
    allowed = [
        1e-5 * np.abs(a).max() + 10 * np.abs(a - b).max() for a, b in zip(expected, run(source, nearby), strict=True)
    ]
    fused = ir.from_proto(source)
    fusion_passes.canonicalize(fused)
    fusion_passes.fuse(fused)
    for lowerings in ((), NHWC):
        model = ir.from_proto(ir.to_proto(fused))
        run_all(model, lowerings)
        bodies.attach(model, [node for node in model.graph if node.domain == DOMAIN])
        got = run(ir.to_proto(model), feeds)
        assert [a.shape for a in got] == [a.shape for a in expected]
        errors = [np.abs(a - b).max() for a, b in zip(got, expected, strict=True)]
        assert all(error <= limit for error, limit in zip(errors, allowed, strict=True)), (errors, allowed)


def test_the_graphs_have_what_fusions_look_for() -> None:
    found: Counter[str] = Counter()
    for seed in SEEDS[::3]:
        model = ir.from_proto(Graph(seed).build())
        found.update(totals(fusion_passes.canonicalize(model), fusion_passes.fuse(model)))
    for name in ("multi_head_attention", "group_norm", "bias_split_gelu", "bias_add", "skip_layer_normalization"):
        assert found[name] > 1, found
