"""Mistral Small 4's decoder: latent attention with q-LoRA, YaRN, llama-4 scaling, experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import LayerSpec, ModelSpec, SSMaxSpec
from ml4core.engine.runner import ModelRunner

from . import judge
from .ours import MIXED_VERIFY_ROWS, Ours, chunks, mixed, one_by_one, run, whole
from .relatives import VOCAB, Relative, mistral4

LENGTHS = (
    23,
    141,
    1,
    77,
    33,
)  # the original context is 64: llama-4 scaling has steps at 64 and 128
STEPS: dict[str, tuple[Any, ...]] = {
    "whole": (whole, {}),
    "chunks": (chunks, {}),
    "one_by_one": (one_by_one, {}),
    "mixed": (mixed, {"verify_rows": MIXED_VERIFY_ROWS}),
    "whole, padded": (whole, {"pad_requests": 7, "pad_rows": 301, "pad_pages": 11}),
    "chunks, padded": (chunks, {"pad_requests": 6, "pad_rows": 160, "pad_pages": 5}),
    "mixed, padded": (
        mixed,
        {"verify_rows": MIXED_VERIFY_ROWS, "pad_requests": 3, "pad_rows": 96, "pad_pages": 10},
    ),
    "one_by_one, padded": (one_by_one, {"pad_requests": 8, "pad_pages": 10}),
}


@dataclass(frozen=True)
class Case:
    relative: Relative
    ours: Ours
    prompts: list[list[int]]
    theirs: list[Tensor]
    """[T, vocab] of each prompt, run alone."""

    def runner(self, **options: Any) -> ModelRunner:
        return self.ours.runner(tokens=max(LENGTHS), sequences=len(LENGTHS), **options)[0]

    def run(self, steps: str, runner: ModelRunner) -> list[Tensor]:
        schedule, padding = STEPS[steps]
        return run(runner, self.prompts, schedule, **padding)


VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "other choices": {
        "apply_scale": True,
        "q_lora_rank": None,
        "dense_layers": 0,
        "renormalize": False,
        "routed_scale": 2.5,
        "tied": True,
        "seed": 1,
    },
}


def _case(variant: str, factory: pytest.TempPathFactory) -> Case:
    relative = mistral4(**VARIANTS[variant])
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    theirs = [judge.logits(relative.model, prompt) for prompt in prompts]
    ours = Ours(relative.save(factory.mktemp("mistral4") / "checkpoint"))
    return Case(relative, ours, prompts, theirs)


@pytest.fixture(scope="module", params=list(VARIANTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return _case(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return _case("as published", tmp_path_factory)


@pytest.mark.parametrize("mla_form", ["absorbed", "unabsorbed"])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("steps", ["whole", "chunks, padded", "mixed"])
def test_logits(case: Case, steps: str, block_size: int, mla_form: str) -> None:
    runner = case.runner(block_size=block_size, mla_form=mla_form)
    judge.assert_equal_logits(case.run(steps, runner), case.theirs)


@pytest.mark.parametrize(
    ("steps", "block_size", "mla_form"),
    [
        ("chunks", 16, "absorbed"),
        ("one_by_one", 16, "absorbed"),
        ("one_by_one, padded", 16, "unabsorbed"),
        ("whole, padded", 16, "unabsorbed"),
        ("whole, padded", 64, "absorbed"),
        ("mixed, padded", 16, "absorbed"),
        ("mixed, padded", 64, "unabsorbed"),
    ],
)
def test_logits_of_other_steps(published: Case, steps: str, block_size: int, mla_form: str) -> None:
    runner = published.runner(block_size=block_size, mla_form=mla_form)
    judge.assert_equal_logits(published.run(steps, runner), published.theirs)


def test_decode_with_its_own_cache(published: Case) -> None:
    """After one prefill both sides decode token by token, each from its own cache."""
    prompt, prefill = published.prompts[1], 39

    def prefill_then_decode(index: int, step: int, left: int) -> int:
        return 1 if step else prefill

    theirs = judge.cached_logits(published.relative.model, prompt, prefill)
    runner, _ = published.ours.runner(tokens=len(prompt), block_size=16)
    judge.assert_equal_logits(run(runner, [prompt], prefill_then_decode), [theirs])


def test_routing_uses_all_experts(published: Case) -> None:
    """Else the comparison would say little about routing."""
    ids: list[Tensor] = []
    handles = [
        layer.mlp.gate.register_forward_hook(lambda module, args, output: ids.append(output[2]))
        for layer in published.relative.model.model.layers[1:]  # type: ignore[union-attr]
    ]
    judge.logits(published.relative.model, published.prompts[1])
    for handle in handles:
        handle.remove()
    for chosen in ids:
        counts = torch.bincount(chosen.flatten(), minlength=16)
        assert int(counts.min()) > 0
        assert int(counts.max()) < len(chosen)


def _each_layer(change: Callable[[LayerSpec], LayerSpec]) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: replace(spec, layers=tuple(change(layer) for layer in spec.layers))


def _rope(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    return _each_layer(lambda layer: replace(layer, rope=replace(layer.rope, **changes)))


def _yarn(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    def change(layer: LayerSpec) -> LayerSpec:
        assert layer.rope is not None
        assert layer.rope.yarn is not None
        return replace(layer, rope=replace(layer.rope, yarn=replace(layer.rope.yarn, **changes)))

    return _each_layer(change)


def _moe(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    return _each_layer(
        lambda layer: replace(layer, moe=replace(layer.moe, **changes) if layer.moe else None)
    )


# Of the table of layers: traits that the checkpoint does not show.
SPEC_FAULTS: dict[str, Callable[[ModelSpec], ModelSpec]] = {
    "rope in halves": _rope(interleaved=False),
    "no YaRN": _rope(yarn=None),
    "YaRN's ramp a pair longer": _yarn(beta_fast=8.0),
    "scale of the latent width": _each_layer(lambda x: replace(x, softmax_scale=96**-0.5)),
    "m^2 in the scale": _each_layer(lambda x: replace(x, softmax_scale=x.softmax_scale * 1.459)),
    "no llama-4 scaling": _each_layer(lambda x: replace(x, ssmax=SSMaxSpec())),
    "llama-4 scaling one position late": _each_layer(
        lambda x: replace(x, ssmax=replace(x.ssmax, original_max_position=65))
    ),
    "epsilon": _each_layer(lambda x: replace(x, norm_eps=1e-3)),
    "router not renormalised": _moe(renormalize=False),
    "routed experts scaled": _moe(routed_scale=1.001),
    "one expert too few": _moe(topk=3),
}
# Of the weights of one layer, as they were laid out.
WEIGHT_FAULTS: dict[str, Callable[[Any], object]] = {
    "shared expert left out": lambda w: w["shared_w2"].data.zero_(),
    "gate and up swapped": lambda w: w["experts_w13"].data.copy_(w["experts_w13"].data.roll(48, 1)),
    "two experts swapped": lambda w: w["gate"].copy_(w["gate"].roll(1, 0)),
    "latent not scaled by its norm's weight": lambda w: w["kv_a_norm"].fill_(1.0),
    "heads of W_UV in another order": lambda w: w["w_uv"].data.copy_(w["w_uv"].data.roll(1, 0)),
    "a frequency a little off": lambda w: w["inv_freq"][2].mul_(1.01),
}


@pytest.mark.parametrize("fault", [*SPEC_FAULTS, *WEIGHT_FAULTS])
def test_each_fault_is_seen(published: Case, fault: str) -> None:
    """The bound separates a right model from one with a single trait wrong."""
    spec = published.ours.spec
    runner = published.runner(spec=SPEC_FAULTS[fault](spec) if fault in SPEC_FAULTS else spec)
    if fault in WEIGHT_FAULTS:
        assert runner.weights is not None
        WEIGHT_FAULTS[fault](runner.weights.layers[1])
    with pytest.raises(AssertionError, match="differs by"):
        judge.assert_equal_logits(published.run("whole", runner), published.theirs)
