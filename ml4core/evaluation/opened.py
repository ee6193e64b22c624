"""Opening the model that is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ml4core.api import ModelSpec
from ml4core.engine.args import EngineArgs
from ml4core.engine.sampling_params import SamplingParams
from ml4core.serving.llm import LLM
from ml4core.serving.outputs import RequestOutput

Tell = Callable[[str, int, int], object]
"""Told (what is measured, cases done, cases in all)."""

SEQUENCES = 8
"""That run together, where no flag says how many."""


def context_of(args: EngineArgs, spec: ModelSpec) -> int:
    """The longest context that may be asked for."""
    return min(args.max_model_len or spec.max_position, spec.max_position)


@contextmanager
def opened(args: EngineArgs, length: int, **flags: Any) -> Iterator[LLM]:
    """The model, for contexts up to ``length`` tokens; ``flags`` take the place of those given."""
    sequences = args.max_num_seqs or max(1, min(SEQUENCES, SEQUENCES * 1024 // length))
    flags = {"max_model_len": length, "max_num_seqs": sequences, **flags}
    with LLM.from_engine_args(replace(args, **flags)) as llm:
        yield llm


def answers(
    llm: LLM, prompts: Sequence[Sequence[int]], tokens: int, told: Callable[[int], object]
) -> list[RequestOutput]:
    """The likeliest continuation of each prompt, up to ``tokens`` tokens."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    return batches(llm, prompts, params, told)


def batches(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    told: Callable[[int], object],
) -> list[RequestOutput]:
    """As many at once as run together, so that ``told`` hears on the way how many are done."""
    outputs: list[RequestOutput] = []
    size = llm.args.max_num_seqs or SEQUENCES
    for start in range(0, len(prompts), size):
        some = [{"prompt_token_ids": list(ids)} for ids in prompts[start : start + size]]
        outputs += llm.generate(some, params, use_tqdm=False)
        told(len(outputs))
    return outputs
