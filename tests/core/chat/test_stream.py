"""Answers in pieces equal answers in one piece, and both equal what the ids say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4core.engine.sampling_params import SamplingParams
from ml4core.serving.chat import AnswerStream, Delta, Message, ToolCall
from ml4core.serving.tokenizer import Tokenizer

Ids = Callable[..., list[int]]

CALLS, ARGS, THINK, END_THINK, EOS = 9, 32, 34, 35, 2
SPECIALS = (CALLS, ARGS, THINK, END_THINK, 3, 33, EOS)
ARGUMENTS = '{"n":42,"s":"a]b}c","u":"\u00e9\U0001fae0","o":{"k":[1,2]},"e":{}}'


def numbered() -> Callable[[], str]:
    numbers: Iterator[int] = iter(range(1000))
    return lambda: f"call{next(numbers):05d}"


def stream(tokenizer: Tokenizer, **chosen: object) -> AnswerStream:
    own = {k: chosen.pop(k) for k in ("tools", "reasoning") if k in chosen}
    params = SamplingParams(max_tokens=None, **chosen)  # type: ignore[arg-type]
    return AnswerStream(tokenizer, params, new_id=numbered(), **({"tools": True} | own))  # type: ignore[arg-type]


@dataclass
class Joined:
    """What a client makes of deltas."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    tokens: int = 0

    def add(self, delta: Delta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        self.tokens += delta.tokens
        for call in delta.tool_calls:
            if call.id is not None:
                assert call.index == len(self.calls), "calls begin in order, each once"
                self.calls.append({"id": call.id, "name": call.name or "", "arguments": ""})
            self.calls[call.index]["arguments"] += call.arguments

    def message(self) -> Message:
        calls = tuple(ToolCall(c["id"], c["name"], c["arguments"]) for c in self.calls)
        content = self.content if self.content or not calls else None
        return Message(content, self.reasoning or None, calls)


def run(
    answer: AnswerStream, ids: Sequence[int], cuts: Sequence[int], reason: str = "length"
) -> Joined:
    joined, edges = Joined(), [0, *sorted(cuts), len(ids)]
    for start, stop in pairwise(edges):
        last = stop == len(ids)
        joined.add(answer.push(ids[start:stop], reason if last else None))  # type: ignore[arg-type]
        if answer.finish_reason is not None:
            break
    return joined


def plain(tokenizer: Tokenizer, ids: Sequence[int]) -> Message:
    """The same read from the whole list, without a machine: cut at the borders."""
    content, reasoning, calls, nameless = "", "", [], ""
    rest = list(ids)
    text = tokenizer.decode
    while rest:
        at = next((i for i, one in enumerate(rest) if one in (CALLS, THINK)), len(rest))
        content += text([one for one in rest[:at] if one not in SPECIALS])
        if at == len(rest):
            break
        begin, rest = rest[at], rest[at + 1 :]
        if begin == THINK:
            end = next((i for i, one in enumerate(rest) if one in (CALLS, END_THINK)), len(rest))
            reasoning += text(rest[:end])
            rest = rest[end if rest[end : end + 1] == [CALLS] else end + 1 :]
            continue
        while True:  # calls: nothing but another call ends one
            end = next((i for i, one in enumerate(rest) if one == CALLS), len(rest))
            call, rest = rest[:end], rest[end + 1 :]
            name = call[: call.index(ARGS)] if ARGS in call else call
            if ARGS in call:
                arguments = text(call[call.index(ARGS) + 1 :])
                calls.append(ToolCall(f"call{len(calls):05d}", text(name).strip(), arguments))
            else:
                nameless += text(name)
            if not rest:
                break
        break
    content += nameless
    return Message(content if content or not calls else None, reasoning or None, tuple(calls))


tokens = st.lists(st.one_of(st.sampled_from(SPECIALS[:-1]), st.integers(64, 400)), max_size=40)


@settings(max_examples=150, deadline=None)
@given(ids=tokens, data=st.data())
def test_pieces_equal_the_whole(v15: Tokenizer, ids: list[int], data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8))
    whole, pieces = stream(v15), stream(v15)
    run(whole, ids, [])
    joined = run(pieces, ids, cuts)
    assert joined.message() == pieces.message() == whole.message()
    assert joined.tokens == pieces.num_tokens == len(ids)
    assert pieces.num_reasoning_tokens == whole.num_reasoning_tokens <= len(ids)
    assert pieces.message() == plain(v15, ids)


@settings(max_examples=150, deadline=None)
@given(text=st.text("abn\u00e9\U0001fae0 ", max_size=20), data=st.data())
def test_a_stop_is_found_across_pieces(v15: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = [THINK, *v15.encode("na na")[1:], END_THINK, *v15.encode(text)[1:]]
    stops = data.draw(st.lists(st.text("abn\u00e9", min_size=1, max_size=3), max_size=2))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8))
    whole, pieces = (stream(v15, stop=tuple(stops)) for _ in range(2))
    run(whole, ids, [])
    joined = run(pieces, ids, cuts)
    assert joined.message() == whole.message()
    assert (pieces.stop, pieces.num_tokens) == (whole.stop, whole.num_tokens)
    found = [text.index(stop) + len(stop) for stop in stops if stop in text]
    assert (whole.stop is None) == (not found)
    if found:  # the first character that completes one ends it; of several the longest counts
        end = min(found)
        stop = max((s for s in stops if text[:end].endswith(s)), key=len)
        assert whole.message().content == text[: end - len(stop)]
        assert whole.finish_reason == "stop"
        assert whole.stop_reason == stop
    assert whole.message().reasoning == "na na"


