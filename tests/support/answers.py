"""Greedy answers of an engine's core, with how likely each token was."""

from __future__ import annotations

from typing import Any

from ml4core.engine.llm import Engine
from ml4core.engine.sampling_params import SamplingParams


class Answers:
    """What becomes of prompts, step by step.

    Attributes:
        made: of each prompt its ``tokens`` so far, and their ``logprobs``.
        steps: that were run.
    """

    def __init__(self, engine: Engine, prompts: list[list[int]], tokens: int) -> None:
        self._engine = engine
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        self.made: list[dict[str, list[Any]]] = [{"tokens": [], "logprobs": []} for _ in prompts]
        self.steps = 0
        for i, prompt in enumerate(prompts):
            engine.core.add_request(str(i), prompt, params)

    def step(self) -> None:
        """Runs what there is to do. Raises ``RuntimeError`` once the core has stopped."""
        outputs = self._engine.core.step()
        self.steps += 1
        if (fault := self._engine.core.fault) is not None:
            raise RuntimeError(f"{fault.code}: {fault.message}")
        for one in outputs:
            held = self.made[int(one.request_id)]
            held["tokens"] += [int(token) for token in one.token_ids]
            held["logprobs"] += [next(iter(each.values())).logprob for each in one.logprobs or ()]

    def all(self) -> list[dict[str, list[Any]]]:
        while self._engine.core.has_work:
            self.step()
        return self.made
