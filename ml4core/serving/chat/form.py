"""The form that a chat's answer is held to: JSON, calls of tools, and reasoning before either."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ml4core.engine.errors import RequestError
from ml4core.engine.structured_outputs import StructuredOutputsParams
from ml4core.serving.chat.tools import OfferedTool, ToolUse, check_schema, dumped
from ml4core.serving.grammars import schema_lark
from ml4core.serving.protocol import ChatRequest, ResponseFormat

if TYPE_CHECKING:
    from ml4core.engine.grammars import GrammarCompiler

_TEXT = r"TEXT: /(.|\n)+/"
_SCHEMA = "response_format.json_schema.schema"


class AnswerForms:
    """Forms in terms of one tokenizer's special tokens, checked by its compiler."""

    def __init__(self, compiler: GrammarCompiler, special_tokens: Mapping[str, int]) -> None:
        self._compiler = compiler
        self._special = special_tokens

    def of(
        self, request: ChatRequest, tools: ToolUse, reasons: bool
    ) -> StructuredOutputsParams | None:
        """None where any text may come, and for a form that the request itself gives, which is
        checked. ``reasons``: the answer may begin with reasoning.

        Raises ``RequestError`` that names the schema which can't be compiled.
        """
        schema = _schema(request.response_format)
        given = request.structured_outputs is not None
        if given and (schema is not None or tools.choice == "required"):
            other = "tool_choice" if schema is None else "response_format"
            raise RequestError("structured_outputs", "given", f"none beside {other}")
        if request.structured_outputs is not None:
            self._compiler.check(request.structured_outputs.params())
            return None
        if schema is None and not tools.constrains:
            return None
        try:
            if schema is not None and not (reasons or tools.tools):
                form = StructuredOutputsParams(json=schema)
            else:
                form = StructuredOutputsParams(grammar=self._grammar(schema, tools, reasons))
        except RequestError as error:  # too long
            raise RequestError(
                "tools" if schema is None else _SCHEMA, error.value, error.remedy
            ) from error
        try:
            self._compiler.check(form)
        except RequestError as error:
            raise self._named(error, schema, tools) from error
        return form

    def _grammar(self, schema: str | None, tools: ToolUse, reasons: bool) -> str:
        calls = "calls" if tools.choice != "none" else ""
        match tools.choice, schema:
            case "required", _:
                body = calls
            case _, None:
                body = f"TEXT? {calls}?"
            case _, _:
                body = f"json | {calls}" if calls else "json"
        lines = [f"start: think? ({body})" if reasons else f"start: {body}", _TEXT]
        if reasons:
            lines.append(f"think: {self._token('[THINK]')} TEXT? {self._token('[/THINK]')}")
        if schema is not None:
            lines.append(f"json: {schema_lark(schema)}")
        if calls:
            own = [tool for tool in tools.tools if tool.name in tools.callable]
            lines.append(f"calls: call{'+' if tools.parallel else ''}")
            lines.append(f"call: {' | '.join(f'call_{i}' for i in range(len(own)))}")
            lines += [self._call(i, tool, tools) for i, tool in enumerate(own)]
        return "\n".join(lines)

    def _call(self, number: int, tool: OfferedTool, tools: ToolUse) -> str:
        begin, separator = self._token("[TOOL_CALLS]"), self._token("[ARGS]")
        arguments = schema_lark(dumped(tools.schema(tool)))
        return f"call_{number}: {begin} {json.dumps(tool.name)} {separator} {arguments}"

    def _token(self, name: str) -> str:
        return f"<[{self._special[name]}]>"

    def _named(self, error: RequestError, schema: str | None, tools: ToolUse) -> RequestError:
        """The error by the field that it is of: each part is compiled alone."""
        parts = {} if schema is None else {_SCHEMA: schema}
        for i, tool in enumerate(tools.tools):
            if tool.name in tools.callable:
                parts[f"tools[{i}].function.parameters"] = dumped(tools.schema(tool))
        for field, text in parts.items():
            try:
                self._compiler.check(StructuredOutputsParams(json=text))
            except RequestError as own:
                return RequestError(field, own.value, "a schema that can be compiled")
        return RequestError("tools" if tools.tools else _SCHEMA, error.value, error.remedy)


def _schema(format: ResponseFormat | None) -> str | None:
    """The text of the JSON schema that the content is held to; None for any text."""
    if format is None or format.type == "text":
        if format is not None and format.json_schema is not None:
            raise RequestError("response_format.json_schema", "given", "with type json_schema")
        return None
    if format.type == "json_object":
        if format.json_schema is not None:
            raise RequestError("response_format.json_schema", "given", "with type json_schema")
        return '{"type":"object"}'
    if format.json_schema is None or format.json_schema.schema_ is None:
        raise RequestError(_SCHEMA, "missing", "a JSON schema")
    if isinstance(format.json_schema.schema_, bool):
        raise RequestError(_SCHEMA, format.json_schema.schema_, "a JSON schema: an object")
    check_schema(format.json_schema.schema_, _SCHEMA)
    return dumped(format.json_schema.schema_)
