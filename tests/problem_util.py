"""Routings, slot tables and weights for tests of the ops, on either backend.

Everything is NumPy. A backend's test uploads what it needs: ``build_entries`` asks for each
factor's address through a function, so that the same weights serve host and device memory.
Answers are brute force in plain Python, or the float64 oracle.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cupylora.dtypes import resolve_dtype
from cupylora.reference.oracle import lora_delta_oracle
from cupylora.worklists import PACKED, ROW_MAJOR, SLOT_ENTRY, Routing

BOUNDS = {"bfloat16": 3e-3, "float16": 5e-4, "float32": 1e-5}
"""Relative Frobenius error allowed on one op's delta; one row may have WORST_ROW times that."""
WORST_ROW = 4
CASE_11_RANKS = (1, 2, 3, 5, 8, 12, 24, 40, 96, 512)

Upload = Callable[[np.ndarray], int]


@dataclass(frozen=True)
class RoutingCase:
    """Arguments of ``route``: topk_ids [T, k], token_to_slot [T] and the sizes."""

    name: str
    topk_ids: np.ndarray
    token_to_slot: np.ndarray
    num_experts: int
    max_loras: int
    start_expert: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        """Keyword arguments of ``route``."""
        return {
            "num_experts": self.num_experts,
            "max_loras": self.max_loras,
            "start_expert": self.start_expert,
        }

    def pair(self, token: int, choice: int, row_order: str) -> int:
        """Number of the pair (token, choice)."""
        tokens, top_k = self.topk_ids.shape
        return choice * tokens + token if row_order == "k_major" else token * top_k + choice

    def local_pairs(self, row_order: str) -> list[tuple[int, int, int, int]]:
        """(local expert, slot, pair, token) of every pair that has a row, unsorted."""
        found = []
        for token, ids in enumerate(self.topk_ids.tolist()):
            slot = max(int(self.token_to_slot[token]), -1)
            for choice, expert in enumerate(ids):
                local = expert - self.start_expert
                if 0 <= local < self.num_experts:
                    found.append((local, slot, self.pair(token, choice, row_order), token))
        return found


def make_case(
    name: str,
    topk_ids: Any,
    token_to_slot: Any,
    num_experts: int,
    max_loras: int,
    start_expert: int = 0,
) -> RoutingCase:
    """A RoutingCase from lists or arrays of any integer type."""
    return RoutingCase(
        name,
        np.asarray(topk_ids, np.int32),
        np.asarray(token_to_slot, np.int32),
        num_experts,
        max_loras,
        start_expert,
    )


def random_topk(
    rng: np.random.Generator, tokens: int, top_k: int, experts: int, foreign_share: float = 0.0
) -> np.ndarray:
    """Distinct experts 0 ... experts-1 for each token, int32 [tokens, top_k]; some become -1."""
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
    ids[rng.random(ids.shape) < foreign_share] = -1
    return ids


def random_slots(
    rng: np.random.Generator, tokens: int, max_loras: int, base_share: float = 0.25
) -> np.ndarray:
    """A slot for each token, int32 [tokens], -1 for about ``base_share`` of them."""
    slots = rng.integers(0, max_loras, tokens).astype(np.int32)
    slots[rng.random(tokens) < base_share] = -1
    return slots


def random_case(
    seed: int,
    tokens: int,
    top_k: int,
    experts: int,
    max_loras: int,
    *,
    base_share: float = 0.25,
    foreign_share: float = 0.0,
    start_expert: int = 0,
) -> RoutingCase:
    """Random routing over ``experts`` local experts (and base rows, and foreign choices)."""
    rng = np.random.default_rng(seed)
    ids = random_topk(rng, tokens, top_k, experts, foreign_share)
    ids[ids >= 0] += start_expert
    slots = random_slots(rng, tokens, max_loras, base_share)
    return make_case(f"random-{seed}", ids, slots, experts, max_loras, start_expert)


