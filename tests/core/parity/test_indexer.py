"""DSA indexers of DeepSeek V3.2 and GLM 5: the keys that they select, and the models' logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import IndexerSpec, ModelSpec

from . import judge
from .ours import Ours, Tapped, by_layer, mixed, run, whole
from .relatives import VOCAB, Relative, deepseek_v32, glm_moe_dsa

SHARING = ("full", "shared", "full", "shared", "shared", "full")
MODELS: Mapping[str, Callable[..., Relative]] = {
    "deepseek_v32": deepseek_v32,
    "glm_moe_dsa": glm_moe_dsa,
}
SEEDS: Mapping[str, int] = {"deepseek_v32": 8, "glm_moe_dsa": 11}
"""Of the cases of logits: weights with which no selection is a tie."""


@dataclass(frozen=True)
class Case:
    ours: Ours
    prompts: list[list[int]]
    theirs: list[judge.Sparse]
    """Of each prompt, run alone."""

    def run(
        self, schedule: Any = whole, *, forced: bool = False, **options: Any
    ) -> tuple[list[Tensor], Tapped]:
        """Logits, and what was selected. ``forced``: each layer attends as the reference does."""
        tokens = max(map(len, self.prompts))
        runner, tapped = self.ours.runner(tokens=tokens, sequences=len(self.prompts), **options)
        if forced:
            tapped.answers = {n: call.topk for n, call in self.indexers.items()}
        return run(runner, self.prompts, schedule), tapped

    @property
    def indexers(self) -> dict[int, judge.IndexerCall]:
        """By layer, of a case with one prompt."""
        (theirs,) = self.theirs
        return theirs.indexers

    def assert_equal_logits(self, ours: list[Tensor]) -> None:
        """The comparison is fair only where no selection hangs on rounding."""
        for theirs in self.theirs:
            for call in theirs.indexers.values():
                assert judge.boundary_gap(call) > 5, "a tie decides this case: choose another seed"
        judge.assert_equal_logits(ours, [theirs.logits for theirs in self.theirs])


def _case(relative: Relative, lengths: tuple[int, ...], folder: Any, writer: str = "save") -> Case:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]
    theirs = [judge.sparse_run(relative.model, prompt) for prompt in prompts]
    return Case(Ours(getattr(relative, writer)(folder)), prompts, theirs)


@pytest.fixture(scope="module", params=list(MODELS))
def long(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """700 tokens, of which 64 are selected."""
    relative = MODELS[request.param](topk=64)
    return _case(relative, (700,), tmp_path_factory.mktemp("long") / "checkpoint")


@pytest.fixture(scope="module", params=list(MODELS))
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """700 tokens, of which 128 are selected."""
    relative = MODELS[request.param](topk=128)
    return _case(relative, (700,), tmp_path_factory.mktemp("wide") / "checkpoint")


@pytest.fixture(scope="module", params=list(MODELS))
def short(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Up to 151 tokens, of which 24 are selected; a checkpoint by Hugging Face's writer."""
    relative = MODELS[request.param](topk=24, seed=SEEDS[request.param])
    folder = tmp_path_factory.mktemp("short")
    return _case(relative, (151, 37, 9, 90), folder, "save_pretrained")


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Case:
    relative = glm_moe_dsa(topk=24, types=SHARING, seed=1)
    return _case(relative, (110,), tmp_path_factory.mktemp("sharing") / "checkpoint")


@pytest.mark.parametrize(("schedule", "block_size"), [(whole, 64), (mixed, 16)])
def test_selection(long: Case, schedule: Any, block_size: int) -> None:
    """Every layer selects the reference's keys; within the tie margin another may stand in."""
    _, tapped = long.run(schedule, forced=True, block_size=block_size)
    found = by_layer(tapped.selections)
    assert set(found) == set(long.indexers) == {0, 1}
    for layer, call in long.indexers.items():
        swapped = judge.assert_equal_selection(found[layer], call)
        assert swapped <= 4, f"layer {layer}: ties are rare in this case, {swapped} keys differ"


