"""The tiny model answers in the form that is asked for: with drafts, several answers, steps in
flight, and by tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from ml4core.api import DraftOutput
from ml4core.engine.errors import RequestError
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.speculation import Drafting
from ml4core.engine.structured_outputs import StructuredOutputsParams as Form
from ml4core.serving.chat import AnswerStream, ChatTemplate
from ml4core.serving.llm import LLM
from ml4core.serving.protocol import ChatRequest, read_body

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 200},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TEXTS = ("Tell me of Tom, who is 12.", "Who is Anna? She is 7 years old.")
GREEDY = SamplingParams(temperature=0, max_tokens=60, structured_outputs=Form(json=SCHEMA))


def prompts(llm: LLM) -> list[list[int]]:
    tokenizer = llm.get_tokenizer()
    return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in TEXTS]


def answer(llm: LLM, params: SamplingParams = GREEDY, overlap: bool = False) -> list[list[int]]:
    llm.engine.core.overlap = overlap
    given = [{"prompt_token_ids": ids} for ids in prompts(llm)]
    outputs = llm.generate(given, params, use_tqdm=False)
    return [one.token_ids for output in outputs for one in output.outputs]


@pytest.fixture(scope="module")
def greedy(plain: LLM) -> list[list[int]]:
    return answer(plain)


def check(value: Any) -> None:
    assert set(value) == {"name", "age", "tags"}
    assert isinstance(value["name"], str)
    assert isinstance(value["age"], int)
    assert set(value["tags"]) <= {"a", "b"}


def test_answers_follow_the_schema(plain: LLM, greedy: list[list[int]]) -> None:
    for ids in greedy:
        check(json.loads(plain.get_tokenizer().decode(ids)))
        assert ids[-1] == plain.get_tokenizer().eos_id
    assert answer(plain, overlap=True) == greedy, "with a step in flight"


class Scripted:
    """Proposes what comes, but for one draft in ``every``."""

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]], every: int) -> None:
        self.answers = answers
        self.every = every
        self.count = 0

    def propose(self, drafting: Drafting) -> DraftOutput:
        ids = torch.zeros(len(drafting.anchors), 3, dtype=torch.int64)
        for request, row in drafting.rows.items():
            made = int(drafting.sampling.positions[request]) + 1 - len(row.prompt_ids)
            for i, token in enumerate(self.answers[tuple(row.prompt_ids)][made : made + 3]):
                self.count += 1
                wrong = self.every and self.count % self.every == 0
                ids[request, i] = 100 if wrong else token
        return DraftOutput(ids, torch.nn.functional.one_hot(ids, 8192) * 20.0)


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_change_nothing(drafting: LLM, greedy: list[list[int]], overlap: bool) -> None:
    """By the model's drafter, which knows no grammar; by drafts that are often wrong; and by what
    comes, all of which is accepted.
    """
    core: Any = drafting.engine.core
    speculation = core._runner._speculation
    own = speculation._proposer
    assert answer(drafting, overlap=overlap) == greedy
    answers = dict(zip(map(tuple, prompts(drafting)), greedy, strict=True))
    try:
        for every in (3, 0):
            speculation._proposer = Scripted(answers, every)
            before = core.stats().drafts
            assert answer(drafting, overlap=overlap) == greedy
            assert core.stats().drafts.accepted_tokens > before.accepted_tokens + 10
    finally:
        speculation._proposer = own


def test_what_a_grammar_leaves_no_choice_about_is_drafted(
    drafting: LLM, greedy: list[list[int]]
) -> None:
    core: Any = drafting.engine.core
    assert core._mend_drafts
    accepted = []
    for mend in (True, False):
        core._mend_drafts = mend
        before = core.stats().drafts.accepted_tokens
        try:
            assert answer(drafting) == greedy
        finally:
            core._mend_drafts = True
        accepted.append(core.stats().drafts.accepted_tokens - before)
    assert accepted[0] > accepted[1]


@pytest.mark.parametrize("which", ["plain", "drafting"])
def test_several_answers_each_have_their_own_grammar(
    request: pytest.FixtureRequest, which: str
) -> None:
    llm: LLM = request.getfixturevalue(which)
    params = SamplingParams(
        temperature=1.2, seed=7, n=2, max_tokens=40, structured_outputs=Form(json=SCHEMA)
    )
    llm.engine.core.overlap = False
    text = {"prompt_token_ids": prompts(llm)[0]}
    outputs = llm.generate([text], params, use_tqdm=False)[0].outputs
    assert len({one.text for one in outputs}) > 1
    for one in outputs:
        if one.finish_reason == "stop":
            check(json.loads(one.text))
        else:
            assert one.finish_reason == "length"


def test_a_form_that_cannot_be_compiled_is_refused_and_disturbs_nobody(plain: LLM) -> None:
    bad = SamplingParams(structured_outputs=Form(regex="("))
    with pytest.raises(RequestError, match=r"structured_outputs\.regex"):
        plain.generate(["x"], bad, use_tqdm=False)
    assert not plain.engine.core.has_work


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_tools_that_must_be_called_are(drafting: LLM, choice: Any) -> None:
    """A prompt that asks for none of them."""
    other = {"type": "function", "function": {"name": "f", "parameters": {}}}
    body = {
        "messages": [{"role": "user", "content": "Tell me a story about a cat."}],
        "tools": [TOOL, other],
        "tool_choice": choice,
        "temperature": 0,
        "parallel_tool_calls": False,
    }
    request = read_body(ChatRequest, body)
    tokenizer = drafting.get_tokenizer()
    prompt = ChatTemplate(tokenizer).encode(request)
    params = request.sampling_params(max_tokens=60, structured_outputs=prompt.form)
    drafting.engine.core.overlap = False
    output = drafting.generate({"prompt_token_ids": prompt.token_ids}, params, use_tqdm=False)[0]
    stream = AnswerStream(tokenizer, params, tools=True)
    stream.push(output.outputs[0].token_ids, "stop")
    message = stream.message()
    assert stream.finish_reason == "tool_calls"
    assert message.content is None
    (call,) = message.tool_calls
    arguments = json.loads(call.arguments)
    if choice == "required":
        assert call.name in ("get_weather", "f")
        assert call.name == "f" or set(arguments) == {"city", "unit"}
    else:
        assert call.name == "f"