def hostile_routings() -> list[RoutingCase]:
    """Routings that broke other runtimes, and the edges of ours."""
    many = [
        random_case(experts, 40, 4, experts, 3, foreign_share=0.1) for experts in (65, 1024, 1536)
    ]
    shuffled = random_case(11, 64, 2, 4, 3, base_share=0.3)
    return [
        make_case("no tokens", np.zeros((0, 2)), [], 4, 2),
        make_case("all foreign", np.full((5, 2), -1), [0, 1, -1, 0, 1], 4, 2),
        make_case("all beyond", np.full((5, 2), 4), [0, 1, -1, 0, 1], 4, 2),
        make_case("all on the last expert", np.full((70, 1), 127), np.arange(70) % 3 - 1, 128, 2),
        make_case("twice the same expert", [[5, 5]], [1], 8, 2),
        make_case("both twice", [[5, 5], [2, 5], [5, 5]], [1, -1, 0], 8, 2),
        make_case("foreign beside local", [[-1, 3], [2, -1]], [0, 1], 4, 2),
        make_case("all base", [[0, 1], [1, 2], [3, 0]], [-1, -7, -1], 4, 2),
        make_case("one token", [[2]], [0], 3, 1),
        make_case("second half of the experts", [[0, 4], [5, 7], [3, 6]], [0, -1, 1], 4, 2, 4),
        make_case("segments 1 and 200", np.zeros((201, 1)), [0] + [1] * 200, 1, 2),
        make_case("segment 129", np.zeros((129, 1)), [1] * 129, 1, 2),
        make_case(
            "63 singles and 400",
            np.array([*range(63), *([63] * 400)])[:, None],
            [0] * 63 + [1] * 400,
            64,
            2,
        ),
        make_case("int32 ends", [[2**31 - 1, -(2**31)], [0, 1]], [1, -(2**31)], 2, 2),
        replace(shuffled, name="mixed"),
        *(replace(case, name=f"{case.num_experts} experts") for case in many),
    ]


@st.composite
def routing_cases(draw: st.DrawFn) -> RoutingCase:
    """Small routings with foreign ids, repeated experts, base rows and an expert offset."""
    tokens, top_k = draw(st.integers(0, 12)), draw(st.integers(1, 4))
    experts, start = draw(st.integers(1, 6)), draw(st.integers(0, 3))
    max_loras = draw(st.integers(1, 4))
    ids = st.lists(st.integers(-1, start + experts + 1), min_size=top_k, max_size=top_k)
    topk_ids = draw(st.lists(ids, min_size=tokens, max_size=tokens))
    slots = draw(st.lists(st.integers(-2, max_loras - 1), min_size=tokens, max_size=tokens))
    table = np.array(topk_ids, np.int32).reshape(tokens, top_k)
    return make_case("drawn", table, slots, experts, max_loras, start)


def brute_route(case: RoutingCase, row_order: str = "token_major") -> tuple[list[int], ...]:
    """(row_to_pair, pair_to_row, expert_first_token_offset) by plain sorting."""
    rows = sorted(case.local_pairs(row_order))
    size = case.topk_ids.size
    row_to_pair, pair_to_row = [-1] * size, [-1] * size
    for row, (_, _, pair, _) in enumerate(rows):
        row_to_pair[row], pair_to_row[pair] = pair, row
    offsets = [
        sum(1 for expert, *_ in rows if expert < bound) for bound in range(case.num_experts + 1)
    ]
    return row_to_pair, pair_to_row, offsets


def brute_rows(
    case: RoutingCase, row_to_pair: Sequence[int], row_order: str = "token_major"
) -> list[tuple[int, int, int]]:
    """(local expert, slot, token) of each valid row of any order of rows."""
    by_pair = {
        pair: (expert, slot, token) for expert, slot, pair, token in case.local_pairs(row_order)
    }
    return [by_pair[pair] for pair in row_to_pair if pair >= 0]


def brute_segments(
    rows: Sequence[tuple[int, int, int]], tile_rows: int
) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int, int, int]]]:
    """Segments and tiles, each (first row, rows, expert, slot), of rows (expert, slot, token)."""
    segments: list[tuple[int, int, int, int]] = []
    for row, (expert, slot, _) in enumerate(rows):
        if segments and segments[-1][2:] == (expert, slot):
            first, count, *_ = segments[-1]
            segments[-1] = (first, count + 1, expert, slot)
        else:
            segments.append((row, 1, expert, slot))
    tiles = []
    for first, count, expert, slot in segments:
        if slot >= 0:
            tiles += [
                (first + at, min(tile_rows, count - at), expert, slot)
                for at in range(0, count, tile_rows)
            ]
    return segments, tiles


