"""Where the rows of a step stand: its segments, padded to a session's buckets."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ml4core.api import Segment, StepBuckets

EXACT = StepBuckets()
"""Steps have the sizes that they have."""

Ints = NDArray[np.int64]
_NONE = Segment(0, 0, 0)


class StepLayout(NamedTuple):
    """The rows of a step, given its work in row order.

    Attributes:
        segments: decodes, verify windows, prefill chunks.
        requests: the plan's request of each work.
        rows: the plan's first row of each work.
        query_start: [R + 1], first row of each of the plan's requests.
        row_request: [T], the request of each row; rows of padding that no request holds count to
            the last one.
    """

    segments: tuple[Segment, Segment, Segment]
    requests: Ints
    rows: Ints
    query_start: Ints
    row_request: Ints


def lay_out(
    rows: Ints,
    windows: int,
    verify_rows: int,
    buckets: StepBuckets,
    decodes: int | None = None,
    segments: tuple[Segment, Segment, Segment] | None = None,
) -> StepLayout:
    """The layout of work in row order that holds ``rows`` [W] of a plan: ``decodes`` (default: all
    of one row), then ``windows`` of ``verify_rows`` each, then chunks, shortest first.

    ``segments``: those to be laid out in, in place of the buckets.
    """
    count = len(rows)
    if decodes is None:
        decodes = int((rows == 1).sum())
    decode, verify, prefill = segments or _padded(rows, decodes, windows, verify_rows, buckets)
    all_requests = decode.requests + verify.requests + prefill.requests
    places = np.arange(count)
    held = rows
    if all_requests != count:
        places[decodes:] += decode.requests - decodes
        places[decodes + windows :] += verify.requests - windows
        held = np.zeros(all_requests, np.int64)
        held[: decode.requests] = 1
        held[decode.requests : decode.requests + verify.requests] = verify.max_rows
        held[places] = rows
    query_start = np.zeros(all_requests + 1, np.int64)
    np.cumsum(held, out=query_start[1:])
    total = decode.rows + verify.rows + prefill.rows
    owner = np.arange(all_requests)
    if total != all_requests or not (held == 1).all():
        owner = np.full(total, all_requests - 1, np.int64)
        owner[: query_start[-1]] = np.repeat(np.arange(all_requests), held)
    return StepLayout((decode, verify, prefill), places, query_start[places], query_start, owner)


def _padded(
    rows: Ints, decodes: int, windows: int, verify_rows: int, buckets: StepBuckets
) -> tuple[Segment, Segment, Segment]:
    decode, verify, prefill = _uniform("decode", decodes, 1, buckets), _NONE, _NONE
    if windows:
        verify = _uniform("verify", windows, verify_rows, buckets)
    chunks = len(rows) - decodes - windows
    if chunks:
        real = int(rows[decodes + windows :].sum())
        total = buckets.padded("prefill_rows", real)
        requests = buckets.padded("prefill_requests", chunks)
        prefill = Segment(requests, total, total if buckets.prefill_rows else int(rows[-1]))
    return decode, verify, prefill


def _uniform(name: str, count: int, width: int, buckets: StepBuckets) -> Segment:
    requests = buckets.padded(name, count)
    return Segment(requests, requests * width, width) if count else _NONE
