"""From files to a slot: read, check, write; synchronous.

The step between files and device: ``peft`` reads and validates, ``slots`` checks the limits and
writes. An adapter that fails anywhere leaves its slot serving what it served before.
"""

from __future__ import annotations

from pathlib import Path

from cupylora.adapters.factors import Adapter
from cupylora.adapters.peft import read_adapter
from cupylora.adapters.slots import SlotTable
from cupylora.errors import ArgumentError

__all__ = ["load_adapter"]


def load_adapter(
    path: str | Path, table: SlotTable, slot: int, *, name: str | None = None
) -> Adapter:
    """Load the adapter at ``path`` into ``slot`` of ``table``; ``name`` defaults to the path's.

    path: as ``read_adapter`` takes it, a PEFT directory or a .safetensors file with Kohya's names.
    Raises as ``read_adapter`` and ``SlotTable.load`` do, with the slot untouched; a slot that is
    not the table's before anything is read.
    """
    if not isinstance(table, SlotTable):
        raise ArgumentError(f"table is a {type(table).__name__}; a SlotTable is needed")
    slot = table.check_slot(slot)
    adapter = read_adapter(path, table.model, name=name, limits=table.limits)
    table.load(slot, adapter)
    return adapter
