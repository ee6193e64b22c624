"""Passes of the tiny model: prompts with margins, their logits in fp64, and steps of a subject."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ml4core.api import KVLayout, ModelSpec
from ml4core_conformance import tiny
from ml4core_conformance.draw import Draw
from ml4core_conformance.oracle.model import ModelOracle, Passed
from ml4core_conformance.oracle.stages import EXACT, Rounding
from ml4core_conformance.rigs import errors
from ml4core_conformance.rigs.plans import Padding, Request, make_plan
from ml4core_conformance.rigs.rig import REFERENCE, Precision, Rig
from ml4core_conformance.subject import Subject
from ml4core_conformance.tolerances import coarser

FLOOR = 2.0**-13
"""Of a row of logits: what fp32 sums lose in eight layers, relative to the row's length."""


ROUTER_MARGIN = 1e-4


INDEX_MARGIN = 1e-5
"""Prompts are chosen so that no expert's logit and no key's score lies nearer to the border."""


@dataclass
class Case:
    """A prompt, its pass in fp64, and the pass of the twin.

    Attributes:
        coarse: whether the latent cache stores less than activations hold. A value that lies near
            the middle of two stored numbers then falls to either side, whatever the precision, and
            layer by layer that moves further ones. So a pass is judged on the rows that its cache
            holds, and these rows for themselves.
    """

    subject: Subject
    rig: Rig
    ids: list[int]
    exact: Passed
    twin: Passed
    coarse: bool

    def judge(self, what: str, got: Tensor, request: Request) -> None:
        """Logits of a request's rows from the first on; what the caches hold of them is there."""
        exact, twin, count = self.exact, self.twin, len(got)
        if self.coarse:
            exact, twin = self._on_held_rows(what, request, count)
        pair = (exact.logits[:count], twin.logits[:count])
        errors.judge(self.subject, "logits", got, *pair, what, floor=FLOOR)

    def _on_held_rows(self, what: str, request: Request, count: int) -> tuple[Passed, Passed]:
        rig, ids = self.rig, self.ids[:count]
        slots = request.slots("latent", rig.block_size)[:count]
        held = {owner: rig.rows(cache)[slots] for owner, cache in rig.kv.latent.items()}
        exact, twin = (oracle_of(rig, one, held=held).run(ids) for one in (EXACT, rig.rounding))
        for owner, rows in held.items():
            want = exact.made[owner]
            where = f"{what}, layer {owner}"
            pair = (twin.made[owner], rig.through("latent", want))
            errors.stored(self.subject, "latent rows", rows, want, *pair, where, FLOOR)
        return exact, twin


def case_of(subject: Subject, precision: Precision, seed: int) -> Case:
    def make() -> Case:
        spec = tiny.model() if precision is REFERENCE else smooth()
        dtype = getattr(torch, precision.settled(subject)["dtype"])
        dense = tiny.weights(spec, seed, dtype)
        rig = Rig(subject, spec, dense, precision)
        rig.fill(seed)  # stale rows, as in pages that were used before
        return made_case(rig, seed, rig.block_size + 20)

    return subject.once(f"model/{precision.name}/{seed}", make)


def made_case(rig: Rig, seed: int, length: int) -> Case:
    """A prompt of so many tokens on a rig."""
    exact, twin = (oracle_of(rig, rounding) for rounding in (EXACT, rig.rounding))
    ids, passed = prompt(rig, exact, seed, length)
    coarse = is_coarse(rig.layouts["latent"], rig.dtype)
    return Case(rig.subject, rig, ids, passed, twin.run(ids), coarse)


def is_coarse(layout: KVLayout, dtype: torch.dtype) -> bool:
    """Whether rows lose more in a cache of this layout than as activations of ``dtype``."""
    return coarser((field.dtype for field in layout.fields), str(dtype).removeprefix("torch."))


def smooth() -> ModelSpec:
    """The tiny model where every key and every expert is chosen: rounding moves its logits a
    little, and never to another key or expert. What is chosen is judged at full precision.
    """
    return tiny.model(topk=512, experts=4, experts_per_token=4)


def oracle_of(
    rig: Rig,
    rounding: Rounding,
    sources: dict[int, int] | None = None,
    held: Mapping[int, Tensor] | None = None,
) -> ModelOracle:
    """The model as the caches of this rig hold it, or are seen to hold it."""
    return ModelOracle(
        rig.spec,
        rig.weights.top,
        rig.weights.layers,
        rounding=rounding,
        store_row=partial(rig.through, "latent"),
        held=held,
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
