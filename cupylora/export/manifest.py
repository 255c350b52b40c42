"""The manifest of an export: every kernel, described for a host in any language.

In: the programs, their declarations (``declarations``), launch rules (``rules``), meanings
(``meanings``) and compiled cubins. Out: a JSON value of the form that ``manifest.schema.json``
states, and the digest that tells whether an installed package matches it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cupylora import __version__
from cupylora.compiler.cache import source_digest
from cupylora.compiler.exported import FORMAT
from cupylora.compiler.programs import PROGRAMS
from cupylora.compiler.sources import KernelProgram, read_sources
from cupylora.errors import ExportError
from cupylora.export.choice import choice
from cupylora.export.cubin import parameter_places
from cupylora.export.declarations import Declarations, Declared, Struct
from cupylora.export.meanings import meaning
from cupylora.export.rules import FUNCTIONS, RULES, SYMBOLS, Rule
from cupylora.resources import cuda_source_dir

__all__ = [
    "ABI",
    "Built",
    "Described",
    "describe",
    "fnv1a",
    "function_of",
    "make_manifest",
    "schema",
]

ABI = 1
"""CUPYLORA_ABI of cupylora.h, which the C table is written for."""

_TYPES = {"float": "f32"}
_DTYPES = {"Bf16": "bfloat16", "Fp16": "float16", "float": "float32"}
_FNV_START, _FNV_PRIME, _WORD = 0xCBF29CE484222325, 0x100000001B3, 2**64 - 1


@dataclass(frozen=True)
class Built:
    """One program's cubin for one architecture. lowered: kernel name -> mangled name."""

    program: KernelProgram
    arch: str
    cubin: bytes
    lowered: Mapping[str, str]

    @property
    def file(self) -> str:
        """Where it lies in the export's folder."""
        return f"{self.arch}/{self.program.name}.cubin"

    @cached_property
    def fnv1a(self) -> int:
        """The digest that C checks."""
        return fnv1a(self.cubin)


@dataclass(frozen=True)
class Described:
    """What the sources declare: parameters by function, and the structs among them."""

    functions: Mapping[str, tuple[Declared, ...]]
    structs: Mapping[str, Struct]


def fnv1a(data: bytes) -> int:
    """64-bit FNV-1a over the 8-byte little-endian words of ``data``, filled up with zeros, and its
    length: a check against mixed-up files that is quick in any language, not against malice."""
    value = _FNV_START
    padded = data + bytes(-len(data) % 8)
    for word in memoryview(padded).cast("Q"):
        value = (value ^ word) * _FNV_PRIME & _WORD
    return (value ^ len(data)) * _FNV_PRIME & _WORD


def function_of(program: KernelProgram, kernel: str) -> str:
    """The ``__global__`` function that a kernel is an instance of."""
    return program.kernels[kernel].partition("<")[0]


def describe() -> Described:
    """Parameters of every kernel function. Raises ExportError for what cannot be described."""
    functions: dict[str, tuple[Declared, ...]] = {}
    structs: dict[str, Struct] = {}
    for program in PROGRAMS:
        sources = read_sources(program, cuda_source_dir())
        declared = Declarations([*sources.headers.values(), sources.text])
        for kernel in program.kernels:
            name = function_of(program, kernel)
            functions.setdefault(name, declared.parameters(name))
        for name, struct in declared.structs.items():
            if structs.setdefault(name, struct) != struct:
                raise ExportError(f"two CUDA sources declare struct {name} differently")
    return Described(functions, structs)


def make_manifest(built: Sequence[Built], nvrtc: tuple[int, int]) -> dict[str, Any]:
    """The manifest of these cubins, which NVRTC of version ``nvrtc`` made.

    Raises ExportError where a cubin's parameters are not what the sources declare, or a function
    has no launch rule or a parameter no meaning.
    """
    described = describe()
    functions = {name: _function(name, described) for name in sorted(described.functions)}
    return {
        "format": FORMAT,
        "abi": ABI,
        "cupylora": __version__,
        "nvrtc": list(nvrtc),
        "architectures": sorted({item.arch for item in built}),
        "notation": {"symbols": dict(SYMBOLS), "functions": dict(FUNCTIONS)},
        "choice": {
            key: [list(row) for row in value] if isinstance(value, tuple) else value
            for key, value in choice().items()
        },
        "structs": {name: _struct(item) for name, item in sorted(described.structs.items())},
        "functions": functions,
        "programs": [_program(item) for item in built],
        "kernels": [kernel for item in built for kernel in _kernels(item, described)],
    }


def schema() -> dict[str, Any]:
    """The JSON schema of a manifest, as it is shipped."""
    path = Path(__file__).with_name("manifest.schema.json")
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def _function(name: str, described: Described) -> dict[str, Any]:
    rule = RULES.get(name)
    if rule is None:
        raise ExportError(f"kernel {name} has no launch rule; add one to export/rules.py")
    return {
        "arguments": [_declared(name, item) for item in described.functions[name]],
        "launch": _launch(rule),
        "workspace": dict(rule.workspace),
        "max_rank": rule.max_rank or None,
    }


def _launch(rule: Rule) -> dict[str, Any]:
    return {
        "where": dict(rule.where),
        "block": rule.block,
        "grid": [rule.grid, rule.grid_y],
        "cluster": rule.cluster,
        "shared": rule.shared,
        "dependent": rule.dependent,
    }


def _struct(struct: Struct) -> dict[str, Any]:
    return {
        "size": struct.size,
        "alignment": struct.alignment,
        "fields": [_declared(struct.name, item) for item in struct.fields],
    }


def _declared(owner: str, item: Declared) -> dict[str, Any]:
    return {
        "name": item.name,
        "type": _TYPES.get(item.kind, item.kind),
        "offset": item.offset,
        "size": item.size,
        "count": item.count,
        "meaning": meaning(owner, item.name),
    }


def _program(item: Built) -> dict[str, Any]:
    sources = read_sources(item.program, cuda_source_dir())
    return {
        "name": item.program.name,
        "arch": item.arch,
        "file": item.file,
        "bytes": len(item.cubin),
        "sha256": hashlib.sha256(item.cubin).hexdigest(),
        "fnv1a": f"{item.fnv1a:016x}",
        "source_sha256": source_digest(item.program, sources, item.arch),
    }


def _kernels(item: Built, described: Described) -> list[dict[str, Any]]:
    places = parameter_places(item.cubin)
    made = []
    for name, mangled in item.lowered.items():
        function = function_of(item.program, name)
        declared = [(d.offset, d.size) for d in described.functions[function]]
        if places.get(mangled) != declared:
            raise ExportError(
                f"kernel {item.program.name}/{name} for {item.arch} has its parameters at "
                f"{places.get(mangled)}; its sources declare {declared}"
            )
        values = _template(item.program.kernels[name])
        made.append(
            {
                "program": item.program.name,
                "name": name,
                "arch": item.arch,
                "function": function,
                "mangled": mangled,
                "template": [int(value) for value in values if value.isdecimal()],
                "dtypes": _dtypes(function, values),
            }
        )
    return made


def _template(expression: str) -> list[str]:
    """Arguments of ``name<a, b>``."""
    found = re.search(r"<(.*)>", expression)
    return [value.strip() for value in found[1].split(",")] if found else []


def _dtypes(function: str, values: Sequence[str]) -> list[str]:
    """Element types of weights and activations; none where a kernel handles lists only."""
    if function.endswith("_f32"):
        return ["float32"]
    return list(dict.fromkeys(_DTYPES[value] for value in values[:1] if value in _DTYPES))
