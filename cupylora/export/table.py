"""``cupylora_table.h``: what cupylora.h knows of kernels, as C instead of JSON.

In: the description and the cubins of an export. Out: the header's text: the numbers of the choice
rules, where each kernel function has which argument, and for each architecture the cubin files with
their kernels' mangled names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cupylora import __version__
from cupylora.compiler.programs import PROGRAMS
from cupylora.export.choice import choice
from cupylora.export.declarations import Declared
from cupylora.export.manifest import ABI, Built, Described, function_of
from cupylora.export.rules import RULES

__all__ = ["C_PROGRAMS", "c_table"]

C_PROGRAMS = (
    *("sort", "segments", "plan", "plan_large", "rows", "rows_unaligned", "lora_f32"),
    *("lora_shrink_", "lora_expand_", "lora_cluster_", "lora_ring_"),
)
"""Programs that cupylora.h launches: of this name or, with a last underscore, beginning so."""


def c_table(built: Sequence[Built], described: Described) -> str:
    """The text of the header for these cubins."""
    used = [item for item in built if _is_used(item.program.name)]
    # Of all architectures: cupylora.h names their arguments, whichever were exported.
    programs = [p for p in PROGRAMS if _is_used(p.name)]
    functions = sorted({function_of(p, k) for p in programs for k in p.kernels})
    lines = [
        "/* Kernels, their arguments' places and choice numbers of one export. Written by",
        f" * `cupylora export` of cupylora {__version__}; cupylora.h includes it. */",
        "#ifndef CUPYLORA_TABLE_H_",
        "#define CUPYLORA_TABLE_H_",
        "#include <stdint.h>",
        "",
        f"#define CUPYLORA_TABLE_ABI {ABI}",
        f'#define CUPYLORA_TABLE_VERSION "{__version__}"',
        "",
        *_numbers(),
        "",
        *_functions(functions, described),
        *_files(used),
        *_kernels(used, functions),
        "#endif /* CUPYLORA_TABLE_H_ */",
    ]
    return "\n".join(lines) + "\n"


def _is_used(program: str) -> bool:
    return any(program == p or (p.endswith("_") and program.startswith(p)) for p in C_PROGRAMS)


def _numbers() -> Iterator[str]:
    for key, value in choice().items():
        if isinstance(value, tuple):
            yield f"#define CUPYLORA_{key}_ROWS {len(value)}"
            yield f"static const int64_t cupylora_{key.lower()}[][{len(value[0])}] = {{"
            yield from (f"    {{{', '.join(map(_number, row))}}}," for row in value)
            yield "};"
        else:
            yield f"#define CUPYLORA_{key} {_number(value)}"


def _number(value: int | float) -> str:
    if isinstance(value, float):
        return repr(value)
    return str(value) if abs(value) < 2**31 else f"INT64_C({value})"


def _functions(functions: Sequence[str], described: Described) -> Iterator[str]:
    """For each function the places of its arguments by name, with structs taken apart as far as
    cupylora.h sets their fields, and the offsets of its parameters."""
    fields = {f: list(_leaves(described.functions[f], described)) for f in functions}
    every = [described.functions[f] for f in functions]
    pointers = (sum(item.kind == "pointer" for item in items) for items in fields.values())
    yield f"#define CUPYLORA_MOST_ARGS {max(p[-1].offset + p[-1].size for p in every)}"
    yield f"#define CUPYLORA_MOST_PARAMS {max(map(len, every))}"
    yield f"#define CUPYLORA_MOST_POINTERS {max(pointers)}"
    yield ""
    keys = sorted({item.name for items in fields.values() for item in items})
    yield "enum {"
    yield from (f"  CUPYLORA_K_{key}," for key in keys)
    yield "  CUPYLORA_KEYS"
    yield "};"
    yield "typedef struct cupylora_field {"
    yield "  uint16_t at;"
    yield "  uint8_t bytes, key;"
    yield "} cupylora_field;"
    yield "typedef struct cupylora_function {"
    yield "  const cupylora_field* field;"
    yield "  const uint16_t* at;"
    yield "  uint16_t fields, params, dynamic_shared;"
    yield "} cupylora_function;"
    yield ""
    for function in functions:
        yield f"static const cupylora_field cupylora_fields_{function}[] = {{"
        for item in fields[function]:
            yield f"    {{{item.offset}, {item.size}, CUPYLORA_K_{item.name}}},"
        yield "};"
        offsets = ", ".join(str(p.offset) for p in described.functions[function])
        yield f"static const uint16_t cupylora_at_{function}[] = {{{offsets}}};"
    yield "static const cupylora_function cupylora_functions[] = {"
    for function in functions:
        dynamic = int(RULES[function].shared != "0")
        counts = f"{len(fields[function])}, {len(described.functions[function])}, {dynamic}"
        yield f"    {{cupylora_fields_{function}, cupylora_at_{function}, {counts}}},"
    yield "};"
    yield ""


def _leaves(items: Sequence[Declared], described: Described, offset: int = 0) -> Iterator[Declared]:
    """Fields as they lie in the parameters; a struct with arrays in it stays whole."""
    for item in items:
        struct = described.structs.get(item.kind)
        if struct is None or any(part.count > 1 for part in struct.fields):
            yield replace(item, offset=offset + item.offset)
        else:
            yield from _leaves(struct.fields, described, offset + item.offset)


def _files(used: Sequence[Built]) -> Iterator[str]:
    yield "typedef struct cupylora_file {"
    yield "  const char *arch, *path;"
    yield "  uint64_t bytes, fnv1a;"
    yield "} cupylora_file;"
    yield "static const cupylora_file cupylora_files[] = {"
    for item in used:
        yield f'    {{"{item.arch}", "{item.file}", {len(item.cubin)}u,'
        yield f"     UINT64_C(0x{item.fnv1a:016x})}},"
    yield "};"
    yield f"#define CUPYLORA_FILES {len(used)}"
    yield ""


def _kernels(used: Sequence[Built], functions: Sequence[str]) -> Iterator[str]:
    """Kernels by architecture and file; ``function``: of cupylora_functions."""
    yield "typedef struct cupylora_kernel {"
    yield "  uint16_t file, function;"
    yield "  const char *program, *name, *mangled;"
    yield "} cupylora_kernel;"
    yield "static const cupylora_kernel cupylora_kernels[] = {"
    count = 0
    for index, item in enumerate(used):
        for name, mangled in item.lowered.items():
            function = functions.index(function_of(item.program, name))
            yield f'    {{{index}, {function}, "{item.program.name}", "{name}",'
            yield f'     "{mangled}"}},'
            count += 1
    yield "};"
    yield f"#define CUPYLORA_KERNELS {count}"
    yield ""
