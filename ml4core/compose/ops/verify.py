"""Verification of drafted tokens by rejection sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.compose.ops.noise import ACCEPT, DRAW, RESIDUAL, row_keys, uniform
from ml4core.compose.ops.ordering import first_argmax
from ml4core.compose.ops.sampling import NEG_INF, clean, draw, sample, tempered


def verify_draft(
    logits: Tensor,
    draft_ids: Tensor,
    draft_logits: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    block: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Ids int64 [R, Q], -1 behind the emitted ones, and counts int64 [R] of emitted tokens.

    Row i of logits [R, Q, vocab] judges draft i of draft_ids [R, Q-1] and stands at position
    positions[r] + i. A token that isn't drawn after a rejection is the one that ``sample`` gives
    for its row and position. draft_logits are those before the temperature. Drafts are judged one
    by one, or with ``block`` as a block.
    """
    depth, vocab = draft_ids.shape[1], logits.shape[-1]
    if depth == 0:
        ids = sample(logits[:, 0], temperature, seeds, positions)
        return ids.unsqueeze(-1), torch.ones_like(ids)
    usable, allowed = clean(logits)
    heat = temperature.view(-1, 1, 1)
    scores = tempered(usable, heat)
    draft_scores = None if draft_logits is None else tempered(clean(draft_logits)[0], heat)

    step = torch.arange(depth + 1, device=logits.device)
    given = (draft_ids >= 0) & (draft_ids < vocab)
    drafts = torch.where(given, draft_ids, 0)
    if block:
        # What comes after a block must not share the noise by which its last drafts were dropped.
        bar = uniform(row_keys(seeds, positions, ACCEPT), depth)
        lucky, weight = _accept_block(scores, drafts, given, draft_scores, bar)
    else:
        keys = row_keys(seeds.unsqueeze(-1), positions.unsqueeze(-1) + step[:-1], ACCEPT)
        bar = uniform(keys, 1).squeeze(-1)
        lucky, weight = _accept(scores, drafts, given, draft_scores, bar)
    equal = given & (drafts == first_argmax(usable, allowed)[:, :-1])
    same = equal.to(torch.int64).cumprod(-1).sum(-1)
    kept = torch.where(temperature > 0, lucky, same)  # [R] drafts

    usable, allowed, scores = (_row(x, kept) for x in (usable, allowed, scores))
    judged = kept.clamp(max=depth - 1)  # the draft that the last row judges, if it judges one
    rejected = (kept < depth) & _row(given, judged)
    draft_row = None if draft_scores is None else _row(draft_scores, judged)
    residual = _residual(scores, _row(drafts, judged), draft_row, weight)
    # The residual is empty if the two laws are equal but for rounding.
    rejected = rejected & (residual > NEG_INF).any(-1)
    weights = torch.where(rejected.unsqueeze(-1), residual, scores)
    purpose = torch.where(rejected, RESIDUAL, DRAW)
    drawn = draw(weights, allowed, row_keys(seeds, positions + kept, purpose))
    last = torch.where(temperature > 0, drawn, first_argmax(usable, allowed))

    end = kept.unsqueeze(-1)
    ids = torch.cat((drafts, torch.zeros_like(end)), dim=-1)
    ids = torch.where(step < end, ids, torch.where(step == end, last.unsqueeze(-1), -1))
    return ids, kept + 1


def _accept(
    scores: Tensor, drafts: Tensor, given: Tensor, draft_scores: Tensor | None, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Of log weights [R, Q, vocab], drafts d [R, Q-1] that are there where ``given``, and noise u
    [R, Q-1] in (0, 1): how many are kept, int64 [R], each as long as u q(d) < p(d); and what weighs
    p in the law of the token after them, [R].
    """
    bar = torch.log(noise)
    if draft_scores is not None:
        bar = bar + _log_odds(draft_scores, drafts)
    accepted = given & (bar < _log_odds(scores[:, :-1], drafts))
    kept = accepted.to(torch.int64).cumprod(-1).sum(-1)
    return kept, torch.ones_like(kept, dtype=torch.float32)


def _accept_block(
    scores: Tensor, drafts: Tensor, given: Tensor, draft_scores: Tensor | None, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for the block rule: the longest prefix of i drafts with u_i < h_i, by which much
    that is unlikely may be kept for what comes after it.
    """
    there = given.to(torch.int64).cumprod(-1).to(torch.bool)
    gain = _log_odds(scores[:, :-1], drafts)
    if draft_scores is not None:
        gain = gain - _log_odds(draft_scores, drafts)
    ratio = torch.nan_to_num(torch.exp(gain), nan=0.0)
    whole = torch.ones_like(ratio[:, 0])
    weights = [whole]
    for i in range(ratio.shape[1]):
        weights.append((weights[-1] * ratio[:, i]).clamp(max=1.0))
    weight = torch.stack(weights, dim=1)  # [R, Q]
    left = _leftover(scores[:, :-1], drafts, draft_scores, weight[:, :-1])
    room = left + 1 - weight[:, :-1]
    chance = torch.where(room > 0, left / room, 0.0)  # of stopping after i drafts, i < Q-1
    last = torch.cat((~there, torch.ones_like(there[:, :1])), dim=1)  # no draft follows
    chance = torch.where(last, weight, torch.cat((chance, weight[:, -1:]), dim=1))
    lucky = noise < chance[:, 1:]
    places = torch.arange(1, ratio.shape[1] + 1, device=scores.device)
    kept = torch.where(lucky & there, places, 0).amax(-1)
    return kept, _row(weight, kept)


def _leftover(
    scores: Tensor, drafts: Tensor, draft_scores: Tensor | None, weight: Tensor
) -> Tensor:
    """Sum over the vocabulary of max(weight p - q, 0), [R, Q-1]."""
    if draft_scores is None:  # all of q is at the draft, and no weight is above 1
        return weight * (1 - torch.exp(_log_odds(scores, drafts)))
    odds = torch.softmax(scores, dim=-1) * weight.unsqueeze(-1)
    return (odds - torch.softmax(draft_scores, dim=-1)).clamp(min=0).sum(-1)


def _log_odds(scores: Tensor, ids: Tensor) -> Tensor:
    """Log probability [R, Q-1] of ids under log weights [R, Q-1, vocab]."""
    return torch.log_softmax(scores, dim=-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _residual(scores: Tensor, draft: Tensor, draft_scores: Tensor | None, weight: Tensor) -> Tensor:
    """Log weights of max(weight p - q, 0) [R, vocab]; q is certain of draft [R] without its
    scores.
    """
    if draft_scores is None:
        ids = torch.arange(scores.shape[-1], device=scores.device)
        return torch.where(ids == draft.unsqueeze(-1), NEG_INF, scores)
    odds = torch.softmax(scores, dim=-1) * weight.unsqueeze(-1)
    return torch.log((odds - torch.softmax(draft_scores, dim=-1)).clamp(min=0))


def _row(x: Tensor, at: Tensor) -> Tensor:
    """x[r, at[r]] of x [R, Q, ...]."""
    index = at.view(-1, 1, *(1,) * (x.dim() - 2)).expand(-1, 1, *x.shape[2:])
    return x.gather(1, index).squeeze(1)
