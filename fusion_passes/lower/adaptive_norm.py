"""Lowers the normalizations of diffusion transformers to AdaptiveNorm, with the gated residual before them.

    RMSNormalization(x, gamma)                                =>  AdaptiveNorm(x, gamma; rms)
    RMSNormalization(x, scale [B,1,C]) + shift [B,1,C]        =>  AdaptiveNorm(x, scale, shift; rms)
    LayerNormalization(x, scale [B,1,C], shift [B,1,C])       =>  AdaptiveNorm(x, scale, shift)
    s = skip + y * gate [B,1,C] -> normalization of s         =>  AdaptiveNorm(y, scale, shift, gate, skip) -> ., s
    s = skip + y -> normalization of s                        =>  AdaptiveNorm(y, .., -, skip) -> ., s

for GPU libraries with that kernel. Rejected: an axis other than the last, parameters of other shapes, a consumer of the
mean. A sum that several normalizations read is computed by the first of them.
"""

from __future__ import annotations

from functools import partial
from itertools import permutations

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.cleanup import clean_up
from fusion_passes.graph_edits import replace_nodes
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, rewrite_nodes
from fusion_passes.shapes.infer import annotate_new

NORMS = ("RMSNormalization", "LayerNormalization")


def _is_vector(value: ir.Value | None, x: ir.Value | None) -> bool:
    """Return whether a value is [C], or [B,1,..,C] or [1,1,..,C] for x [B,..,C]."""
    shape, vector = values.dims(x), values.dims(value)
    if value is None or x is None or shape is None or vector is None or value.dtype != x.dtype:
        return False
    ones = [1] * (len(shape) - 2)
    return vector in (shape[-1:], [shape[0], *ones, shape[-1]], [1, *ones, shape[-1]])


def _reject_reason(node: ir.Node) -> str | None:
    x, parameters = node.inputs[0], node.inputs[1:]
    if not values.last_axis(node.attributes.get_int("axis", -1), x) or values.size(x, -1) is None:
        return "it is not over a last axis of known size"
    if not all(_is_vector(each, x) for each in parameters):
        return "its parameters are neither vectors nor one row for each image"
    if node.op_type == "LayerNormalization" and values.rank(parameters[0]) == 1:
        return "its parameters are those of all images"  # SkipLayerNormalization has a kernel for it
    if len({tuple(values.dims(each) or ()) for each in parameters}) > 1:
        return "scale and shift differ in shape"
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return "its mean or deviation has consumers"
    return None


def _addends(total: ir.Value | None) -> tuple[ir.Value, ir.Value | None, ir.Value] | None:
    """Return (y, gate, skip) of total = skip + y * gate, or (y, None, skip) of another sum, or None."""
    add = None if total is None else total.producer()
    if total is None or add is None or add.op_type != "Add" or add.domain:
        return None
    sides = [each for each in add.inputs if values.same_shape(each, total)]
    for product, skip in permutations([each for each in sides if each is not None], 2):
        node = product.producer()
        if node is None or node.op_type != "Mul" or node.domain or product.is_graph_output():
            continue
        if len(values.consumers(product)) > 1 or skip is product:
            continue
        for y, gate in permutations([each for each in node.inputs if each is not None], 2):
            if values.same_shape(y, total) and values.rank(gate) == values.rank(total) and _is_vector(gate, y):
                return y, gate, skip
    return (sides[0], None, sides[1]) if len(sides) == 2 and sides[0] is not None and sides[1] is not None else None


def _depends(value: ir.Value | None, source: ir.Value) -> bool:
    """Return whether a value is computed from `source`."""
    stack, seen = [value], {value}
    while stack:
        current = stack.pop()
        if current is source:
            return True
        node = None if current is None else current.producer()
        new = [] if node is None else [each for each in node.inputs if each not in seen]
        seen.update(new)
        stack += new
    return False


