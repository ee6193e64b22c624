"""From scheduled work to the input of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ml4core.engine.batch import BatchState
from ml4core.engine.feeding import Feed
from ml4core.engine.image_inputs import ImageRows, rows_of
from ml4core.engine.sampler_io import SamplerRow
from ml4core.engine.scheduler import Work
from ml4core.engine.steps import PromptRows, StepHandle, StepInput

Places = Mapping[int, tuple[int, int]]
"""By ``Request.order``: which draw of a step is its, and the most tokens that it emits."""


class Assembled(NamedTuple):
    """A step, whose draws are whose, and the work of each report on a prompt."""

    step: StepInput
    draws: Places
    prompts: list[Work]
    prompt_tokens: int


def assemble(
    batch: BatchState, work: Sequence[Work], before: tuple[StepHandle, Places] | None
) -> Assembled:
    """The step of work that is in row order.

    ``before`` is the step in flight with its draws: the tokens that are not known yet are its.
    """
    reports: list[tuple[int, PromptRows]] = []
    prompt_tokens = 0
    for place, item in enumerate(work):
        request, start, end = item.request, item.start, item.end
        if start < (prompt := len(request.prompt_ids)) or (end - start > 1 and not item.window):
            prompt_tokens += max(0, min(end, prompt) - start)
            report = _report(item)
            if report is not None:
                reports.append((place, report))
    built = batch.build(work, every_row=[place for place, _ in reports])
    firsts, plan_rows = built.logits.tolist(), built.layout.rows.tolist()
    requests_of = built.layout.requests.tolist()

    drawn: list[int] = []
    rows: list[SamplerRow] = []
    requests: list[int] = []
    first_rows: list[int] = []
    draws: dict[int, tuple[int, int]] = {}
    feed = Feed([], [], [], [], [], [])
    images: list[ImageRows] = []
    whole = {place for place, _ in reports}
    first_window = windows = 0
    width = 1
    for place, item in enumerate(work):
        request, start, end, draw, _, window = item
        if start >= request.num_tokens:
            assert before is not None, "a token is unknown only while its step is in flight"
            _feed(feed, item, plan_rows[place], requests_of[place], before[1][request.order])
        if request.images:
            images += rows_of(request.images, start, end, plan_rows[place])
        if not draw:
            continue
        last = end - start - 1
        if window:
            first_window = first_window if windows else len(drawn)
            windows += 1
            width = window
            last = 0
        draws[request.order] = len(drawn), end - start if window else 1
        drawn.append(firsts[place] + (last if place in whole else 0))
        requests.append(requests_of[place])
        first_rows.append(plan_rows[place] + last)
        rows.append(
            SamplerRow(
                request.params,
                request.prompt_ids,
                request.output_ids,
                request.seed,
                start + last,  # of the row, so that a verified draft draws alike
                request.stop_ids,
                request.drafts,
                request.grammar,
            )
        )
    step = StepInput(
        built.plan,
        drawn,
        rows,
        feed if feed.rows else None,
        before[0] if before is not None and feed.rows else None,
        [one._replace(first=firsts[place] + one.first) for place, one in reports],
        range(first_window, first_window + windows),
        width,
        requests,
        first_rows,
        [item.request.slot for item in work if item.draws],
        [most for _, most in draws.values()],
        images,
    )
    return Assembled(step, draws, [work[place] for place, _ in reports], prompt_tokens)


def _feed(feed: Feed, item: Work, row: int, request: int, source: tuple[int, int]) -> None:
    """Notes what this work takes from the step in flight."""
    draw, most = source
    for i in range(item.end - item.start):
        feed.rows.append(row + i)
        feed.draws.append(draw)
        feed.nth.append(i)
    if most > 1:
        feed.requests.append(request)
        feed.after.append(draw)
        feed.expected.append(most)


def _report(item: Work) -> PromptRows | None:
    """The work's rows, from its first, that predict tokens of the prompt which have not been
    reported on.
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
    return PromptRows(first - item.start, next_ids, top)
