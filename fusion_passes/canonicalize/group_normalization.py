"""Group normalization: every spelling becomes sd_ort.GroupNorm in NCHW, without activation.

Reshape(x -> [0,G,...]) -> InstanceNormalization(1, 0) -> Reshape(-> [N,C,...]) -> Mul(w) -> Add(b)
GroupNormalization(x, scale, bias), opset 21: scale and bias per channel
GroupNormalization(x, scale, bias), opset 18: scale and bias per group, repeated for the channels of each group
GroupNorm on a flattened image [B,C,HW] = Reshape(x: BCHW)          =>  Reshape(GroupNorm(x))
of another rank (sound [N,C,L], video [N,C,F,H,W]): the same on [N,C,positions,1], between two Reshapes

Kernels and function bodies know images alone; the statistics of a group are those of all its positions, in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from fusion_passes import checks as c
from fusion_passes.operators.record import DOMAIN
from fusion_passes.pass_ import Case
from fusion_passes.recipes import note
from fusion_passes.rewriting import unique
from fusion_passes.rule import Rule, rule_pass


def is_image(x: ir.Value | None) -> bool:
    """Whether a value is [N,C,H,W], or such a one seen as [N,C,HW]."""
    node = None if x is None else x.producer()
    if c.rank(x) == 4 or node is None or node.op_type != "Reshape":
        return c.rank(x) == 4
    return c.rank(node.inputs[0]) == 4 and flattens_positions(node.inputs[0], x)


def flattens_positions(x: ir.Value | None, flat: ir.Value | None) -> bool:
    """Whether `flat` is `x` with the axes behind [N,C] made one."""
    before, after = c.dims(x), c.dims(flat)
    return before is not None and after is not None and len(after) == 3 < len(before) and before[:2] == after[:2]


def _affine(
    op: Any, sources: list[ir.Value], numbers: list[np.ndarray], operation: str, arguments: list[Any], out: ir.Value
) -> list[ir.Value]:
    """gamma and beta [channels] as new initializers, made by a recipe's operation from `sources`."""
    return [
        note(op.initializer(ir.tensor(np.ascontiguousarray(a)), name=unique(out, name)), operation, argument, [source])
        for name, a, argument, source in zip(("gamma", "beta"), numbers, arguments, sources, strict=True)
    ]


def _group_norm(op: Any, x: ir.Value, affine: list[ir.Value], groups: int, epsilon: float, out: ir.Value) -> Any:
    attributes = {"groups": groups, "epsilon": epsilon, "activation": 0, "channels_last": 0, "_domain": DOMAIN}
    if is_image(x):
        return op.GroupNorm(x, *affine, **attributes)
    flat = op.initializer(ir.tensor([0, c.size(x, 1) or 1, -1, 1], dtype=ir.DataType.INT64), name=unique(out, "image"))
    return op.Reshape(op.GroupNorm(op.Reshape(x, flat), *affine, **attributes), op.Shape(x))


class FromInstanceNormalization(Rule):
    """The spelling of TorchScript and of opsets below 21."""

    def pattern(self, op: Any, x: Any, split: Any, ones: Any, zeros: Any, shape: Any, weight: Any, bias: Any) -> Any:
        grouped = op.Reshape(x, split, _outputs=["grouped"])
        normal = op.InstanceNormalization(grouped, ones, zeros, _outputs=["normal"])
        restored = op.Reshape(normal, shape, _outputs=["restored"])
        return op.Add(op.Mul(restored, weight), bias, _outputs=["out"])

    def refuse(
        self, x: ir.Value, grouped: ir.Value, ones: ir.Value, zeros: ir.Value, shape: ir.Value, restored: ir.Value,
        weight: ir.Value, bias: ir.Value, **_: Any,
    ) -> str | None:  # fmt: skip
        before, middle, after = c.dims(x), c.dims(grouped), c.dims(restored)
        if before is None or middle is None or len(middle) < 3 or len(before) < 3:
            return "not [N,C,...] seen as [N,groups,...]"
        if before[0] != middle[0] or not isinstance(before[1], int) or not isinstance(middle[1], int):
            return "batch, channels or groups are not known"
        if before[1] % middle[1]:
            return "the groups do not divide the channels"
        if after is None or len(after) < 3 or after[:2] != before[:2]:
            return "batch and channels are not restored after the normalization"
        if after != before and 0 in (c.ints(shape) or [])[1:]:
            return "what restores the shape copies an axis of the groups"
        scale, shift = c.constant(ones), c.constant(zeros)
        if scale is None or shift is None or not (np.all(scale == 1) and np.all(shift == 0)):
            return "InstanceNormalization has an affine of its own"
        affine = [before[1], *[1] * (len(after) - 2)]
        if not (c.is_constant(weight) and c.is_constant(bias)):
            return "the affine is not constant"
        if c.dims(weight) not in (affine, [1, *affine]) or c.dims(bias) not in (affine, [1, *affine]):
            return "the affine is not one number per channel"
        return None

    def rewrite(
        self, op: Any, x: ir.Value, grouped: ir.Value, normal: ir.Value, shape: ir.Value, restored: ir.Value,
        weight: ir.Value, bias: ir.Value, out: ir.Value, **_: Any,
    ) -> Any:  # fmt: skip
        node, gamma, beta = normal.producer(), c.constant(weight), c.constant(bias)
        assert node is not None
        assert gamma is not None
        assert beta is not None
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        made = _affine(op, [weight, bias], [gamma.ravel(), beta.ravel()], "reshape", [[-1], [-1]], out)
        result = _group_norm(op, x, made, c.size(grouped, 1) or 1, epsilon, out)
        return result if c.same_shape(x, restored) else op.Reshape(result, shape)


