"""First projection's output -> input of the down projection.

In: x (gate and up columns, or up alone), the base experts' bias if they have one. Out: [N, I].
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from cupylora.activations import ActivationForm, activation_form
from cupylora.checks import FLOATS, check_array, check_choice
from cupylora.errors import ArgumentError
from cupylora.reference._erf import erfc
from cupylora.reference._numeric import ieee_arithmetic, narrow, widen
from cupylora.reference._output import output_array
from cupylora.reference._rows import valid_rows
from cupylora.shapes import ActivationKind, GateUpLayout
from cupylora.worklists import Array, Routing

__all__ = ["activated", "activation"]

Float32 = npt.NDArray[np.float32]


def activation(
    x: Array,
    *,
    kind: ActivationKind,
    gated: bool,
    layout: GateUpLayout = "gate_first",
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: Array | None = None,
    routing: Routing | None = None,
    rows: Literal["pair", "row"] = "pair",
    out: Array | None = None,
) -> Array:
    """act(gate) · up (gated) or act(x), [N, I], computed in float32 and rounded once.

    x: [N, width], bfloat16, float16 or float32; width is 2·I when gated, I otherwise.
    kind: "silu", "gelu" (exact), "relu2" (relu squared), or "swiglu_oai" (gated only): with
    g = min(gate, limit) and u = up clipped to ±limit, g · sigmoid(alpha · g) · (u + 1).
    layout: where gate and up lie among the columns: "gate_first", "up_first" or "interleaved".
    bias: [E, width] of x's dtype, added to x by local expert first; needs ``routing``.
    routing: when given, N = T·k and x is laid out by ``rows``, "pair" or "row"; ghost rows and
    pairs whose expert is not ours are then left as they were in ``out`` (zeros if it is allocated).
    out: [N, I] of x's dtype.

    Raises ArgumentError naming an argument that does not fit.
    """
    form = activation_form(kind, gated, layout, alpha, limit)
    check_choice("rows", rows, ("pair", "row"))
    valid = None if routing is None else valid_rows(routing)
    length = None if routing is None else routing.num_rows
    check_array("x", x, dtype=FLOATS, shape=(length, None), on_device=False)
    width = x.shape[1]
    hidden = form.hidden("x", width)
    if bias is not None:
        if routing is None:
            raise ArgumentError("bias is given without routing, which tells each row's expert")
        shape = (routing.num_experts, width)
        check_array("bias", bias, dtype=x.dtype, shape=shape, on_device=False)
    result = output_array("out", out, (len(x), hidden), x.dtype)

    index = slice(None) if valid is None else valid.index(rows)
    with ieee_arithmetic():
        values = widen(x[index])
        if bias is not None and valid is not None:
            values += widen(bias)[valid.expert]
        result[index] = narrow(activated(values, form), x.dtype)
    return result


def activated(values: Float32, form: ActivationForm) -> Float32:
    """The activation of float32 rows [N, width], not rounded: [N, I]."""
    parts = [values[:, c] for c in form.columns(form.hidden("values", values.shape[1]))]
    if not form.gated:
        return _activate(parts[0], form.kind)
    gate, up = parts
    if form.kind == "swiglu_oai":
        return _clamped(gate, up, np.float32(form.alpha), np.float32(form.limit))
    product: Float32 = _activate(gate, form.kind) * up
    return product


def _sigmoid(x: Float32) -> Float32:
    return np.float32(1) / (np.float32(1) + np.exp(-x))


def _activate(x: Float32, kind: ActivationKind) -> Float32:
    if kind == "silu":
        return x * _sigmoid(x)
    if kind == "relu2":
        return np.square(np.maximum(x, np.float32(0)))
    wide = x.astype(np.float64)
    return (0.5 * wide * erfc(-wide / np.sqrt(2.0))).astype(np.float32)


def _clamped(gate: Float32, up: Float32, alpha: np.float32, limit: np.float32) -> Float32:
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate * _sigmoid(alpha * gate) * (up + np.float32(1))
