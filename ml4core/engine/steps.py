"""What the engine core asks of whatever runs its steps, and how a model serves that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from ml4core.api import StepOutput, StepPlan
from ml4core.engine.runner import ModelRunner
from ml4core.engine.sampler import Sampler
from ml4core.engine.sampler_io import SampledToken, SamplerRow


class PromptRows(NamedTuple):
    """Consecutive logit rows from ``first`` on that predict tokens of a prompt: ``next_ids``."""

    first: int
    next_ids: list[int]
    top: int  # likeliest tokens to report beside each


class Feed(NamedTuple):
    """Rows of a plan whose tokens the step before it draws: the token of row ``rows[i]`` is draw
    ``draws[i]`` of ``before``.
    """

    before: StepHandle
    rows: list[int]
    draws: list[int]


@dataclass(frozen=True)
class StepInput:
    """A step to run.

    Attributes:
        drawn: logit rows from which a token is drawn, ascending, and
        rows: how, for each of them. They hold live lists: output that becomes known before the
            step's result is asked for is seen.
        feed: None if all tokens of the plan are known.
    """

    plan: StepPlan
    drawn: list[int]
    rows: list[SamplerRow]
    feed: Feed | None = None
    prompts: list[PromptRows] = field(default_factory=list)


class StepResult(NamedTuple):
    """A token for each drawn row, and the report of each of the input's ``prompts``."""

    tokens: list[SampledToken]
    prompts: list[list[Any]]


class StepHandle(Protocol):
    """A step that may still be running."""

    def result(self) -> StepResult:
        """Waits for it. Raises ``FaultError``; then nothing of the step leaves. Asked again, it
        answers the same.
        """
        ...


class StepRunner(Protocol):
    def launch(self, step: StepInput) -> StepHandle:
        """Starts a step after all that were started before. May raise ``FaultError`` for one of
        those.
        """
        ...


class ModelSteps:
    """Steps of a model. Forwards are queued on the device; draws wait until they are asked for."""

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler

    def launch(self, step: StepInput) -> StepHandle:
        if step.feed is not None:
            tokens = step.feed.before.result().tokens
            ids = [tokens[draw].token_id for draw in step.feed.draws]
            step.plan.token_ids[step.feed.rows] = torch.tensor(ids).to(step.plan.token_ids.device)
        return _ModelStep(self._runner, self._sampler, step, self._runner.launch(step.plan))


class _ModelStep:
    def __init__(
        self, runner: ModelRunner, sampler: Sampler, step: StepInput, output: StepOutput
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._step = step
        self._output: StepOutput | None = output
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        if self._result is None:
            assert self._output is not None
            self._runner.check(self._output)
            self._result = self._draw(self._output.logits, self._step)
            self._output = None  # logits are large
        return self._result

    @torch.inference_mode()
    def _draw(self, logits: torch.Tensor, step: StepInput) -> StepResult:
        prompts = [
            list(
                self._sampler.prompt_logprobs(
                    logits[p.first : p.first + len(p.next_ids)], p.next_ids, p.top
                )
            )
            for p in step.prompts
        ]
        tokens: Sequence[SampledToken] = ()
        if step.drawn:
            whole = len(step.drawn) == len(logits)
            tokens = self._sampler(logits if whole else logits[step.drawn], step.rows)
        return StepResult(list(tokens), prompts)
