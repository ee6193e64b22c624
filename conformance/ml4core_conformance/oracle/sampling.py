"""Drawing and verification: exact where it is greedy, the law elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ml4core_conformance.oracle.expected import Exact, Expected, Law
from ml4core_conformance.oracle.numbers import wide

Results = Mapping[str, Tensor]


def sample(options: Mapping[str, Any], args: Mapping[str, Any]) -> Expected:
    """``options['law']``: all rows have the same logits and temperature, and the draws of ``law``
    rows that follow each other are judged together. Without it rows of temperature 0 are judged.
    """
    logits, temperature = wide(args["logits"]), wide(args["temperature"])
    together = options.get("law")
    if not together:
        return Expected({"ids": Exact(greedy(logits), ("T",), temperature == 0)})
    odds = law(logits[0], float(temperature[0]))
    return Expected({"ids": sequences([odds] * together, lambda results: results["ids"])})


def verify_draft(options: Mapping[str, Any], args: Mapping[str, Any]) -> Expected:
    """``options['law']``:

    - ``tokens``: all requests have the same target, and drafts that the case drew from its drafts'
      law. What is emitted, completed by draws from the target, has the target's law.
    - ``counts``: the same; how many drafts are accepted, one by one or, with ``block``, as a block.
    - ``certain``: draft and target are equal, so each draft is accepted.

    Without it requests of temperature 0 are judged.
    """
    logits, temperature = wide(args["logits"]), wide(args["temperature"])
    drafts = args["draft_ids"]
    kind = options.get("law")
    if kind is None:
        return _greedy_run(logits, drafts, temperature == 0)
    if kind == "certain":
        every = torch.full(drafts.shape[:1], drafts.shape[1] + 1)
        ids = torch.cat((drafts, torch.zeros_like(drafts[:, :1])), -1)
        mask = torch.arange(ids.shape[1]) < drafts.shape[1]
        return Expected({"ids": Exact(ids, ("R", "Q"), mask), "counts": Exact(every, ("R",))})
    heat = float(temperature[0])
    target = [law(row, heat) for row in logits[0]]
    if kind == "counts":
        drafted = [law(row, heat) for row in wide(args["draft_logits"])[0]]
        odds = accepted(target, drafted, bool(args.get("block")))
        names = tuple(f"{kept} accepted" for kept in range(len(odds)))
        return Expected({"counts": Law(odds, names, lambda results: results["counts"] - 1)})
    return Expected({"ids": sequences(target, _completed(target))})


def greedy(logits: Tensor) -> Tensor:
    """The lowest id int64 [...] of the largest logit; NaN is none."""
    usable = torch.where(torch.isnan(logits), -torch.inf, logits)
    hit = (usable == usable.amax(-1, keepdim=True)) & ~torch.isnan(logits)
    return hit.to(torch.int64).argmax(-1)


def law(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities fp64 [vocab] of one row; NaN has none."""
    usable = torch.where(torch.isnan(logits), -torch.inf, logits)
    return torch.softmax(usable / temperature, -1)


def accepted(target: list[Tensor], drafted: list[Tensor], block: bool) -> Tensor:
    """Probabilities fp64 [Q] of 0 .. Q-1 accepted drafts, over all runs of drafts.

    ``target`` and ``drafted`` are laws fp64 [vocab] of each place, which don't depend on what
    stands before it.
    """
    depth, total = len(drafted), torch.zeros(len(target), dtype=torch.float64)
    for run in product(range(len(drafted[0])), repeat=depth):
        likely = math.prod(float(q[d]) for q, d in zip(drafted, run, strict=True))
        if likely == 0:
            continue
        whole, chances = 1.0, []
        for place, d in enumerate(run):
            ratio = float(target[place][d] / drafted[place][d])
            whole = min(whole * ratio, 1.0)
            if not block:
                chances.append(min(ratio, 1.0))
            elif place == depth - 1:
                chances.append(whole)
            else:
                rest = whole * target[place + 1] - drafted[place + 1]
                left = float(rest.clamp(min=0).sum())
                room = left + 1 - whole
                chances.append(left / room if room > 0 else 0.0)
        total += likely * _kept(chances, block)
    return total


def _kept(chances: list[float], block: bool) -> Tensor:
    """Probabilities fp64 [Q] of how many are kept: as many as succeed in a row, or, for a block, up
    to the last that succeeds.
    """
    depth = len(chances)
    found = torch.zeros(depth + 1, dtype=torch.float64)
    for kept in range(depth + 1):
        if block:
            behind = math.prod(1 - chance for chance in chances[kept:])
            found[kept] = behind * (chances[kept - 1] if kept else 1.0)
        else:
            ends = 1 - chances[kept] if kept < depth else 1.0
            found[kept] = math.prod(chances[:kept]) * ends
    return found


def sequences(laws: list[Tensor], ids: Callable[[Results], Tensor]) -> Law:
    """The law of independent tokens, one of each law in turn; ``ids`` gives them from results."""
    joint, names = laws[0], tuple(str(i) for i in range(len(laws[0])))
    for more in laws[1:]:
        joint = (joint.unsqueeze(-1) * more).flatten()
        names = tuple(f"{a} {b}" for a, b in product(names, range(len(more))))
    count = len(laws[0])

    def cell(results: Results) -> Tensor:
        tokens = ids(results).reshape(-1, len(laws))
        outside = ((tokens < 0) | (tokens >= count)).any(-1)
        cells = torch.zeros(len(tokens), dtype=torch.int64)
        for column in range(len(laws)):
            cells = cells * count + tokens[:, column]
        return torch.where(outside, -1, cells)

    return Law(joint, names, cell)


def _completed(target: list[Tensor]) -> Callable[[Results], Tensor]:
    """The emitted tokens [R, Q], those behind them drawn from the target."""

    def tokens(results: Results) -> Tensor:
        ids, counts = results["ids"], results["counts"]
        bits = np.random.Generator(np.random.Philox(key=[ids.shape[0], ids.shape[1]]))
        drawn = [
            torch.from_numpy(bits.choice(len(odds), ids.shape[0], p=odds.numpy()))
            for odds in target
        ]
        behind = torch.arange(ids.shape[1]) >= counts.unsqueeze(-1)
        return torch.where(behind, torch.stack(drawn, -1), ids)

    return tokens


def _greedy_run(logits: Tensor, drafts: Tensor, cold: Tensor) -> Expected:
    best = greedy(logits)  # [R, Q]
    kept = (best[:, :-1] == drafts).to(torch.int64).cumprod(-1).sum(-1)
    behind = torch.arange(best.shape[1]) > kept.unsqueeze(-1)
    ids = torch.where(behind, -1, best)
    judged = cold.unsqueeze(-1)
    return Expected(
        {
            "ids": Exact(ids, ("R", "Q"), judged),
            "counts": Exact(kept + 1, ("R",), cold),
        }
    )


ORACLE = MappingProxyType({"sample": sample, "verify_draft": verify_draft})
