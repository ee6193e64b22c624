"""What an op does beside its numbers: form of results, memory, repetition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core_conformance.check import Status
from ml4core_conformance.poison import allocations_are_poisoned, poisoned_allocations
from ml4core_conformance.results import CheckResult

Op = Callable[..., Any]
Dies = Callable[..., str]


def _result(change: Callable[[Tensor], Any]) -> Callable[[Op], Op]:
    return lambda honest: lambda *args: change(honest(*args))


def _last_row_unwritten(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:-1] = x[:-1]
    return out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Tensor.double, "float64"),
        (lambda x: x[:-1], "wanted is"),
        (lambda x: x.T.contiguous().T, "strides"),
        (lambda x: (x,), "tuple"),
        (lambda x: None, "NoneType"),
        (lambda x: x.to("meta"), "meta"),
    ],
)
def test_a_result_of_another_form_dies(dies: Dies, change: Op, words: str) -> None:
    assert words in dies("ops.signature[silu_mul/bf16]", silu_mul=_result(change))


def test_a_result_in_an_arguments_memory_dies(dies: Dies) -> None:
    def wrap(honest: Op) -> Op:
        return lambda x, *rest: x.copy_(honest(x, *rest))

    assert "argument 'x'" in dies("ops.signature[rms_norm/bf16]", rms_norm=wrap)
    assert "argument 'x' was changed" in dies("ops.purity[rms_norm/bf16]", rms_norm=wrap)


def test_a_buffer_that_is_used_again_dies(dies: Dies) -> None:
    def wrap(honest: Op) -> Op:
        kept: dict[Any, Tensor] = {}

        def call(x: Tensor) -> Tensor:
            found = honest(x)
            return kept.setdefault((found.shape, found.dtype), found.clone()).copy_(found)

        return call

    assert "call before" in dies("ops.signature[silu_mul/bf16]", silu_mul=wrap)


def test_an_input_that_is_kept_and_changed_later_dies(dies: Dies) -> None:
    def wrap(honest: Op) -> Op:
        kept: list[Tensor] = []

        def call(x: Tensor) -> Any:
            for old in kept:
                old.zero_()
            kept.append(x)
            return honest(x)

        return call

    assert "'gate_up' was changed" in dies("ops.purity[silu_mul/bf16]", silu_mul=wrap)


def test_a_row_that_is_not_written_dies(dies: Dies) -> None:
    for op, variant in (("gemm", "bf16+bf16"), ("embed", "bf16"), ("rms_norm", "fp32")):
        reason = dies(f"ops.written[{op}/{variant}]", **{op: _result(_last_row_unwritten)})
        assert "not written" in reason


def test_integers_that_are_not_written_die(dies: Dies) -> None:
    dies("ops.written[sample/bf16]", sample=_result(_last_row_unwritten))


def test_a_random_last_bit_dies(dies: Dies) -> None:
    def nudge(x: Tensor) -> Tensor:
        up = torch.nextafter(x, torch.full_like(x, torch.inf))
        return torch.where(torch.rand(x.shape) < 0.01, up, x)

    dies("ops.repeat[gemm/fp32+fp32]", gemm=_result(nudge))


BATCH = frozenset({"feature:batch_invariant"})


def test_sums_that_follow_the_number_of_rows_die(dies: Dies, passes: Op) -> None:
    def wrap(honest: Op) -> Op:
        def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            wide = x.float()
            parts = wide.pow(2).tensor_split(1 + x.shape[0] % 5, dim=-1)
            square = torch.stack([part.sum(-1) for part in parts]).sum(0) / x.shape[-1]
            rate = torch.rsqrt(square.unsqueeze(-1) + eps)
            return (wide * rate * weight.float()).to(x.dtype)

        return norm

    dies("ops.batch[rms_norm/fp32]", rms_norm=wrap, words=BATCH)
    passes("ops.elements[rms_norm/fp32]", rms_norm=wrap)
    passes("ops.batch[ssmax/bf16]", words=BATCH)


def test_an_op_that_raises_is_an_error_of_its_own(verdict: Callable[..., CheckResult]) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("no such kernel")

    result = verdict("ops.elements[gemm/bf16+bf16]", gemm=lambda honest: fail)
    assert result.status is Status.ERROR
    assert "no such kernel" in result.reason


def test_poisoning_leaves_no_trace() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    assert allocations_are_poisoned(torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), poisoned_allocations():
        1 / int(not torch.isnan(torch.empty(8)).all())
    assert torch.are_deterministic_algorithms_enabled() is before
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
