"""Tools of a request, and which of them the answer may or must call."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ml4core.engine.errors import RequestError
from ml4core.serving.protocol import ChatRequest, NamedToolChoice

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_TOOLS = 1024

Choice = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class ToolUse:
    """What an answer may do with tools.

    Attributes:
        tools: those that the prompt offers.
        choice: ``required``: it must call. ``none`` where there are no tools, too.
        callable: names that it may call.
        parallel: whether it may make several calls.
        exact: whether arguments are held to the schemas of tools that are not ``strict``, too.
    """

    tools: tuple[OfferedTool, ...] = ()
    choice: Choice = "none"
    callable: tuple[str, ...] = ()
    parallel: bool = True
    exact: bool = False

    @property
    def constrains(self) -> bool:
        """Whether calls have to be held to a form while they are made."""
        if self.choice == "auto":
            return not self.parallel or any(tool.strict for tool in self.tools)
        return self.choice == "required"

    def schema(self, tool: OfferedTool) -> dict[str, Any]:
        """What the arguments of a call of this tool are held to."""
        return tool.parameters if self.exact or tool.strict else {"type": "object"}


@dataclass(frozen=True)
class OfferedTool:
    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool


def read_tools(request: ChatRequest) -> ToolUse:
    """Raises ``RequestError`` for tools or a choice that can't be."""
    offered: list[OfferedTool] = []
    names: set[str] = set()
    if request.tools is not None and len(request.tools) > MAX_TOOLS:
        raise RequestError("tools", f"{len(request.tools):,} tools", f"at most {MAX_TOOLS:,}")
    for i, tool in enumerate(request.tools or ()):
        function, where = tool.function, f"tools[{i}].function"
        if NAME.fullmatch(function.name) is None:
            works = "1 to 64 letters, digits, _ and -"
            raise RequestError(f"{where}.name", function.name, works)
        if function.name in names:
            raise RequestError(f"{where}.name", function.name, "names that differ")
        names.add(function.name)
        parameters = function.parameters or {"type": "object", "properties": {}}
        if parameters.get("type", "object") != "object":
            works = "object, since a call's arguments are one"
            raise RequestError(f"{where}.parameters.type", parameters["type"], works)
        check_schema(parameters, f"{where}.parameters")
        offered.append(
            OfferedTool(
                function.name, function.description or "", parameters, bool(function.strict)
            )
        )
    return _choose(request, tuple(offered))


def _choose(request: ChatRequest, offered: tuple[OfferedTool, ...]) -> ToolUse:
    names = tuple(tool.name for tool in offered)
    parallel = request.parallel_tool_calls is not False
    match request.tool_choice:
        case "none":
            return ToolUse()  # a tool that must not be called is not offered
        case NamedToolChoice(function=function):
            if function.name not in names:
                raise RequestError("tool_choice.function.name", function.name, _one_of(names))
            # The tool is asked for, so one call of it is the answer.
            return ToolUse(offered, "required", (function.name,), parallel=False, exact=True)
        case "required":
            if not offered:
                raise RequestError("tool_choice", "required", "tools to choose from")
            return ToolUse(offered, "required", names, parallel, exact=True)
        case _:
            return ToolUse(offered, "auto", names, parallel) if offered else ToolUse()


def _one_of(names: Sequence[str]) -> str:
    return f"one of the tools: {', '.join(names)}" if names else "tools to choose from"


def check_schema(schema: Any, field: str) -> None:
    """Raises ``RequestError`` for what is no JSON schema."""
    from mistral_common.utils.json_utils import validate_json_schema_by_draft7

    try:
        validate_json_schema_by_draft7(value=schema)
    except (ValueError, TypeError, RecursionError) as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RequestError(field, text[:200], "a JSON schema of draft 7") from error


def dumped(schema: Any) -> str:
    """JSON in one form, so that equal schemas are equal texts."""
    return json.dumps(schema, ensure_ascii=False, sort_keys=False, separators=(",", ":"))
