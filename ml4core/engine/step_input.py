"""From scheduled work to the input of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ml4core.engine.batch import BatchState
from ml4core.engine.sampler_io import SamplerRow
from ml4core.engine.scheduler import Work
from ml4core.engine.steps import Feed, PromptRows, StepHandle, StepInput


class Assembled(NamedTuple):
    """A step, which draw is whose by ``Request.order``, and the work of each report on a prompt."""

    step: StepInput
    draws: Mapping[int, int]
    prompts: list[Work]
    prompt_tokens: int


def assemble(
    batch: BatchState,
    work: Sequence[Work],
    before: tuple[StepHandle, Mapping[int, int]] | None,
) -> Assembled:
    """The step of work that is in row order.

    ``before`` is the step in flight with its draws: the tokens that are not known yet are its.
    """
    drawn: list[int] = []
    rows: list[SamplerRow] = []
    draws: dict[int, int] = {}
    fed_rows: list[int] = []
    fed_draws: list[int] = []
    reports: list[PromptRows] = []
    prompts: list[Work] = []
    every: list[int] = []
    prompt_tokens = row = logit = 0
    for place, item in enumerate(work):
        request, start, end, draw, _ = item
        if end - start > 1 or start < len(request.prompt_ids):
            prompt_tokens += max(0, min(end, len(request.prompt_ids)) - start)
            report = _report(item, logit)
            if report is not None:
                reports.append(report)
                prompts.append(item)
                every.append(place)
                logit += end - start - 1
        if start >= request.num_tokens:
            assert before is not None, "a token is unknown only while its step is in flight"
            fed_rows.append(row)
            fed_draws.append(before[1][request.order])
        if draw:
            draws[request.order] = len(drawn)
            drawn.append(logit)
            rows.append(
                SamplerRow(
                    request.params,
                    request.prompt_ids,
                    request.output_ids,
                    request.seed,
                    end - 1,  # of the row, so that a verified draft draws alike
                    request.stop_ids,
                )
            )
        row += end - start
        logit += 1
    feed = Feed(before[0], fed_rows, fed_draws) if before and fed_rows else None
    plan = batch.build(work, every_row=every)
    return Assembled(StepInput(plan, drawn, rows, feed, reports), draws, prompts, prompt_tokens)


def _report(item: Work, logit: int) -> PromptRows | None:
    """The rows that predict tokens of the prompt which have not been reported on: ``logit`` is
    that of the work's first row.
    """
    request = item.request
    top = request.params.prompt_logprobs
    if top is None or request.index:
        return None
    first = max(item.start, len(request.prompt_logprobs))
    last = min(item.end, len(request.prompt_ids) - 1)
    if first >= last:
        return None
    next_ids = request.prompt_ids[first + 1 : last + 1]
    return PromptRows(logit + first - item.start, next_ids, top)
