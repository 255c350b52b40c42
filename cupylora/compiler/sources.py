"""What a kernel program is, and the text it is made of.

In: a declaration (see ``programs``) and the folder of CUDA sources. Out: a :class:`SourceSet`, the
program's source with every quoted header it can reach. That text alone is what ``nvrtc`` compiles
and what ``cache`` hashes, so a header edit can neither be missed nor half seen.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cupylora.compiler.arch import supports
from cupylora.errors import CompileError

__all__ = ["KernelProgram", "SourceSet", "instances", "read_sources"]

_QUOTED_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class KernelProgram:
    """One translation unit and the kernels taken from it.

    name: what ``load_kernel`` calls it.
    source: the .cu file, relative to the CUDA sources; its ``#include "..."`` are relative to there
        too, whichever folder the including file is in.
    kernels: our name of each kernel -> its C++ name expression, such as ``fill_uniform<Bf16>``.
        Naming a template's instance here is what instantiates it (see ``instances``).
    defines: macros, NAME -> VALUE.
    min_arch: the first architecture it is built for; exact_arch: and the only one.
    matrix: every kernel must hold tensor-core instructions, which ``check`` verifies.
    """

    name: str
    source: str
    kernels: Mapping[str, str]
    defines: Mapping[str, str | int] = field(default_factory=dict)
    min_arch: str = "sm_80"
    exact_arch: bool = False
    matrix: bool = False

    def built_for(self, arch: str) -> bool:
        """Whether a build for ``arch`` holds this program."""
        return arch == self.min_arch if self.exact_arch else supports(arch, self.min_arch)


@dataclass(frozen=True)
class SourceSet:
    """A program's source (``path`` relative to the CUDA sources) and its headers, path -> text."""

    path: str
    text: str
    headers: Mapping[str, str]


def instances(
    template: str, **values: Mapping[str, str | int] | Sequence[str | int]
) -> dict[str, str]:
    """Kernels of one template: the product of ``values`` put into ``template``'s ``{fields}``.

    A field's values are a sequence, or a mapping from our name of a value to its C++ spelling:
    ``instances("gemm<{dtype}, {tile}>", dtype={"float16": "Fp16"}, tile=(8, 16))`` gives
    ``{"float16_8": "gemm<Fp16, 8>", "float16_16": "gemm<Fp16, 16>"}``.
    """
    choices = [
        v.items() if isinstance(v, Mapping) else [(x, x) for x in v] for v in values.values()
    ]
    kernels = {}
    for chosen in itertools.product(*choices):
        name = "_".join(str(ours) for ours, _ in chosen)
        spelled = (cpp for _, cpp in chosen)
        kernels[name] = template.format(**dict(zip(values, spelled, strict=True)))
    return kernels


def read_sources(program: KernelProgram, root: Path) -> SourceSet:
    """Read a program's source and, transitively, the quoted headers under ``root``.

    Raises CompileError naming the file that includes one which does not exist.
    """
    text = _read(root, program.source, f"kernel program {program.name!r}")
    headers: dict[str, str] = {}
    pending = [(program.source, text)]
    while pending:
        including, content = pending.pop()
        for header in _QUOTED_INCLUDE.findall(content):
            if header not in headers:
                headers[header] = _read(root, header, including)
                pending.append((header, headers[header]))
    return SourceSet(program.source, text, dict(sorted(headers.items())))


def _read(root: Path, relative: str, wanted_by: str) -> str:
    try:
        return (root / relative).read_text(encoding="utf-8")
    except OSError as error:
        raise CompileError(
            f"{wanted_by} needs {relative!r}, which cannot be read from {root}: {error.strerror}; "
            "quoted includes are relative to that folder"
        ) from error
