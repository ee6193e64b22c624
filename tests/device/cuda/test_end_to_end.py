"""The trained small model through the whole engine on a GPU: its greedy tokens are the cpu's.

Every token that the GPU makes is judged by the cpu under the same context, so that one which comes
out differently ends nothing: it has to be within ``MARGIN`` of the cpu's likeliest, and few may
differ at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import Engine, open_engine
from ml4core.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.accelerator

MARGIN = 0.25
"""Nats of log probability: what bf16 and FP8 rows may turn round in a model of 12 layers."""
FEW = 0.08
"""Part of the tokens that may differ from the cpu's likeliest."""
TOKENS = 48
DRAFTS = {"method": "dspark", "num_speculative_tokens": 3}


def prompts(count: int) -> list[list[int]]:
    """Of 3 to 700 tokens: some shorter than a page, some beyond the index's top-k of 256."""
    draw = torch.Generator().manual_seed(count)
    lengths = [40, 3, 300, 64, 65, 700, 129, 17][:count]
    return [torch.randint(64, 8192, (n,), generator=draw).tolist() for n in lengths]


def opened(backend: str, **more: Any) -> Engine:
    args = EngineArgs("ml4-tiny", backend=backend, max_model_len=1024, **more)
    return open_engine(args, sequences=8, tokens_each=1024)


@pytest.fixture(scope="module")
def reference() -> Iterator[Engine]:
    """In the same formats: what differs then is the order of sums."""
    args: dict[str, Any] = {"kv_cache_dtype": "fp8_ds_mla", "dtype": "bfloat16"}
    engine = opened("cpu", **args)
    yield engine
    engine.close()


def judged(engine: Engine, prompt: list[int], made: list[int]) -> list[float]:
    """How far each token made is behind the likeliest, in nats."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    core, found = engine.core, None
    core.add_request("judged", prompt + made, params)
    while core.has_work:
        for output in core.step():
            found = output.prompt_logprobs or found
        if core.cause is not None:
            raise core.cause
    assert found is not None
    gaps = []
    for token, entries in zip(made, found[len(prompt) :], strict=True):
        gaps.append(max(one.logprob for one in entries.values()) - entries[token].logprob)
    return gaps


def greedy(engine: Engine, asked: list[list[int]], each: int) -> list[list[int]]:
    """``each`` prompts at a time."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    found = []
    for first in range(0, len(asked), each):
        found += engine.generate(asked[first : first + each], params)
    return [one.token_ids for one in found]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("each", [1, 8], ids=["alone", "mixed"])
def test_greedy_tokens_are_the_cpus(
    reference: Engine, eager: bool, drafts: bool, each: int
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    more: dict[str, Any] = {"speculative_config": DRAFTS} if drafts else {}
    engine = opened("cuda", enforce_eager=eager, max_num_seqs=8, **more)
    asked = prompts(8 if each > 1 else 4)
    try:
        made = greedy(engine, asked, each)
        captures = getattr(engine.runner.session.executor, "captures", [])
    finally:
        engine.close()
    assert bool(captures) != eager
    gaps = [gap for p, m in zip(asked, made, strict=True) for gap in judged(reference, p, m)]
    assert len(gaps) == TOKENS * len(asked)
    assert max(gaps) <= MARGIN
    assert sum(gap > 0 for gap in gaps) <= FEW * len(gaps)


def test_graphs_change_no_token() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    found = []
    for eager in (True, False):
        engine = opened("cuda", enforce_eager=eager, max_num_seqs=8)
        try:
            found.append(greedy(engine, prompts(8), 8))
        finally:
            engine.close()
    assert found[0] == found[1]


def test_latency_specialised_steps_are_the_cpus(reference: Engine) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    engine = opened("cuda", additional_config={"decode_backend": "latency_specialized"})
    asked = prompts(4)
    try:
        made = greedy(engine, asked, 4)
        parts = engine.report()["parts"]
    finally:
        engine.close()
    assert any(one["provider"].endswith("latency_specialized") for one in parts)
    gaps = [gap for p, m in zip(asked, made, strict=True) for gap in judged(reference, p, m)]
    assert max(gaps) <= MARGIN
