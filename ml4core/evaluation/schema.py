"""Values against the part of JSON Schema that tools are described with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "boolean": (bool,),
        "array": (list,),
        "object": (dict,),
        "null": (type(None),),
    }
)


def problem(value: Any, schema: Mapping[str, Any], where: str = "value") -> str | None:
    """Why a value is not allowed; None if it is. Keywords: type, enum, properties, required,
    additionalProperties, items; keys that a schema with properties doesn't name are not allowed
    unless it says so. Others are not looked at.
    """
    if (kind := schema.get("type")) is not None and not _is(value, kind):
        return f"{where}: {value!r} is no {kind}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where}: {value!r} is none of {schema['enum']}"
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name not in value:
                return f"{where}: no {name}"
        for name, part in value.items():
            if name in properties:
                found = problem(part, properties[name], f"{where}.{name}")
                if found is not None:
                    return found
            elif "properties" in schema and not schema.get("additionalProperties", False):
                return f"{where}: an unknown {name}"
    if isinstance(value, list) and "items" in schema:
        for index, part in enumerate(value):
            found = problem(part, schema["items"], f"{where}[{index}]")
            if found is not None:
                return found
    return None


def _is(value: Any, kind: str | list[str]) -> bool:
    if isinstance(kind, list):
        return any(_is(value, one) for one in kind)
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(kind, ()))
