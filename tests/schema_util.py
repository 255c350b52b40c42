"""As much of JSON Schema as the manifest's schema uses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: Mapping[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "number": (int, float),
    "null": type(None),
}

Schema = Mapping[str, Any]


def faults(schema: Schema, value: Any, root: Schema, where: str = "it") -> list[str]:
    """Where ``value`` is not what ``schema`` says; ``root`` has the definitions."""
    if "$ref" in schema:
        return faults(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root, where)
    kinds = schema.get("type", list(_TYPES))
    if not any(_is_a(kind, value) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return [f"{where} is no {kinds}"]
    found = list(_of_itself(schema, value, root, where))
    if isinstance(value, list):
        found += _of_list(schema, value, root, where)
    if isinstance(value, dict):
        found += _of_object(schema, value, root, where)
    return found


def _is_a(kind: str, value: Any) -> bool:
    return isinstance(value, _TYPES[kind]) and isinstance(value, bool) == (kind == "boolean")


def _of_itself(schema: Schema, value: Any, root: Schema, where: str) -> Iterator[str]:
    if "const" in schema and value != schema["const"]:
        yield f"{where} is not {schema['const']}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is none of {schema['enum']}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{where} does not match {schema['pattern']}"
    if "minimum" in schema and value < schema["minimum"]:
        yield f"{where} is too small"
    if "minLength" in schema and len(value) < schema["minLength"]:
        yield f"{where} is too short"
    if "oneOf" in schema and sum(not faults(s, value, root) for s in schema["oneOf"]) != 1:
        yield f"{where} is not one of what it may be"


def _of_list(schema: Schema, value: list[Any], root: Schema, where: str) -> Iterator[str]:
    count = len(value)
    if not schema.get("minItems", 0) <= count <= schema.get("maxItems", count):
        yield f"{where} has {count} items"
    for index, item in enumerate(value if "items" in schema else ()):
        yield from faults(schema["items"], item, root, f"{where}[{index}]")


def _of_object(schema: Schema, value: dict[str, Any], root: Schema, where: str) -> Iterator[str]:
    yield from (f"{where}.{k} is missing" for k in schema.get("required", ()) if k not in value)
    rest = schema.get("additionalProperties", True)
    for key, item in value.items():
        own = schema.get("properties", {}).get(key, rest)
        if own is False:
            yield f"{where}.{key} is unknown"
        elif own is not True:
            yield from faults(own, item, root, f"{where}.{key}")
