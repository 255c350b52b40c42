"""What names a point, in a list of points and in a record's rows alike."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from cupylora.text import counted

__all__ = ["Kind", "PointId", "RoutingDraw"]

Kind = Literal["dense", "moe", "route", "step"]
"""dense: deltas of modules that share x, one node. moe: gate and up, then down, of routed experts.
route: the work lists of a batch. step: a chain of operations as a layer runs them."""

RoutingDraw = Literal["uniform", "hot-expert", "zipf"]
"""How tokens choose: experts and adapters alike likely; every token also chooses one common expert;
adapter i is chosen 1/(i + 1) times as often as the first."""


@dataclass(frozen=True)
class PointId:
    """One batch shape of one operation.

    suite: the list it stands in. kind: a Kind. in_features, out_features: x's and y's columns
    (dense), hidden and intermediate size (experts), 0 for routes. routing: a RoutingDraw.
    """

    suite: str
    kind: str
    model: str
    in_features: int
    out_features: int
    rank: int
    max_loras: int
    tokens: int
    active: int
    routing: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two of them the same point, whatever suites they stand in."""
        return tuple(value for name, value in self.identity.items() if name != "suite")

    @property
    def identity(self) -> dict[str, Any]:
        """The fields of a PointId by name."""
        return {f.name: getattr(self, f.name) for f in fields(PointId)}

    @property
    def shape(self) -> str:
        """In words, what it has in common with points of other batch sizes."""
        if self.kind == "route":
            return f"route of {self.model}, {self.max_loras} slots"
        chain = "step of " if self.kind == "step" else ""
        sizes = f"{self.in_features}x{self.out_features}"
        words = f"{chain}{self.model} {sizes}, rank {self.rank}, {self.max_loras} slots"
        return words if self.routing == "uniform" else f"{words}, {self.routing}"

    @property
    def label(self) -> str:
        """In a few words."""
        return f"{self.suite}: {self.shape}, {counted(self.tokens, 'token')}, {self.active} active"
