"""Steps of padding alone: what an engine runs before it has a request, to see what steps take and
to have them compiled and captured. They write to no cache and see nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ml4core.api import Segment, StepBuckets, StepPlan, StepShape
from ml4core.engine.sampler_io import SamplerRow
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.steps import StepInput
from ml4core.engine.transfers import upload

_NONE = Segment(0, 0, 0)
_PROMPT = (0,)


@dataclass(frozen=True)
class StepSizes:
    """What steps of an engine may be like at most, and what they are padded to.

    Attributes:
        groups: KV groups, in the order of plans.
        sequences: that run together.
        rows: of a step.
        longest: tokens of a sequence, and those that a drafter's block is ahead.
        window: rows of a verify window; 1 without a drafter.
        replicas: whether one replica's chunks may stand beside what runs in another.
    """

    groups: tuple[str, ...]
    sequences: int
    rows: int
    longest: int
    window: int
    block_size: int
    buckets: StepBuckets
    replicas: bool = False

    def pages(self, tokens: int) -> int:
        """Pages that the table of a request of this many tokens has, padded."""
        return self.buckets.padded("pages", -(-tokens // self.block_size))

    def uniform(self, requests: int, pages: int) -> StepShape:
        """A step of ``requests`` requests, padded, each with one row, or one verify window."""
        segments = self._running(requests)
        logits = self.buckets.padded("logits", segments[0].rows + segments[1].rows)
        return StepShape(*segments, _NONE, self._tables(pages), logits)

    def with_chunk(self, requests: int, rows: int, pages: int) -> StepShape:
        """The same beside a chunk of a prompt, with ``rows`` rows together before any padding; of
        several replicas, the chunk has as many.
        """
        running = self._running(requests)
        chunk = max(1, rows if self.replicas else rows - requests * self.window)
        padded = self.buckets.padded("prefill_rows", chunk)
        prefill = Segment(self.buckets.padded("prefill_requests", 1), padded, padded)
        logits = self.buckets.padded("logits", running[0].rows + running[1].rows + 1)
        return StepShape(*running, prefill, self._tables(pages), logits)

    def _running(self, requests: int) -> tuple[Segment, Segment]:
        if not requests:
            return _NONE, _NONE
        if self.window == 1:
            padded = self.buckets.padded("decode", requests)
            return Segment(padded, padded, 1), _NONE
        padded = self.buckets.padded("verify", requests)
        return _NONE, Segment(padded, padded * self.window, self.window)

    def _tables(self, pages: int) -> tuple[tuple[str, int], ...]:
        return tuple((group, pages) for group in self.groups)


def padding_step(
    shape: StepShape, device: torch.device | str, params: SamplingParams, draws: int | None = None
) -> StepInput:
    """A step of this shape in which each request of the first two segments draws, and the first
    chunk. Beyond ``draws``, if given, none does.
    """
    decode, verify, prefill = shape.decode, shape.verify, shape.prefill
    held = np.zeros(shape.requests, np.int64)
    held[: decode.requests] = 1
    held[decode.requests : decode.requests + verify.requests] = verify.max_rows
    if prefill.requests:
        held[decode.requests + verify.requests] = prefill.rows
    starts = np.zeros(shape.requests + 1, np.int64)
    np.cumsum(held, out=starts[1:])
    plan = _plan(shape, held, starts, torch.device(device))
    width = max(1, verify.max_rows)
    count = decode.requests + verify.requests + (prefill.requests > 0)
    if draws is not None:
        count = min(count, draws)
    requests = list(range(count))
    windows = range(min(decode.requests, count), min(decode.requests + verify.requests, count))
    drawn = [_logit_row(shape, request) for request in requests]
    first_rows = [int(starts[request]) for request in requests]
    if count > decode.requests + verify.requests:
        first_rows[-1] = int(starts[count]) - 1
    row = SamplerRow(params, _PROMPT, (), 0, 0)
    return StepInput(
        plan,
        drawn,
        [row] * count,
        windows=windows,
        width=width if windows else 1,
        requests=requests,
        first_rows=first_rows,
        slots=requests,
        most=[width if request in windows else 1 for request in requests],
    )


def _logit_row(shape: StepShape, request: int) -> int:
    """The first logit row of a request."""
    if request <= shape.decode.requests:
        return request
    windows = min(request - shape.decode.requests, shape.verify.requests)
    return shape.decode.requests + windows * shape.verify.max_rows


def _plan(
    shape: StepShape, held: NDArray[np.int64], starts: NDArray[np.int64], device: torch.device
) -> StepPlan:
    rows, requests = shape.rows, shape.requests
    # A step of several replicas may have fewer logits than its segments: none has all of them.
    running = shape.decode.rows + shape.verify.rows
    wanted: Sequence[int] = [*range(running), *([rows - 1] if shape.prefill.rows else [])]
    logits = np.zeros(shape.logits, np.int64)
    logits[: len(wanted)] = wanted[: shape.logits]
    names = [group for group, _ in shape.pages]
    arrays: list[NDArray[np.generic]] = [
        np.zeros(rows, np.int64),
        np.zeros(rows, np.int64),
        np.repeat(np.arange(requests), held),
        np.zeros(rows, np.int32),
        logits,
        starts.astype(np.int32),
        *(np.zeros((requests, pages), np.int32) for _, pages in shape.pages),
        *(np.full(rows, -1, np.int64) for _ in shape.pages),
    ]
    ids, positions, owner, visible, indices, query_start, *grouped = upload(arrays, device)
    return StepPlan(
        shape=shape,
        token_ids=ids,
        positions=positions,
        row_request=owner,
        query_start=query_start,
        visible=visible,
        block_tables=dict(zip(names, grouped[: len(names)], strict=True)),
        slots=dict(zip(names, grouped[len(names) :], strict=True)),
        logits_indices=indices,
    )
