"""Each corner that a contract names is tried by name, and each op is composed."""

from __future__ import annotations

import pytest

from ml4core.api import OPS
from ml4core.compose.ops import COMPOSED

from . import (
    test_attention,
    test_gemms,
    test_indexer,
    test_kv,
    test_moe,
    test_norms,
    test_positions,
    test_sampling,
    test_topk,
    test_verify,
    test_window,
)

TRIED = {
    op: set(corners)
    for module in (
        test_attention,
        test_gemms,
        test_indexer,
        test_kv,
        test_moe,
        test_norms,
        test_positions,
        test_sampling,
        test_topk,
        test_verify,
        test_window,
    )
    for op, corners in module.CORNERS.items()
}


def test_every_op_is_composed() -> None:
    assert set(COMPOSED) == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_every_corner_is_tried(op: str) -> None:
    assert TRIED[op] == set(OPS[op].corners)


@pytest.mark.parametrize("op", OPS)
def test_arguments_have_the_names_and_order_of_the_contract(op: str) -> None:
    code = COMPOSED[op].__code__
    assert code.co_varnames[: code.co_argcount] == tuple(arg.name for arg in OPS[op].args)
