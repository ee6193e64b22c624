"""Bad values are refused by name, with what works; good ones are kept as they are."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from ml4core.engine.errors import RequestError
from ml4core.engine.sampling_params import MAX_N, SamplingParams

NAN, INF = math.nan, math.inf

BAD: list[tuple[str, Any]] = [
    *(("temperature", x) for x in (-0.1, NAN, INF, -INF, "1", None, True, 10**400, 1e39)),
    *(("top_p", x) for x in (0, -0.1, 1.0001, NAN, "0.5", False)),
    *(("top_k", x) for x in (-2, 1.0, NAN, True, "5", None)),
    *(("min_p", x) for x in (-0.01, 1.01, NAN, None)),
    *(("presence_penalty", x) for x in (-2.01, 2.01, NAN, INF)),
    *(("frequency_penalty", x) for x in (-2.01, 2.01, NAN, INF)),
    *(("repetition_penalty", x) for x in (0, -1, NAN, INF, 1e39, 1e-39)),
    *(("n", x) for x in (0, -1, MAX_N + 1, 10**9, 1.5, None)),
    *(("seed", x) for x in (2**63, -(2**63) - 1, 1.0, "7")),
    *(("max_tokens", x) for x in (0, -1, 1.5, NAN)),
    *(("min_tokens", x) for x in (-1, 17, None, 0.5)),
    *(("logprobs", x) for x in (-1, 1.5, True)),
    *(("prompt_logprobs", x) for x in (-1, 1.5, True)),
    *(("stop", x) for x in ([""], ["a", ""], "", [1], [None], 5, b"x")),
    *(("stop_token_ids", x) for x in ([-1], [1.0], ["1"], 3, "12")),
    *(("allowed_token_ids", x) for x in ([], [-1], [0.5], 3)),
    *(("logit_bias", x) for x in ({-1: 1.0}, {"1": 1.0}, [1, 2], 3)),
    ("bad_words", ["no"]),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda x: repr(x)[:24])
def test_bad_values(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert "(works: " in str(caught.value)


@pytest.mark.parametrize("bias", [NAN, INF, -INF, 1e39, "2", None])
def test_bad_bias(bias: Any) -> None:
    with pytest.raises(RequestError, match="logit_bias of token 3") as caught:
        SamplingParams(logit_bias={3: bias})
    assert caught.value.field == "logit_bias of token 3"


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"n": 2, "temperature": 0.0}, "n"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"stop": "x", "detokenize": False}, "stop"),
    ],
)
def test_contradictions(params: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": -1},
        {"top_k": 10**9},
        {"temperature": 0, "top_p": 1e-300},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1e-3},
        {"temperature": 3.4e38, "repetition_penalty": 3.4e38},
        {"temperature": 1e-320, "repetition_penalty": 1.2e-38},
        {"max_tokens": 4, "min_tokens": 4},
        {"max_tokens": None, "min_tokens": 1000},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"n": MAX_N},
        {"logprobs": 0, "prompt_logprobs": 0},
        {"logit_bias": {}},
    ],
)
def test_values_at_the_edge(params: dict[str, Any]) -> None:
    made = SamplingParams(**params)
    assert {name: getattr(made, name) for name in params} == params


def test_lists_are_kept_as_tuples() -> None:
    bias = {1: 2.0}
    made = SamplingParams(
        stop="end", stop_token_ids=[1], allowed_token_ids=range(3), logit_bias=bias
    )
    bias[1] = 3.0
    assert made.stop == ("end",)
    assert made.stop_token_ids == (1,)
    assert made.allowed_token_ids == (0, 1, 2)
    assert made.logit_bias == {1: 2.0}
    assert made.edits
    assert pickle.loads(pickle.dumps(made)) == made
    assert SamplingParams(stop=None).stop == ()


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop_token_ids": [3, 10]}, "stop_token_ids"),
        ({"allowed_token_ids": [10]}, "allowed_token_ids"),
        ({"logit_bias": {10: 1.0}}, "logit_bias"),
        ({"logprobs": 11}, "logprobs"),
        ({"prompt_logprobs": 11}, "prompt_logprobs"),
        ({"max_tokens": None, "min_tokens": 100}, "min_tokens"),
    ],
)
def test_what_a_model_can_not_serve(params: dict[str, Any], field: str) -> None:
    made = SamplingParams(**params)
    with pytest.raises(RequestError) as caught:
        made.check(10, 100)
    assert caught.value.field == field
    made.check(11, 101)


@pytest.mark.parametrize(
    ("max_tokens", "prompt", "want"), [(16, 10, 26), (16, 90, 100), (None, 10, 100), (1, 99, 100)]
)
def test_length_limit(max_tokens: int | None, prompt: int, want: int) -> None:
    assert SamplingParams(max_tokens=max_tokens).length_limit(prompt, 100) == want
