"""The official client against the shipped model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

STORY = [{"role": "user", "content": "Tell me a story about a rabbit named Pip."}]
GREEDY = {"model": "ml4-tiny", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(tiny: Any) -> Iterator[openai.OpenAI]:
    with tiny.openai() as made:
        yield made


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**({"messages": STORY} | GREEDY | options))


def complete(client: openai.OpenAI, prompt: Any = "Once upon a", **options: Any) -> Any:
    return client.completions.create(prompt=prompt, **(GREEDY | options))


def joined(stream: Any) -> tuple[str, Any, list[Any]]:
    """The content, the last usage, and all chunks."""
    chunks = list(stream)
    parts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    return "".join(parts), chunks[-1].usage, chunks


def test_models(client: openai.OpenAI) -> None:
    (one,) = client.models.list().data
    assert one.id == "ml4-tiny"
    assert client.models.retrieve("ml4-tiny").id == "ml4-tiny"
    with pytest.raises(openai.NotFoundError, match="works: ml4-tiny"):
        client.models.retrieve("gpt-5")


def test_a_chat_streamed_or_not_is_the_same(client: openai.OpenAI) -> None:
    whole = ask(client)
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert "rabbit" in choice.message.content
    assert choice.finish_reason == "length"
    stream = ask(client, stream=True, stream_options={"include_usage": True})
    text, usage, chunks = joined(stream)
    assert text == choice.message.content
    assert usage.model_dump(exclude={"prompt_tokens_details", "completion_tokens_details"}) == (
        whole.usage.model_dump(exclude={"prompt_tokens_details", "completion_tokens_details"})
    )
    assert usage.completion_tokens == 12
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_usage_in_each_chunk(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask(client, stream=True, stream_options=options))
    made = [c.usage.completion_tokens for c in chunks]
    assert made == sorted(made)
    assert made[0] >= 1
    assert made[-1] == 12


def test_drafts_are_told(client: openai.OpenAI) -> None:
    details = ask(client, max_tokens=24).usage.completion_tokens_details
    assert details.num_drafts > 0
    assert details.accepted_prediction_tokens == sum(details.accepted_per_position)


def test_completions(client: openai.OpenAI) -> None:
    one = complete(client)
    assert one.choices[0].text.startswith(" time")
    assert one.usage.completion_tokens == 12
    streamed = list(complete(client, stream=True))
    assert "".join(c.choices[0].text for c in streamed) == one.choices[0].text


def test_prompts_of_every_form(client: openai.OpenAI, tiny: Any) -> None:
    ids = tiny.post("/tokenize", {"prompt": "Once upon a"}).json()["tokens"]
    want = complete(client).choices[0].text
    for prompt in (ids, [ids], ["Once upon a"], [ids, ids]):
        found = complete(client, prompt)
        assert [c.text for c in found.choices] == [want] * len(found.choices)
        assert [c.index for c in found.choices] == list(range(len(found.choices)))
    assert len(found.choices) == 2
    assert found.usage.prompt_tokens == 2 * len(ids)


def test_several_answers(client: openai.OpenAI) -> None:
    """B104: as many as asked for, different ones, the same again by the same seed."""
    options: dict[str, Any] = {"n": 4, "seed": 7, "temperature": 1.0, "max_tokens": 10}
    first = ask(client, **options)
    assert [c.index for c in first.choices] == [0, 1, 2, 3]
    texts = [c.message.content for c in first.choices]
    assert len(set(texts)) == 4
    assert first.usage.completion_tokens <= 40
    parts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for chunk in ask(client, **options, stream=True):
        for choice in chunk.choices:
            assert choice.index not in ends, "nothing comes behind the end"
            parts[choice.index] = parts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert sorted(ends) == [0, 1, 2, 3]
    assert [parts[i] for i in range(4)] == texts


def test_a_seed_makes_an_answer_again(client: openai.OpenAI) -> None:
    one, two, other = (
        complete(client, temperature=1.0, seed=seed).choices[0].text for seed in (3, 3, 4)
    )
    assert one == two != other


@pytest.mark.parametrize("length", [1, 3, 7])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client: openai.OpenAI, length: int, stream: bool) -> None:
    """B062: the text ends before it, wherever tokens and chunks end; ids and log-probabilities
    do not go beyond.
    """
    whole = complete(client, max_tokens=24).choices[0].text
    stop = whole[9 : 9 + length]
    options = {"logprobs": 1, "stop": [stop], "extra_body": {"return_token_ids": True}}
    options |= {"max_tokens": 24}
    if stream:
        last = {"stream_options": {"include_usage": True}}
        chunks = list(complete(client, stream=True, **last, **options))
        usage, told = chunks[-1].usage, [c.choices[0] for c in chunks if c.choices]
    else:
        found = complete(client, **options)
        usage, told = found.usage, list(found.choices)
    assert "".join(one.text for one in told) == whole.partition(stop)[0]
    assert told[-1].finish_reason == "stop"
    assert told[-1].stop_reason == stop
    tokens = [token for one in told for token in one.logprobs.tokens]
    ids = [token for one in told for token in one.token_ids]
    assert len(tokens) == len(ids) == usage.completion_tokens
    assert "".join(tokens).startswith(whole.partition(stop)[0])


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    (choice,) = ask(client, logprobs=True, top_logprobs=3).choices
    content = choice.logprobs.content
    assert len(content) == 12
    assert b"".join(bytes(one.bytes) for one in content).decode() == choice.message.content
    for one in content:
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].token == one.token, "at temperature 0 the likeliest"
        assert one.logprob == one.top_logprobs[0].logprob <= 0
        assert [t.logprob for t in one.top_logprobs] == sorted(
            (t.logprob for t in one.top_logprobs), reverse=True
        )
    streamed = [
        one
        for chunk in ask(client, logprobs=True, top_logprobs=3, stream=True)
        for one in chunk.choices[0].logprobs.content
    ]
    assert [one.token for one in streamed] == [one.token for one in content]


def test_echo_and_prompt_logprobs(client: openai.OpenAI) -> None:
    plain = complete(client, max_tokens=4).choices[0].text
    (choice,) = complete(client, echo=True, logprobs=2, max_tokens=4).choices
    assert choice.text == "Once upon a" + plain
    listed = choice.logprobs
    assert listed.token_logprobs[0] is None
    assert all(value <= 0 for value in listed.token_logprobs[1:])
    assert "".join(listed.tokens[1:]) == choice.text
    assert len(listed.top_logprobs) == len(listed.tokens) == len(listed.text_offset)
    nothing = complete(client, echo=True, logprobs=2, max_tokens=0)
    assert nothing.choices[0].text == "Once upon a"
    assert nothing.usage.completion_tokens == 0
    assert nothing.choices[0].logprobs.tokens == listed.tokens[:-4]
    assert nothing.choices[0].logprobs.token_logprobs == pytest.approx(
        listed.token_logprobs[:-4], abs=1e-4
    )
    asked = complete(client, max_tokens=1, extra_body={"prompt_logprobs": 1}).choices[0]
    first, *rest = asked.prompt_logprobs
    assert first is None
    assert all(next(iter(one.values()))["logprob"] <= 0 for one in rest)
    chat = ask(client, max_tokens=1, extra_body={"prompt_logprobs": 0})
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


def test_a_salt_parts_the_prefix_cache(client: openai.OpenAI) -> None:
    """B056."""
    prompt = list(range(300, 500))

    def cached(salt: str) -> int:
        found = complete(client, prompt, max_tokens=1, extra_body={"cache_salt": salt})
        return int(found.usage.prompt_tokens_details.cached_tokens)

    assert cached("a") == 0
    assert cached("b") == 0
    assert cached("a") > 0


def test_ignore_eos_and_min_tokens(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "Say yes."}]
    options: dict[str, Any] = {"messages": question, "max_tokens": 200}
    ended = ask(client, **options)
    count = ended.usage.completion_tokens
    assert ended.choices[0].finish_reason == "stop"
    more = ask(client, **options, extra_body={"min_tokens": count + 3})
    assert more.usage.completion_tokens >= count + 3
    never = ask(client, **(options | {"max_tokens": count + 9}), extra_body={"ignore_eos": True})
    assert never.usage.completion_tokens == count + 9
    assert never.choices[0].finish_reason == "length"


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_kept(client: openai.OpenAI, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    options: dict[str, Any] = {"response_format": form, "max_tokens": 100, "temperature": 1.0}
    options |= {"seed": 1}
    text = (
        joined(ask(client, stream=True, **options))[0]
        if stream
        else ask(client, **options).choices[0].message.content
    )
    found = json.loads(text)
    assert found.keys() == {"name", "age"}
    assert isinstance(found["age"], int)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_a_tool_that_must_be_called_is(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    options: dict[str, Any] = {
        "messages": question,
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "parallel_tool_calls": False,
        "max_tokens": 100,
    }
    whole = ask(client, **options).choices[0]
    (call,) = whole.message.tool_calls
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    assert whole.finish_reason == "tool_calls"
    name, arguments, ids = "", "", set()
    for chunk in ask(client, **options, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            assert part.index == 0
            name += part.function.name or ""
            arguments += part.function.arguments or ""
            ids |= {part.id} - {None}
    assert (name, arguments) == ("get_weather", call.function.arguments)
    assert len(ids) == 1
    answer = [
        *question,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "content": "Sunny", "tool_call_id": call.id},
    ]
    assert ask(client, messages=answer, tools=[WEATHER]).choices[0].message.content is not None


def test_who_goes_gives_pages_back(client: openai.OpenAI, tiny: Any, until: Any) -> None:
    before = tiny.metric("ml4_requests_cancelled_total")
    stream = ask(client, stream=True, max_tokens=900, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    until(lambda: tiny.metric("ml4_requests_cancelled_total") == before + 1)
    until(lambda: tiny.metric("ml4_num_requests_running") == 0)
    assert tiny.metric("ml4_kv_group_usage_perc") == 0
    assert ask(client).choices[0].message.content


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, temperature=-1)
    assert caught.value.param == "temperature"
    assert "works: 0 to" in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        ask(client, model="gpt-5")


def test_a_character_cut_at_the_end(client: openai.OpenAI, tiny: Any) -> None:
    """B090: of a character of several tokens nothing is told before its last; one that stays cut
    is one U+FFFD.
    """
    text = "\U0001fae0"
    ids = tiny.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert len(ids) > 1
    first = {"allowed_token_ids": [ids[0]], "ignore_eos": True}
    chunks = [c.choices[0] for c in complete(client, max_tokens=3, stream=True, extra_body=first)]
    assert "".join(c.text for c in chunks) == "\ufffd" * 3, "three beginnings of characters"
    echoed = complete(client, ids, echo=True, max_tokens=0).choices[0].text
    assert echoed == text
