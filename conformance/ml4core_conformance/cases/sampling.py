"""Inputs of ``sample`` and ``verify_draft``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ml4core_conformance.case import Arguments, OpCase
from ml4core_conformance.draw import FEW, Draw
from ml4core_conformance.op_inputs import ACTIVATIONS, needs

_DRAWS = 8192
_REQUESTS = 6000

Make = Callable[[Draw], Arguments]


def cases() -> list[OpCase]:
    return [
        case
        for act, dtype in ACTIVATIONS.items()
        for case in (
            *_sample(act, dtype),
            *_verify(act, dtype),
            *(as_block(case) for case in _verify(act, dtype)),
        )
    ]


def _sample(act: str, dtype: torch.dtype) -> list[OpCase]:
    def case(name: str, make: Make, *corners: str, law: int = 0, small: bool = False) -> OpCase:
        options = {"law": law} if law else {}
        return OpCase("sample", act, name, make, frozenset(corners), needs(act), small, options)

    return [
        case("greedy", partial(_greedy, dtype), "temperature 0", "tie", "-inf logits", small=True),
        case("none", partial(_nothing, dtype)),
        case("batch", partial(_batch, dtype), "same seed, other batch", small=True),
        case("seeds", partial(_seeds, dtype), law=1, small=True),
        case("positions", partial(_positions, dtype), law=1),
        case("cold", partial(_cold, dtype), "-inf logits", law=1),
        case("neighbours", partial(_neighbours, dtype), law=2),
    ]


def as_block(case: OpCase) -> OpCase:
    """The same drafts, judged as a block."""

    def make(draw: Draw) -> Arguments:
        return {**case.make(draw), "block": True}

    words = case.requires | {"spec:block_verification"}
    return replace(case, variant=f"block+{case.variant}", make=make, requires=words)


def _verify(act: str, dtype: torch.dtype) -> list[OpCase]:
    def case(
        name: str, make: Make, *corners: str, law: str = "", small: bool = False, bug: str = ""
    ) -> OpCase:
        return OpCase(
            "verify_draft",
            act,
            name,
            make,
            frozenset(corners),
            needs(act),
            small,
            {"law": law} if law else {},
            (bug,) if bug else (),
        )

    ends = ("all accepted", "none accepted", "draft -1", "temperature 0")
    found = [
        case(
            f"greedy-{depth}", partial(_greedy_drafts, dtype, depth, True), *ends, small=depth == 2
        )
        for depth in (1, 2, 3)
    ]
    found += [
        case(
            f"law-{depth}",
            partial(_drafted, dtype, depth),
            "depth 1, 2, 3",
            law="tokens",
            small=depth == 2,
        )
        for depth in (1, 2, 3)
    ]
    return [
        *found,
        case("greedy-bare", partial(_greedy_drafts, dtype, 3, False), *ends),
        case("counts", partial(_drafted, dtype, 1), law="counts", small=True, bug="B058"),
        case("counts-2", partial(_drafted, dtype, 2), law="counts", small=True),
        case("counts-3", partial(_drafted, dtype, 3), law="counts"),
        case("sure", partial(_sure, dtype), law="tokens", small=True),
        case("ended", partial(_ended, dtype), "draft -1", law="tokens"),
        case("outside", partial(_outside, dtype), "none accepted", law="tokens"),
        case("equal", partial(_equal, dtype), "all accepted", law="certain", small=True),
        case("none", partial(_no_requests, dtype)),
        case("batch", partial(_verify_batch, dtype)),
    ]


def _greedy(dtype: torch.dtype, draw: Draw) -> Arguments:
    logits = draw.normal(9, 517, dtype=dtype)
    logits[0, [3, 500]] = 9.0  # a tie
    logits[1] = 0.0
    logits[2, 516] = 50.0
    logits[3] = -torch.inf
    logits[3, 77] = -1e30
    logits[4, 10:] = -torch.inf
    logits[5] = -torch.inf
    logits[6, 5] = torch.nan  # never chosen
    logits[7, [9, 8]] = torch.inf
    return {**_rows(draw, 9), "logits": logits, "temperature": torch.zeros(9)}


def _nothing(dtype: torch.dtype, draw: Draw) -> Arguments:
    """No row at all, as in a step without drafts."""
    return {name: value[:0] for name, value in _greedy(dtype, draw).items()}


def _batch(dtype: torch.dtype, draw: Draw) -> Arguments:
    """Rows that are drawn alone, in part and in another order too."""
    temperature = draw.uniform(48, low=0.3, high=2.0)
    temperature[::5] = 0
    logits = draw.normal(48, 300, dtype=dtype)
    return {**_rows(draw, 48), "logits": logits, "temperature": temperature}


def _rows(draw: Draw, rows: int) -> Arguments:
    """Seeds of all 64 bits, and positions."""
    seeds = draw.integers(rows, low=-(1 << 63), high=(1 << 63) - 1)
    return {"seeds": seeds, "positions": draw.integers(rows, high=1 << 20)}


def _alike(logits: Tensor, rows: int, temperature: float) -> Arguments:
    """The same logits [..., vocab] and temperature in each row."""
    return {
        "logits": logits.expand(rows, *logits.shape).contiguous(),
        "temperature": torch.full((rows,), temperature),
    }


def _seeds(dtype: torch.dtype, draw: Draw) -> Arguments:
    """Seeds that count up, at one position."""
    logits = 1.5 * draw.normal(37, dtype=dtype)
    rows = draw.rows(_DRAWS, slow=4096)  # as many show a temperature that is off by a tenth
    seeds, positions = torch.arange(rows), torch.full((rows,), 12)
    return {**_alike(logits, rows, 1.0), "seeds": seeds, "positions": positions}


def _positions(dtype: torch.dtype, draw: Draw) -> Arguments:
    """One seed, positions that count up."""
    logits = draw.normal(23, dtype=dtype)
    rows = draw.rows(_DRAWS, slow=256)
    seeds, positions = torch.full((rows,), 7), torch.arange(rows)
    return {**_alike(logits, rows, 1.7), "seeds": seeds, "positions": positions}


def _cold(dtype: torch.dtype, draw: Draw) -> Arguments:
    logits = draw.normal(64, dtype=dtype)
    logits[::3] = -torch.inf
    rows = draw.rows(_DRAWS, slow=256)
    return {**_alike(logits, rows, 0.6), **_rows(draw, rows)}


def _neighbours(dtype: torch.dtype, draw: Draw) -> Arguments:
    """Two positions of one seed, judged together: they must not depend on each other."""
    logits = draw.normal(6, dtype=dtype)
    rows = draw.rows(_DRAWS, slow=256)
    seeds = torch.arange(rows // 2).repeat_interleave(2)
    positions = 1000 + torch.arange(rows) % 2
    return {**_alike(logits, rows, 1.0), "seeds": seeds, "positions": positions}


def _greedy_drafts(dtype: torch.dtype, depth: int, with_logits: bool, draw: Draw) -> Arguments:
    """Drafts that are the target's choice up to some depth, then another token, or -1."""
    rows, vocab = 4 * (depth + 1), 41
    logits = draw.normal(rows, depth + 1, vocab, dtype=dtype)
    logits[1, 0, [5, 6]] = 9.0  # a tie: 5 is right
    best = logits.float().argmax(-1)[:, :-1]
    best[1, 0] = 5
    good = torch.arange(rows) % (depth + 1)  # drafts that are right
    wrong = torch.where(torch.arange(rows) // (depth + 1) % 2 == 0, (best[:, 0] + 1) % vocab, -1)
    drafts = torch.where(torch.arange(depth) < good.unsqueeze(-1), best, wrong.unsqueeze(-1))
    drafted = draw.normal(rows, depth, vocab, dtype=dtype) if with_logits else None
    return {
        **_rows(draw, rows),
        "logits": logits,
        "draft_ids": drafts,
        "draft_logits": drafted,
        "temperature": torch.zeros(rows),
    }


def _no_requests(dtype: torch.dtype, draw: Draw) -> Arguments:
    return {name: value[:0] for name, value in _greedy_drafts(dtype, 2, True, draw).items()}


def _drafted(dtype: torch.dtype, depth: int, draw: Draw) -> Arguments:
    """Drafts drawn from their law, which is near to the target's."""
    vocab = 7 if depth < 3 else 4
    target = draw.normal(depth + 1, vocab, dtype=dtype)
    drafter = (target[:-1].float() + draw.normal(depth, vocab)).to(dtype)
    return _requests(draw, target, drafter, 0.8)


def _outside(dtype: torch.dtype, draw: Draw) -> Arguments:
    """The drafter proposes what the target can't say."""
    target, drafter = draw.normal(2, 6, dtype=dtype), draw.normal(1, 6, dtype=dtype)
    target[0, :3] = -torch.inf
    drafter[0, 4:] = -torch.inf
    return _requests(draw, target, drafter, 1.0)


def _equal(dtype: torch.dtype, draw: Draw) -> Arguments:
    target = 2 * draw.normal(4, 50, dtype=dtype)
    return _requests(draw, target, target[:-1].clone(), 1.3, 400)


def _sure(dtype: torch.dtype, draw: Draw) -> Arguments:
    """Drafts without a law count as certain."""
    target = draw.normal(3, 6, dtype=dtype)
    args = _requests(draw, target, target[:-1], 1.0, slow=512)  # noise that is used twice shows
    drafts = torch.tensor([2, 4]).expand(len(args["seeds"]), 2).contiguous()
    return {**args, "draft_ids": drafts, "draft_logits": None}


def _ended(dtype: torch.dtype, draw: Draw) -> Arguments:
    """Half of the requests have no draft, the others one of two."""
    args = _requests(draw, draw.normal(3, 6, dtype=dtype), draw.normal(2, 6, dtype=dtype), 1.0)
    drafts = args["draft_ids"].clone()
    drafts[:, 1] = -1
    drafts[::2, 0] = -1
    return {**args, "draft_ids": drafts}


def _requests(
    draw: Draw,
    target: Tensor,
    drafter: Tensor,
    heat: float,
    requests: int = _REQUESTS,
    slow: int = FEW,
) -> Arguments:
    """Requests of one target [Q, vocab], whose drafts are drawn from ``drafter`` [Q-1, vocab]."""
    rows = draw.rows(requests, slow)
    odds = torch.softmax(drafter.double() / heat, -1)
    ends = odds.cumsum(-1).contiguous()
    thrown = draw.uniform(len(ends), rows, dtype=torch.float64)
    ids = torch.searchsorted(ends, thrown, right=True).clamp(max=odds.shape[-1] - 1)
    return {
        **_rows(draw, rows),
        **_alike(target, rows, heat),
        "draft_ids": ids.T.contiguous(),
        "draft_logits": drafter.expand(rows, *drafter.shape).contiguous(),
    }


def _verify_batch(dtype: torch.dtype, draw: Draw) -> Arguments:
    rows, vocab = 40, 60
    temperature = draw.uniform(rows, low=0.3, high=2.0)
    temperature[::7] = 0
    logits = draw.normal(rows, 4, vocab, dtype=dtype)
    return {
        **_rows(draw, rows),
        "logits": logits,
        "draft_ids": draw.integers(rows, 3, low=-1, high=vocab),
        "draft_logits": logits[:, :-1] + draw.normal(rows, 3, vocab, dtype=dtype),
        "temperature": temperature,
    }
