"""A batch for the C++ host (tools/hosts/cpp): its arrays, and what the Python ops make of them.

In: sizes and an array maker of a device, emulated or real. Out: a folder as mixed_moe.cpp reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from problem_util import random_case, random_values

from cupylora import load_model, ops, write_pack
from cupylora.adapters.pack_file import Pack, read_pack
from cupylora.adapters.peft import read_adapter
from cupylora.dtypes import BFLOAT16
from cupylora.resources import data_dir
from cupylora.worklists import SLOT_ENTRY, LoraSlice

MODEL = load_model("tiny-moe")
NAMES = ("contracts-r8", "legal-stacked-r6", "support-rslora-r4")
QKV = ("q_proj", "k_proj", "v_proj")
LAYER = 1


@dataclass(frozen=True)
class Sizes:
    """Of a batch through one layer of tiny-moe. slots: of the adapters NAMES."""

    tokens: int
    tile_rows: int = 8
    max_loras: int = 4
    max_rank: int = 16
    slots: tuple[int, ...] = (2, 0, 3)


@dataclass
class Place:
    """How arrays come to a device. put: an array that may be written, or one that may not; get:
    back to the host."""

    put: Callable[..., Any]
    get: Callable[[Any], np.ndarray]


def write_demo_pack(path: Path) -> Pack:
    folders = (data_dir() / "demo" / name for name in NAMES)
    write_pack(path, (read_adapter(f, MODEL) for f in folders), MODEL)
    return read_pack(path)


def table_rows(pack: Pack, address: int, sizes: Sizes) -> np.ndarray:
    """uint8 [table rows, max_loras, 48]: the adapters in their slots, blocks at ``address``."""
    table = np.zeros((len(pack.layouts[0].records), sizes.max_loras), SLOT_ENTRY)
    for slot, adapter in zip(sizes.slots, pack.layouts, strict=True):
        starts = np.cumsum([address, *adapter.sizes]).astype(np.uint64)
        records = adapter.records.copy()
        used = records["rank"] != 0
        for pointer in ("a_ptr", "b_ptr"):
            records[pointer][used] = starts[adapter.records[pointer][used].astype(int)]
        table[:, slot] = records
        address += adapter.nbytes
    return table.view(np.uint8).reshape(*table.shape, -1)


def write_case(folder: Path, sizes: Sizes, pack: Pack, place: Place, seed: int = 1) -> None:
    """Draw a batch, run the ops on it, write both."""
    moe = MODEL.moe
    assert moe is not None
    rng = np.random.default_rng(seed)
    drawn = random_case(seed, sizes.tokens, moe.top_k, moe.experts, len(NAMES), base_share=0.2)
    slots = np.array([-1, *sizes.slots], np.int32)[drawn.token_to_slot + 1]
    rows = sizes.tokens * moe.top_k
    widths = [MODEL.modules[MODEL.module_index(name)].out_features for name in QKV]
    arrays = {
        "topk_ids": drawn.topk_ids,
        "token_to_slot": slots,
        "topk_weights": rng.random((sizes.tokens, moe.top_k)).astype(np.float32),
        "x": random_values(rng, (sizes.tokens, moe.hidden), "bfloat16"),
        "qkv": random_values(rng, (sizes.tokens, sum(widths)), "bfloat16"),
        "gate_up": random_values(rng, (rows, 2 * moe.intermediate), "bfloat16"),
        "down": random_values(rng, (rows, moe.hidden), "bfloat16"),
    }
    wanted = _run_ops(sizes, pack, place, arrays, widths)
    first_row = LAYER * len(MODEL.modules)
    numbers = {
        "tokens": sizes.tokens,
        "top_k": moe.top_k,
        "experts": moe.experts,
        "max_loras": sizes.max_loras,
        "max_rank": sizes.max_rank,
        "tile_rows": sizes.tile_rows,
        "hidden": moe.hidden,
        "intermediate": moe.intermediate,
        **dict(zip("qkv", widths, strict=True)),
        "q_row": first_row + MODEL.module_index("q_proj"),
        "gate_row": first_row + MODEL.module_index("gate_proj"),
        "down_row": first_row + MODEL.module_index("down_proj"),
    }
    folder.mkdir()
    lines = [f"{name} {value}" for name, value in numbers.items()]
    lines += [f"slot {s} {n}" for s, n in zip(sizes.slots, NAMES, strict=True)]
    (folder / "case.txt").write_text("\n".join(lines) + "\n")
    for name, array in {**arrays, **{f"want_{n}": a for n, a in wanted.items()}}.items():
        (folder / f"{name}.bin").write_bytes(np.ascontiguousarray(array).tobytes())


def _run_ops(
    sizes: Sizes, pack: Pack, place: Place, arrays: dict[str, np.ndarray], widths: Sequence[int]
) -> dict[str, np.ndarray]:
    moe = MODEL.moe
    assert moe is not None
    blocks = place.put(pack.blocks)
    table = table_rows(pack, int(blocks.data.ptr), sizes)
    here = {name: place.put(arrays[name]) for name in ("x", "topk_ids", "token_to_slot")}
    y = {name: place.put(arrays[name], written=True) for name in ("qkv", "gate_up", "down")}
    zeros = place.put(np.zeros((sizes.tokens, 1), np.int32))
    shared: dict[str, Any] = {"max_loras": sizes.max_loras, "tile_rows": sizes.tile_rows}
    plans = {
        "dense": ops.plan(zeros, here["token_to_slot"], num_experts=1, **shared),
        "moe": ops.plan(here["topk_ids"], here["token_to_slot"], num_experts=moe.experts, **shared),
    }

    def delta(
        plan: str, x: Any, out: Any, names: Sequence[str], outs: Sequence[int], **rows: Any
    ) -> None:
        first = LAYER * len(MODEL.modules) + MODEL.module_index(names[0])
        starts = np.cumsum([0, *outs]).tolist()
        routing, segments = plans[plan]
        ops.lora_delta(
            x,
            out,
            segments,
            routing,
            place.put(table[first : first + len(names)]),
            [LoraSlice(width, start) for width, start in zip(outs, starts, strict=False)],
            in_features=x.shape[1],
            max_rank=sizes.max_rank,
            **rows,
        )

    delta("dense", here["x"], y["qkv"], QKV, widths)
    gate_up = ("gate_proj", "up_proj")
    delta("moe", here["x"], y["gate_up"], gate_up, [moe.intermediate] * 2)
    routing = plans["moe"][0]
    hidden = ops.activation(y["gate_up"], kind="silu", gated=True, routing=routing)
    delta("moe", hidden, y["down"], ("down_proj",), [moe.hidden], x_rows="pair")
    out = ops.finalize(y["down"], place.put(arrays["topk_weights"]), routing)
    found = {**y, "hidden": hidden, "out": out}
    return {n: place.get(found[n]).astype(BFLOAT16) for n in ("qkv", "hidden", "down", "out")}