@pytest.mark.parametrize("layout", ["planar_f32", "tiled16_f32"])
def test_selection_from_fp8_keys(wide: Case, layout: str) -> None:
    _, tapped = wide.run(forced=True, index=layout)
    found = by_layer(tapped.selections)
    for layer, call in wide.indexers.items():
        shares = judge.overlap(found[layer], call)
        assert float(shares.mean()) >= 0.99, f"layer {layer}"
        assert float(shares.min()) >= 0.9, f"layer {layer}"


@pytest.mark.parametrize("mla_form", ["absorbed", "unabsorbed"])
@pytest.mark.parametrize(("schedule", "block_size"), [(whole, 16), (mixed, 64)])
def test_logits(short: Case, schedule: Any, block_size: int, mla_form: str) -> None:
    logits, _ = short.run(schedule, block_size=block_size, mla_form=mla_form)
    short.assert_equal_logits(logits)


@pytest.mark.parametrize("mla_form", ["absorbed", "unabsorbed"])
def test_logits_with_shared_selections(sharing: Case, mla_form: str) -> None:
    logits, tapped = sharing.run(mixed, block_size=16, mla_form=mla_form)
    sharing.assert_equal_logits(logits)
    assert set(by_layer(tapped.selections)) == {0, 2, 5}


def test_sharers_attend_as_the_owner_before_them(sharing: Case) -> None:
    _, tapped = sharing.run(mixed, block_size=16)
    attended = by_layer(tapped.attended)
    selected = by_layer(tapped.selections)
    (theirs,) = sharing.theirs
    for layer, owner in enumerate((0, 0, 2, 2, 2, 5)):
        assert torch.equal(attended[layer], selected[owner]), f"layer {layer}"
        call = judge.IndexerCall(theirs.indexers[owner].scores, theirs.attended[layer])
        judge.assert_equal_selection(attended[layer], call)
    assert not torch.equal(selected[0], selected[2])


def _indexers(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    def change(indexer: IndexerSpec | None) -> IndexerSpec | None:
        return replace(indexer, **changes) if indexer is not None else None

    return lambda spec: replace(
        spec, layers=tuple(replace(x, indexer=change(x.indexer)) for x in spec.layers)
    )


SPEC_FAULTS: dict[str, Callable[[ModelSpec], ModelSpec]] = {
    "rope of the indexer not as trained": lambda spec: _indexers(
        rope_interleaved=not spec.layers[0].indexer.rope_interleaved  # type: ignore[union-attr]
    )(spec),
    "no rope in the indexer": _indexers(rope_dim=0),
    "one key too few": _indexers(topk=63),
}
WEIGHT_FAULTS: dict[str, Callable[[Any], object]] = {
    "no bias in the key's norm": lambda w: w["index_k_norm_bias"].zero_(),
    "negative head weights clamped": lambda w: w["index_weights_proj"].data.abs_(),
    "heads of the query in another order": lambda w: w["index_wq"].data.copy_(
        w["index_wq"].data.roll(128, 0)
    ),
}


@pytest.mark.parametrize("fault", [*SPEC_FAULTS, *WEIGHT_FAULTS])
def test_each_fault_is_seen(long: Case, fault: str) -> None:
    """A single trait wrong makes a selection that ties can't explain."""
    spec = long.ours.spec
    spec = SPEC_FAULTS[fault](spec) if fault in SPEC_FAULTS else spec
    (prompt,) = long.prompts
    runner, tapped = long.ours.runner(tokens=len(prompt), spec=spec)
    if fault in WEIGHT_FAULTS:
        assert runner.weights is not None
        WEIGHT_FAULTS[fault](runner.weights.layers[0])
    run(runner, [prompt])
    found = by_layer(tapped.selections)[0]
    with pytest.raises(AssertionError):
        judge.assert_equal_selection(found, long.indexers[0])
