"""Wrong backends made of this one, whose kernels are interpreted: the suite tells them apart.

A few of each kind, cheap ones, by one layout or format each. All of them by all:
``ml4 conformance selftest --backend rocm --device interpreted --profile ops --profile layouts``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ml4core_conformance.facts import Found
from ml4core_conformance.mutants import mutants
from ml4core_conformance.selftest import selftest, text
from ml4core_conformance.verify import find

pytestmark = [  # what numpy says of the interpreter's ways
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

DIES_AT = {
    "last-head-zeroed": ("ops.structure[sparse_mla/e4m3+bf16]",),
    "topk-weakest": ("ops.topk[topk/*]",),
    "slots-of-nothing": ("ops.exact[to_slots/*]",),
    "one-byte-more": ("layout.canary[kv_write/e4m3+bf16]",),
    "own-byte-order": ("layout.cross_read[kv/e4m3]", "layout.golden[kv/e4m3]"),
    "row-unwritten": ("ops.written[rms_norm/*]",),
    "column-dropped": ("ops.structure[gemm/fp8_block+bf16]",),
    "renormalised-otherwise": ("ops.router[router/*]",),
}
"""The mutant, and the checks that have to say FAIL of it and PASS of the honest backend."""


@pytest.fixture(scope="module")
def rocm() -> Found:
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled in this process, not interpreted")
    return find("rocm", device_kind="interpreted")


@pytest.mark.parametrize("name", DIES_AT)
def test_a_wrong_kernel_is_found(rocm: Found, name: str) -> None:
    (mutant,) = (one for one in mutants() if one.name == name)
    wrong = replace(mutant, dies_at=DIES_AT[name])
    outcome = selftest(rocm, [wrong], jobs=0, partial=True)
    assert outcome.passed, text(outcome)
    assert not outcome.trials[0].idle, "nothing was shown: the honest backend supports no check"
