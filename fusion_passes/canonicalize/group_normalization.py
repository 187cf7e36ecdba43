"""Group normalization: rewrites all patterns to sd_ort.GroupNorm in NCHW without activation.

Reshape(x -> [0,G,...]) -> InstanceNormalization(1, 0) -> Reshape(-> [N,C,...]) -> Mul(w) -> Add(b)
GroupNormalization(x, scale, bias), opset 21: scale and bias per channel
GroupNormalization(x, scale, bias), opset 18: scale and bias per group, repeated for the channels of each group
GroupNorm on a flattened image [B,C,HW] = Reshape(x: BCHW)          =>  Reshape(GroupNorm(x))
of another rank (audio [N,C,L], video [N,C,F,H,W]): the same on [N,C,positions,1], between two Reshapes

Kernels and function bodies support 4-D images only. The order of positions does not change a group's statistics.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_edits import unique_name
from fusion_passes.graph_pass import case_makers
from fusion_passes.rule import Rule, rule_pass
from fusion_passes.weight_recipes import record_recipe


def is_image(x: ir.Value | None) -> bool:
    """Return whether a value is [N,C,H,W], or a Reshape of such a value to [N,C,HW]."""
    node = None if x is None else x.producer()
    if values.rank(x) == 4 or node is None or node.op_type != "Reshape":
        return values.rank(x) == 4
    return values.rank(node.inputs[0]) == 4 and flattens_positions(node.inputs[0], x)


def flattens_positions(x: ir.Value | None, flat: ir.Value | None) -> bool:
    """Return whether `flat` is `x` with the axes after [N,C] merged."""
    before, after = values.dims(x), values.dims(flat)
    return before is not None and after is not None and len(after) == 3 < len(before) and before[:2] == after[:2]


def _affine(
    op: Any, sources: list[ir.Value], arrays: list[np.ndarray], operation: str, arguments: list[Any], out: ir.Value
) -> list[ir.Value]:
    """Return gamma and beta [channels] as new initializers, computed from `sources` by a weight recipe's operation."""
    affine = []
    for name, array, argument, source in zip(("gamma", "beta"), arrays, arguments, sources, strict=True):
        value = op.initializer(ir.tensor(np.ascontiguousarray(array)), name=unique_name(out, name))
        affine.append(record_recipe(value, operation, argument, [source]))
    return affine


def _group_norm(op: Any, x: ir.Value, affine: list[ir.Value], groups: int, epsilon: float, out: ir.Value) -> Any:
    attributes = {"groups": groups, "epsilon": epsilon, "activation": 0, "channels_last": 0, "_domain": DOMAIN}
    if is_image(x):
        return op.GroupNorm(x, *affine, **attributes)
    flat = op.initializer(
        ir.tensor([0, values.size(x, 1) or 1, -1, 1], dtype=ir.DataType.INT64), name=unique_name(out, "image")
    )
    return op.Reshape(op.GroupNorm(op.Reshape(x, flat), *affine, **attributes), op.Shape(x))


