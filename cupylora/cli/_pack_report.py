"""What a pack holds, as a table or a record: for ``pack`` and ``inspect``."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from cupylora import __version__
from cupylora.adapters.pack_file import Pack
from cupylora.adapters.packed import AdapterLayout
from cupylora.cli._console import OutputConsole
from cupylora.dtypes import dtype_name
from cupylora.files import named
from cupylora.text import byte_size, counted, shown

__all__ = ["pack_problems", "pack_record", "print_pack"]


def pack_record(pack: Pack) -> dict[str, Any]:
    """All of it but the blocks, as JSON values."""
    return {
        "cupylora": __version__,
        "pack": str(pack.path),
        "model": pack.model,
        "layers": pack.layers,
        "modules": [module[0] for module in pack.modules],
        "dtype": dtype_name(pack.dtype),
        "bytes": len(pack.blocks),
        "adapters": [
            {
                "name": adapter.name,
                "max_rank": adapter.max_rank,
                "modules": _applied(adapter),
                "blocks": len(adapter.sizes),
                "bytes": adapter.nbytes,
            }
            for adapter in pack.layouts
        ],
    }


def pack_problems(
    pack: Pack, *, dtype: str, max_rank: int, max_bytes: int, values: bool, links: bool
) -> list[str]:
    """Why a server of these limits would refuse it, options being those of ``inspect``."""
    found = []
    rank = max(adapter.max_rank for adapter in pack.layouts)
    if rank > max_rank:
        found.append(f"has an adapter of rank {rank}; at most {max_rank} is taken")
    if len(pack.blocks) > max_bytes:
        size, most = byte_size(len(pack.blocks)), byte_size(max_bytes)
        found.append(f"has {size} of blocks; at most {most} are taken")
    if dtype_name(pack.dtype) != dtype:
        found.append(f"is packed as {dtype_name(pack.dtype)}, not {dtype}; pack it again for that")
    if not links and pack.path.is_symlink():
        found.append("is a link; give the file itself")
    if values and not pack.is_finite():
        found.append("holds values that are not finite; pack its adapters again")
    return found


def print_pack(pack: Pack) -> None:
    """Print it to stdout."""
    console = OutputConsole()
    table = Table()
    table.add_column("adapter", overflow="fold")
    for column in ("largest rank", "modules", "blocks", "bytes"):
        table.add_column(column, justify="right", overflow="fold")
    for adapter in pack.layouts:
        table.add_row(
            escape(shown(adapter.name)),
            str(adapter.max_rank),
            str(_applied(adapter)),
            str(len(adapter.sizes)),
            byte_size(adapter.nbytes),
        )
    head = (
        f"Pack {named(pack.path)} for {shown(pack.model)}: "
        f"{counted(len(pack.layouts), 'adapter')} in {dtype_name(pack.dtype)}, "
        f"{byte_size(len(pack.blocks))} in one copy"
    )
    console.print(head, markup=False, highlight=False, soft_wrap=True)
    console.print(table)


def _applied(adapter: AdapterLayout) -> int:
    """Rows of a slot table that it fills."""
    return int((adapter.records["rank"] != 0).sum())
