"""An answer's token ids to content, reasoning and tool calls, as they come.

The borders are special tokens, known by their ids: text that looks like one is text. Whatever the
ids are divided into, the deltas joined are the same ``Message``.
"""

from __future__ import annotations

import codecs
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ml4core.engine.outputs import FinishReason
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.stops import StopChecker
from ml4core.serving.tokenizer import Tokenizer

ID_LENGTH = 9
"""Of a call's id, which the templates take as they are: letters and digits."""
_ID_LETTERS = string.ascii_letters + string.digits


def new_call_id() -> str:
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(ID_LENGTH))


@dataclass(frozen=True)
class ToolCall:
    """``arguments``: as the model wrote them: JSON, unless it made a mistake or was cut off."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCallDelta:
    """More of the call ``index``. The first one of a call has its id and name, the others none."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Delta(NamedTuple):
    """What some tokens add.

    Attributes:
        tokens: how many of those pushed belong to the answer; less than all where a stop string has
            ended it among them.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    tokens: int = 0

    def __bool__(self) -> bool:
        """Whether there is something to tell."""
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(frozen=True)
class Message:
    """An answer. ``content``: None where there are calls and no text."""

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class AnswerStream:
    """One answer of one request.

    Stop strings are looked for in the content alone. A name behind ``[TOOL_CALLS]`` that no
    ``[ARGS]`` follows is no call: it is content, told at the end.

    Attributes:
        stop: the stop string that has ended it, if one did: its request is to be aborted.
        finish_reason: None while it goes on; ``tool_calls`` for one that stopped with calls.
        stop_reason: the stop string, or the stop token that the request named.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        tools: bool = False,
        reasoning: bool = True,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """
        Args:
            tools: whether calls may come; else ``[TOOL_CALLS]`` is a token as any other.
            reasoning: whether to tell of reasoning; it is left out of the content either way.
        """
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._router = _Router(tokenizer, params, tools, new_id)
        self._checker = StopChecker(params, self._router)
        self._tell_reasoning = reasoning
        # The end of sequence is no stop that the request named.
        self._unnamed = None if params.ignore_eos else tokenizer.eos_id
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []

    @property
    def stop(self) -> str | None:
        return self._checker.stop

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer: those pushed, up to the one that completed a stop string."""
        return self._checker.num_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        """How many of them are reasoning, its borders included."""
        return self._router.reasoning_tokens

    def push(self, token_ids: Sequence[int], reason: FinishReason | None = None) -> Delta:
        """What these ids add. ``reason``: the answer ends with them; after ``stop`` the last one
        is the token that ended it. Does nothing once the answer has ended.
        """
        if self.finish_reason is not None:
            return Delta()
        checker, before = self._checker, self._checker.num_tokens
        last = token_ids[-1] if reason == "stop" and token_ids else None
        text = checker.push(*(token_ids if last is None else token_ids[:-1]))
        if checker.stop is not None:
            text += self._end("stop", checker.stop)
        elif reason is not None:
            text += checker.finish(last)
            text += self._end(reason, None if last == self._unnamed else last)
        return self._delta(text, checker.num_tokens - before)

    def message(self) -> Message:
        """All that the deltas up to now have told."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        calls = tuple(call.whole() for call in self._calls)
        return Message(content if content or not calls else None, reasoning or None, calls)

    def _end(self, reason: str, stop: str | int | None) -> str:
        """Sets what the answer ended by; content that is told only now."""
        calls = reason == "stop" and self._router.calls > 0
        self.finish_reason = "tool_calls" if calls else reason
        self.stop_reason = stop
        return self._router.end()

    def _delta(self, content: str, tokens: int) -> Delta:
        reasoning, calls = self._router.take()
        if not self._tell_reasoning:
            reasoning = ""
        if content:
            self._content.append(content)
        if reasoning:
            self._reasoning.append(reasoning)
        for call in calls:
            if call.id is not None:
                self._calls.append(_Call(call.id, call.name or ""))
            self._calls[call.index].arguments.append(call.arguments)
        return Delta(content, reasoning, tuple(calls), tokens)


@dataclass
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def whole(self) -> ToolCall:
        return ToolCall(self.id, self.name, "".join(self.arguments))


class _State(Enum):
    CONTENT = "content"
    REASONING = "reasoning"
    NAME = "name"
    ARGUMENTS = "arguments"


class _Router:
    """The machine: reads one id after the other. To a ``StopChecker`` it is a decoder whose text is
    the content; the rest waits for ``take``.

    Attributes:
        calls: calls whose arguments have begun.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        tools: bool,
        new_id: Callable[[], str],
    ) -> None:
        self.calls = 0
        self.reasoning_tokens = 0
        self._tokenizer = tokenizer
        self._skip = params.skip_special_tokens
        self._new_id = new_id
        self._begin_call = tokenizer.special_id("[TOOL_CALLS]") if tools else None
        self._arguments = tokenizer.special_id("[ARGS]") if tools else None
        self._think = tokenizer.special_id("[THINK]")
        self._end_think = tokenizer.special_id("[/THINK]")
        self._state = _State.CONTENT
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._name = ""
        self._told = ""  # reasoning
        self._deltas: list[ToolCallDelta] = []
        self._nameless = ""

    def push(self, token_id: int) -> str:
        """Reads one id; its content."""
        if self._state is _State.REASONING:
            self.reasoning_tokens += 1
        if token_id == self._begin_call and token_id is not None:
            text = self._switch(_State.NAME)
            self._drop_name()
            return text
        if token_id == self._arguments and self._state is _State.NAME:
            self._switch(_State.ARGUMENTS)
            self._open_call()
            return ""
        if token_id == self._think and self._state is _State.CONTENT:
            self.reasoning_tokens += 1
            return self._switch(_State.REASONING)
        if token_id == self._end_think and self._state is _State.REASONING:
            return self._switch(_State.CONTENT)
        if token_id in (self._think, self._end_think, self._begin_call, self._arguments):
            return ""  # out of place
        skip = self._skip or self._state is not _State.CONTENT
        return self._give(self._utf8.decode(self._tokenizer.piece(token_id, skip)))

    def flush(self) -> str:
        """At the end: content that was held for the rest of a character."""
        return self._give(self._utf8.decode(b"", final=True))

    def end(self) -> str:
        """No more ids come. Content of names without a call, which goes behind all other."""
        self._drop_name()
        return self._nameless

    def take(self) -> tuple[str, list[ToolCallDelta]]:
        """Reasoning and calls since the last time."""
        found = self._told, _merged(self._deltas) if self._deltas else []
        self._told, self._deltas = "", []
        return found

    def _switch(self, state: _State) -> str:
        """Goes on in another state; the content that the old one still held."""
        text = self._give(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        self._state = state
        return text

    def _give(self, text: str) -> str:
        if self._state is _State.CONTENT:
            return text
        if self._state is _State.REASONING:
            self._told += text
        elif self._state is _State.NAME:
            self._name += text
        elif text:
            self._deltas.append(ToolCallDelta(self.calls - 1, arguments=text))
        return ""

    def _open_call(self) -> None:
        name, self._name = self._name.strip(), ""
        self._deltas.append(ToolCallDelta(self.calls, self._new_id(), name))
        self.calls += 1

    def _drop_name(self) -> None:
        """A name that no call came of."""
        self._nameless += self._name
        self._name = ""


def _merged(deltas: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """One for each call, in order."""
    merged: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        merged.setdefault(delta.index, []).append(delta)
    return [
        ToolCallDelta(index, some[0].id, some[0].name, "".join(d.arguments for d in some))
        for index, some in merged.items()
    ]
