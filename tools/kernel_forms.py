"""Forms of the LoRA kernels beside the shipped one: what ``lora/tuning.cuh`` can be set to, other
kernels, and other shapes of their launches.

In: a :class:`Form`. Out: within ``installed(form)`` the ops launch it, under names of its own, so
that nothing of another form is taken for it. No form changes a result.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest.mock import patch

from cupylora.bench import calls
from cupylora.compiler import loader
from cupylora.compiler.programs import find_program
from cupylora.compiler.sources import KernelProgram
from cupylora.ops import _lora_choice, _lora_fused, _lora_pair
from cupylora.ops._lora_choice import Choice, FusedShape, KernelName, Workload, k_ranges

__all__ = ["DEFINES", "SHIPPED", "Form", "find_form", "form_of", "installed"]

DEFINES = {"QUADS": 0}
"""What lora/tuning.cuh ships with."""


@dataclass(frozen=True)
class Form:
    """One form. Values that are None are the rule's own.

    defines: of lora/tuning.cuh, those that differ from what ships, sorted.
    kernel: that serves: "cluster", "ring", the "pair" of small batches, or that of "large" ones.
    cluster: CTAs an item, where K and the device allow.
    parts: clusters that share a tile's columns, each with a shrink of its own (ring; of the cluster
        kernel where ``kernel`` asks for it, as long as B's share fits shared memory).
    resident: share of the clusters that the device holds that are launched at most (ring).
    even: no more of them than take every round of the expected items alike (ring).
    spread: CTAs an item in all, against the rule's (cluster kernel).
    tile_rows: of the row tiles.
    """

    defines: tuple[tuple[str, int], ...] = ()
    kernel: str | None = None
    cluster: int | None = None
    parts: int = 1
    resident: float = 1.0
    even: bool = False
    spread: float = 1.0
    tile_rows: int | None = None

    def with_defines(self, **values: int) -> Form:
        """The form with these defines."""
        merged = {**dict(self.defines), **values}
        kept = {name: value for name, value in merged.items() if value != DEFINES[name]}
        return replace(self, defines=tuple(sorted(kept.items())))

    @property
    def text(self) -> str:
        """All that differs from what ships; "shipped" where nothing does."""
        others = {k: v for k, v in asdict(self).items() if k != "defines"}
        plain = asdict(SHIPPED)
        parts = [f"{name}={value}" for name, value in self.defines]
        parts += [f"{name}={value}" for name, value in others.items() if value != plain[name]]
        return ",".join(parts) or "shipped"

    def suffix(self, program: str) -> str:
        """What makes the name of a program its own: the settings that it depends on."""
        fused = program.startswith(("lora_cluster", "lora_ring"))
        return "".join(f"@{name}={value}" for name, value in self.defines) if fused else ""

    def programs(self, dtype: str = "bfloat16") -> list[str]:
        """Names of its programs, of those that are not the shipped ones."""
        bases = [f"lora_{kernel}_{dtype}" for kernel in ("ring", "cluster")]
        return [base + self.suffix(base) for base in bases if self.suffix(base)]


SHIPPED = Form()


def form_of(values: Mapping[str, Any]) -> Form:
    """A form from what ``dataclasses.asdict`` gave, also by way of JSON."""
    defines = tuple((str(name), int(value)) for name, value in values["defines"])
    return Form(**{**values, "defines": defines})


def find_form(name: str) -> KernelProgram:
    """``find_program`` that also knows the programs of forms: NAME@DEFINE=VALUE@..."""
    base, *settings = name.split("@")
    program = find_program(base)
    if not settings:
        return program
    return replace(program, name=name, defines=dict(s.split("=") for s in settings))


@contextlib.contextmanager
def installed(form: Form) -> Iterator[None]:
    """Within, the fused ops launch this form, and the bench makes its lists for it."""
    changes: dict[tuple[Any, str], Any] = {
        (loader, "find_program"): find_form,
        (_lora_fused, "ring_shape"): _ring_shapes(form),
        (_lora_fused, "cluster_shape"): _cluster_shapes(form),
    }
    for name in ("enqueue", "resident_blocks", "active_clusters"):
        changes[_lora_fused, name] = _renaming(getattr(_lora_fused, name), form)
    if form.kernel is not None:
        delta = importlib.import_module("cupylora.ops.lora_delta")
        changes[delta, "choose"] = _choosing(form.kernel)
        changes[_lora_pair, "_STREAM_ROWS"] = 0 if form.kernel == "large" else sys.maxsize
    if form.tile_rows is not None:
        changes[calls, "choose_tile_rows"] = lambda *_, **__: form.tile_rows
    with contextlib.ExitStack() as stack:
        for (module, name), value in changes.items():
            stack.enter_context(patch.object(module, name, value))
        stack.callback(_lora_fused._settings.cache_clear)
        _lora_fused._settings.cache_clear()
        yield


def _choosing(name: str) -> Any:
    wanted: Any = "pair" if name == "large" else name

    def choose(work: Workload, *, kernel: Choice, hopper: bool) -> KernelName:  # noqa: ARG001
        return _lora_choice.choose(work, kernel=wanted, hopper=hopper)

    return choose


def _renaming(call: Any, form: Form) -> Any:
    def renamed(program: str, *args: Any, **kwargs: Any) -> Any:
        return call(program + form.suffix(program), *args, **kwargs)

    return renamed


def _ring_shapes(form: Form) -> Any:
    plain = _lora_choice.ring_shape

    def shape_of(work: Workload, clusters_of: dict[int, int]) -> FusedShape:
        if form.cluster is not None:
            size = max(c for c in clusters_of if c <= form.cluster)
            clusters_of = {size: clusters_of[size]}
        shape = plain(work, clusters_of)
        size, held = shape.cluster, clusters_of[shape.cluster]
        columns = _lora_choice._cut(max(work.widths), size * form.parts)
        parts = _lora_choice._parts(work.widths, size * columns)
        most = max(1, min(math.ceil(form.resident * held), work.tile_capacity * parts))
        if form.even:
            items = math.ceil(max(1.0, work.tiles) * parts)
            most = math.ceil(items / math.ceil(items / most))
        return FusedShape(size, columns, most)

    return shape_of


def _cluster_shapes(form: Form) -> Any:
    plain = _lora_choice.cluster_shape

    def shape_of(work: Workload, blocks: int) -> FusedShape:
        shape = plain(work, blocks)
        if form.cluster is None and form.spread == 1:
            return shape
        wide = max(work.widths)
        size = min(form.cluster or shape.cluster, k_ranges(work.in_features), 8)
        room = _lora_choice._SHARED_LIMIT - _lora_choice.cluster_sum_bytes(work, size)
        if form.kernel != "cluster":
            room = min(_lora_choice._B_LIMIT, room)
        fit = max(64, room // (work.max_rank * 2) // 64 * 64)
        if form.kernel == "cluster":
            ctas = size * max(form.parts, math.ceil(wide / (size * fit)))
        else:
            ctas = max(size, math.ceil(wide / shape.cta_columns * form.spread))
        columns = min(fit, _lora_choice._cut(wide, ctas))
        most = work.tile_capacity * _lora_choice._parts(work.widths, size * columns)
        return FusedShape(size, columns, max(1, min(most, 4 * blocks // size)))

    return shape_of
