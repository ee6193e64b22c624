"""A chat request to the token ids of its prompt, by mistral-common's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ml4core.engine.errors import RequestError
from ml4core.engine.image_inputs import PlacedImage, place_images
from ml4core.engine.structured_outputs import StructuredOutputsParams
from ml4core.serving.chat.form import AnswerForms
from ml4core.serving.chat.messages import ReadImage, read_messages
from ml4core.serving.chat.tools import OfferedTool, ToolUse, read_tools
from ml4core.serving.grammars import LLGrammars
from ml4core.serving.protocol import ChatRequest
from ml4core.serving.tokenizer import Tokenizer

VERSIONS = ("v13", "v15")
"""Tokenizers whose templates have calls as ``[TOOL_CALLS]name[ARGS]{json}``."""


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt up to where the answer begins.

    Attributes:
        images: with their places in ``token_ids``.
        tools: what the answer may do with tools.
        form: what the answer is held to, for ``SamplingParams``; None where any text may come.
    """

    token_ids: list[int]
    images: tuple[PlacedImage, ...]
    tools: ToolUse
    form: StructuredOutputsParams | None = None


class ChatTemplate:
    """Chats of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._thinks = tokenizer.special_id("[THINK]") is not None
        self._grammars = LLGrammars(tokenizer)
        self._forms = AnswerForms(self._grammars, tokenizer.special_tokens)

    def prepare(self) -> None:
        """Does what the first request would else wait for."""
        self._grammars.prepare()

    def check_form(self, form: StructuredOutputsParams) -> None:
        """Raises ``RequestError`` for a form that can't be compiled."""
        self._grammars.check(form)

    def encode(
        self,
        request: ChatRequest,
        read_image: ReadImage | None = None,
    ) -> ChatPrompt:
        """``read_image``: None where images can't be.

        Raises ``RequestError`` that names the field at fault, its value and what works.
        """
        continued = bool(request.continue_final_message)
        if request.add_generation_prompt is not None and (
            request.add_generation_prompt is continued
        ):
            works = "false with continue_final_message, else true"
            raise RequestError("add_generation_prompt", request.add_generation_prompt, works)
        tools = read_tools(request)
        if tools.tools:
            self._check_version("tools")
        messages = read_messages(request.messages, continued=continued, read_image=read_image)
        self._check_history(messages)
        form = self._forms.of(request, tools, self._reasons(request) and not continued)
        if continued and (form is not None or request.structured_outputs is not None):
            works = "false with a form of the answer, whose beginning it would have to be"
            raise RequestError("continue_final_message", True, works)
        tokens, images = self._encode(request, messages, tools.tools, continued)
        return ChatPrompt(tokens, images, tools, form)

    def _check_version(self, field: str) -> None:
        version = self.tokenizer.version
        if version not in VERSIONS:
            works = f"a model whose tokenizer is {' or '.join(VERSIONS)}; this one is {version}"
            raise RequestError(field, "given", works)

    def _check_history(self, messages: Sequence[Mapping[str, Any]]) -> None:
        for i, message in enumerate(messages):
            if message.get("tool_calls"):
                self._check_version(f"messages[{i}].tool_calls")
            if message.get("reasoning") and not self._thinks:
                works = "none: this tokenizer has no [THINK]"
                raise RequestError(f"messages[{i}].reasoning", "given", works)

    def _encode(
        self,
        request: ChatRequest,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[OfferedTool],
        continued: bool,
    ) -> tuple[list[int], tuple[PlacedImage, ...]]:
        from mistral_common.exceptions import MistralCommonException
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        fields: dict[str, Any] = {"messages": [_message(m) for m in messages]}
        if continued:
            fields["messages"][-1].prefix = True
        if tools:
            fields["tools"] = [_tool(one) for one in tools]
        effort = self._effort(request)
        if effort is not None:
            fields["reasoning_effort"] = effort
        encode = self.tokenizer.mistral.encode_chat_completion
        try:
            found = encode(ChatCompletionRequest(**fields))
        except RecursionError as error:
            works = "arguments of fewer levels"
            raise RequestError("messages", "a call nested too deep", works) from error
        except (MistralCommonException, ValueError, TypeError, AssertionError) as error:
            text = str(error).strip().splitlines() or [type(error).__name__]
            works = f"a chat that the {self.tokenizer.version} template allows"
            raise RequestError("messages", text[0][:200], works) from error
        if not found.images:
            return found.tokens, ()
        image_id, cell = self.tokenizer.special_id("[IMG]"), self.tokenizer.image_cell
        assert image_id is not None
        assert cell is not None
        return found.tokens, place_images(found.tokens, found.images, image_id, cell)

    def _reasons(self, request: ChatRequest) -> bool:
        """Whether an answer may begin with reasoning: if the template can tell, if told so."""
        if not self.tokenizer.reasoning_efforts:
            return self._thinks
        effort = request.reasoning_effort or self.tokenizer.default_reasoning_effort
        return self._thinks and effort != "none"

    def _effort(self, request: ChatRequest) -> str | None:
        """What the template is told; None where it has no such setting."""
        allowed = self.tokenizer.reasoning_efforts
        effort = request.reasoning_effort
        if effort is None:
            return None
        if not allowed and effort == "none":
            return None  # what such a model does anyway
        if effort not in allowed:
            works = f"one of {', '.join(allowed)}" if allowed else "none: this model has no such"
            raise RequestError("reasoning_effort", effort, works)
        return effort


def _message(read: Mapping[str, Any]) -> Any:
    from mistral_common.protocol.instruct.messages import (
        AssistantMessage,
        SystemMessage,
        ToolMessage,
        UserMessage,
    )

    role, content = read["role"], _content(read["content"])
    if role == "system":
        return SystemMessage(content=content)
    if role == "user":
        return UserMessage(content=content)
    if role == "tool":
        return ToolMessage(content=content, tool_call_id=read["tool_call_id"])
    if read.get("reasoning"):
        content = _with_reasoning(read["reasoning"], content)
    calls = [_call(call) for call in read.get("tool_calls") or ()]
    return AssistantMessage(content=content, tool_calls=calls or None)


def _content(read: Any) -> Any:
    from mistral_common.protocol.instruct.chunk import ImageChunk, TextChunk

    if not isinstance(read, list):
        return read
    return [
        TextChunk(text=value) if kind == "text" else ImageChunk(image=value) for kind, value in read
    ]


def _with_reasoning(reasoning: str, content: Any) -> list[Any]:
    from mistral_common.protocol.instruct.chunk import TextChunk, ThinkChunk

    rest = [TextChunk(text=content)] if isinstance(content, str) and content else content or []
    return [ThinkChunk(thinking=reasoning, closed=True), *rest]


def _call(read: Mapping[str, str]) -> Any:
    from mistral_common.protocol.instruct.tool_calls import FunctionCall, ToolCall

    function = FunctionCall(name=read["name"], arguments=read["arguments"] or "{}")
    return ToolCall(id=read["id"], function=function)


def _tool(offered: OfferedTool) -> Any:
    from mistral_common.protocol.instruct.tool_calls import Function, Tool

    return Tool(
        function=Function(
            name=offered.name, description=offered.description, parameters=offered.parameters
        )
    )