@pytest.mark.parametrize("step", [1, 2, 3, 4, 1000])
def test_two_calls_at_once(tokenizer: Tokenizer, ids: Ids, step: int) -> None:
    """B086: marks, ids and names, whatever the accepted runs."""
    made = ids("[TOOL_CALLS]", "first", "[ARGS]", ARGUMENTS) * 2 + [EOS]
    answer, joined = stream(tokenizer), Joined()
    for start in range(0, len(made), step):
        last = start + step >= len(made)
        joined.add(answer.push(made[start : start + step], "stop" if last else None))
    message = joined.message()
    assert message == answer.message()
    assert message.content is None
    assert [call.name for call in message.tool_calls] == ["first", "first"]
    assert [call.id for call in message.tool_calls] == ["call00000", "call00001"]
    for call in message.tool_calls:
        assert call.arguments == ARGUMENTS
        assert json.loads(call.arguments)["n"] == 42
    assert answer.finish_reason == "tool_calls"
    assert answer.stop_reason is None


def test_reasoning_then_text_then_a_call(tokenizer: Tokenizer, ids: Ids) -> None:
    made = ids("[THINK]", "so", "[/THINK]", "Well.", "[TOOL_CALLS]", "f", "[ARGS]", "{}")
    answer = stream(tokenizer)
    answer.push([*made, EOS], "stop")
    assert answer.message() == Message("Well.", "so", (ToolCall("call00000", "f", "{}"),))
    assert answer.num_reasoning_tokens == len(ids("so")) + 2
    hidden = stream(tokenizer, reasoning=False)
    hidden.push([*made, EOS], "stop")
    assert hidden.message().reasoning is None
    assert hidden.message().content == "Well."


def test_a_call_closes_reasoning(tokenizer: Tokenizer, ids: Ids) -> None:
    answer = stream(tokenizer)
    answer.push(ids("[THINK]", "so", "[TOOL_CALLS]", "f", "[ARGS]", "{}"), "length")
    assert answer.message() == Message(None, "so", (ToolCall("call00000", "f", "{}"),))
    assert answer.finish_reason == "length"


def test_arguments_that_are_no_json_come_as_they_are(tokenizer: Tokenizer, ids: Ids) -> None:
    answer = stream(tokenizer)
    answer.push(ids("[TOOL_CALLS]", "f", "[ARGS]", '{"a": '), "length")
    assert answer.message().tool_calls[0].arguments == '{"a": '


def test_a_name_alone_is_content(tokenizer: Tokenizer, ids: Ids) -> None:
    answer = stream(tokenizer)
    answer.push([*ids("Hm. ", "[TOOL_CALLS]", "f"), EOS], "stop")
    assert answer.message() == Message("Hm. f")
    assert answer.finish_reason == "stop"


def test_without_tools_a_mark_is_no_call(tokenizer: Tokenizer, ids: Ids) -> None:
    answer = stream(tokenizer, tools=False)
    answer.push([*ids("[TOOL_CALLS]", "f", "[ARGS]", "{}"), EOS], "stop")
    assert answer.message() == Message("f{}")
    assert answer.finish_reason == "stop"


def test_text_that_looks_like_a_mark_is_text(tokenizer: Tokenizer) -> None:
    answer, text = stream(tokenizer), "[TOOL_CALLS]f[ARGS]{} [THINK] </s>"
    answer.push([*tokenizer.encode(text)[1:], EOS], "stop")
    assert answer.message() == Message(text)


def test_a_character_over_several_tokens(tokenizer: Tokenizer) -> None:
    """B090: given once it is whole; one replacement for what is cut at the end."""
    made = [64 + byte for byte in "\U0001fae0\u9f9c\u05d0".encode()]
    answer, joined = stream(tokenizer), Joined()
    for one in made[:-1]:
        joined.add(answer.push([one]))
        assert "\ufffd" not in joined.content
    joined.add(answer.push([], "length"))
    assert joined.content == "\U0001fae0\u9f9c\ufffd"


def test_special_tokens_are_shown_if_asked_for_but_no_marks(tokenizer: Tokenizer, ids: Ids) -> None:
    answer = stream(tokenizer, skip_special_tokens=False)
    answer.push(ids("[THINK]", "so", "[/THINK]", "a", "[INST]", "b"), "length")
    assert answer.message() == Message("a[INST]b", "so")


def test_nothing_comes_after_the_end(tokenizer: Tokenizer, ids: Ids) -> None:
    answer = stream(tokenizer, stop=("b",))
    assert answer.push(ids("ab cd")).content == "a"
    assert not answer.push(ids("more"))
    assert answer.message() == Message("a")


def test_a_named_stop_token_is_told(tokenizer: Tokenizer, ids: Ids) -> None:
    stop = ids("x")[0]
    answer = stream(tokenizer, stop_token_ids=(stop,))
    answer.push([*ids("a"), stop], "stop")
    assert answer.message() == Message("a")
    assert answer.stop_reason == stop
    assert answer.num_tokens == 2