def expert_order(routing: Routing, seed: int) -> Routing:
    """The same rows as another stack may order them: by expert alone, anyhow within an expert."""
    rng = np.random.default_rng(seed)
    row_to_pair = np.array(routing.row_to_pair)
    bounds = np.array(routing.expert_first_token_offset).tolist()
    for first, last in pairwise(bounds):
        row_to_pair[first:last] = rng.permutation(row_to_pair[first:last])
    pair_to_row = np.full_like(row_to_pair, -1)
    pair_to_row[row_to_pair[: bounds[-1]]] = np.arange(bounds[-1])
    return replace(routing, row_to_pair=row_to_pair, pair_to_row=pair_to_row)


@dataclass(frozen=True)
class Factors:
    """What one slot holds for one module: A [E or 1, r, in], B [E or 1, out, r] and the scale."""

    a: np.ndarray
    b: np.ndarray
    scale: float

    @property
    def rank(self) -> int:
        """r."""
        return int(self.a.shape[1])

    def expert(self, expert: int) -> tuple[np.ndarray, np.ndarray, float]:
        """(A, B, scale) of a global expert; a shared factor serves all."""
        return (
            self.a[expert if len(self.a) > 1 else 0],
            self.b[expert if len(self.b) > 1 else 0],
            self.scale,
        )


@dataclass(frozen=True)
class ModuleWeights:
    """One module over all slots; None where a slot does not touch it."""

    in_features: int
    out_features: int
    slots: tuple[Factors | None, ...]


def random_values(
    rng: np.random.Generator, shape: Sequence[int], dtype: Any, size: float = 1.0
) -> np.ndarray:
    """Normal values of standard deviation ``size``, rounded to ``dtype``."""
    return (rng.standard_normal(tuple(shape), np.float32) * size).astype(resolve_dtype(dtype))


def random_module(
    rng: np.random.Generator,
    ranks: Sequence[int],
    in_features: int,
    out_features: int,
    experts: int,
    dtype: Any,
    *,
    share: str = "",
) -> ModuleWeights:
    """Factors of one module for slots of the given ranks (0: None); the scale is never 1.

    ``share`` holds "a" or "b" (or both) where one factor serves all experts.
    """
    slots: list[Factors | None] = []
    for slot, rank in enumerate(ranks):
        if rank == 0:
            slots.append(None)
            continue
        a_shape = (1 if "a" in share else experts, rank, in_features)
        b_shape = (1 if "b" in share else experts, out_features, rank)
        a = random_values(rng, a_shape, dtype, in_features**-0.5)
        b = random_values(rng, b_shape, dtype, rank**-0.5)
        slots.append(Factors(a, b, 0.5 + 0.375 * slot))
    return ModuleWeights(in_features, out_features, tuple(slots))


def pack_by_pieces(a: np.ndarray) -> np.ndarray:
    """Packed bytes of A [rank, in], placed piece by piece as the layout's definition says."""
    rank, features = a.shape
    width = 128 // a.itemsize
    rows = np.ascontiguousarray(a).view(np.uint8).reshape(rank, -1)
    packed = np.zeros(rows.size, np.uint8)
    full = features // width
    for chunk in range(full):
        for i in range(rank):
            start = chunk * 128 * rank + i * 128
            for piece in range(8):
                source = rows[i, chunk * 128 + piece * 16 :][:16]
                packed[start + (piece ^ (i & 7)) * 16 :][:16] = source
    packed[full * 128 * rank :] = rows[:, full * 128 :].reshape(-1)
    return packed


def build_entries(
    modules: Sequence[ModuleWeights], upload: Upload, *, packed: bool = False
) -> np.ndarray:
    """Slot-table bytes uint8 [modules, max_loras, 48] over factors that ``upload`` has placed.

    upload: takes a contiguous array, keeps a copy of its bytes alive, returns their address.
    """
    table = np.zeros((len(modules), len(modules[0].slots)), SLOT_ENTRY)
    for place, module in enumerate(modules):
        for slot, factors in enumerate(module.slots):
            if factors is None:
                continue
            a, b = factors.a, factors.b
            blocks = np.concatenate([pack_by_pieces(block) for block in a]) if packed else a
            table[place, slot] = (
                upload(blocks),
                upload(b),
                a[0].nbytes if len(a) > 1 else 0,
                b[0].nbytes if len(b) > 1 else 0,
                factors.rank,
                factors.scale,
                PACKED if packed else ROW_MAJOR,
                1,
            )
    return table.view(np.uint8).reshape(*table.shape, SLOT_ENTRY.itemsize)


