"""The one-node deltas, in every shape, against the float64 oracle and bit for bit against the pair:
sizes, layouts, alignments, row orders, values that break arithmetic, and early starts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu_util import to_device, to_host
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_batch import (
    FUSED,
    Batch,
    Shifts,
    assert_same_bits,
    check_variants,
    columns_of,
    replays,
    write,
)
from problem_util import (
    BOUNDS,
    Factors,
    ModuleWeights,
    RoutingCase,
    assert_close,
    bits_of,
    fragile_values,
    hostile_routings,
    make_case,
    random_case,
    random_module,
    random_values,
    routing_cases,
)

from cupylora.dtypes import resolve_dtype
from cupylora.ops._device import is_hopper
from cupylora.ops._lora_choice import _TILE_ROWS, FusedShape, k_ranges
from cupylora.worklists import SLOT_ENTRY, STATUS_BAD_RANK, STATUS_BAD_SLOT, LoraSlice

pytestmark = pytest.mark.gpu

DTYPES = ("bfloat16", "float16")
KERNELS = ("pair", *FUSED)
SIZES = [
    (8, (40, 65)),
    (63, (101, 3)),
    (64, (333,)),
    (100, (64, 72)),
    (200, (264, 7)),
    (768, (130,)),
    (1544, (136, 64)),
    (2048, (256, 64)),
    (2880, (320, 33)),
    (3080, (200,)),
    (4096, (520,)),
    (7168, (136, 200)),
    (14336, (200, 1)),
]
"""in_features, and the slices' out_features. 1544 and 3080 have ranges of K without a chunk."""

RANKS = {
    16: (16, 1, 0, 3, 5, 8, 16),
    32: (32, 17, 24, 0, 8, 5),
    64: (64, 1, 3, 5, 8, 16, 17, 24, 33, 48, 0),
}
"""Ranks of the slots by max_rank: one for each size class of the kernels."""


@pytest.fixture(scope="module", autouse=True)
def _hopper() -> None:
    if not is_hopper():
        pytest.skip("the fused kernels need compute capability 9.0")


def modules_of(
    in_features: int,
    widths: Any,
    ranks: Any,
    experts: int,
    dtype: str,
    *,
    seed: int = 5,
    turn: bool = True,
) -> list[ModuleWeights]:
    """A module a width; their slots have the same ranks, in another order if ``turn``."""
    rng = np.random.default_rng(seed)
    made = []
    for index, width in enumerate(widths):
        own = [*ranks[index * turn :], *ranks[: index * turn]]
        made.append(random_module(rng, own, in_features, width, experts, dtype))
    return made


