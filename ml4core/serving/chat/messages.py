"""The messages of a chat: what each may hold, and in what order they may stand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from ml4core.engine.errors import RequestError
from ml4core.serving.tokenizer import check_text

AFTER: Mapping[str, tuple[str, ...]] = {
    "": ("system", "user", "assistant"),
    "system": ("system", "user", "assistant"),
    "user": ("system", "user", "assistant"),
    "assistant": ("user", "assistant", "tool"),
    "tool": ("user", "assistant", "tool"),
}
"""Which roles may follow which."""

_FIELDS: Mapping[str, frozenset[str]] = {
    "system": frozenset({"role", "content", "name"}),
    "user": frozenset({"role", "content", "name"}),
    "assistant": frozenset(
        {"role", "content", "name", "tool_calls", "reasoning", "reasoning_content", "prefix"}
        # What clients send back of an answer as they have got it; null says nothing.
        | {"refusal", "audio", "annotations", "function_call"}
    ),
    "tool": frozenset({"role", "content", "name", "tool_call_id"}),
}
_MUST_BE_NULL = ("refusal", "audio", "annotations", "function_call")
_NO_CALL = "null"
"""An id that the template takes for none."""

ReadImage = Callable[[Mapping[str, Any], str], Any]
"""An image of a part ``image_url``, and what messages call it. Raises ``RequestError``."""


def read_messages(
    messages: Sequence[object], *, continued: bool, read_image: ReadImage | None
) -> list[dict[str, Any]]:
    """The messages, their content a text or a list of ("text", text) and ("image", image).

    Args:
        continued: the last one is the beginning of the answer.
        read_image: None where images can't be.

    Raises ``RequestError`` that names ``messages[i]`` and the part of it.
    """
    if not messages:
        raise RequestError("messages", "empty", "at least one message")
    read = [_message(m, f"messages[{i}]", read_image) for i, m in enumerate(messages)]
    _check_order(read)
    _check_results(read)
    last = len(read) - 1
    for i, message in enumerate(read):
        if message.pop("prefix", False) and not (i == last and continued):
            raise RequestError(
                f"messages[{i}].prefix", True, "continue_final_message, and the last message"
            )
    role = read[-1]["role"]
    if continued and role != "assistant":
        raise RequestError(
            "continue_final_message", f"true after a message of {role!r}", "one of 'assistant' last"
        )
    if continued and read[-1].get("tool_calls"):
        raise RequestError(
            "continue_final_message", "true after tool calls", "a last message of text alone"
        )
    if role == "assistant" and not continued:
        raise RequestError(
            f"messages[{last}].role",
            "assistant",
            "user or tool last; or continue_final_message, which goes on with it",
        )
    return read


def _message(given: object, name: str, read_image: ReadImage | None) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise RequestError(name, given, 'an object: {"role": ..., "content": ...}')
    named = given.get("role")
    role = "system" if named == "developer" else str(named)
    if not isinstance(named, str) or role not in _FIELDS:
        raise RequestError(f"{name}.role", named, f"one of {', '.join(_FIELDS)}")
    for field, value in given.items():
        unknown = field not in _FIELDS[role]
        if unknown and value is not None:
            works = f"with role {role}: {', '.join(sorted(_FIELDS[role]))}"
            raise RequestError(f"{name}.{field}", value, works)
        if field in _MUST_BE_NULL and value not in (None, [], ""):
            raise RequestError(f"{name}.{field}", value, "null: it is not served")
    message: dict[str, Any] = {"role": role}
    content = given.get("content")
    if role == "assistant":
        _read_assistant(message, given, name)
        if not (content or message.get("tool_calls") or message.get("reasoning")):
            found = content if content is None else "empty"
            raise RequestError(f"{name}.content", found, "a text, or tool_calls")
    elif content is None:
        raise RequestError(f"{name}.content", None, "a text, or a list of parts")
    if role == "tool":
        message["tool_call_id"] = _call_id(given.get("tool_call_id"), f"{name}.tool_call_id")
    message["content"] = _content(content, role, f"{name}.content", read_image)
    return message


def _read_assistant(message: dict[str, Any], given: Mapping[str, Any], name: str) -> None:
    reasons = [given.get("reasoning"), given.get("reasoning_content")]
    found = [reason for reason in reasons if reason is not None]
    if len(found) == 2 and found[0] != found[1]:
        raise RequestError(f"{name}.reasoning_content", found[1], "the same text as reasoning")
    if found and found[0] != "":
        message["reasoning"] = _text(found[0], f"{name}.reasoning")
    prefix = given.get("prefix")
    if prefix not in (None, False, True):
        raise RequestError(f"{name}.prefix", prefix, "true or false")
    message["prefix"] = bool(prefix)
    calls = given.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list):
        raise RequestError(f"{name}.tool_calls", calls, "a list of calls")
    message["tool_calls"] = [_call(c, f"{name}.tool_calls[{i}]") for i, c in enumerate(calls)]


def _call(given: object, name: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(function, Mapping):
        works = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
        raise RequestError(name, given, works)
    if given.get("type", "function") != "function":
        raise RequestError(f"{name}.type", given["type"], "function")
    arguments = function.get("arguments", "")
    if isinstance(arguments, Mapping):
        raise RequestError(f"{name}.function.arguments", "an object", "its JSON, as a text")
    return {
        "id": _call_id(given.get("id"), f"{name}.id"),
        "name": _text(function.get("name"), f"{name}.function.name", empty=False),
        "arguments": _text(arguments, f"{name}.function.arguments"),
    }


def _call_id(given: object, name: str) -> str:
    text = _text(given, name, empty=False)
    if text == _NO_CALL:
        raise RequestError(name, text, "the id of a call, which is another text")
    return text


def _content(
    content: object, role: str, name: str, read_image: ReadImage | None
) -> str | list[tuple[str, Any]] | None:
    if content is None:
        return None
    if isinstance(content, str):
        return _text(content, name)
    if not isinstance(content, list | tuple):
        raise RequestError(name, content, "a text, or a list of parts")
    if not content and role != "assistant":
        raise RequestError(name, content, "a text, or at least one part")
    parts = [_part(p, role, f"{name}[{i}]", read_image) for i, p in enumerate(content)]
    if all(kind == "text" for kind, _ in parts) and len(parts) == 1:
        return str(parts[0][1])
    return parts


def _part(given: object, role: str, name: str, read_image: ReadImage | None) -> tuple[str, Any]:
    if not isinstance(given, Mapping):
        raise RequestError(name, given, '{"type": "text", "text": ...}')
    kind = given.get("type")
    if kind == "text":
        return "text", _text(given.get("text"), f"{name}.text")
    if kind != "image_url":
        raise RequestError(f"{name}.type", kind, "text, or image_url in a message of user or tool")
    if role not in ("user", "tool"):
        raise RequestError(f"{name}.type", kind, f"text, in a message of {role}")
    if read_image is None:
        raise RequestError(f"{name}.type", kind, "text: this model takes no images")
    return "image", read_image(given, name)


def _text(given: object, name: str, *, empty: bool = True) -> str:
    if not isinstance(given, str) or not (given or empty):
        raise RequestError(name, given, "a text" if empty else "a text of at least one character")
    check_text(given, name)
    return given


def _check_order(messages: Sequence[Mapping[str, Any]]) -> None:
    before = ""
    for i, message in enumerate(messages):
        role = message["role"]
        if role not in AFTER[before]:
            where = f"after {before}" if before else "first"
            works = f"{' or '.join(AFTER[before])} {where}"
            raise RequestError(f"messages[{i}].role", role, works)
        before = role


def _check_results(messages: Sequence[Mapping[str, Any]]) -> None:
    """Each result answers one call of the assistant's message before it, and each call has one."""
    open_ids: dict[str, None] = {}  # in order
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            name, found = f"messages[{i}].tool_call_id", message["tool_call_id"]
            if found not in open_ids:
                works = f"the id of a call without a result: {_some(open_ids) or 'none is open'}"
                raise RequestError(name, found, works)
            del open_ids[found]
        elif open_ids and message["role"] != "system":
            works = f"a message of role tool for {_some(open_ids)} first"
            raise RequestError(f"messages[{i}].role", message["role"], works)
        if message["role"] == "assistant":
            open_ids = {}
            for j, call in enumerate(message.get("tool_calls") or ()):
                if (one := call["id"]) in open_ids:
                    raise RequestError(f"messages[{i}].tool_calls[{j}].id", one, "ids that differ")
                open_ids[one] = None
    if open_ids:
        last = len(messages) - 1
        works = f"a message of role tool for {_some(open_ids)} behind it"
        raise RequestError(f"messages[{last}]", "the last one, with calls open", works)


def _some(ids: Collection[str]) -> str:
    """The first of them, for a message."""
    rest = f" and {len(ids) - 4:,} more" if len(ids) > 4 else ""
    return ", ".join(one[:64] for one in islice(ids, 4)) + rest