@dataclass
class HostMemory:
    """Keeps uploaded arrays alive, each ``shift`` bytes beyond an aligned address."""

    shift: int = 0
    kept: list[Any] = field(default_factory=list)

    def upload(self, array: np.ndarray) -> int:
        """Address of a copy of ``array``."""
        data = np.ascontiguousarray(array).tobytes()
        memory = ctypes.create_string_buffer(len(data) + 256 + self.shift)
        address = -(-ctypes.addressof(memory) // 256) * 256 + self.shift
        ctypes.memmove(address, data, len(data))
        self.kept.append(memory)
        return address


def pair_deltas(
    case: RoutingCase, x: np.ndarray, module: ModuleWeights, row_order: str = "token_major"
) -> np.ndarray:
    """Float64 delta [T·k, out] of each pair by its number, for x [T, in]; zeros if none is due."""
    out = np.zeros((case.topk_ids.size, module.out_features))
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for expert, slot, pair, token in case.local_pairs(row_order):
        groups.setdefault((expert, slot), []).append((pair, token))
    for (expert, slot), members in groups.items():
        factors = module.slots[slot] if slot >= 0 else None
        if factors is not None:
            pairs, tokens = (list(part) for part in zip(*members, strict=True))
            out[pairs] = lora_delta_oracle(x[tokens], *factors.expert(expert + case.start_expert))
    return out


def relative_errors(actual: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Frobenius error over the norm of ``expected``, and the largest row's over its own norm.

    Rows where nothing is expected must be zero, and count as infinite error otherwise.
    """
    error = actual.astype(np.float64) - expected
    norms, errors = np.linalg.norm(expected, axis=1), np.linalg.norm(error, axis=1)
    if (errors[norms == 0] != 0).any() or not np.isfinite(errors).all():
        return np.inf, np.inf
    if not norms.any():
        return 0.0, 0.0
    worst = float((errors[norms > 0] / norms[norms > 0]).max())
    return float(np.linalg.norm(error) / np.linalg.norm(expected)), worst


def assert_close(actual: np.ndarray, expected: np.ndarray, bound: float) -> None:
    """Both relative errors within ``bound`` (a single row: WORST_ROW times that)."""
    whole, worst = relative_errors(actual, expected)
    assert whole <= bound, f"relative Frobenius error {whole:.2e}, allowed {bound:.1e}"
    assert worst <= WORST_ROW * bound, f"worst row {worst:.2e}, allowed {WORST_ROW * bound:.1e}"


def comparable_rows(rng: np.random.Generator, delta: np.ndarray, dtype: Any) -> np.ndarray:
    """y0 of about the delta's size, row by row, so that y's own rounding stays within the bound.

    The error is judged on y - y0 over |delta|; were |y0| much larger than |delta|, the rounding of
    y alone (half a unit in its last place) would exceed any bound stated on the delta. Rows without
    a delta get values of size 1.
    """
    size = np.linalg.norm(delta, axis=1, keepdims=True) / np.sqrt(max(1, delta.shape[1]))
    size[size == 0] = 1
    return (rng.standard_normal(delta.shape) * size).astype(resolve_dtype(dtype))


def fragile_values(shape: tuple[int, int], dtype: Any) -> np.ndarray:
    """-0.0, quiet and signalling NaNs with payloads, infinities and subnormals of both signs.

    Any arithmetic on them, even adding 0, changes some of their bits.
    """
    resolved = resolve_dtype(dtype)
    patterns: dict[str, tuple[int, ...]] = {
        "bfloat16": (0x8000, 0x7FC5, 0xFFA3, 0x0001, 0x807F, 0x7F80, 0xFF80),
        "float16": (0x8000, 0x7E15, 0xFD33, 0x0001, 0x83FF, 0x7C00, 0xFC00),
        "float32": (0x80000000, 0x7FC01234, 0xFFA54321, 1, 0x807FFFFF, 0x7F800000, 0xFF800000),
    }
    bits = np.array(patterns[resolved.name], f"u{resolved.itemsize}")
    return np.resize(bits, shape).view(resolved)


def bits_of(array: np.ndarray) -> np.ndarray:
    """The array's bits, as unsigned integers of its item size."""
    return array.view(f"u{array.dtype.itemsize}")
