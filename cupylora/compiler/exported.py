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
from cupylora.files import named, read_json, reason
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
        record = self._record(program.name, arch)
        sources = read_sources(program, cuda_source_dir())
        if record["source_sha256"] != source_digest(program, sources, arch):
            raise ExportError(
                f"export {named(self.folder)}: program {program.name!r} was made from other "
                f"sources than those installed here; {_AGAIN}"
            )
        path = self.folder / record["file"]
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise ExportError(f"{named(path)}: {reason(error)}; {_AGAIN}") from error
        if digest != record["sha256"]:
            raise ExportError(f"{named(path)} is not the file that was exported; {_AGAIN}")
        kernels = self._rows("kernels", program=program.name, arch=arch)
        return Entry(path, {row["name"]: row["mangled"] for row in kernels}, log="")

    def _require(self, key: str, needed: Any) -> None:
        got = self._manifest.get(key)
        if got != needed:
            raise ExportError(
                f"export {named(self.folder)} has {key} {got!r}; this cupylora needs {needed!r}: "
                f"{_AGAIN}"
            )

    def _record(self, program: str, arch: str) -> Mapping[str, Any]:
        found = self._rows("programs", name=program, arch=arch)
        if not found:
            has = ", ".join(map(str, self._manifest.get("architectures", ())))
            raise ExportError(
                f"export {named(self.folder)} has no program {program!r} for {arch}; it is for "
                f"{has or 'no architecture'}: export with --arch {arch}"
            )
        return found[0]

    def _rows(self, key: str, **wanted: str) -> list[Mapping[str, Any]]:
        try:
            return [
                row
                for row in self._manifest[key]
                if all(row[name] == value for name, value in wanted.items())
            ]
        except (KeyError, TypeError) as error:
            raise ExportError(
                f"{named(self.folder / MANIFEST)} is damaged at {key!r}; {_AGAIN}"
            ) from error


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
