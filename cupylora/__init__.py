"""cupylora: a torch-free runtime for multi-LoRA inference on NumPy and CuPy.

Importing this package imports neither CuPy nor cuda.bindings: a device is touched only when an
operation is given device arrays or ``cupylora.device`` is asked about one. The names below are
loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cupylora.adapters.inspection import inspect_adapter
    from cupylora.adapters.loading import load_adapter
    from cupylora.adapters.pack_file import read_pack, write_pack
    from cupylora.adapters.slots import Arena, SlotTable
    from cupylora.backend import open_backend
    from cupylora.compiler.exported import use_export
    from cupylora.compiler.loader import prepare
    from cupylora.errors import CupyloraError
    from cupylora.graphs.buckets import DispatchOptions
    from cupylora.graphs.manager import GraphOptions, Step
    from cupylora.interop.streams import use_stream
    from cupylora.interop.view import ArrayView
    from cupylora.layers.dense import DenseLora, dense_needs
    from cupylora.layers.moe import MoeLora, MoeWeights, moe_needs
    from cupylora.layers.plan import BatchPlan
    from cupylora.layers.workspace import Workspace
    from cupylora.runtime import LoraRuntime
    from cupylora.shapes import LoraLimits, ModelShape, ModuleShape, MoeShape, load_model

__all__ = [
    "Arena",
    "ArrayView",
    "BatchPlan",
    "CupyloraError",
    "DenseLora",
    "DispatchOptions",
    "GraphOptions",
    "LoraLimits",
    "LoraRuntime",
    "ModelShape",
    "ModuleShape",
    "MoeLora",
    "MoeShape",
    "MoeWeights",
    "SlotTable",
    "Step",
    "Workspace",
    "__version__",
    "dense_needs",
    "inspect_adapter",
    "load_adapter",
    "load_model",
    "moe_needs",
    "open_backend",
    "prepare",
    "read_pack",
    "use_export",
    "use_stream",
    "write_pack",
]

__version__ = "0.1.0"

_HOMES = {
    "adapters.inspection": ("inspect_adapter",),
    "adapters.loading": ("load_adapter",),
    "adapters.pack_file": ("read_pack", "write_pack"),
    "adapters.slots": ("Arena", "SlotTable"),
    "backend": ("open_backend",),
    "compiler.exported": ("use_export",),
    "compiler.loader": ("prepare",),
    "errors": ("CupyloraError",),
    "graphs.buckets": ("DispatchOptions",),
    "graphs.manager": ("GraphOptions", "Step"),
    "interop.streams": ("use_stream",),
    "interop.view": ("ArrayView",),
    "layers.dense": ("DenseLora", "dense_needs"),
    "layers.moe": ("MoeLora", "MoeWeights", "moe_needs"),
    "layers.plan": ("BatchPlan",),
    "layers.workspace": ("Workspace",),
    "runtime": ("LoraRuntime",),
    "shapes": ("LoraLimits", "ModelShape", "ModuleShape", "MoeShape", "load_model"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
