"""What is slightly wrong is red, and the message names slice, worst error and bound."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest

from ml4core.api import Backend
from ml4core_conformance.catalog import all_checks
from ml4core_conformance.check import Status
from ml4core_conformance.judge import judge
from ml4core_conformance.mutants import drafts, mutants
from ml4core_conformance.mutants.altered import Changed, Ops
from ml4core_conformance.subject import Subject
from ml4core_conformance.verify import find

CHECKS = {check.id: check for check in all_checks()}
MUTANTS = {mutant.name: mutant.wrap for mutant in mutants()}

ABOVE = r"error (?P<error>[\d.e+-]+) is above the bound (?P<bound>[\d.e+-]+) \([\d.e+]+ times\) at "
CASE = r"case sparse_mla/{}/\S+ seed 0"


@cache
def honest() -> Backend:
    return find("cpu").target.load()


def verdict(wrap: Callable[[Backend], Backend], id: str) -> tuple[Status, str]:
    backend = wrap(honest())
    subject = Subject(backend, backend.probe().devices[0], small=True)
    try:
        result = judge(subject, CHECKS[id])
    finally:
        subject.close()
    return result.status, result.reason


@pytest.mark.parametrize("variant", ["fp8_ds_mla+bf16", "bf16+bf16", "fp32+fp32"])
@pytest.mark.parametrize(
    ("mutant", "family", "told"),
    [
        ("last-head-zeroed", "ops.structure", rf"out relative RMS by N: {ABOVE}{CASE}, N (7|63)"),
        ("attention-gain", "ops.bias", rf"out gain: {ABOVE}{CASE}"),
        ("page-off-by-one", "ops.elements", rf"out elements: {ABOVE}{CASE}, T \d+, N \d+, L \d+"),
    ],
)
def test_attention(mutant: str, family: str, told: str, variant: str) -> None:
    status, reason = verdict(MUTANTS[mutant], f"{family}[sparse_mla/{variant}]")
    assert status is Status.FAIL
    found = re.fullmatch(told.replace("{}", re.escape(variant)), reason)
    assert found, reason
    assert float(found["error"]) > float(found["bound"]) > 0
    if mutant == "attention-gain":
        assert float(found["error"]) == pytest.approx(0.012, rel=0.1)
    if mutant == "last-head-zeroed":
        assert float(found["error"]) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(
    ("mutant", "check", "told"),
    [
        (
            "scale-rounded-up",
            "bytes.quantize[quantize/mxfp4+bf16]",
            r"weight\.scale: \d+ of \d+ values differ, first at case \S+ seed 0, "
            r"element \S+ \d+\]: found \d+, wanted is \d+",
        ),
        (
            "scale-rounded-down",
            "layout.bytes[kv_write/fp8_ds_mla+bf16]",
            r"\d+ bytes of written rows are wrong, first byte \d+ of page \d+ \(slot \d+, its byte "
            r"\d+ of 656\): found 0x\w\w, wanted is 0x\w\w, at case \S+ seed 0",
        ),
        (
            "page-off-by-one",
            "layout.cross_read[kv/fp8_ds_mla]",
            rf"out elements: {ABOVE}sparse_mla over pages of the oracle, \d+ tokens a page, "
            r"T \d, N \d, L \d+",
        ),
        (
            "product-gain",
            "ops.bias[gemm/mxfp4+bf16]",
            rf"out gain: {ABOVE}case gemm/mxfp4\+bf16/\S+ seed 0",
        ),
        (
            "lse-base-two",
            "ops.lse[sparse_mla/bf16+bf16]",
            rf"lse elements \(in base 2; wanted is base e\): {ABOVE}case \S+ seed 0, T \d, N \d",
        ),
    ],
)
def test_scales_layouts_and_products(mutant: str, check: str, told: str) -> None:
    status, reason = verdict(MUTANTS[mutant], check)
    assert status is Status.FAIL
    assert re.fullmatch(told, reason), reason


def test_only_the_noise_is_wrong() -> None:
    """With noise of its own the verification that ``shared-noise`` is made of is right."""
    fresh = Changed(Ops(verify_draft=drafts.FRESH))
    status, reason = verdict(fresh, "spec.distribution[verify_draft/fp32]")
    assert (status, reason) == (Status.PASS, "")
