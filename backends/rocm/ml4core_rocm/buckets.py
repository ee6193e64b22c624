"""The step sizes that graphs are captured for."""

from __future__ import annotations

from ml4core.api import Deployment, StepBuckets, StepShape

MAX_ROWS = 512
"""Rows of the largest step that is captured: beyond, a launch costs less than what it starts."""


def step_buckets(deployment: Deployment) -> StepBuckets:
    """Requests 1, 2, 4, then by 8, by 16 from 256; pages by powers of two. Chunks of prompts keep
    their sizes, as steps with one run eagerly.
    """
    requests = sizes(deployment.max_num_seqs)
    pages = -(-max(1, deployment.max_model_len) // deployment.block_size)
    return StepBuckets(
        decode=requests,
        verify=requests,
        pages=_powers(pages),
        logits=sizes(max(deployment.max_num_seqs, MAX_ROWS)),
    )


def sizes(largest: int) -> tuple[int, ...]:
    """Ascending sizes up to ``largest``, which is one of them."""
    steps = (1, 2, 4, *range(8, 257, 8), *range(272, largest + 1, 16))
    return (*(size for size in steps if size < largest), largest)


def captured(shape: StepShape, buckets: StepBuckets) -> bool:
    """Whether a shape is one of those that graphs are captured for: no chunk of a prompt in it, and
    each size a bucket. Others are too many to keep.
    """
    if shape.prefill.rows or not shape.rows or shape.rows > MAX_ROWS:
        return False
    wanted = (("decode", shape.decode.requests), ("verify", shape.verify.requests))
    return all(not size or size in getattr(buckets, name) for name, size in wanted) and all(
        pages in buckets.pages for _, pages in shape.pages
    )


def _powers(largest: int) -> tuple[int, ...]:
    found = [1]
    while found[-1] < largest:
        found.append(found[-1] * 2)
    return tuple(found)
