"""The oracle of stages and models: properties that no implementation is needed for."""

from __future__ import annotations

import pytest
import torch

from ml4core_conformance import tiny
from ml4core_conformance.oracle.draft import DraftOracle
from ml4core_conformance.oracle.model import ModelOracle, select
from ml4core_conformance.oracle.stages import Rounding, attend, hadamard

IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19]


@pytest.fixture(scope="module")
def oracle() -> ModelOracle:
    spec = tiny.model()
    dense = tiny.weights(spec, 0)
    return ModelOracle(spec, dense.top, dense.layers)


def test_pattern_is_the_one_written_out() -> None:
    spec = tiny.model()
    assert spec.kv_owners == tiny.KV_OWNERS
    assert spec.index_owners == tiny.INDEX_OWNERS
    assert {layer.index: layer.topk_source for layer in spec.layers} == tiny.SOURCES
    assert spec.layers[7].kv_source == 3
    assert [layer.index for layer in spec.layers if layer.rope is None] == [3, 7]


def test_later_tokens_change_no_earlier_row(oracle: ModelOracle) -> None:
    whole, part = oracle.run(IDS).logits, oracle.run(IDS[:11]).logits
    torch.testing.assert_close(whole[:11], part, rtol=1e-12, atol=1e-12)


def test_another_owners_selection_moves_logits() -> None:
    spec = tiny.model()
    dense = tiny.weights(spec, 0)
    right = ModelOracle(spec, dense.top, dense.layers).run(IDS).logits
    wrong = ModelOracle(spec, dense.top, dense.layers, sources={5: 1, 6: 1}).run(IDS).logits
    # Up to topk keys every selection is all of them.
    topk = tiny.CONFIG.topk
    torch.testing.assert_close(right[:topk], wrong[:topk])
    assert (right[topk:] - wrong[topk:]).abs().max() > 0.1


def test_twin_is_near_and_not_equal() -> None:
    spec = tiny.model(topk=64, experts=4, experts_per_token=4)
    dense = tiny.weights(spec, 0)
    exact = ModelOracle(spec, dense.top, dense.layers).run(IDS).logits
    twin = ModelOracle(spec, dense.top, dense.layers, rounding=Rounding(torch.bfloat16)).run(IDS)
    error = (twin.logits - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.1


def test_selection_takes_ties_from_the_front() -> None:
    causal = torch.ones(3, 3, dtype=torch.bool).tril()
    chosen, margin = select(torch.ones(3, 3, dtype=torch.float64), causal, 2)
    assert chosen.tolist() == [[True, False, False], [True, True, False], [True, True, False]]
    assert margin == 0


def test_unseen_rows_may_hold_anything() -> None:
    q, rows = torch.randn(2, 1, 4).double(), torch.randn(3, 4).double()
    rows[1] = torch.nan
    mask = torch.tensor([[True, False, True], [False, False, False]])
    out, lse = attend(q, rows, mask, 0.5, 3)
    weights = torch.softmax(0.5 * (q[0] @ rows[[0, 2]].T), -1)
    torch.testing.assert_close(out[0], weights @ rows[[0, 2], :3])
    assert not out[1].any()
    assert lse[1].item() == -torch.inf


def test_hadamard_is_orthogonal() -> None:
    x = torch.eye(8, dtype=torch.float64)
    torch.testing.assert_close(hadamard(x) @ hadamard(x).T, x)


@pytest.mark.parametrize(
    ("changes", "first", "last"),
    [
        ({"window": 4}, [7, 8, 9, 10, 11, 12], [9, 10, 11, 12]),
        ({"window": 4, "window_mode": "block"}, [6, 7, 8, 9, 10, 11, 12], [*range(6, 13)]),
        ({"window": None}, [*range(13)], [*range(13)]),
    ],
)
def test_windows_of_a_block(changes: dict, first: list[int], last: list[int]) -> None:
    spec = tiny.drafter(tiny.model(), **changes)
    dense = tiny.weights(spec, 0)
    weights = tiny.draft_weights(spec, 0, torch.float32, dense.top)
    assert spec.draft is not None
    seen = DraftOracle(spec.draft, weights).sees(10)
    assert seen[0].nonzero().flatten().tolist() == first
    assert seen[2].nonzero().flatten().tolist() == last
