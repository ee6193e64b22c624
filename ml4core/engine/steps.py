"""What the engine core asks of whatever runs its steps, and how a model serves that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ml4core.api import StepOutput, StepPlan
from ml4core.engine.feeding import Feed, Made, feed_plan
from ml4core.engine.image_inputs import ImageRows
from ml4core.engine.images import ImageEncoder
from ml4core.engine.logprobs import LogprobReport
from ml4core.engine.runner import ModelRunner
from ml4core.engine.sampler import Sampler
from ml4core.engine.sampler_draws import Draws, check_drawn
from ml4core.engine.sampler_io import SampledToken, SamplerRow
from ml4core.engine.speculation import Speculation
from ml4core.engine.transfers import HostCopy, ints


class PromptRows(NamedTuple):
    """Consecutive logit rows from ``first`` on that predict tokens of a prompt: ``next_ids``."""

    first: int
    next_ids: list[int]
    top: int  # likeliest tokens to report beside each


@dataclass(frozen=True)
class StepInput:
    """A step to run.

    Attributes:
        drawn: the logit row from which each draw is made, or the first one of its window.
        rows: how, for each of them. They hold live lists: output that becomes known before the
            step's result is asked for is seen.
        feed: None if all tokens of the plan are known.
        before: the step that the feed is of.
        windows: the draws that are verify windows, each of ``width`` logit rows.
        requests: the plan's request of each draw.
        first_rows: the plan's row of each draw's first logit row.
        slots: of each draw, a number that its request keeps from step to step.
        most: of each draw, tokens that it may emit.
        images: rows of the plan that take embeddings of images.
        others_draw: whether a request of another replica draws: then a drafter goes along, whether
            or not one of this step does.
    """

    plan: StepPlan
    drawn: list[int]
    rows: list[SamplerRow]
    feed: Feed | None = None
    before: StepHandle | None = None
    prompts: list[PromptRows] = field(default_factory=list)
    windows: range = range(0)
    width: int = 1
    requests: list[int] = field(default_factory=list)
    first_rows: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    most: list[int] = field(default_factory=list)
    images: list[ImageRows] = field(default_factory=list)
    others_draw: bool = False


class StepResult(NamedTuple):
    """Of each draw its tokens and the drafts of those to come (none without a drafter); and the
    report of each of the input's ``prompts``.
    """

    tokens: list[list[SampledToken]]
    prompts: list[list[Any]]
    drafts: Sequence[Sequence[int]] = ()


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
        those. All results but that of the step before are known to the core by now.
        """
        ...


class ModelSteps:
    """Steps of a model. What a step draws stays on the device, where the next one takes its tokens
    from; the host is told later.

    Draws of a step are queued as late as can be, when its result is asked for or the next step
    comes: then all tokens before them are known, which penalties need.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        speculation: Speculation | None = None,
        images: ImageEncoder | None = None,
    ) -> None:
        self._images = images
        self._runner = runner
        self._sampler = sampler
        self._speculation = speculation
        self._last: _ModelStep | None = None

    @torch.inference_mode()
    def launch(self, step: StepInput) -> StepHandle:
        if self._last is not None:
            self._last.settle()  # the next forward may overwrite its output
        if step.feed is not None:
            assert isinstance(step.before, _ModelStep)
            made = step.before.settle()
            feed_plan(step.plan, step.feed, made, self._runner.block_size, self._runner.vocab_size)
            step = replace(step, before=None)  # else each step keeps all before it alive
        if step.images or step.plan.shape.images:
            assert self._images is not None, "without an encoder no image is taken"
            step = replace(step, plan=self._images.place(step.plan, step.images), images=[])
        output = self._runner.launch(step.plan)
        self._last = _ModelStep(self._runner, self._sampler, self._speculation, step, output)
        return self._last


class _ModelStep:
    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        speculation: Speculation | None,
        step: StepInput,
        output: StepOutput,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._speculation = speculation
        self._step = step
        self._output: StepOutput | None = output
        self._made: Made | None = None
        self._draws: list[Draws] = []
        self._reports: list[LogprobReport] = []
        self._copy: HostCopy | None = None
        self._result: StepResult | None = None

    @torch.inference_mode()
    def settle(self) -> Made:
        """Queues all that reads the forward's output, and the way of its results to the host.
        Broken off, as by Ctrl-C, it can be asked again.
        """
        if self._made is None:
            step, output = self._step, self._output
            assert output is not None
            self._reports = [
                self._sampler.report(
                    output.logits[p.first : p.first + len(p.next_ids)], p.next_ids, p.top
                )
                for p in step.prompts
            ]
            # What drafts is a step of its own, which may take over the memory of this output.
            fault = output.fault if self._speculation is None else output.fault.clone()
            made = self._draw(step, output)
            sent = [fault, *chain.from_iterable(one.tensors for one in self._sources())]
            if made.drafts is not None:
                sent.append(made.drafts)
            self._copy = HostCopy(sent)
            self._made, self._output = made, None  # logits are large
        return self._made

    def _sources(self) -> Sequence[Draws | LogprobReport]:
        return [*self._reports, *self._draws]

    def _draw(self, step: StepInput, output: StepOutput) -> Made:
        device = output.logits.device
        if self._speculation is not None:
            made, self._draws = self._speculation.run(step, output, self._sampler)
            return made
        if not step.drawn:
            return Made(torch.empty(0, 1, dtype=torch.int64, device=device))
        whole = len(step.drawn) == len(output.logits)
        logits = output.logits if whole else output.logits[ints(step.drawn, device)]
        self._draws = [self._sampler.draw(logits, step.rows)]
        return Made(self._draws[0].ids)

    def result(self) -> StepResult:
        if self._result is None:
            self.settle()
            assert self._copy is not None
            self._result = self._told(self._copy.wait())
        return self._result

    def _told(self, tensors: list[Tensor]) -> StepResult:
        self._runner.check(tensors[0])
        at, told = 1, []
        for source in self._sources():
            told.append(tensors[at : at + len(source.tensors)])
            at += len(source.tensors)
        found = iter(told)
        prompts = [list(report.entries(next(found))) for report in self._reports]
        pieces = [draws.tokens(next(found)) for draws in self._draws]
        if len(pieces) == 2:  # singles, and the windows that stand among them
            first = self._step.windows.start
            pieces = [pieces[0][:first], pieces[1], pieces[0][first:]]
        drafts: Sequence[Sequence[int]] = ()
        if at < len(tensors):
            drafter = f"{self._sampler.origin}stage 'draft_block'"
            check_drawn(drafter, tensors[at], self._runner.vocab_size)
            drafts = tensors[at].tolist()
        return StepResult(list(chain.from_iterable(pieces)), prompts, drafts)
