"""Passes of the tiny model: prompts with margins, their logits in fp64, and steps of a subject."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ml4core.api import ModelSpec
from ml4core_conformance import tiny
from ml4core_conformance.draw import Draw
from ml4core_conformance.oracle.model import ModelOracle, Passed
from ml4core_conformance.oracle.stages import EXACT, Rounding
from ml4core_conformance.rigs import errors
from ml4core_conformance.rigs.plans import Padding, Request, make_plan
from ml4core_conformance.rigs.rig import REFERENCE, Precision, Rig
from ml4core_conformance.subject import Subject

FLOOR = 2.0**-13
"""Of a row of logits: what fp32 sums lose in eight layers, relative to the row's length."""


ROUTER_MARGIN = 1e-4


INDEX_MARGIN = 1e-5
"""Prompts are chosen so that no expert's logit and no key's score lies nearer to the border."""


@dataclass
class Case:
    """A prompt, its pass in fp64, and the pass of the twin."""

    subject: Subject
    rig: Rig
    ids: list[int]
    exact: Passed
    twin: Passed

    def judge(self, what: str, got: Tensor, start: int = 0) -> None:
        """Logits of the rows from ``start`` on."""
        end = start + len(got)
        exact, twin = self.exact.logits[start:end], self.twin.logits[start:end]
        where = f"{what}, from position {start} on"
        errors.judge(self.subject, "logits", got, exact, twin, where, floor=FLOOR)


def case_of(subject: Subject, precision: Precision, seed: int) -> Case:
    def make() -> Case:
        spec = tiny.model() if precision is REFERENCE else smooth()
        dtype = getattr(torch, precision.settled(subject)["dtype"])
        dense = tiny.weights(spec, seed, dtype)
        rig = Rig(subject, spec, dense, precision)
        rig.fill(seed)  # stale rows, as in pages that were used before
        exact, twin = (oracle_of(rig, rounding) for rounding in (EXACT, rig.rounding))
        ids, passed = prompt(rig, exact, seed, rig.block_size + 20)
        return Case(subject, rig, ids, passed, twin.run(ids))

    return subject.once(f"model/{precision.name}/{seed}", make)


def smooth() -> ModelSpec:
    """The tiny model where every key and every expert is chosen: rounding moves its logits a
    little, and never to another key or expert. What is chosen is judged at full precision.
    """
    return tiny.model(topk=512, experts=4, experts_per_token=4)


def oracle_of(rig: Rig, rounding: Rounding, sources: dict[int, int] | None = None) -> ModelOracle:
    """The model as the caches of this rig hold it."""
    return ModelOracle(
        rig.spec,
        rig.weights.top,
        rig.weights.layers,
        rounding=rounding,
        store_row=partial(rig.through, "latent"),
        store_key=partial(rig.through, "index"),
        index_fp8=rig.layouts["index"].fp8 is not None,
        sources=sources,
    )


def prompt(rig: Rig, oracle: ModelOracle, seed: int, length: int) -> tuple[list[int], Passed]:
    """The first prompt of a seed whose pass has margins, if they matter here."""
    for attempt in range(64):
        draw = Draw(seed, f"prompt/{attempt}")
        ids = draw.integers(length, high=rig.spec.vocab_size).tolist()
        passed = oracle.run(ids)
        if passed.router_margin > ROUTER_MARGIN and passed.index_margin > INDEX_MARGIN:
            return ids, passed
    raise RuntimeError(f"no prompt of seed {seed} has margins; another seed works")


def run_steps(
    rig: Rig,
    request: Request,
    sizes: Sequence[int],
    window: int = 0,
    padding: Padding | None = None,
) -> Tensor:
    """Logits of a request's rows, computed in steps of these sizes."""
    found = []
    for rows in sizes:
        plan = make_plan(
            [(request, rows)],
            rig.block_size,
            verify_rows=window,
            padding=padding or Padding(),
            device=rig.device,
        )
        found.append(rig.step(plan).logits)
        request.computed += rows
    return torch.cat(found)
