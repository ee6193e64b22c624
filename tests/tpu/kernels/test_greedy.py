"""The shipped model on kernels, from prompt to tokens, beside the cpu backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import Engine, open_engine
from ml4core.engine.sampling_params import SamplingParams
from ml4core.registry import Choice, select
from ml4core_tpu.layouts import LANE33, TILES

PROMPT = list(range(300, 340))
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


def start(choice: Choice, **flags: Any) -> Engine:
    # One token bucket: the prompt comes in two chunks.
    flags = {"dtype": "float32", "max_num_batched_tokens": 32, **flags}
    args = EngineArgs("ml4-tiny", backend=choice.backend.name, **flags)
    return open_engine(args, choice=choice, sequences=1, tokens_each=64)


def interpreted(**flags: Any) -> Engine:
    choice = select("tpu", device_kind="interpreted")
    return start(choice, additional_config={"device": "interpreted"}, **flags)


def answer(engine: Engine) -> list[int]:
    try:
        return list(engine.generate([PROMPT], GREEDY)[0].token_ids)
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_greedy_tokens_are_those_of_the_cpu() -> None:
    """Plain caches: every number within fp32 rounding."""
    plain = {"kv_cache_dtype": "float32"}
    assert answer(interpreted(**plain)) == answer(start(select("cpu"), **plain))


@pytest.mark.timeout(900)
def test_greedy_tokens_of_fp8_tiles() -> None:
    """The cpu backend keeps the same codes in rows of ``e4m3``. What is allocated is FP8 by its
    bytes.
    """
    engine = interpreted()
    assert (engine.deployment.kv_layout, engine.deployment.index_layout) == (TILES, LANE33)
    assert engine.runner.kv is not None
    for held, bytes_each in ((engine.runner.kv.latent, 640), (engine.runner.kv.index_keys, 132)):
        for cache in held.values():
            assert {part.dtype for part in cache.parts} == {torch.uint8}
            assert cache.nbytes == cache.blocks * cache.block_size * bytes_each
    cpu = select("cpu")
    found = cpu.devices[0]
    defaults = {**found.capabilities.defaults, "fp8": "e4m3"}
    rows = replace(found, capabilities=replace(found.capabilities, defaults=defaults))
    other = start(replace(cpu, devices=(rows,)), kv_cache_dtype="fp8_e4m3")
    assert other.deployment.kv_layout == "e4m3"
    assert answer(engine) == answer(other)
