"""Drawing and verification: greedy choices exactly, draws by their law, noise by (seed, position)
alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ml4core_conformance import compare
from ml4core_conformance.case import Arguments
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.distribution import chi_square
from ml4core_conformance.evaluation import Evaluation, caller_of, result
from ml4core_conformance.op_checks import op_check, variants
from ml4core_conformance.oracle.expected import Exact, Law
from ml4core_conformance.subject import Subject

Judge = Callable[[Subject, Evaluation], bool]


def checks() -> list[Check]:
    found = []
    for _, _, cases in variants(("sample",)):
        found.append(op_check("ops.sample", cases, _sample, _sample.__doc__ or ""))
    for _, _, cases in variants(("verify_draft",)):
        cold = [case for case in cases if not case.options]
        warm = [case for case in cases if case.options]
        found.append(op_check("spec.greedy", cold, _greedy, _greedy.__doc__ or ""))
        found.append(op_check("spec.distribution", warm, _verified, _verified.__doc__ or ""))
    return found


def _sample(subject: Subject, evaluation: Evaluation) -> bool:
    """At temperature 0 the largest logit, ties to the lowest id; above it draws have the law of
    softmax(logits / temperature), by noise of (seed, position) alone. A failure means other text
    for the same request: a biased draw, or one that depends on who shares the batch.
    """
    _judge_ids(subject, evaluation)
    if not evaluation.case.options:
        _same_in_other_batches(subject, evaluation)
    return True


def _greedy(subject: Subject, evaluation: Evaluation) -> bool:
    """At temperature 0 the drafts that equal the target's choice are accepted, up to the first that
    doesn't, and one token more comes from the target; a request's tokens don't depend on its batch.
    A failure means that drafting changes greedy text.
    """
    _judge_run(evaluation)
    _judge_ids(subject, evaluation)
    _same_in_other_batches(subject, evaluation)
    return True


def _verified(subject: Subject, evaluation: Evaluation) -> bool:
    """Whatever the drafts, what is emitted has the law of the target; a draft that the target can't
    say is never accepted, one of an equal law always, and others at the rate sum(min(p, q)). A
    failure means that drafting changes what the model says, or accepts less than it could.
    """
    _judge_run(evaluation)
    _judge_ids(subject, evaluation)
    return True


def _judge_ids(subject: Subject, evaluation: Evaluation) -> None:
    for name, want in evaluation.expected.results.items():
        found = result(evaluation, name)
        if isinstance(want, Law):
            cells = want.cell(evaluation.results)
            label = f"{evaluation.case.op} {name}"
            subject.measure(
                chi_square(label, cells, want.probabilities, want.outcomes, evaluation.where)
            )
        elif isinstance(want, Exact):
            compare.exact(name, found, want, evaluation.where)


def _judge_run(evaluation: Evaluation) -> None:
    """Emitted tokens are the accepted drafts and one of the vocabulary, then -1."""
    ids, counts = result(evaluation, "ids"), result(evaluation, "counts")
    drafts, logits = evaluation.before["draft_ids"], evaluation.before["logits"]
    if ids.shape != logits.shape[:2] or counts.shape != logits.shape[:1]:
        raise CheckFailed(
            f"ids {list(ids.shape)} and counts {list(counts.shape)} at {evaluation.where}; wanted "
            f"are {list(logits.shape[:2])} and {list(logits.shape[:1])}"
        )
    column = torch.arange(ids.shape[1])
    last = counts.unsqueeze(-1) - 1
    vocab = logits.shape[-1]
    kept = torch.cat((drafts, torch.full_like(drafts[:, :1], -1)), -1)
    problems: tuple[tuple[str, Tensor], ...] = (
        ("counts lie in 1..Q", (last < 0) | (last >= ids.shape[1])),
        ("tokens before the last are the drafts", (column < last) & (ids != kept)),
        ("a draft of -1 is never accepted", (column < last) & (kept < 0)),
        ("the last is of the vocabulary", (column == last) & ((ids < 0) | (ids >= vocab))),
        ("behind it stands -1", (column > last) & (ids != -1)),
    )
    for rule, broken in problems:
        if broken.any():
            row = int(broken.any(-1).nonzero()[0])
            raise CheckFailed(
                f"{rule}: at {evaluation.where}, R {row}: ids {ids[row].tolist()}, count "
                f"{int(counts[row])}, drafts {drafts[row].tolist()}"
            )


def _same_in_other_batches(subject: Subject, evaluation: Evaluation) -> None:
    """Rows give the same tokens alone, in part, in another order, and with other neighbours."""
    before = evaluation.before
    rows = before["logits"].shape[0]
    if rows == 0:
        return
    caller = caller_of(subject, evaluation.case)
    order = torch.arange(rows)
    for name, chosen in (
        ("alone", order[-1:]),
        ("in part", order[1::3]),
        ("in reverse", order.flip(0)),
        ("twice", torch.cat((order, order[:7]))),
    ):
        found = caller.results(_rows(before, chosen))
        for key in evaluation.expected.results:
            want = result(evaluation, key)[chosen]
            if found[key].shape != want.shape or not torch.equal(found[key], want):
                wrong = (found[key] != want).flatten(1) if want.dim() > 1 else found[key] != want
                row = int(wrong.flatten().nonzero()[0]) // max(1, want.numel() // len(want))
                raise CheckFailed(
                    f"{key} of row {int(chosen[row])} depend on the batch: {want[row].tolist()} "
                    f"among {rows} rows, {found[key][row].tolist()} {name}, at {evaluation.where}"
                )


def _rows(arguments: Arguments, chosen: Tensor) -> Arguments:
    return {
        name: value[chosen] if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
