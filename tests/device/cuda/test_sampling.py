"""Drawing and verification: the tokens of core's own ops, whose law the suite judges."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ml4core.api import OPS
from ml4core.compose.ops import COMPOSED
from ml4core_conformance.case import OpCase
from ml4core_conformance.cases import cases_of
from ml4core_triton.ops import load

pytestmark = [  # what numpy says of the interpreter's ways
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

ROWS = 12
"""Of a case's rows, which are alike but for their noise."""
CASES = [case for op in ("sample", "verify_draft") for case in cases_of(op)]
OTHER_DTYPE = {"fp32", "block+bf16"}
BY_DTYPE = {"greedy-2", "law-2"}


def _marked(case: OpCase) -> Any:
    """Of drafts, for `make test-full`: cases of counts, whose rows are made as those of a law are,
    and most of one dtype for each rule, as only the load of logits differs.
    """
    same = case.name.startswith("counts") or (
        case.variant in OTHER_DTYPE and case.name not in BY_DTYPE
    )
    slow = case.op == "verify_draft" and same
    return pytest.param(case, marks=[pytest.mark.slow] if slow else [], id=case.id)


@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_tokens_are_those_of_core(case: OpCase, device: torch.device) -> None:
    op = load(case.op, "ml4core_cuda")
    arguments = {
        name: value[:ROWS].to(device) if isinstance(value, torch.Tensor) else value
        for name, value in case.arguments(0).items()
    }
    given = [arguments.get(arg.name) for arg in OPS[case.op].args]
    found, wanted = op(*given), COMPOSED[case.op](*given)
    for got, want in zip(
        found if isinstance(found, tuple) else (found,),
        wanted if isinstance(wanted, tuple) else (wanted,),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_a_row_in_parts_gives_what_it_gives_alone(device: torch.device) -> None:
    """A vocabulary of several parts, with ties across their borders."""
    from ml4core_triton.kernels.sample import parts_of, sample

    vocab = 9000
    assert parts_of(vocab, 1)[0] > 1
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(3, vocab, generator=draw)
    logits[0, [2, 8999]] = 9.0
    logits[1, [4096, 8192]] = 9.0
    heat = torch.tensor([0.0, 0.0, 0.7])
    seeds, positions = torch.tensor([1, 2, 3]), torch.tensor([7, 8, 9])
    given = (logits, heat, seeds, positions)
    found = sample(*(one.to(device) for one in given)).cpu()
    assert found[:2].tolist() == [2, 4096]
    assert torch.equal(found, COMPOSED["sample"](*given))
