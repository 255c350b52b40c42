"""Random LoRA deltas, and what they must come to: every kernel gives the bits that the pair gives.

In: a seed, which decides everything. A case is a batch of mixed and odd ranks, widths, alignments,
row orders and layouts; some lists or weights are hostile. ``check`` runs it on an emulated device
twice, with y of zeros and of values, in launch shapes and schedules of its own each time.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from problem_util import (
    BOUNDS,
    ModuleWeights,
    RoutingCase,
    assert_close,
    bits_of,
    build_entries,
    expert_order,
    pair_deltas,
    random_case,
    random_module,
    random_values,
)

from cupylora import ops, reference
from cupylora.ops import _lora_fused, _lora_pair
from cupylora.ops._lora_choice import FusedShape, Workload, k_ranges
from cupylora.worklists import SLOT_ENTRY, LoraSlice, Routing, Segments

from .device import Device, Schedule

__all__ = ["HOSTILE", "KERNELS", "DeltaCase", "check", "draw"]

KERNELS = ("cluster", "ring", "stream")
HOSTILE = ("slot", "rows", "inf", "rank")
"""A tile's slot or rows, a value of x, an entry's rank."""

_MOST_RANK = {"cluster": {8: 64}, "ring": {8: 64, 16: 32}}
_MOST_RANK["stream"] = dict.fromkeys((8, 16, 32, 64), 100)
_RANKS = (1, 2, 3, 4, 5, 8, 12, 15, 16, 17, 20, 24, 31, 32, 33, 36, 40, 48, 60, 63, 64)
_IN_FEATURES = (8, 63, 64, 100, 136, 200, 392, 768, 1000, 2048, 2880, 4096, 7168)
_WIDTHS = (8, 9, 37, 64, 128, 130, 136, 200, 264, 400, 512)
_WIDE = (1024, 1536, 2048)
_SMALL_IN_FEATURES = 1000
_SHARED_LIMIT = 226 * 1024
_MOST_CTAS = 16
_STALE = 0x7B7B7B7B
"""Fills what a list holds behind its end."""


@dataclass
class DeltaCase:
    """One batch; see ``draw``."""

    seed: int
    kernel: str
    dtype: str
    in_features: int
    tile_rows: int
    ranks: tuple[int, ...]
    max_rank: int
    crowded: bool
    hostile: str | None
    settled: bool
    x_rows: Any
    y_rows: Any
    slices: list[LoraSlice]
    columns: list[slice]
    width: int
    modules: list[ModuleWeights]
    batch: RoutingCase
    row_order: Any
    routing: Routing
    segments: Segments
    tiles: int
    x: np.ndarray
    clean: Segments
    """The segments without what makes them hostile, where the pair would not survive it."""

    @property
    def token_major_rows(self) -> bool:
        """Whether x lies by token and y by pair, as ``pair_deltas`` has them."""
        return (self.x_rows, self.y_rows) == ("token", "pair")

    def __str__(self) -> str:
        tokens, top_k = self.batch.topk_ids.shape
        return (
            f"{self.kernel} {self.dtype} K {self.in_features} ranks {self.ranks} of "
            f"{self.max_rank}, {self.slices} in {self.width} columns, {tokens} x {top_k} rows, "
            f"{self.tiles} tiles of {self.tile_rows}, hostile: {self.hostile}, settled: "
            f"{self.settled}, x by {self.x_rows}, y by {self.y_rows}"
        )


def draw(
    seed: int,
    *,
    kernel: str | None = None,
    dtype: str | None = None,
    hostile: str | None = None,
    tile_rows: int | None = None,
    small: bool = False,
    crowded: bool = False,
) -> DeltaCase:
    """The case of a seed; what is given is not left to chance.

    small: of fewer features. crowded: many groups of a few rows, through one or two large clusters.
    """
    pick = random.Random(seed)
    rng = np.random.default_rng(seed)
    kernel = kernel or pick.choice(KERNELS)
    dtype = dtype or pick.choice(["bfloat16", "float16"])
    in_features = pick.choice(_IN_FEATURES)
    if small:
        in_features = min(in_features, _SMALL_IN_FEATURES)
    tile_rows = tile_rows or pick.choice(list(_MOST_RANK[kernel]))
    most = min(pick.choice([16, 32, 64, 100]), _MOST_RANK[kernel][tile_rows])
    ranks = _draw_ranks(pick, most)
    batch = _draw_batch(pick, seed, len(ranks), in_features, crowded)
    slices, columns, width = _draw_slices(pick)
    experts = batch.num_experts + batch.start_expert
    modules = _draw_modules(pick, rng, slices, ranks, in_features, experts, dtype)
    row_order = pick.choice(["token_major", "k_major"])
    routing = reference.route(
        batch.topk_ids, batch.token_to_slot, row_order=row_order, **batch.sizes
    )
    if pick.random() < 0.2:
        routing = expert_order(routing, seed)
    x_rows, y_rows = pick.choice(
        [("token", "pair")] * 2 + [("pair", "row"), ("row", "row"), ("row", "pair")]
    )
    segments = reference.build_segments(
        routing, batch.token_to_slot, max_loras=batch.max_loras, tile_rows=tile_rows
    )
    tiles = int(np.asarray(segments.tile_count)[0])
    segments.tiles[tiles:] = _STALE
    x = random_values(
        rng, (len(batch.topk_ids) if x_rows == "token" else routing.num_rows, in_features), dtype
    )
    case = DeltaCase(
        seed=seed,
        kernel=kernel,
        dtype=dtype,
        in_features=in_features,
        tile_rows=tile_rows,
        ranks=ranks,
        max_rank=max(*ranks, pick.choice([1, most])),
        crowded=crowded,
        hostile=hostile or pick.choice([None] * 8 + list(HOSTILE)),
        settled=pick.random() < 0.5,
        x_rows=x_rows,
        y_rows=y_rows,
        slices=slices,
        columns=columns,
        width=width,
        modules=modules,
        batch=batch,
        row_order=row_order,
        routing=routing,
        segments=segments,
        clean=segments,
        tiles=tiles,
        x=x,
    )
    _make_hostile(case, pick)
    return case


def _draw_ranks(pick: random.Random, most: int) -> tuple[int, ...]:
    known = [rank for rank in _RANKS if rank <= most]
    ranks = tuple(pick.choice([*known, 8, 16, most]) for _ in range(pick.choice([1, 2, 4])))
    return (*ranks, 0) if pick.random() < 0.3 else ranks


def _draw_batch(
    pick: random.Random, seed: int, loras: int, in_features: int, crowded: bool
) -> RoutingCase:
    experts = 6 if crowded else pick.choice([1, 1, 3, 6])
    top_k = 2 if crowded else pick.choice([1, 2]) if experts > 1 else 1
    tokens = [3, 6, 12] if crowded else [1, 2, 5, 8, 17, 33]
    return random_case(
        seed,
        pick.choice(tokens + [70] * (in_features <= 2880 and not crowded)),
        top_k,
        experts,
        loras,
        base_share=pick.choice([0.1] * 8 + [0.15] * 2 + [1.0]),
        foreign_share=pick.choice([0, 0.2]) if experts > 1 else 0,
        start_expert=pick.choice([0, 0, 2]),
    )


def _draw_slices(pick: random.Random) -> tuple[list[LoraSlice], list[slice], int]:
    """Slices of y, where their columns lie, and how many columns y has."""
    widths = [pick.choice(_WIDTHS) for _ in range(pick.choice([1, 1, 2, 3]))]
    if pick.random() < 0.1:
        widths[0] = pick.choice(_WIDE)
    if len(widths) == 2 and pick.random() < 0.25:
        both = [LoraSlice(widths[0], i, 2) for i in range(2)]
        return both, [slice(i, None, 2) for i in range(2)], 2 * widths[0]
    aligned = pick.random() < 0.6
    if aligned:
        widths = [-(-width // 8) * 8 for width in widths]
    at = pick.choice([0, 8] if aligned else [0, 2, 3, 8])
    slices, columns = [], []
    for width in widths:
        slices.append(LoraSlice(width, at))
        columns.append(slice(at, at + width))
        at += width + pick.choice([0, 8] if aligned else [0, -width % 8, 5])
    return slices, columns, at + (-at % 8 if aligned else pick.choice([0, 7, -at % 8]))


def _draw_modules(
    pick: random.Random,
    rng: np.random.Generator,
    slices: list[LoraSlice],
    ranks: tuple[int, ...],
    in_features: int,
    experts: int,
    dtype: str,
) -> list[ModuleWeights]:
    share = pick.choice(["", "", "a", "b", "ab"])
    modules = []
    for place, part in enumerate(slices):
        own = ranks if place == 0 else tuple(_other_rank(pick, rank) for rank in ranks)
        modules.append(
            random_module(rng, own, in_features, part.out_features, experts, dtype, share=share)
        )
    return modules


def _other_rank(pick: random.Random, rank: int) -> int:
    return pick.choice([rank, max(1, rank // 2), 0, rank]) if rank else 0


def _make_hostile(case: DeltaCase, pick: random.Random) -> None:
    if case.hostile == "inf" and case.x.size:
        case.x[pick.randrange(len(case.x)), pick.randrange(case.in_features)] = np.inf
    if case.hostile not in ("slot", "rows") or not case.tiles:
        return
    tiles = case.segments.tiles.copy()
    record = tiles[pick.randrange(case.tiles)]
    if case.hostile == "slot":
        loras = case.batch.max_loras
        record[3] = pick.choice([loras, loras + 1000, 2**31 - 1, -1, -(2**31)])
        case.clean = dataclasses.replace(case.segments, tiles=tiles.copy())
    elif case.kernel != "stream" and record[1] == case.tile_rows:
        record[1] = pick.choice([case.tile_rows + 1, case.tile_rows + 5, 64, 1000])
    case.segments = dataclasses.replace(case.segments, tiles=tiles)


@dataclass
class _Run:
    """A case on a device."""

    device: Device
    case: DeltaCase
    entries: np.ndarray

    def delta(
        self, kernel: str, y: np.ndarray, segments: Segments, x_shift: int = 0, y_shift: int = 0
    ) -> tuple[np.ndarray, int]:
        """y after the op, and the status word; shifts in elements."""
        case, device = self.case, self.device
        lists: dict[str, Any] = {"late": not case.settled}
        hidden = {**lists, "visible": 0}
        itemsize = y.dtype.itemsize
        out = device.array(y, once=True, shift=y_shift * itemsize)
        status = device.status()
        ops.lora_delta(
            device.array(case.x, shift=x_shift * itemsize),
            out,
            dataclasses.replace(
                device.upload(segments, **hidden),
                tiles=device.array(segments.tiles, visible=case.tiles * 64, **lists),
                tile_count=device.array(segments.tile_count, **lists),
            ),
            dataclasses.replace(
                device.upload(case.routing, **hidden),
                row_to_pair=device.array(case.routing.row_to_pair, **lists),
            ),
            device.array(self.entries, late=False),
            case.slices,
            in_features=case.in_features,
            max_rank=case.max_rank,
            x_rows=case.x_rows,
            y_rows=case.y_rows,
            kernel="pair" if kernel == "stream" else kernel,
            status=status,
            plan_settled=case.settled,
        )
        return out.host.copy(), int(status.host[0])


def check(device: Device, case: DeltaCase, *, strict_push: bool = False) -> None:
    """Run the case; raises AssertionError (EmulatorError is one) where anything is off.

    strict_push: see ``Schedule``.
    """
    device.forget()
    pick = random.Random(~case.seed)
    run = _Run(device, case, _place_weights(device, case, pick))
    zeros = np.zeros((case.routing.num_rows, case.width), case.x.dtype)
    values = random_values(np.random.default_rng(case.seed), zeros.shape, case.dtype)
    for y in (zeros, values):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_lora_pair, "_STREAM_ROWS", sys.maxsize)
            device.schedule = Schedule(pick.getrandbits(60), 20_000, 0)
            want, want_status = run.delta("pair", y, case.clean)
        if y is zeros:
            _check_against_oracle(case, want)
        device.schedule = _draw_schedule(pick, strict_push)
        with pytest.MonkeyPatch.context() as patch:
            shape = _draw_shape(device, case, pick, patch)
            shifts = pick.choice([0, 0, 0, 1]), pick.choice([0, 0, 1, 2, 4])
            try:
                got, status = run.delta(case.kernel, y, case.segments, *shifts)
                _compare(case, y, got, want)
                expected = want_status if case.hostile in ("slot", "rank") else 0
                assert status == expected, f"status {status:#x} for {expected:#x}"
            except AssertionError as error:
                error.add_note(f"seed {case.seed}: {case}; {shape}, shifts {shifts}")
                error.add_note(f"{device.launched[-1]} {device.schedule}")
                raise


def _place_weights(device: Device, case: DeltaCase, pick: random.Random) -> np.ndarray:
    """Entries over weights that lie aligned or not, packed or not, at times mixed."""
    shift = pick.choice([0, 0, 0, 2, 8])
    mixed, packed = pick.random() < 0.3, pick.random() < 0.75

    def upload(values: np.ndarray) -> int:
        return device.weights(values, pick.choice([0, 0, 0, 0, 2, 8]) if mixed else shift)

    entries = build_entries(case.modules, upload, packed=packed)
    if mixed:
        other = build_entries(case.modules, upload, packed=not packed)
        taken = np.random.default_rng(case.seed).random(entries.shape[:2]) < 0.3
        entries = np.where(taken[..., None], other, entries)
    if case.hostile == "rank":
        records = entries.reshape(-1, SLOT_ENTRY.itemsize).view(SLOT_ENTRY)
        records["rank"][pick.randrange(len(records))] = pick.choice(
            [case.max_rank + 1, -1, 2**31 - 1]
        )
    return entries


def _draw_schedule(pick: random.Random, strict_push: bool) -> Schedule:
    return Schedule(
        pick.getrandbits(60),
        deliver=pick.choice([0, 200, 20_000, 300_000, 900_000]),
        pause=pick.choice([0, 0, 2_000, 50_000]),
        strict_push=strict_push,
    )


def _draw_shape(
    device: Device, case: DeltaCase, pick: random.Random, patch: pytest.MonkeyPatch
) -> str:
    """Decide the launch of the case's kernel, and say how."""
    if case.kernel == "stream":
        patch.setattr(_lora_pair, "_STREAM_ROWS", 0)
        # So few rows would always split K, so that no warp has more than one range of it.
        splits = pick.choice([1, _lora_pair._STREAM_SPLITS])
        patch.setattr(_lora_pair, "_STREAM_SPLITS", splits)
        for form in ("_WIDE", "_PANEL"):
            least = pick.choice([0, 0, sys.maxsize])
            patch.setattr(_lora_pair, f"{form}_ROWS", least)
        patch.setattr(_lora_pair, "_PANEL_ELEMENTS", 0)
        patch.setattr(device, "hopper", pick.random() < 0.5)
        return f"streams, up to {splits} splits"
    most = k_ranges(case.in_features)
    sizes = (2, 4, 8) if case.crowded and most > 1 else (1, 2, 4, 8)
    cluster = pick.choice([size for size in sizes if size <= most])
    natural = -(-max(part.out_features for part in case.slices) // (64 * cluster)) * 64
    columns = pick.choice([natural, natural, 64, -(-natural // 128) * 64])
    clusters = pick.choice([1, 1, 2] if case.crowded else [1, 1, 2, 3, 5])
    clusters = min(clusters, _MOST_CTAS // cluster)
    stages = pick.choice([6, 6, 4, 3, 2])
    patch.setattr(_lora_fused, "_RING_STAGES", stages)
    # So few CTAs would never be the instance with fewer chunks in flight than a warp has.
    patch.setattr(_lora_fused, "_DEEP_CTAS", _MOST_CTAS * (case.seed % 2))
    plain = _lora_fused.run_fused

    def run_fused(inputs: Any, y: Any, slices: Any, y_rows: Any, kernel: Any, work: Any) -> None:
        shape = _fitting(FusedShape(cluster, columns, clusters), kernel, work)
        plain(inputs, y, slices, y_rows, kernel, work, shape)

    patch.setattr(sys.modules["cupylora.ops.lora_delta"], "run_fused", run_fused)
    return f"{clusters} clusters of {cluster}, {columns} columns, {stages} stages"


def _fitting(shape: FusedShape, kernel: str, work: Workload) -> FusedShape:
    """The shape with as many columns as shared memory has room for."""
    while kernel == "cluster" and _lora_fused._cluster_bytes(work, shape) > _SHARED_LIMIT:
        shape = dataclasses.replace(shape, cta_columns=shape.cta_columns - 64)
    return shape


def _check_against_oracle(case: DeltaCase, delta: np.ndarray) -> None:
    plain = case.token_major_rows and case.routing.row_order == case.row_order
    if not plain or case.hostile in ("slot", "inf", "rank"):
        return
    for module, columns in zip(case.modules, case.columns, strict=True):
        expected = pair_deltas(case.batch, case.x, module, case.row_order)
        assert_close(delta[:, columns], expected, BOUNDS[case.dtype])


def _compare(case: DeltaCase, y: np.ndarray, got: np.ndarray, want: np.ndarray) -> None:
    outside = np.ones(case.width, bool)
    for columns in case.columns:
        outside[columns] = False
    kept = bits_of(got)[:, outside] == bits_of(y)[:, outside]
    assert kept.all(), "columns of no slice have changed"
    differ = _one_nan(got) != _one_nan(want)
    if differ.any():
        row, column = np.argwhere(differ)[0]
        raise AssertionError(
            f"{int(differ.sum())} elements are not the pair's, the first in row {row}, column "
            f"{column}: {got[row, column]} for {want[row, column]}"
        )


def _one_nan(values: np.ndarray) -> np.ndarray:
    """Bits, those of all NaNs alike."""
    bits = bits_of(values).copy()
    bits[np.isnan(values.astype(np.float32))] = 0x7FFF
    return bits
