"""From scheduled work to the input of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from ml4core.api import StepShape
from ml4core.engine.batch import BatchState
from ml4core.engine.feeding import Feed
from ml4core.engine.image_inputs import ImageRows, padded_rows, rows_of
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


class Agreed(Protocol):
    """What is known of a step before it is built, besides its work.

    Attributes:
        shape: what it has, at least.
        draws: whether a request of any replica draws.
    """

    @property
    def shape(self) -> StepShape: ...

    @property
    def draws(self) -> bool: ...


Agree = Callable[[StepShape, bool], Agreed]
"""Given the shape that a step would have, and whether one of its requests draws."""


def assemble(
    batch: BatchState,
    work: Sequence[Work],
    before: tuple[StepHandle, Places] | None,
    agree: Agree | None = None,
) -> Assembled:
    """The step of work that is in row order.

    Args:
        before: the step in flight with its draws: the tokens that are not known yet are its.
        agree: says what others need of the step.
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
    settling = None if agree is None else _Settling(agree, work)
    built = batch.build(work, every_row=[place for place, _ in reports], settle=settling)
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
        settling is not None and settling.others_draw,
    )
    return Assembled(step, draws, [work[place] for place, _ in reports], prompt_tokens)


class _Settling:
    """Gives the step's shape the size on which all agree."""

    def __init__(self, agree: Agree, work: Sequence[Work]) -> None:
        self.others_draw = False
        self._agree = agree
        self._draws = any(item.draws for item in work)
        self._images = padded_rows(sum(_image_rows(item) for item in work))

    def __call__(self, shape: StepShape) -> StepShape:
        agreed = self._agree(replace(shape, images=self._images), self._draws)
        self.others_draw = agreed.draws
        return agreed.shape


def _image_rows(item: Work) -> int:
    """Rows that take embeddings of images."""
    if not item.request.images:
        return 0
    return sum(len(one.rows) for one in rows_of(item.request.images, item.start, item.end, 0))


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