class FromInstanceNormalization(Rule):
    """InstanceNormalization between Reshapes, from TorchScript and opsets below 21 => GroupNorm"""

    def pattern(self, op: Any, x: Any, split: Any, ones: Any, zeros: Any, shape: Any, weight: Any, bias: Any) -> Any:
        grouped = op.Reshape(x, split, _outputs=["grouped"])
        normal = op.InstanceNormalization(grouped, ones, zeros, _outputs=["normal"])
        restored = op.Reshape(normal, shape, _outputs=["restored"])
        return op.Add(op.Mul(restored, weight), bias, _outputs=["out"])

    def reject_reason(
        self, x: ir.Value, grouped: ir.Value, ones: ir.Value, zeros: ir.Value, shape: ir.Value, restored: ir.Value,
        weight: ir.Value, bias: ir.Value, **_: Any,
    ) -> str | None:  # fmt: skip
        before, middle, after = values.dims(x), values.dims(grouped), values.dims(restored)
        if before is None or middle is None or len(middle) < 3 or len(before) < 3:
            return "the Reshape is not from [N,C,...] to [N,groups,...]"
        if before[0] != middle[0] or not isinstance(before[1], int) or not isinstance(middle[1], int):
            return "the batch, channels or groups are unknown"
        if before[1] % middle[1]:
            return "the groups do not divide the channels"
        if after is None or len(after) < 3 or after[:2] != before[:2]:
            return "batch and channels are not restored after the normalization"
        if after != before and 0 in (values.ints(shape) or [])[1:]:
            return "the Reshape after the normalization copies an axis of the groups"
        scale, shift = values.constant(ones), values.constant(zeros)
        if scale is None or shift is None or not (np.all(scale == 1) and np.all(shift == 0)):
            return "InstanceNormalization has an affine of its own"
        affine = [before[1], *[1] * (len(after) - 2)]
        if not (values.is_constant(weight) and values.is_constant(bias)):
            return "the affine is not constant"
        if values.dims(weight) not in (affine, [1, *affine]) or values.dims(bias) not in (affine, [1, *affine]):
            return "the affine is not one number per channel"
        return None

    def rewrite(
        self, op: Any, x: ir.Value, grouped: ir.Value, normal: ir.Value, shape: ir.Value, restored: ir.Value,
        weight: ir.Value, bias: ir.Value, out: ir.Value, **_: Any,
    ) -> Any:  # fmt: skip
        node, gamma, beta = values.producer(normal), values.constant(weight), values.constant(bias)
        assert gamma is not None
        assert beta is not None
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        affine = _affine(op, [weight, bias], [gamma.ravel(), beta.ravel()], "reshape", [[-1], [-1]], out)
        result = _group_norm(op, x, affine, values.size(grouped, 1) or 1, epsilon, out)
        return result if values.same_shape(x, restored) else op.Reshape(result, shape)


