"""Sampling, and verification of drafts, as a composition of ops."""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.api import Sampling, Verified, Verifier
from ml4core.compose.attention import Children
from ml4core.compose.context import StageContext


def verify_and_sample(ctx: StageContext, children: Children) -> Verifier:
    ops = ctx.ops

    def call(
        logits: Tensor,
        sampling: Sampling,
        draft_ids: Tensor | None = None,
        draft_logits: Tensor | None = None,
        *,
        block: bool = False,
    ) -> Verified:
        requests = sampling.seeds.shape[0]
        _check(logits, requests, draft_ids, draft_logits)
        if draft_ids is None:
            ids = ops["sample"](logits, *sampling).unsqueeze(-1)
            return Verified(ids, torch.ones_like(ids[:, 0]))
        windows = logits.unflatten(0, (requests, -1))
        # A backend's op need not know of blocks, unless it declares them.
        more = (True,) if block else ()
        return Verified(*ops["verify_draft"](windows, draft_ids, draft_logits, *sampling, *more))

    return call


def _check(
    logits: Tensor, requests: int, draft_ids: Tensor | None, draft_logits: Tensor | None
) -> None:
    """Rows that do not belong together would give tokens of other requests, and no error."""
    depth = 0
    if draft_ids is not None:
        depth = draft_ids.shape[-1]
        if tuple(draft_ids.shape) != (requests, depth):
            raise ValueError(
                f"draft_ids has shape {list(draft_ids.shape)}; for {requests} requests it must be "
                f"[{requests}, depth]"
            )
    elif draft_logits is not None:
        raise ValueError("draft_logits were given without draft_ids, which they belong to")
    rows, vocab = logits.shape
    if rows != requests * (depth + 1):
        raise ValueError(
            f"{rows} rows of logits for {requests} requests with {depth} drafts each; it must be "
            f"{requests * (depth + 1)} rows"
        )
    if draft_logits is not None and tuple(draft_logits.shape) != (requests, depth, vocab):
        raise ValueError(
            f"draft_logits has shape {list(draft_logits.shape)}; it must be "
            f"{[requests, depth, vocab]}"
        )
