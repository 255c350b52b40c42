"""Kernels from a folder that ``cupylora export`` wrote, for machines without NVRTC.

In: the folder, named by ``CUPYLORA_EXPORT_DIR`` or ``use_export``. Out: for ``loader``, what the
cache gives elsewhere: an :class:`Entry` of a program. A cubin is taken only if it is whole and was
made from the very sources that are installed here, since the ops pack arguments for those.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cupylora import __version__
from cupylora.compiler.cache import Entry, source_digest
from cupylora.compiler.sources import KernelProgram, read_sources
from cupylora.errors import ExportError
from cupylora.files import named, open_regular, read_json, reason
from cupylora.resources import cuda_source_dir

__all__ = ["FORMAT", "MANIFEST", "ExportedKernels", "current_export", "use_export"]

FORMAT = 1
"""Of the manifest; raised when a reader of the format before would misread it."""

MANIFEST = "manifest.json"
_VARIABLE = "CUPYLORA_EXPORT_DIR"
_AGAIN = "export the kernels again with the cupylora that is installed"

_chosen: list[ExportedKernels] = []
"""What ``use_export`` was given last, if anything."""


class ExportedKernels:
    """The kernels under ``folder``. Raises ExportError where it is no export of this version."""

    def __init__(self, folder: str | Path) -> None:
        if not isinstance(folder, str | Path):
            raise ExportError(f"folder is {folder!r}; the path of an export is needed")
        self.folder = Path(folder)
        try:
            self._manifest = read_json(self.folder / MANIFEST)
        except (OSError, ValueError) as error:
            raise ExportError(
                f"{named(self.folder / MANIFEST)}: {reason(error)}; name a folder that `cupylora "
                "export` wrote"
            ) from error
        self._require("format", FORMAT)
        self._require("cupylora", __version__)

    def get(self, program: KernelProgram, arch: str) -> Entry:
        """The program's cubin for ``arch``.

        Raises ExportError where the export has none, or a file that is damaged or of other sources.
        """
        record = self._record(program, arch)
        sources = read_sources(program, cuda_source_dir())
        if record.get("source_sha256") != source_digest(program, sources, arch):
            raise ExportError(
                f"export {named(self.folder)}: program {program.name!r} was made from other "
                f"sources than those installed here; {_AGAIN}"
            )
        file_name = f"{arch}/{program.name}.cubin"
        if record.get("file") != file_name:
            raise self._damaged("programs")
        path = self.folder / file_name
        try:
            with open_regular(path) as file:
                digest = hashlib.sha256(file.read()).hexdigest()
        except (OSError, ValueError) as error:
            raise ExportError(f"{named(path)}: {reason(error)}; {_AGAIN}") from error
        if digest != record.get("sha256"):
            raise ExportError(f"{named(path)} is not the file that was exported; {_AGAIN}")
        return Entry(path, self._kernels(program, arch), log="")

    def _kernels(self, program: KernelProgram, arch: str) -> dict[str, str]:
        """Mangled names by ours."""
        rows = self._rows("kernels", program=program.name, arch=arch)
        found = {str(row.get("name")): row.get("mangled") for row in rows}
        mangled = {name: value for name, value in found.items() if isinstance(value, str)}
        if mangled.keys() != program.kernels.keys():
            raise self._damaged("kernels")
        return mangled

    def _require(self, key: str, needed: Any) -> None:
        got = self._manifest.get(key)
        if got != needed:
            raise ExportError(
                f"export {named(self.folder)} has {key} {got!r}; this cupylora needs {needed!r}: "
                f"{_AGAIN}"
            )

    def _record(self, program: KernelProgram, arch: str) -> Mapping[str, Any]:
        found = self._rows("programs", name=program.name, arch=arch)
        if not found:
            known = self._manifest.get("architectures")
            has = ", ".join(map(str, known)) if isinstance(known, list) else ""
            raise ExportError(
                f"export {named(self.folder)} has no program {program.name!r} for {arch}; it is "
                f"for {has or 'no architecture'}: export with --arch {arch}"
            )
        return found[0]

    def _rows(self, key: str, **wanted: str) -> list[Mapping[str, Any]]:
        rows = self._manifest.get(key)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise self._damaged(key)
        return [
            row for row in rows if all(row.get(name) == value for name, value in wanted.items())
        ]

    def _damaged(self, key: str) -> ExportError:
        return ExportError(f"{named(self.folder / MANIFEST)} is damaged at {key!r}; {_AGAIN}")


def use_export(folder: str | Path | None) -> None:
    """Take kernels from ``folder`` from here on, or compile them again (None).

    What was loaded before stays loaded, so call it first. Raises ExportError where ``folder`` is no
    export of this version of cupylora.
    """
    made = [] if folder is None else [ExportedKernels(folder)]
    _chosen[:] = made


def current_export() -> ExportedKernels | None:
    """What ``use_export`` set, else what ``CUPYLORA_EXPORT_DIR`` names, else None."""
    if _chosen:
        return _chosen[0]
    folder = os.environ.get(_VARIABLE)
    return _opened(folder) if folder else None


@functools.cache
def _opened(folder: str) -> ExportedKernels:
    return ExportedKernels(folder)