class FromGroupNormalization(Rule):
    """GroupNormalization of opset 18 (one scale per group) or 21 (one scale per channel) => GroupNorm"""

    def pattern(self, op: Any, x: Any, scale: Any, bias: Any) -> Any:
        return op.GroupNormalization(x, scale, bias, _outputs=["out"])

    def reject_reason(self, x: ir.Value, scale: ir.Value, bias: ir.Value, out: ir.Value) -> str | None:
        channels, node = values.size(x, 1), values.producer(out)
        groups = node.attributes["num_groups"].as_int()
        if (values.rank(x) or 0) < 3:
            return "its input is not known to be [N,C,...] with positions"
        if channels is None or channels % groups:
            return "the channels are unknown or not divided by the groups"
        for value in (scale, bias):
            if not (values.is_vector(value, channels) or values.is_vector(value, groups)):
                return "the affine is not a constant of one number per channel or group"
        return None

    def rewrite(self, op: Any, x: ir.Value, scale: ir.Value, bias: ir.Value, out: ir.Value) -> Any:
        node, channels = values.producer(out), values.static_size(x, 1)
        groups = node.attributes["num_groups"].as_int()
        arrays = [a for a in (values.constant(scale), values.constant(bias)) if a is not None]
        times = [channels // a.size for a in arrays]
        repeated = [np.repeat(a, n) for a, n in zip(arrays, times, strict=True)]
        affine = _affine(op, [scale, bias], repeated, "repeat", times, out)
        return _group_norm(op, x, affine, groups, node.attributes.get_float("epsilon", 1e-5), out)


class BeforeFlattening(Rule):
    """GroupNorm(Reshape(x: BCHW -> [B,C,HW])) => Reshape(GroupNorm(x)): the statistics are the same."""

    def pattern(self, op: Any, x: Any, shape: Any, gamma: Any, beta: Any) -> Any:
        return op.GroupNorm(op.Reshape(x, shape, _outputs=["flat"]), gamma, beta, _domain=DOMAIN, _outputs=["out"])

    def reject_reason(self, x: ir.Value, flat: ir.Value, shape: ir.Value, **_: Any) -> str | None:
        return None if flattens_positions(x, flat) else "the Reshape does more than flatten positions"

    def rewrite(
        self, op: Any, x: ir.Value, shape: ir.Value, gamma: ir.Value, beta: ir.Value, out: ir.Value, **_: Any
    ) -> Any:
        attributes = dict(values.producer(out).attributes)
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
_case, _rejected = case_makers(_SIZES)
CASES = [
    _case("instance normalization", _instance(), ops={"GroupNorm": 1, "InstanceNormalization": 0, "Shape": 0}),
    _case("affine with a batch axis", _instance(affine="1,8,1,1"), ops={"GroupNorm": 1}),
    _rejected("affine per position", _instance(affine="5"), rejection="one number per channel"),
    _rejected("affine inside too", _instance(ones="{1,2,1,1}"), rejection="affine of its own"),
    _case(
        "positions restored in another shape",
        _instance(back="other"),
        ops={"GroupNorm": 1, "Reshape": 1},
        sizes={"N": 2, "H": 3, "W": 4},
    ),
    _rejected(
        "channels restored as positions",
        _instance(back="other").replace("float[N,8,W,H] other", "float[N,4,W,P] other").replace("8,1,1]", "4,1,1]"),
        rejection="not restored",
        sizes={"N": 2, "H": 4, "W": 3, "P": 8},
    ),
    _rejected("normalized value is an output too", _instance(extra=", float[N,4,P] n"), sizes={**_SIZES, "P": 30}),
    _rejected(
        "groups along the height",
        _instance(channels=4, groups=8)
        .replace("{0, 8, -1}", "{0, 8, -1}")
        .replace("float[8,1,1] w, float[8,1,1] b", "float[4,1,1] w, float[4,1,1] b")
        .replace("{1,1,1,1}", "{1,1,1,1,1,1,1,1}")
        .replace("{0,0,0,0}", "{0,0,0,0,0,0,0,0}"),
        rejection="divide the channels",
        sizes={"N": 2, "H": 4, "W": 2},
    ),
    _rejected(
        "affine that is an input",
        _instance(extra="").replace("] other)", "] other, float[8,1,1] v)").replace("Mul (q, w)", "Mul (q, v)"),
        rejection="not constant",
    ),
    _case(
        "sound instead of an image",
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8,L] x) => (float[N,8,L] y) <float[8] w, float[8] b> {
            y = GroupNormalization <num_groups = 4> (x, w, b)
        }""",
        ops={"GroupNorm": 1, "Reshape": 2},
        sizes={"N": 8, "L": 5},
    ),
    _case(
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
    _rejected(
        "flat vectors",
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8] x) => (float[N,8] y) <float[8] w, float[8] b> {
            y = GroupNormalization <num_groups = 4> (x, w, b)
        }""",
        rejection="with positions",
        sizes={"N": 3},
    ),
    _case(
        "flattened image",
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8,H,W] x) => (float[N,8,L] y) <float[8] w, float[8] b, int64[3] flat = {0, 8, -1}> {
            f = Reshape (x, flat)
            y = GroupNormalization <num_groups = 4> (f, w, b)
        }""",
        rewrites=2,
        ops={"GroupNorm": 1},
        sizes=_SIZES | {"L": 15},
    ),
    _case(
        "flattened with other channels",
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,4,H,W] x) => (float[N,8,L] y) <float[8] w, float[8] b, int64[3] flat = {0, 8, -1}> {
            f = Reshape (x, flat)
            y = GroupNormalization <num_groups = 4> (f, w, b)
        }""",
        ops={"GroupNorm": 1, "Reshape": 3},
        sizes={"N": 2, "H": 2, "W": 5, "L": 5},
    ),
    _case("operator of opset 21", _operator(21, 8), ops={"GroupNorm": 1, "GroupNormalization": 0}),
    _case(
        "behind an activation of another opset",
        _instance().replace("r = Reshape (x, split)", "active = Mish (x)  r = Reshape (active, split)"),
        ops={"GroupNorm": 1, "Mish": 1},
    ),
]

PASS = rule_pass("group_normalization", RULES, CASES)