class FromGroupNormalization(Rule):
    """The operator of opsets 18 (one scale per group) and 21 (one scale per channel)."""

    def pattern(self, op: Any, x: Any, scale: Any, bias: Any) -> Any:
        return op.GroupNormalization(x, scale, bias, _outputs=["out"])

    def refuse(self, x: ir.Value, scale: ir.Value, bias: ir.Value, out: ir.Value) -> str | None:
        channels, node = c.size(x, 1), out.producer()
        assert node is not None
        groups = node.attributes["num_groups"].as_int()
        if (c.rank(x) or 0) < 3:
            return "its input is not known to be [N,C,...] with positions"
        if channels is None or channels % groups:
            return "the channels are unknown or not divided by the groups"
        for value in (scale, bias):
            if not (c.is_vector(value, channels) or c.is_vector(value, groups)):
                return "the affine is not a constant of one number per channel or group"
        return None

    def rewrite(self, op: Any, x: ir.Value, scale: ir.Value, bias: ir.Value, out: ir.Value) -> Any:
        node, channels = out.producer(), c.size(x, 1)
        assert node is not None
        assert channels is not None
        groups = node.attributes["num_groups"].as_int()
        old = [a for a in (c.constant(scale), c.constant(bias)) if a is not None]
        times = [channels // a.size for a in old]
        repeated = [np.repeat(a, n) for a, n in zip(old, times, strict=True)]
        made = _affine(op, [scale, bias], repeated, "repeat", times, out)
        return _group_norm(op, x, made, groups, node.attributes.get_float("epsilon", 1e-5), out)


class BeforeFlattening(Rule):
    """GroupNorm(Reshape(x: BCHW -> [B,C,HW])) => Reshape(GroupNorm(x)): the statistics are the same."""

    def pattern(self, op: Any, x: Any, shape: Any, gamma: Any, beta: Any) -> Any:
        return op.GroupNorm(op.Reshape(x, shape, _outputs=["flat"]), gamma, beta, _domain=DOMAIN, _outputs=["out"])

    def refuse(self, x: ir.Value, flat: ir.Value, shape: ir.Value, **_: Any) -> str | None:
        return None if flattens_positions(x, flat) else "the Reshape does more than flatten positions"

    def rewrite(
        self, op: Any, x: ir.Value, shape: ir.Value, gamma: ir.Value, beta: ir.Value, out: ir.Value, **_: Any
    ) -> Any:
        node = out.producer()
        assert node is not None
        attributes = dict(node.attributes)
        return op.Reshape(op.GroupNorm(x, gamma, beta, _domain=DOMAIN, **attributes), shape)


RULES = (FromInstanceNormalization, FromGroupNormalization, BeforeFlattening)


def _instance(
    channels: int = 8, groups: int = 4, affine: str = "8,1,1", ones: str = "{1,1,1,1}", back: str = "x", extra: str = ""
) -> str:
    return f"""<ir_version: 10, opset_import: ["" : 20]>
        g (float[N,{channels},H,W] x, float[N,{channels},W,H] other) => (float[N,P1,P2,P3] y {extra})
        <int64[3] split = {{0, {groups}, -1}}, float[{groups}] ones = {ones}, float[{groups}] zeros = {{0,0,0,0}},
         float[{affine}] w, float[{affine}] b> {{
            r = Reshape (x, split)
            n = InstanceNormalization <epsilon = 0.0001> (r, ones, zeros)
            s = Shape ({back})
            q = Reshape (n, s)
            m = Mul (q, w)
            y = Add (m, b)
        }}"""


def _operator(opset: int, size: int) -> str:
    return f"""<ir_version: 10, opset_import: ["" : {opset}]>
        g (float[N,8,H,W] x) => (float[N,8,H,W] y) <float[{size}] w, float[{size}] b> {{
            y = GroupNormalization <num_groups = 4, epsilon = 0.001> (x, w, b)
        }}"""


_SIZES = {"N": 2, "H": 3, "W": 5}
CASES = [
    Case(
        "instance normalization",
        _instance(),
        ops={"GroupNorm": 1, "InstanceNormalization": 0, "Shape": 0},
        sizes=_SIZES,
    ),
    Case("affine with a batch axis", _instance(affine="1,8,1,1"), ops={"GroupNorm": 1}, sizes=_SIZES),
    Case("affine per position", _instance(affine="5"), fires=0, refused="one number per channel", sizes=_SIZES),
    Case("affine inside too", _instance(ones="{1,2,1,1}"), fires=0, refused="affine of its own", sizes=_SIZES),
    Case(
        "positions restored in another shape",
        _instance(back="other"),
        ops={"GroupNorm": 1, "Reshape": 1},
        sizes={"N": 2, "H": 3, "W": 4},
    ),
    Case(
        "channels restored as positions",
        _instance(back="other").replace("float[N,8,W,H] other", "float[N,4,W,P] other").replace("8,1,1]", "4,1,1]"),
        fires=0,
        refused="not restored",
        sizes={"N": 2, "H": 4, "W": 3, "P": 8},
    ),
    Case("normalized value is an output too", _instance(extra=", float[N,4,P] n"), fires=0, sizes={**_SIZES, "P": 30}),
    Case(
        "groups along the height",
        _instance(channels=4, groups=8)
        .replace("{0, 8, -1}", "{0, 8, -1}")
        .replace("float[8,1,1] w, float[8,1,1] b", "float[4,1,1] w, float[4,1,1] b")
        .replace("{1,1,1,1}", "{1,1,1,1,1,1,1,1}")
        .replace("{0,0,0,0}", "{0,0,0,0,0,0,0,0}"),
        fires=0,
        refused="divide the channels",
        sizes={"N": 2, "H": 4, "W": 2},
    ),
    Case(
        "affine that is an input",
        _instance(extra="").replace("] other)", "] other, float[8,1,1] v)").replace("Mul (q, w)", "Mul (q, v)"),
        fires=0,
        refused="not constant",
        sizes=_SIZES,
    ),
    Case(
        "sound instead of an image",
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8,L] x) => (float[N,8,L] y) <float[8] w, float[8] b> {
            y = GroupNormalization <num_groups = 4> (x, w, b)
        }""",
        ops={"GroupNorm": 1, "Reshape": 2},
        sizes={"N": 8, "L": 5},
    ),
    Case(
        "video, grouped by instance normalization",
        _instance()
        .replace("{0, 4, -1}", "{0, 4, 2, -1}")
        .replace("int64[3]", "int64[4]")
        .replace("H,W]", "F,H,W]")
        .replace("P3]", "P3,P4]")
        .replace("8,1,1]", "8,1,1,1]"),
        ops={"GroupNorm": 1, "InstanceNormalization": 0},
        sizes={"N": 2, "F": 3, "H": 3, "W": 5},
    ),
    Case(
        "flat vectors",
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8] x) => (float[N,8] y) <float[8] w, float[8] b> {
            y = GroupNormalization <num_groups = 4> (x, w, b)
        }""",
        fires=0,
        refused="with positions",
        sizes={"N": 3},
    ),
    Case(
        "flattened image",
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8,H,W] x) => (float[N,8,L] y) <float[8] w, float[8] b, int64[3] flat = {0, 8, -1}> {
            f = Reshape (x, flat)
            y = GroupNormalization <num_groups = 4> (f, w, b)
        }""",
        fires=2,
        ops={"GroupNorm": 1},
        sizes=_SIZES | {"L": 15},
    ),
    Case(
        "flattened with other channels",
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,4,H,W] x) => (float[N,8,L] y) <float[8] w, float[8] b, int64[3] flat = {0, 8, -1}> {
            f = Reshape (x, flat)
            y = GroupNormalization <num_groups = 4> (f, w, b)
        }""",
        ops={"GroupNorm": 1, "Reshape": 3},
        sizes={"N": 2, "H": 2, "W": 5, "L": 5},
    ),
    Case("operator of opset 21", _operator(21, 8), ops={"GroupNorm": 1, "GroupNormalization": 0}, sizes=_SIZES),
    Case(
        "behind an activation of another opset",
        _instance().replace("r = Reshape (x, split)", "active = Mish (x)  r = Reshape (active, split)"),
        ops={"GroupNorm": 1, "Mish": 1},
        sizes=_SIZES,
    ),
]

PASS = rule_pass("group_normalization", RULES, CASES)
