"""Where the files that travel with the package lie: CUDA sources and example data.

A wheel carries both inside the package (``_cuda_src``, ``_data``); a checkout, and so an editable
install, has them at the top level (``cuda_src``, ``tests/data``). The compiler reads its sources
and the command line its example adapters through the two functions here.
"""

from __future__ import annotations

from pathlib import Path

from cupylora.errors import CupyloraError

__all__ = ["cuda_source_dir", "data_dir", "include_dir"]

_PACKAGE = Path(__file__).resolve().parent


def cuda_source_dir() -> Path:
    """The folder that holds the CUDA sources.

    Raises CupyloraError where neither the package nor a checkout around it has them.
    """
    return _find("_cuda_src", "cuda_src")


def data_dir() -> Path:
    """The folder that holds the example adapters and layers.

    Raises CupyloraError where neither the package nor a checkout around it has them.
    """
    return _find("_data", "tests/data")


def include_dir() -> Path:
    """The folder of cupylora.h, which needs a ``cupylora_table.h`` from an export beside it."""
    return _PACKAGE / "include"


def _find(installed: str, checkout: str) -> Path:
    candidates = (_PACKAGE / installed, _PACKAGE.parent / checkout)
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise CupyloraError(
        f"cupylora's files are incomplete: none of {', '.join(map(str, candidates))} exists; "
        "reinstall the package"
    )