def _shift(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """Return (Add, shift) if the only consumer of an RMSNormalization adds a shift with the shape of its scale."""
    normal, scale = node.outputs[0], node.inputs[1]
    add = next(iter(values.consumers(normal)), None)
    if node.op_type != "RMSNormalization" or not values.has_one_use(normal):
        return None
    if add is None or add.op_type != "Add" or add.domain:
        return None
    shift = next((each for each in add.inputs if each is not normal), None)
    same = shift is not None and values.dims(shift) == values.dims(scale) and _is_vector(shift, node.inputs[0])
    return (add, shift) if same and shift is not None else None


def _lower(graph: ir.Graph, node: ir.Node) -> None:
    x, scale, *shift = node.inputs
    rms = int(node.op_type == "RMSNormalization")
    if (shifted := _shift(node)) is not None:
        last, added = shifted
        shift = [added]
        node.outputs[0].name = None  # the name of the sum is that of the result
    else:
        last = node
    addends = None if x is None or any(_depends(each, x) for each in (scale, *shift)) else _addends(x)
    inputs = [x, scale, *shift]
    if addends is not None:
        y, gate, skip = addends
        inputs = [y, scale, shift[0] if shift else None, gate, skip]
    attributes = {"epsilon": node.attributes.get_float("epsilon", 1e-5), "rms": rms}
    fused = ir.node("AdaptiveNorm", inputs, attributes, domain=DOMAIN, num_outputs=2)
    fused.outputs[1].name = f"{last.outputs[0].name}.sum"
    replace_nodes(graph, fused, node, last, node)
    if addends is not None and x is not None:
        add = x.producer()
        total = fused.outputs[1]
        total.type, total.shape, name, x.name = x.type, x.shape, x.name, None
        total.name = name
        ir.convenience.replace_all_uses_with(x, total, replace_graph_outputs=True)
        assert add is not None
        graph.remove(add, safe=True)


def _is_norm(node: ir.Node) -> bool:
    return node.op_type in NORMS and not node.domain


def adaptive_norm(model: ir.Model) -> PassOutcome:
    """Rewrite the normalizations of `model` in place."""
    outcome = rewrite_nodes(model, "adaptive_norm", _is_norm, _reject_reason, _lower)
    if outcome.counts.total():
        model.graph.opset_imports.setdefault(DOMAIN, 1)
        clean_up(model)
        annotate_new(model.graph)
    return outcome


def _graph(body: str, scale: str = "B,1,4", outputs: str = "") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 23]>
        g (float[B,S,4] x, float[B,S,4] r, float[{scale}] scale, float[{scale}] shift, float[B,1,4] gate)
            => (float[B,S,4] y {outputs}) <float[4] w, float[4] b, float[6,4] rows> {{ {body} }}"""


_NORM = "n = LayerNormalization <epsilon = 0.01> (s, scale, shift)  y = Relu (n)"
_case = partial(PassCase, sizes={"B": 2, "S": 6}, ops={"AdaptiveNorm": 1, "LayerNormalization": 0, "Add": 0, "Mul": 0})
_rejected = partial(PassCase, sizes={"B": 2, "S": 6}, rewrites=0, ops={"AdaptiveNorm": 0})
CASES = [
    _case("RMS of heads", _graph("n = RMSNormalization <epsilon = 0.01> (x, w)  y = Relu (n)")),
    _case("AdaLN", _graph(f"s = Relu (x)  {_NORM}")),
    _case("AdaLN of one modulation for all images", _graph(f"s = Relu (x)  {_NORM}", scale="1,1,4")),
    _case(
        "a gated residual, read again",
        _graph(f"g = Mul (gate, x)  s = Add (r, g)  {_NORM.replace('Relu', 'Sub').replace('(n)', '(n, s)')}"),
    ),
    _case("the sum is an output", _graph(f"g = Mul (x, gate)  s = Add (g, r)  {_NORM}", outputs=", float[B,S,4] s")),
    PassCase(
        "two modulations of one sum",
        _graph(
            "g = Mul (x, gate)  s = Add (g, r)  m = LayerNormalization (s, scale, shift)"
            "  n = LayerNormalization (s, shift, scale)  y = Sub (m, n)"
        ),
        2,
        {"AdaptiveNorm": 2, "Add": 0, "Mul": 0},
        sizes={"B": 2, "S": 6},
    ),
    _case(
        "the scale depends on the sum",
        _graph(
            "one = Constant <value_ints = [1]> ()  g = Mul (x, gate)  s = Add (g, r)  t = ReduceMean (s, one)"
            "  n = LayerNormalization (s, t, gate)  y = Relu (n)"
        ),
        ops={"AdaptiveNorm": 1, "Add": 1, "Mul": 1},
    ),
    _case("T5", _graph("s = Add (x, r)  n = RMSNormalization (s, w)  y = Sub (n, s)")),
    _case(
        "the product has another consumer",
        _graph(f"g = Mul (x, gate)  s = Add (g, r)  {_NORM.replace('Relu', 'Sub').replace('(n)', '(n, g)')}"),
        ops={"AdaptiveNorm": 1, "Add": 0, "Mul": 1},
    ),
    _case(
        "a factor for each token is no gate",
        _graph(f"g = Mul (x, scale)  s = Add (g, r)  {_NORM.replace('scale, shift', 'gate, gate')}", scale="B,S,4"),
        ops={"AdaptiveNorm": 1, "Add": 0, "Mul": 1},
    ),
    _case("RMS, modulated", _graph("n = RMSNormalization <epsilon = 0.01> (x, scale)  y = Add (shift, n)")),
    _case(
        "a gated residual, RMS, modulated",
        _graph(
            "g = Mul (gate, x)  s = Add (r, g)  n = RMSNormalization (s, scale)  m = Add (n, shift)  y = Sub (m, s)"
        ),
    ),
    _case("RMS of heads with a bias", _graph("n = RMSNormalization (x, w)  y = Add (n, b)")),
    _case(
        "RMS, read beside its shift",
        _graph("n = RMSNormalization (x, scale)  m = Add (n, shift)  y = Sub (m, n)"),
        ops={"AdaptiveNorm": 1, "Add": 1},
    ),
    _case(
        "RMS, a shift of another shape",
        _graph("n = RMSNormalization (x, scale)  y = Add (n, b)"),
        ops={"AdaptiveNorm": 1, "Add": 1},
    ),
    _case(
        "RMS and tokens", _graph("n = RMSNormalization (x, scale)  y = Add (n, r)"), ops={"AdaptiveNorm": 1, "Add": 1}
    ),
    _rejected("parameters of all images", _graph("y = LayerNormalization (x, w, b)"), rejection="of all images"),
    _rejected("parameters of tokens", _graph(f"s = Relu (x)  {_NORM}", scale="B,S,4"), rejection="neither vectors"),
    _rejected("two axes", _graph("y = LayerNormalization <axis = 1> (x, rows, rows)"), rejection="last axis"),
    _rejected(
        "the mean is read", _graph("n, m = LayerNormalization (x, scale, shift)  y = Add (n, m)"), rejection="mean"
    ),
]

PASS = Pass("adaptive_norm", adaptive_norm, CASES)
