"""The step sizes that graphs are captured for."""

from __future__ import annotations

from ml4core.api import DRAFT_GROUP, Deployment, StepBuckets, StepShape

MAX_ROWS = 512
"""Rows of the largest step that is captured, unless the flags want larger ones: beyond, a launch
costs less than what it starts.
"""

PAGES_APART = 4
"""Page tables of steps are padded to the largest divided by powers of this: each width is a graph
of its own for each size, and kernels leave early what a row doesn't see.
"""
FEWEST_PAGES = 16


def step_buckets(deployment: Deployment) -> StepBuckets:
    """Rows 1, 2, 4, then by 8, by 16 from 256; or those that the flags say. Chunks of prompts keep
    their sizes, as steps with one run eagerly.
    """
    most, window = deployment.max_num_seqs, verify_rows(deployment)
    decode = verify = sizes(most)
    if asked := deployment.cudagraph_capture_sizes:
        decode = tuple(size for size in asked if size <= most) or (most,)
        windows = {-(-size // window) for size in asked}
        verify = tuple(sorted(size for size in windows if size <= most)) or (most,)
    elif most * window > MAX_ROWS > window:
        fits = MAX_ROWS // window
        verify = (*(size for size in sizes(most) if size < fits), fits)
    logits = {*decode, *(size * window for size in verify), *sizes(max(most, MAX_ROWS))}
    draft = deployment.model.draft
    longest = max(1, deployment.max_model_len) + (draft.depth if draft is not None else 0)
    return StepBuckets(
        decode=decode,
        verify=verify,
        pages=widths(-(-longest // deployment.block_size)),
        logits=tuple(sorted(logits)),
    )


def most_rows(deployment: Deployment) -> int:
    """Rows of the largest step that is captured."""
    return max((MAX_ROWS, *deployment.cudagraph_capture_sizes))


def verify_rows(deployment: Deployment) -> int:
    """Rows of a verify window; 1 without a drafter."""
    draft = deployment.model.draft
    if draft is None:
        return 1
    asked = deployment.speculative_config.get("num_speculative_tokens")
    return 1 + (asked if isinstance(asked, int) else draft.depth)


def sizes(largest: int) -> tuple[int, ...]:
    """Ascending sizes up to ``largest``, which is one of them."""
    steps = (1, 2, 4, *range(8, 257, 8), *range(272, largest + 1, 16))
    return (*(size for size in steps if size < largest), largest)


def widths(largest: int) -> tuple[int, ...]:
    """Ascending pages up to ``largest``, which is one of them."""
    found = [largest]
    while found[0] > PAGES_APART * FEWEST_PAGES:
        found.insert(0, -(-found[0] // PAGES_APART))
    return tuple(found)


def captured(shape: StepShape, buckets: StepBuckets, most: int = MAX_ROWS) -> bool:
    """Whether a shape is one of those that graphs are captured for: all its requests of one kind,
    no chunk of a prompt, each size a bucket, and ``most`` rows at most; or the drafter's block
    behind such a step. Others are too many to keep.
    """
    if any(pages not in buckets.pages for _, pages in shape.pages):
        return False
    if [group for group, _ in shape.pages] == [DRAFT_GROUP]:
        return _captured_block(shape, buckets, most)
    decode, verify = shape.decode, shape.verify
    if shape.prefill.rows or bool(decode.rows) == bool(verify.rows) or shape.rows > most:
        return False
    if decode.rows:
        return decode.requests in buckets.decode
    return verify.requests in buckets.verify


def _captured_block(shape: StepShape, buckets: StepBuckets, most: int) -> bool:
    blocks, context = shape.verify, shape.prefill.rows
    if not blocks.rows or context > most:
        return False
    if context == blocks.requests:
        return blocks.requests in buckets.decode
    return (
        blocks.requests in buckets.verify
        and context % blocks.requests == 0
        and context // blocks.requests <= blocks.max_rows + 1
    )
