"""The check of a backend's results: composed ops pass it, and no wrong shape or dtype does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import OPS, Weight
from ml4core.compose.contract import CheckedOp, ContractError, misfit
from ml4core.compose.ops import COMPOSED

from .support import Draw
from .test_export import CASES


def called(case: str) -> tuple[Any, tuple[Any, ...], Any]:
    name, args = case.split("/")[0], CASES[case](Draw(1))
    return OPS[name], args, COMPOSED[name](*args)


def spoilt(result: Any) -> Iterator[tuple[str, Any]]:
    """The result with one thing wrong, and what it is."""
    if isinstance(result, tuple):
        yield "one result fewer", result[:-1]
        for place, one in enumerate(result):
            for what, other in spoilt(one):
                yield f"{place}: {what}", (*result[:place], other, *result[place + 1 :])
    elif isinstance(result, Weight):
        yield "no weight", result.data
        yield "shape", Weight(result.format, (*result.shape, 1), result.parts)
    elif result is None:
        yield "something", torch.zeros(1)
    else:
        yield "dtype", result.to(torch.float64)
        yield "kind", result.to(torch.int16)
        yield "nothing", None
        yield "nested", (result,)
        yield "rank", result.unsqueeze(0)
        for dim in range(result.dim()):
            yield f"axis {dim}", torch.cat((result, result.narrow(dim, 0, 1)), dim)


@pytest.mark.parametrize("case", CASES)
def test_composed_ops_keep_the_contract_and_nothing_unlike_does(case: str) -> None:
    spec, args, result = called(case)
    assert misfit(spec, args, result) == ""
    for what, other in spoilt(result):
        assert misfit(spec, args, other), what


def test_the_message_tells_what_was_found_and_what_is_wanted() -> None:
    spec, args, (positions, lens, has_nan) = called("topk")
    assert misfit(spec, args, (positions, lens.long(), has_nan)) == (
        "result 'lens' is int64 [4]; wanted is int32 [T] = [4]"
    )
    assert misfit(spec, args, [positions, lens]) == (
        "returned a list of 2; wanted are 3 results: positions, lens, has_nan"
    )
    spec, args, result = called("rms_norm")
    assert misfit(spec, args, result[:, :-1]) == (
        "result 'out' is float32 [3, 15]; wanted is float32 or bfloat16 [..., H] = [3, 16]"
    )
    spec, args, _ = called("kv_write/bf16")
    assert misfit(spec, args, torch.zeros(2)) == (
        "returned float32 [2]; wanted is nothing, and cache written in place"
    )


def test_a_result_has_the_dtype_that_was_asked_for() -> None:
    spec, (x, weight), out = called("gemm/fp32")
    assert misfit(spec, (x, weight, torch.bfloat16), out) == (
        "result 'out' is float32 [3, 200]; wanted is bfloat16 [T, N] = [3, 200]"
    )
    assert misfit(spec, (x, weight, torch.bfloat16), out.bfloat16()) == ""


def test_arguments_may_be_named() -> None:
    spec, (x, weight), out = called("gemm/fp32")
    op = CheckedOp(spec, lambda x, weight, out_dtype=None: out, "theirs")
    assert op(x, weight) is out
    assert op(x, weight, out_dtype=torch.float32) is out
    with pytest.raises(ContractError, match=r"backend 'theirs', op 'gemm' \(.*\): result 'out' is"):
        op(x, weight, out_dtype=torch.bfloat16)


def test_the_norm_may_be_missing_only_without_its_weight() -> None:
    spec, args, (residual, hidden) = called("all_reduce_rms_norm")
    assert "'hidden' is None" in misfit(spec, args, (residual, None))
    without = (*args[:2], None, *args[3:])
    assert misfit(spec, without, (residual, None)) == ""
    assert misfit(spec, without, (residual, hidden)) == ""


def test_meta_tensors_are_enough() -> None:
    """Nothing looks at data."""
    spec, args, result = called("router")
    args = tuple(arg.to("meta") if isinstance(arg, Tensor) else arg for arg in args)
    weights, ids = (one.to("meta") for one in result)
    assert misfit(spec, args, (weights, ids)) == ""
    assert "'ids'" in misfit(spec, args, (weights, ids.int()))
