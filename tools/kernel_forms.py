"""Forms of the fused LoRA kernels beside the shipped one: what ``lora/tuning.cuh`` can be set to,
and other shapes of their launches.

In: a :class:`Form`. Out: within ``installed(form)`` the ops launch it, under names of its own, so
that nothing of another form is taken for it. No form changes a result.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest.mock import patch

from cupylora.bench import calls
from cupylora.compiler import loader
from cupylora.compiler.programs import find_program
from cupylora.compiler.sources import KernelProgram
from cupylora.ops import _lora_choice, _lora_fused, _lora_pair
from cupylora.ops._lora_choice import FusedShape, Workload, k_ranges

__all__ = ["DEFINES", "SHIPPED", "Form", "find_form", "form_of", "installed"]

DEFINES = {
    "RING_WEIGHT_BYTES": 8192,
    "RING_WEIGHT_BYTES_4": 16384,
    "RING_ROW_BYTES": 512,
    "RING_BLOCKS_1": 4,
    "RING_BLOCKS_2": 3,
    "RING_BLOCKS_4": 2,
    "RING_FILL": 0,
    "RING_WIDE_Y": 0,
    "RING_ROWS": 0,
    "RING_PREFETCH": 0,
    "RING_PREFETCH_LINES": 0,
    "RING_STREAM_Y": 0,
    "RING_TURN_RANKS": 0,
    "CLUSTER_OWN_TILES": 0,
    "LISTS_PREFETCH": 0,
}
"""What lora/tuning.cuh ships with."""

_OF_CLUSTER = ("CLUSTER_OWN_TILES", "LISTS_PREFETCH")
_DEEP, _TALL = "1_4", "4_16"
"""Instances that do not ship. Of the cluster kernel: one rank tile, four chunks in flight. Of the
ring: four rank tiles, tiles of 16 rows."""


@dataclass(frozen=True)
class Form:
    """One form. Values that are None are the rule's own.

    defines: of lora/tuning.cuh, those that differ from what ships, sorted.
    cluster: CTAs an item, where K and the device allow.
    parts: clusters that share a tile's columns, each with a shrink of its own (ring).
    resident: share of the clusters that the device holds that are launched at most (ring).
    even: no more of them than take every round of the expected items alike (ring).
    least_stages: for which an SM gets a CTA less (ring).
    spread: CTAs an item in all, against the rule's (cluster kernel).
    deep: four chunks in flight where a warp has that many (cluster kernel).
    tall: tiles of 16 rows for ranks above 32 (ring).
    split_items: of the stream pair's shrink, below which K is split.
    tile_rows: of the row tiles.
    """

    defines: tuple[tuple[str, int], ...] = ()
    cluster: int | None = None
    parts: int = 1
    resident: float = 1.0
    even: bool = False
    least_stages: int = 4
    spread: float = 1.0
    deep: bool = False
    tall: bool = False
    split_items: int | None = None
    tile_rows: int | None = None

    def with_defines(self, **values: int) -> Form:
        """The form with these defines."""
        merged = {**dict(self.defines), **values}
        if not merged.get("RING_PREFETCH"):
            merged.pop("RING_PREFETCH_LINES", None)  # of no effect
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
        cluster = program.startswith("lora_cluster")
        if not cluster and not program.startswith("lora_ring"):
            return ""
        settings = [
            (name, value)
            for name, value in self.defines
            if (name in _OF_CLUSTER if cluster else name != "CLUSTER_OWN_TILES")
        ]
        flag = "@deep" if cluster and self.deep else "@tall" if not cluster and self.tall else ""
        return flag + "".join(f"@{name}={value}" for name, value in settings)

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
    """``find_program`` that also knows the programs of forms: NAME@FLAG@DEFINE=VALUE@..."""
    base, *settings = name.split("@")
    program = find_program(base)
    if not settings:
        return program
    kernels = dict(program.kernels)
    if settings[0] == "deep":
        kernels[_DEEP] = kernels["1_1"].replace(", 1, 1>", ", 1, 4>")
    if settings[0] == "tall":
        kernels = {_TALL: kernels["4_8"].replace(", 4, 1>", ", 4, 2>")}
    defines = dict(setting.split("=") for setting in settings if "=" in setting)
    return replace(program, name=name, kernels=kernels, defines=defines)


@contextlib.contextmanager
def installed(form: Form) -> Iterator[None]:
    """Within, the fused ops launch this form, and the bench makes its lists for it."""
    values = {**DEFINES, **dict(form.defines)}
    small = values["RING_WEIGHT_BYTES"]
    changes: dict[tuple[Any, str], Any] = {
        (loader, "find_program"): find_form,
        (_lora_fused, "ring_shape"): _ring_shapes(form),
        (_lora_fused, "cluster_shape"): _cluster_shapes(form),
        (_lora_fused, "_cluster_kernel"): _cluster_kernels(form),
        (_lora_fused, "_WEIGHT_BYTES"): {1: small, 2: small, 4: values["RING_WEIGHT_BYTES_4"]},
        (_lora_fused, "_ROW_BYTES"): values["RING_ROW_BYTES"],
        (_lora_fused, "_BLOCKS_OF"): {1: values["RING_BLOCKS_1"], 2: values["RING_BLOCKS_2"]},
        (_lora_fused, "_FEW_STAGES"): form.least_stages,
        (_lora_fused, "_FOUR_TILE_BLOCKS"): values["RING_BLOCKS_4"],
    }
    for name in ("enqueue", "resident_blocks", "active_clusters"):
        changes[_lora_fused, name] = _renaming(getattr(_lora_fused, name), form)
    if form.split_items is not None:
        most = max(form.split_items * _lora_pair._STREAM_TILE, _lora_pair._SPLIT_ROWS)
        changes[_lora_pair, "_STREAM_ITEMS"] = form.split_items
        changes[_lora_pair, "_SPLIT_ROWS"] = most
    if form.tall:
        rows = {**_lora_choice._TILE_ROWS["ring"], 16: 64}
        changes[_lora_choice, "_TILE_ROWS"] = {**_lora_choice._TILE_ROWS, "ring": rows}
    if form.tile_rows is not None:
        changes[calls, "choose_tile_rows"] = lambda *_, **__: form.tile_rows
    with contextlib.ExitStack() as stack:
        for (module, name), value in changes.items():
            stack.enter_context(patch.object(module, name, value))
        stack.callback(_forget_shapes)
        _forget_shapes()
        yield


def _forget_shapes() -> None:
    _lora_fused._settings.cache_clear()
    _lora_choice.choose.cache_clear()


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
        ctas = math.ceil(wide / shape.cta_columns * form.spread)
        room = _lora_choice._SHARED_LIMIT - _lora_choice.cluster_sum_bytes(work, size)
        fit = max(64, min(_lora_choice._B_LIMIT, room) // (work.max_rank * 2) // 64 * 64)
        columns = min(fit, _lora_choice._cut(wide, max(size, ctas)))
        most = work.tile_capacity * _lora_choice._parts(work.widths, size * columns)
        return FusedShape(size, columns, max(1, min(most, 4 * blocks // size)))

    return shape_of


def _cluster_kernels(form: Form) -> Any:
    plain = _lora_fused._cluster_kernel

    def kernel_of(work: Workload, cluster: int) -> str:
        name = plain(work, cluster)
        return _DEEP if form.deep and name == "1_2" else name

    return kernel_of
