"""Reading params.json: every fault in one error, each with the key, the value and the cure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType, UnionType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ml4core.models.errors import CheckpointError, shown
from ml4core.models.params import Params
from ml4core.models.params_checks import CHECKS

PARAMS_FILE = "params.json"

# Stand-ins for required keys that are missing or wrong, so that the rest can still be checked.
_PLACEHOLDERS: Mapping[str, int] = MappingProxyType(
    {"dim": 1, "n_layers": 1, "n_heads": 1, "kv_lora_rank": 1, "qk_rope_head_dim": 0}
)
# pydantic's error types -> what would work, with values of the error's own context.
_WANTED: Mapping[str, str] = MappingProxyType(
    {
        "missing": "missing; it has no default",
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_type": "must be a number",
        "bool_type": "must be true or false",
        "string_type": "must be text",
        "dict_type": "must be an object",
        "list_type": "must be a list",
        "model_type": "must be an object",
        "model_attributes_type": "must be an object",
        "finite_number": "must be finite",
        "greater_than": "must be above {gt}",
        "greater_than_equal": "must be {ge} or more",
        "less_than_equal": "must be at most {le}",
        "literal_error": "must be one of {expected}",
        "value_error": "{error}",
    }
)


def parse_params(raw: Mapping[str, Any], where: str = PARAMS_FILE) -> Params:
    """`raw`, the content of a params.json, as checked data. `where` names the file in messages.

    Raises CheckpointError that lists every fault: unknown keys, wrong types and ranges, and
    contradictions between keys, as far as those keys were right themselves.
    """
    problems: list[str] = []
    wrong: frozenset[str] = frozenset()
    try:
        params = Params.model_validate(dict(raw))
    except ValidationError as error:
        errors = error.errors(include_url=False)
        wrong = frozenset(str(entry["loc"][0]) for entry in errors)
        problems = _unique(_problem(entry) for entry in errors)
        rest = {key: value for key, value in raw.items() if key not in wrong}
        params = Params.model_validate({**_PLACEHOLDERS, **rest})
    for fields, check in CHECKS:
        if not fields & wrong:
            problems += check(params)
    if problems:
        raise refusal(problems, where)
    return params


def block_problems(block: type[BaseModel], name: str, error: ValidationError) -> list[str]:
    """One text for each fault of a block called `name`, which `block` failed to validate."""
    return _unique(_problem(entry, block, name) for entry in error.errors(include_url=False))


def refusal(problems: Iterable[str], where: str) -> CheckpointError:
    """One error of all `problems`."""
    lines = list(problems)
    head = f"{where}: {len(lines)} problem{'s' * (len(lines) > 1)}"
    return CheckpointError("\n  - ".join((head, *lines)))


def _unique(lines: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(lines))


def _problem(error: ErrorDetails, block: type[BaseModel] = Params, name: str = "") -> str:
    path = [str(part) for part in error["loc"]]
    key, kind = ".".join([name, *path] if name else path), error["type"]
    if kind == "extra_forbidden":
        return _unknown_key(key, path[-1], _keys_at(path[:-1], block))
    text = _WANTED.get(kind)
    wanted = text.format(**error.get("ctx", {})) if text is not None else error["msg"]
    return f"{key}: {wanted}" if kind == "missing" else f"{key}: {shown(error['input'])}; {wanted}"


def _unknown_key(key: str, name: str, accepted: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, accepted, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{key}: unknown key{hint}; accepted: {', '.join(accepted)}"


def _keys_at(path: list[str], block: type[BaseModel]) -> tuple[str, ...]:
    """The keys of the block that `path` leads to from `block`."""
    for name in path:
        block = _block_in(block.model_fields[name].annotation) or block
    return tuple(block.model_fields)


def _block_in(annotation: Any) -> type[BaseModel] | None:
    options = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return next((t for t in options if isinstance(t, type) and issubclass(t, BaseModel)), None)
