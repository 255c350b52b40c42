"""What the adapters of ``cupylora run`` take, told before any of them is made.

In: their files and ranks. Out: CapacityError where there is no room for their values in host
memory (files are read whole) or their blocks in the arena.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from cupylora.adapters.factors import synthetic_host_bytes
from cupylora.adapters.safetensors_file import (
    INDEX_FILE,
    LARGEST_JSON,
    MOST_TENSORS,
    SINGLE_FILE,
    SUFFIX,
)
from cupylora.adapters.slots import block_bytes
from cupylora.backend import ArrayBackend, NumpyBackend
from cupylora.files import is_there, read_json
from cupylora.layers.stack import require_room
from cupylora.shapes import ModelShape
from cupylora.text import counted

__all__ = ["file_bytes", "require_adapter_room", "synthetic_arena_bytes", "synthetic_host_bytes"]


def require_adapter_room(
    backend: ArrayBackend,
    model: ModelShape,
    folders: Iterable[str],
    ranks: Iterable[int],
    itemsize: int,
    base_bytes: int,
) -> None:
    """Raise CapacityError, with bytes, for adapters that cannot all be had beside base weights.

    folders: of adapter files, whose blocks are not counted (that needs their headers). ranks: of
    synthetic adapters. itemsize: of the slot table's elements. base_bytes: still to be allocated.
    """
    folders, by_rank = tuple(folders), Counter(ranks)
    host = sum(map(file_bytes, folders))
    host += sum(n * synthetic_host_bytes(model, r, itemsize) for r, n in by_rank.items())
    arena = sum(n * synthetic_arena_bytes(model, r, itemsize) for r, n in by_rank.items())
    what = counted(len(folders) + by_rank.total(), "adapter")
    fewer = "fewer layers, fewer adapters or smaller ranks"
    if backend.on_device:
        require_room(NumpyBackend(), host, f"{what} in host memory", f"use {fewer}")
        host = 0
    if base_bytes:
        what, fewer = f"{what} and the base expert weights", f"--lora-only, {fewer}"
    require_room(backend, base_bytes + arena + host, what, f"use {fewer}")


def file_bytes(folder: str) -> int:
    """Bytes of the weight files that the reader would open; 0 for what it will refuse.

    folder: an adapter's directory, or its one file.
    """
    try:
        if folder.endswith(SUFFIX) and Path(folder).is_file():
            return Path(folder).stat().st_size
        return sum((Path(folder) / name).stat().st_size for name in _weight_files(Path(folder)))
    except (OSError, ValueError):
        return 0


def _weight_files(folder: Path) -> set[str]:
    if is_there(folder / SINGLE_FILE):
        return {SINGLE_FILE}
    shards = read_json(folder / INDEX_FILE, LARGEST_JSON, MOST_TENSORS).get("weight_map")
    names = shards.values() if isinstance(shards, dict) else ()
    return {name for name in names if isinstance(name, str)}


def synthetic_arena_bytes(model: ModelShape, rank: int, itemsize: int) -> int:
    """Bytes of blocks of a synthetic adapter of all modules."""
    return model.layers * sum(
        block_bytes(module.experts * rank * features * itemsize)
        for module in model.modules
        for features in (module.in_features, module.out_features)
    )
