"""What every op that activates takes: kind, layout and constants, checked in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from cupylora.checks import check_choice, check_number
from cupylora.errors import ArgumentError
from cupylora.shapes import ActivationKind, GateUpLayout

__all__ = ["ActivationForm", "activation_form"]

_KINDS: tuple[ActivationKind, ...] = get_args(ActivationKind)
_LAYOUTS: tuple[GateUpLayout, ...] = get_args(GateUpLayout)


@dataclass(frozen=True)
class ActivationForm:
    """An activation and where its inputs lie among a row's columns."""

    kind: ActivationKind
    gated: bool
    layout: GateUpLayout
    alpha: float
    limit: float

    @property
    def codes(self) -> tuple[int, int, int]:
        """(kind, gated, layout) as moe/gate_up.cuh numbers them."""
        return _KINDS.index(self.kind), int(self.gated), _LAYOUTS.index(self.layout)

    def hidden(self, name: str, width: int) -> int:
        """Columns I of the result for an input ``name`` of ``width`` columns.

        Raises ArgumentError where gate and up cannot be of one width.
        """
        if self.gated and width % 2:
            raise ArgumentError(f"{name} has {width} columns; gate and up need an even number")
        return width // 2 if self.gated else width

    def columns(self, hidden: int) -> tuple[slice, ...]:
        """Columns of gate and of up, or of up alone where there is no gate."""
        if not self.gated:
            return (slice(0, hidden),)
        if self.layout == "interleaved":
            return slice(0, 2 * hidden, 2), slice(1, 2 * hidden, 2)
        first, second = slice(0, hidden), slice(hidden, 2 * hidden)
        return (first, second) if self.layout == "gate_first" else (second, first)


def activation_form(kind: Any, gated: Any, layout: Any, alpha: Any, limit: Any) -> ActivationForm:
    """The checked form; raises ArgumentError naming the argument that does not fit."""
    check_choice("kind", kind, _KINDS)
    check_choice("layout", layout, _LAYOUTS)
    alpha, limit = check_number("alpha", alpha), check_number("limit", limit)
    if kind == "swiglu_oai" and not gated:
        raise ArgumentError("kind 'swiglu_oai' is a gated activation; gated=True is needed")
    return ActivationForm(kind, bool(gated), layout, alpha, limit)