def assert_near_oracle(batch: Batch, y: np.ndarray) -> None:
    change = batch.by_pair(y).astype(np.float64) - batch.y0.astype(np.float64)
    assert_close(change, batch.delta, BOUNDS[batch.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_rank", RANKS)
@pytest.mark.parametrize(("in_features", "widths"), SIZES, ids=[str(size[0]) for size in SIZES])
def test_every_shape_gives_the_same_bits(
    in_features: int, widths: tuple[int, ...], max_rank: int, dtype: str
) -> None:
    ranks = RANKS[max_rank]
    case = random_case(max_rank, 40, 2, 2, len(ranks))
    modules = modules_of(in_features, widths, ranks, 2, dtype)
    batch = Batch(case, modules, dtype, max_rank)
    assert_near_oracle(batch, check_variants(batch))


LARGE_TILES = [(rows, rank) for rows, rank in _TILE_ROWS["ring"].items() if rows > 8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tile_rows", "max_rank"), LARGE_TILES)
@pytest.mark.parametrize(("in_features", "widths"), SIZES[4::2])
def test_large_tiles_give_the_same_bits(
    in_features: int, widths: tuple[int, ...], tile_rows: int, max_rank: int, dtype: str
) -> None:
    """Tiles of every number of rows, and several of a segment."""
    ranks = RANKS[max_rank]
    slots = np.repeat(
        np.arange(-1, len(ranks)), [5, 1, 9, 16, 17, 31, 33, 70, 32][: len(ranks) + 1]
    )
    case = make_case("", np.zeros((len(slots), 1)), slots, 1, len(ranks))
    modules = modules_of(in_features, widths, ranks, 1, dtype)
    batch = Batch(case, modules, dtype, max_rank, tile_rows=tile_rows)
    expected = check_variants(batch)
    assert_near_oracle(batch, expected)
    assert_same_bits(replace(batch, tile_rows=8).run("ring"), expected)


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 23])
@pytest.mark.parametrize("kernel", FUSED)
def test_tiles_of_every_number_of_rows(kernel: str, tokens: int) -> None:
    case = make_case("", np.zeros((tokens, 1)), np.zeros(tokens), 1, 1)
    batch = Batch(case, modules_of(768, (200,), (20,), 1, "bfloat16"), "bfloat16", 32)
    y = batch.run(kernel)
    assert_same_bits(y, batch.run("pair"))
    assert_near_oracle(batch, y)


LAYOUTS: dict[str, tuple[list[LoraSlice], int]] = {
    "16-byte pieces": ([LoraSlice(64, 8), LoraSlice(136, 80)], 216),
    "16-byte columns, narrow": ([LoraSlice(60, 8), LoraSlice(4, 72)], 80),
    "4-byte columns": ([LoraSlice(64, 2), LoraSlice(72, 68)], 142),
    "odd column": ([LoraSlice(64, 1), LoraSlice(72, 70)], 150),
    "odd pitch": ([LoraSlice(64, 0), LoraSlice(72, 64)], 137),
    "odd widths": ([LoraSlice(63, 0), LoraSlice(33, 64), LoraSlice(1, 98)], 104),
    "interleaved": ([LoraSlice(96, 0, 2), LoraSlice(96, 1, 2)], 192),
    "stride 3": ([LoraSlice(50, 3, 3), LoraSlice(41, 1, 3)], 153),
    "eight slices": (
        [
            LoraSlice(width, at)
            for width, at in zip(
                (1, 8, 64, 65, 200, 3, 130, 16), (0, 1, 9, 73, 138, 338, 341, 471), strict=True
            )
        ],
        487,
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_rank", RANKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_of_y_lie_anyhow(layout: str, max_rank: int, dtype: str) -> None:
    slices, width = LAYOUTS[layout]
    ranks = RANKS[max_rank]
    case = random_case(3, 30, 2, 2, len(ranks))
    modules = modules_of(512, [part.out_features for part in slices], ranks, 2, dtype)
    batch = Batch(case, modules, dtype, max_rank, slices, width)
    y = check_variants(batch)
    assert_near_oracle(batch, y)
    for part in slices:
        y[:, columns_of(part)] = batch.y0[:, columns_of(part)]
    assert_same_bits(y, batch.y0)


SHIFTS = [
    *(Shifts(**{name: 1}) for name in "abxy"),
    *(Shifts(**{name: 4}) for name in "abxy"),
    Shifts(1, 1, 1, 1),
    Shifts(y=2),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_rank", RANKS)
@pytest.mark.parametrize("shifts", SHIFTS, ids=str)
def test_alignment_does_not_change_a_bit(shifts: Shifts, max_rank: int, dtype: str) -> None:
    ranks = RANKS[max_rank]
    case = random_case(4, 30, 2, 2, len(ranks))
    aligned = Batch(case, modules_of(512, (136, 72), ranks, 2, dtype), dtype, max_rank)
    shifted = replace(aligned, shifts=shifts)
    assert_same_bits(check_variants(shifted), aligned.run("pair"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_features", [63, 100, 136, 1096, 4096])
def test_layout_of_a_does_not_change_a_bit(in_features: int, dtype: str) -> None:
    ranks = RANKS[64]
    case = random_case(5, 30, 2, 2, len(ranks))
    packed = Batch(case, modules_of(in_features, (136,), ranks, 2, dtype), dtype, 64)
    by_rows = replace(packed, packed=False)
    assert_same_bits(check_variants(by_rows), packed.run("pair"))


@pytest.mark.parametrize("share", ["a", "b", "ab"])
@pytest.mark.parametrize("kernel", FUSED)
def test_shared_factors(kernel: str, share: str) -> None:
    rng = np.random.default_rng(6)
    case = random_case(6, 40, 2, 5, 3, start_expert=2)
    module = random_module(rng, (8, 16, 4), 192, 72, 7, "bfloat16", share=share)
    batch = Batch(case, [module], "bfloat16", 16)
    y = batch.run(kernel)
    assert_same_bits(y, batch.run("pair"))
    assert_near_oracle(batch, y)


@pytest.mark.parametrize("row_order", ["token_major", "k_major"])
@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("tile_rows", [8, 16])
def test_row_maps(row_order: str, foreign: bool, tile_rows: int) -> None:
    case = random_case(7, 40, 3, 4, 3, foreign_share=0.2, start_expert=3)
    modules = modules_of(136, (80, 24), (8, 16, 5), 7, "bfloat16")
    plain = Batch(
        case,
        modules,
        "bfloat16",
        16,
        tile_rows=tile_rows,
        row_order=row_order,
        foreign=foreign,
    )
    expected = plain.run("pair")
    assert_near_oracle(plain, expected)
    for x_rows, y_rows in itertools.product(("token", "pair", "row"), ("pair", "row")):
        batch = replace(plain, x_rows=x_rows, y_rows=y_rows)
        for kernel in FUSED if tile_rows == 8 else ("ring",):
            for settled in (False, True):
                y = batch.by_pair(batch.run(kernel, settled=settled))
                assert_same_bits(y, expected, (kernel, x_rows, y_rows, settled))


HOSTILE = hostile_routings()


@pytest.mark.parametrize("case", HOSTILE, ids=[case.name for case in HOSTILE])
def test_hostile_routings(case: RoutingCase) -> None:
    ranks = [(8, 3, 16)[slot % 3] for slot in range(case.max_loras)]
    experts = case.num_experts + case.start_expert
    batch = Batch(case, modules_of(64, (40,), ranks, experts, "bfloat16"), "bfloat16", 16)
    expected = batch.run("pair")
    for kernel in FUSED:
        for settled in (False, True):
            y = batch.run(kernel, settled=settled)
            assert_same_bits(y, expected, (kernel, settled))
    assert_near_oracle(batch, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", FUSED)
def test_rows_of_no_adapter_keep_every_bit(kernel: str, dtype: str) -> None:
    case = random_case(8, 40, 2, 4, 3, base_share=0.5)
    modules = modules_of(192, (136, 33), (8, 0, 16), 4, dtype, turn=False)
    y0 = fragile_values((80, 169), dtype)
    batch = Batch(case, modules, dtype, 16, y0=y0)
    slots = np.repeat(case.token_to_slot, 2)
    untouched = (slots < 0) | (slots == 1)
    assert 0 < untouched.sum() < len(untouched)
    for shape in (None, FusedShape(1, 64, 2)):
        y = batch.run(kernel, shape)
        assert_same_bits(y[untouched], y0[untouched])


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("kernel", FUSED)
def test_batches_without_work_leave_the_stream_in_order(kernel: str, settled: bool) -> None:
    """No tile at all, and tiles of rank 0 alone: what follows still sees what came before."""
    base = random_case(9, 20, 1, 1, 2, base_share=1.0)
    slots = replace(base, token_to_slot=np.zeros(20, np.int32))
    for case in (base, slots):
        batch = Batch(case, modules_of(256, (64,), (0, 8), 1, "bfloat16"), "bfloat16", 16)
        some = replace(batch, case=replace(base, token_to_slot=np.ones(20, np.int32)))
        y = batch.fresh_y()
        for _ in range(20):
            write([(some.device_y0, y)])
            batch.enqueue(y, kernel, settled=settled)
            batch.enqueue(y, kernel, settled=True)
            some.enqueue(y, kernel, settled=True)
            assert_same_bits(np.asarray(to_host(y)), some.run("pair"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_fp_range_of_h(kernel: str, dtype: str) -> None:
    """h beyond the range of fp16, and rows of small values beside it."""
    case = make_case("", np.zeros((9, 1)), np.zeros(9), 1, 1)
    a, b = np.full((1, 24, 4096), 4), np.full((1, 72, 24), 1e-4)
    a[:, 1::2] = 2.0**-7
    kind = resolve_dtype(dtype)
    module = ModuleWeights(4096, 72, (Factors(a.astype(kind), b.astype(kind), 0.75),))
    x = np.full((9, 4096), 8, kind)
    x[3], x[5] = 2.0**-14, 0
    zero = np.zeros((9, 72), kind)
    batch = Batch(case, [module], dtype, 32, x=x, y0=zero)
    y = batch.run(kernel)
    assert np.isfinite(y.astype(np.float64)).all()
    assert_near_oracle(batch, y)
    assert_same_bits(y, batch.run("pair"))


@pytest.mark.parametrize("rank", [1, 5, 13, 16, 20, 48])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_x_gives_what_arithmetic_says(dtype: str, rank: int) -> None:
    """Factors above zero: an infinite x makes an infinite y, of its token alone. Ranks that only
    fill up a product have no part in that."""
    rng = np.random.default_rng(10)
    case = make_case("", np.zeros((11, 1)), np.zeros(11), 1, 1)
    a = np.abs(random_values(rng, (1, rank, 448), dtype, 0.05)) + resolve_dtype(dtype).type(0.01)
    b = np.abs(random_values(rng, (1, 72, rank), dtype)) + resolve_dtype(dtype).type(0.01)
    module = ModuleWeights(448, 72, (Factors(a, b, 0.5),))
    x = random_values(rng, (11, 448), dtype)
    x[2, 70], x[4, 447], x[9, 0] = np.inf, -np.inf, np.inf
    batch = Batch(case, [module], dtype, max(16, rank), x=x, y0=random_values(rng, (11, 72), dtype))
    y = check_variants(batch).astype(np.float64)
    assert (y[[2, 9]] == np.inf).all()
    assert (y[4] == -np.inf).all()
    assert np.isfinite(np.delete(y, [2, 4, 9], 0)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_with_its_token_and_its_adapter(dtype: str) -> None:
    """One CTA takes all items, so that shared memory still holds the NaN of the ones before."""
    ranks = (64, 8, 3, 24, 20, 64, 5)
    case = random_case(11, 60, 1, 1, len(ranks), base_share=0.0)
    clean = Batch(case, modules_of(512, (136, 71), ranks, 1, dtype, turn=False), dtype, 64)
    expected = clean.run("pair")
    modules = [
        replace(module, slots=(spoilt(module.slots[0]), *module.slots[1:]))
        for module in clean.modules
    ]
    x = clean.x.copy()
    bad = case.token_to_slot == 0
    bad[5] = True
    x[5] = np.nan
    batch = replace(clean, modules=modules, x=x, y0=clean.y0)
    for kernel, size in itertools.product(FUSED, (1, 2)):
        y = batch.run(kernel, FusedShape(size, 64, 1))
        assert np.isnan(y[bad].astype(np.float64)).all()
        assert_same_bits(y[~bad], expected[~bad], (kernel, size))


def spoilt(factors: Factors | None) -> Factors:
    assert factors is not None
    return replace(factors, a=np.full_like(factors.a, np.nan), b=np.full_like(factors.b, np.nan))


@pytest.mark.parametrize("rank", [-3, 17, 2**30])
@pytest.mark.parametrize("kernel", KERNELS)
def test_entry_rank_out_of_range_is_reported(kernel: Any, rank: int) -> None:
    import cupy

    case = random_case(12, 30, 1, 1, 2)
    modules = modules_of(256, (64, 40), (8, 16), 1, "bfloat16", turn=False)
    batch = Batch(case, modules, "bfloat16", 16)
    table = np.array(to_host(batch.entries))
    table.view(SLOT_ENTRY)["rank"][:, 1] = rank
    broken = replace(batch)
    broken.entries = to_device(table)
    word, clean = cupy.zeros(1, np.int32), cupy.zeros(1, np.int32)
    y, good = broken.run(kernel, status=word), batch.run(kernel, status=clean)
    mine = case.token_to_slot == 1
    assert_same_bits(y[mine], batch.y0[mine])
    assert_same_bits(y[~mine], good[~mine])
    assert (int(word[0]), int(clean[0])) == (STATUS_BAD_RANK, 0)


@pytest.mark.parametrize("slot", [2, 1000, 2**31 - 1])
@pytest.mark.parametrize("kernel", KERNELS)
def test_tile_of_a_slot_out_of_range_is_reported(kernel: Any, slot: int) -> None:
    import cupy

    case = random_case(13, 30, 1, 1, 2)
    batch = Batch(case, modules_of(256, (64, 40), (8, 16), 1, "bfloat16"), "bfloat16", 16)
    expected = batch.run(kernel)
    first, rows = to_host(batch.segments.tiles)[1, :2].tolist()
    batch.segments.tiles[1, 3] = slot
    word = cupy.zeros(1, np.int32)
    y = batch.run(kernel, status=word)
    pairs = batch.host_routing.row_to_pair[first : first + rows]
    expected[pairs] = batch.y0[pairs]
    assert_same_bits(y, expected)
    assert int(word[0]) == STATUS_BAD_SLOT


@pytest.mark.parametrize("kernel", FUSED)
@pytest.mark.parametrize("max_rank", RANKS)
def test_fifty_runs_give_the_same_bits(kernel: str, max_rank: int) -> None:
    import cupy

    ranks = RANKS[max_rank]
    case = random_case(14, 60, 2, 4, len(ranks))
    modules = modules_of(4096, (264, 100), ranks, 4, "bfloat16")
    batch = Batch(case, modules, "bfloat16", max_rank)
    expected = to_device(bits_of(batch.run("pair")))
    different = cupy.zeros((), np.int64)
    for _ in range(50):
        y = batch.fresh_y()
        batch.enqueue(y, kernel, settled=True)
        different += (y.view(np.uint16) != expected).sum()
    assert int(different) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_rank", RANKS)
def test_rows_do_not_depend_on_their_batch(max_rank: int, dtype: str) -> None:
    """Alone, in half of the batch, in all of it: in whatever shape the sizes ask for."""
    ranks = RANKS[max_rank]
    case = random_case(15, 64, 2, 2, len(ranks))
    modules = modules_of(7168, (136,), ranks, 2, dtype)
    x = random_values(np.random.default_rng(15), (64, 7168), dtype)
    y0 = random_values(np.random.default_rng(16), (128, 136), dtype)
    full = Batch(case, modules, dtype, max_rank, x=x, y0=y0).run("pair")
    for tokens in (1, 2, 32, 64):
        ids, slots = case.topk_ids[:tokens], case.token_to_slot[:tokens]
        part = replace(case, topk_ids=ids, token_to_slot=slots)
        batch = Batch(part, modules, dtype, max_rank, x=x[:tokens], y0=y0[: 2 * tokens])
        for kernel in (*FUSED, "auto"):
            assert_same_bits(batch.run(kernel), full[: 2 * tokens], (tokens, kernel))


AUTO = {
    # in_features, widths, max_rank, tokens, top_k, experts, adapters
    "dense": (4096, (4096,), 16, 8, 1, 1, 4),
    "qkv": (2048, (2048, 512, 512), 32, 33, 1, 1, 5),
    "moe gate up": (2048, (768, 768), 16, 32, 8, 16, 3),
    "moe down": (768, (2048,), 16, 32, 8, 16, 3),
    "one long row": (14336, (4096,), 64, 1, 1, 1, 1),
    "wide": (512, (14336,), 64, 16, 1, 1, 2),
    "many items of many ranks": (3072, (800,) * 4, 64, 128, 1, 1, 1),
    "narrow": (1, (1,), 1, 9, 1, 1, 2),
}


@pytest.mark.parametrize("name", AUTO)
def test_shapes_that_sizes_ask_for(name: str) -> None:
    in_features, widths, max_rank, tokens, top_k, experts, adapters = AUTO[name]
    case = random_case(17, tokens, top_k, experts, adapters, base_share=0.0)
    ranks = [max_rank] * adapters
    batch = Batch(
        case, modules_of(in_features, widths, ranks, experts, "bfloat16"), "bfloat16", max_rank
    )
    expected = batch.run("pair")
    for kernel in (*FUSED, "auto"):
        assert_same_bits(batch.run(kernel), expected, kernel)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("max_rank", RANKS)
@pytest.mark.parametrize("in_features", [64, 768, 4096])
def test_x_and_y_of_the_kernel_ahead(in_features: int, max_rank: int, packed: bool) -> None:
    """The kernel ahead lets the delta start at once and writes x and y late."""
    ranks = RANKS[max_rank]
    case = random_case(18, 24, 2, 2, len(ranks))
    modules = modules_of(in_features, (136, 64), ranks, 2, "bfloat16")
    batch = Batch(case, modules, "bfloat16", max_rank, packed=packed)
    expected = batch.run("pair")
    for kernel in FUSED:
        assert_same_bits(batch.run_behind_writer(kernel), expected, kernel)
    for kernel, shape in batch.variants():
        assert_same_bits(batch.run_behind_writer(kernel, shape), expected, (kernel, shape))


def test_large_tiles_behind_the_kernel_ahead() -> None:
    for tile_rows, max_rank in LARGE_TILES:
        case = random_case(19, 200, 1, 1, 3)
        modules = modules_of(2048, (136, 64), (max_rank, 5, 8), 1, "bfloat16")
        batch = Batch(case, modules, "bfloat16", max_rank, tile_rows=tile_rows)
        expected = batch.run("pair")
        for kernel, shape in batch.variants():
            assert_same_bits(batch.run_behind_writer(kernel, shape), expected, (tile_rows, shape))


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("kernel", FUSED)
def test_captured_delta_follows_the_kernel_that_writes_x_and_y(kernel: str, settled: bool) -> None:
    """Twenty replays with another x and y each; before each of them both hold NaN."""
    import cupy

    rng = np.random.default_rng(20)
    case = random_case(20, 24, 2, 4, 4)
    modules = modules_of(2048, (264, 72), (16, 5, 8, 16), 4, "bfloat16")
    batch = Batch(case, modules, "bfloat16", 16)
    values = [random_values(rng, batch.x.shape, "bfloat16") for _ in range(20)]
    sources = [to_device(value.view(np.uint16)) for value in values]
    bases = [to_device(np.roll(bits_of(batch.y0), turn, 0)) for turn in range(20)]
    expected = []
    for source, base in zip(sources, bases, strict=True):
        y = base.copy()
        kind = resolve_dtype("bfloat16")
        batch.enqueue(y.view(kind), "pair", x=source.view(kind))
        expected.append(to_host(y))
    x, y = cupy.empty_like(batch.device_x), batch.fresh_y()
    here, base_here = cupy.zeros_like(sources[0]), cupy.zeros_like(bases[0])
    nan, nan_y = cupy.full_like(here, 0xFFFF), cupy.full_like(base_here, 0xFFFF)

    def step() -> None:
        write([(nan, x), (nan_y, y)], 0)
        write([(here, x), (base_here, y)])
        batch.enqueue(y, kernel, x=x, settled=settled)

    def prepare(turn: int) -> None:
        here[...] = sources[turn]
        base_here[...] = bases[turn]

    turns = [lambda turn=turn: prepare(turn) for turn in range(20)]
    for turn, _ in enumerate(replays(step, turns)):
        np.testing.assert_array_equal(bits_of(to_host(y)), expected[turn], err_msg=str(turn))


CHAINS = [
    ("cluster", "cluster", "cluster"),
    ("ring", "ring", "ring"),
    ("cluster", "ring", "cluster"),
    ("ring", "cluster", "pair"),
    ("pair", "ring", "cluster"),
    ("auto", "auto", "auto"),
]


@pytest.mark.parametrize("second", [64, 65])
@pytest.mark.parametrize("kernels", CHAINS, ids="-".join)
def test_captured_deltas_on_one_y_add_up(kernels: tuple[Any, ...], second: int) -> None:
    """Each may start before the one ahead of it has ended. y in 16-byte pieces, and element by
    element."""
    case = random_case(21, 40, 2, 4, 4)
    links = [
        Batch(
            case,
            modules_of(1024 * (turn + 1), (264, second), (16, 8, 5, 16), 4, "bfloat16", seed=turn),
            "bfloat16",
            16,
            x=random_values(np.random.default_rng(turn), (40, 1024 * (turn + 1)), "bfloat16"),
            y0=random_values(np.random.default_rng(9), (80, 264 + second), "bfloat16"),
        )
        for turn in range(3)
    ]
    expected = chain_apart(links, links[0].fresh_y())
    y = links[0].fresh_y()

    def step() -> None:
        write([(links[0].device_y0, y)])
        for link, kernel in zip(links, kernels, strict=True):
            link.enqueue(y, kernel, settled=True)

    for turn, _ in enumerate(replays(step, [lambda: None] * 10)):
        assert_same_bits(np.asarray(to_host(y)), expected, turn)


def chain_apart(links: list[Batch], y: Any) -> np.ndarray:
    """The links one after the other, each waited for."""
    import cupy

    for link in links:
        link.enqueue(y, "pair")
        cupy.cuda.runtime.deviceSynchronize()
    return np.asarray(to_host(y))


@pytest.mark.parametrize("kernels", CHAINS, ids="-".join)
def test_captured_deltas_read_the_x_that_the_one_ahead_wrote(kernels: tuple[Any, ...]) -> None:
    """y of a link is x of the next."""
    rng = np.random.default_rng(22)
    case, width = random_case(22, 24, 2, 2, 4), 768
    values = [random_values(rng, (48, width), "bfloat16") for _ in range(3)]
    first = Batch(
        case,
        modules_of(width, (width,), (16, 8, 5, 16), 2, "bfloat16"),
        "bfloat16",
        16,
        y0=values[0],
    )
    links = [first] + [
        replace(
            first,
            modules=modules_of(width, (width,), (16, 3, 16, 8), 2, "bfloat16", seed=turn),
            x_rows="pair",
            y0=values[turn],
        )
        for turn in (1, 2)
    ]
    outputs = [link.fresh_y() for link in links]
    sources = [first.device_x, *outputs[:2]]

    def run(names: tuple[Any, ...], wait: bool) -> None:
        import cupy

        for link, y in zip(links, outputs, strict=True):
            write([(link.device_y0, y)], 0)
        for link, kernel, x, y in zip(links, names, sources, outputs, strict=True):
            link.enqueue(y, kernel, x=x, settled=True)
            if wait:
                cupy.cuda.runtime.deviceSynchronize()

    run(("pair",) * 3, wait=True)
    expected = [to_host(y) for y in outputs]
    for turn, _ in enumerate(replays(lambda: run(kernels, wait=False), [lambda: None] * 10)):
        for y, want in zip(outputs, expected, strict=True):
            assert_same_bits(np.asarray(to_host(y)), np.asarray(want), turn)


@given(
    case=routing_cases(),
    in_features=st.sampled_from((1, 8, 56, 64, 65, 136, 384, 448, 769, 1544)),
    widths=st.lists(st.sampled_from((1, 2, 8, 15, 64, 65, 128, 200)), min_size=1, max_size=4),
    ranks=st.lists(st.integers(0, 64), min_size=4, max_size=4),
    dtype=st.sampled_from(DTYPES),
    packed=st.booleans(),
    shifts=st.builds(Shifts, *[st.sampled_from((0, 0, 0, 1, 2, 4))] * 4),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_drawn_batches(
    case: RoutingCase,
    in_features: int,
    widths: list[int],
    ranks: list[int],
    dtype: str,
    packed: bool,
    shifts: Shifts,
    data: st.DataObject,
) -> None:
    experts = case.num_experts + case.start_expert
    modules = modules_of(in_features, widths, ranks[: case.max_loras], experts, dtype)
    max_rank = max(1, *ranks[: case.max_loras])
    batch = Batch(case, modules, dtype, max_rank, packed=packed, shifts=shifts)
    expected = batch.run("pair")
    sizes = [size for size in (1, 2, 4, 8) if size <= k_ranges(in_features)]
    for kernel in FUSED:
        size, columns = data.draw(st.sampled_from(sizes)), 64 * data.draw(st.integers(1, 4))
        shape = FusedShape(size, columns, data.draw(st.integers(1, 40)))
        assert_same_bits(batch.run(kernel, shape), expected, shape)
