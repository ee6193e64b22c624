"""A model that ranks share out gives what the whole one does."""

from __future__ import annotations

from functools import partial

import torch

from ml4core.models.checkpoint import Checkpoint
from ml4core.models.tensors import load_model_spec
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.draw import Draw
from ml4core_conformance.oracle.model import ModelOracle
from ml4core_conformance.oracle.stages import Rounding
from ml4core_conformance.rigs import errors
from ml4core_conformance.rigs.child import ChildFailed
from ml4core_conformance.rigs.engines import checkpoint, oracle_of
from ml4core_conformance.rigs.passes import FLOOR, INDEX_MARGIN, ROUTER_MARGIN
from ml4core_conformance.rigs.ranks import STEPS, logits_of_ranks
from ml4core_conformance.rigs.rig import REFERENCE
from ml4core_conformance.subject import Subject

RANKS = 2


def checks() -> list[Check]:
    doc = (
        "Two ranks that share the model out, {}, have the logits of the whole model in fp64, in "
        "chunks and decodes, and the same bits of them. A failure is a sum over ranks that is left "
        "out or made twice, or a share that isn't the rank's."
    )
    return [
        Check(
            "parallel.logits",
            "model",
            partial(_logits, variant == "ep"),
            doc.format(how),
            variant=variant,
            requires=REFERENCE.requires | {"parallel:tp", f"parallel:{variant}"},
            unit=f"parallel/{variant}",
            timeout_s=300.0,
        )
        for variant, how in (
            ("tp", "heads, widths and vocabulary each in halves"),
            ("ep", "experts whole, and all else in halves"),
        )
    ]


def _logits(expert_parallel: bool, subject: Subject) -> None:
    words = {"parallel:tp"} | ({"parallel:ep"} if expert_parallel else set())
    spans = "feature:spanning_session" in subject.capabilities
    with checkpoint(layers=4, vocab=500) as folder:  # no multiple of what ranks have of it
        deployment = subject.deployment(
            load_model_spec(Checkpoint.open(folder)),
            **REFERENCE.settled(subject),
            needs=REFERENCE.requires | words,
            tensor_parallel_size=RANKS,
            enable_expert_parallel=expert_parallel,
            enforce_eager=not spans,  # threads meet within a step, which no graph can have
            spanning_session=spans,
        )
        subject.exercise(deployment.needs)
        exact, twin = oracle_of(folder), oracle_of(folder, rounding=Rounding(torch.float32))
        for seed in subject.seeds:
            ids = _prompt(exact, seed)
            try:
                found = logits_of_ranks(subject, deployment, folder, ids)
            except ChildFailed as failure:
                raise CheckFailed(f"a rank of {RANKS} in a process: {failure}") from None
            if not all(torch.equal(one, found[0]) for one in found):
                raise CheckFailed("ranks have other bits of logits than rank 0")
            pair = (exact.run(ids).logits, twin.run(ids).logits)
            where = f"steps of {STEPS} rows, on {RANKS} ranks"
            errors.judge(subject, "logits", found[0], *pair, where, floor=FLOOR)


def _prompt(oracle: ModelOracle, seed: int) -> list[int]:
    """The first of a seed whose pass has margins."""
    for attempt in range(64):
        draw = Draw(seed, f"parallel/{attempt}")
        ids: list[int] = draw.integers(sum(STEPS), high=oracle.spec.vocab_size).tolist()
        passed = oracle.run(ids)
        if passed.router_margin > ROUTER_MARGIN and passed.index_margin > INDEX_MARGIN:
            return ids
    raise RuntimeError(f"no prompt of seed {seed} has margins; another seed works")
