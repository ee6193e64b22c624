"""A drafter's tensors: compared by name and shape, and read as the weights that the stage takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import DRAFT_WEIGHTS, DraftWeights, LayerSpec, ModelSpec, Weight
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.dspark import with_drafter
from ml4core.models.dspark_weights import load_draft, validate_draft
from ml4core.models.errors import CheckpointError
from ml4core.models.rope_freqs import inv_freq
from ml4core.models.tensors import load_model_spec, validate
from ml4core.models.weights import load_layers

from .checkpoints import params_of, tensors_of, write
from .reference import Reference
from .rig import Rig, check

Tensors = dict[str, Tensor]
PARAMS = params_of()
P = "mtp_dspark."


def opened(folder: Path, tensors: Tensors, params: Any = PARAMS) -> tuple[Checkpoint, ModelSpec]:
    checkpoint = Checkpoint.open(write(folder / "m", params, tensors))
    return checkpoint, with_drafter(checkpoint, load_model_spec(checkpoint))


def load(
    checkpoint: Checkpoint, model: ModelSpec, dtype: torch.dtype = torch.bfloat16
) -> DraftWeights:
    assert model.draft is not None
    (first, top), *layers = load_draft(checkpoint, model.draft, dtype)
    assert first is None
    assert [layer for layer, _ in layers] == list(model.draft.layers)
    return DraftWeights(top, tuple(weights for _, weights in layers))


@pytest.fixture
def tensors() -> Tensors:
    return tensors_of(PARAMS)


def test_every_weight_is_what_lies_in_the_file(tmp_path: Path, tensors: Tensors) -> None:
    checkpoint, model = opened(tmp_path, tensors)
    weights = load(checkpoint, model)
    named = {
        "fc": "fc.weight",
        "context_norm": "context_norm.weight",
        "mask_embeddings": "mask_embeddings.weight",
        "norm": "norm.weight",
        "markov_w1": "markov_head.w1.weight",
        "markov_joint": "markov_head.joint_proj.weight",
        "markov_joint_bias": "markov_head.joint_proj.bias",
        "markov_w2": "markov_head.w2.weight",
    }
    assert weights.top.keys() == named.keys() == DRAFT_WEIGHTS.keys() - {"embedding", "output"}
    for role, name in named.items():
        value = weights.top[role]
        assert isinstance(value, Weight) == DRAFT_WEIGHTS[role].startswith("Weight")
        assert torch.equal(value.data if isinstance(value, Weight) else value, tensors[P + name])
    for n, layer in enumerate(weights.layers):
        prefix = f"{P}layers.{n}."
        assert torch.equal(layer["wq"].data, tensors[prefix + "attention.wq.weight"])
        assert torch.equal(layer["wkv_a"].data, tensors[prefix + "attention.wkv_a_with_mqa.weight"])
        heads = tensors[prefix + "attention.wkv_b.weight"].view(3, 16, 32)
        assert torch.equal(layer["w_uk"].data, heads[:, :6].transpose(1, 2))
        assert torch.equal(layer["w_uv"].data, heads[:, 6:])
        both = [tensors[f"{prefix}feed_forward.{w}.weight"] for w in ("w1", "w3")]
        assert torch.equal(layer["dense_w13"].data, torch.cat(both))


def test_a_loaded_drafter_drafts(tmp_path: Path, tensors: Tensors) -> None:
    checkpoint, model = opened(tmp_path, tensors)
    assert model.draft is not None
    assert model.taps == model.draft.taps == (0, 3)
    _, target = next(iter(load_layers(checkpoint, model)))
    loaded = load(checkpoint, model)
    rig = Rig(model.draft, torch.bfloat16)
    shared = {name: target[name] for name in ("embedding", "output")}
    rig.weights = DraftWeights({**loaded.top, **shared}, loaded.layers)
    rig.reference = Reference(model.draft, rig.weights)
    requests = rig.requests(0, 5, 13)
    check(rig, requests, rig.run(requests), 0.05)


@pytest.mark.parametrize("own", [False, True])
def test_learned_frequencies_are_its_own_or_the_targets(tmp_path: Path, own: bool) -> None:
    tensors = tensors_of(PARAMS, own_frequencies=own)
    assert (f"{P}rope_freqs" in tensors) == own
    checkpoint, model = opened(tmp_path, tensors)
    layer = load(checkpoint, model).layers[1]
    learned = tensors[f"{P}rope_freqs" if own else "rope_freqs"].float()
    rope = model.layers[0].rope
    assert rope is not None
    assert torch.equal(layer["inv_freq"], inv_freq(rope, learned))
    assert not torch.equal(layer["inv_freq"], inv_freq(rope, torch.ones(4)))


def test_no_learned_frequencies_anywhere(tmp_path: Path, tensors: Tensors) -> None:
    del tensors["rope_freqs"]
    checkpoint, model = opened(tmp_path, tensors)
    assert model.draft is not None
    with pytest.raises(CheckpointError, match=r"mtp_dspark.rope_freqs \[4\]"):
        validate_draft(checkpoint, model.draft)


def test_other_spellings(tmp_path: Path, tensors: Tensors) -> None:
    wanted = load(*opened(tmp_path / "a", tensors))
    spelt = {
        name.replace(f"{P}fc.", f"{P}context_proj.")
        .replace("mask_embeddings.weight", "mask_embeddings")
        .replace("markov_head.w1.weight", "markov_head.w1")
        .replace(f"{P}layers.0.attention.wkv_b", f"{P}layers.0.self_attn.kv_b_proj"): tensor
        for name, tensor in tensors.items()
    }
    assert len(set(spelt) - set(tensors)) == 4
    got = load(*opened(tmp_path / "b", spelt))
    for role, value in wanted.top.items():
        plain = value.data if isinstance(value, Weight) else value
        other = got.top[role]
        assert torch.equal(plain, other.data if isinstance(other, Weight) else other)
    assert torch.equal(wanted.layers[0]["w_uv"].data, got.layers[0]["w_uv"].data)


def edit_missing(tensors: Tensors) -> None:
    del tensors[f"{P}layers.1.attention.kv_a_norm.weight"]
    del tensors[f"{P}markov_head.w2.weight"]


def edit_unknown(tensors: Tensors) -> None:
    tensors[f"{P}confidence_head.weight"] = torch.zeros(1, 53)
    tensors[f"{P}layers.0.attention.indexer.wk.weight"] = torch.zeros(4, 48)
    tensors[f"{P}output.weight"] = torch.zeros(80, 48)


def edit_misshapen(tensors: Tensors) -> None:
    tensors[f"{P}markov_head.joint_proj.weight"] = torch.zeros(15, 57)
    tensors[f"{P}norm.weight"] = torch.zeros(47)


def edit_twice(tensors: Tensors) -> None:
    tensors[f"{P}hidden_norm.weight"] = torch.zeros(48)


def edit_unsupported(tensors: Tensors) -> None:
    tensors[f"{P}markov_head.w1.weight"] = torch.zeros(80, 5, dtype=torch.int64)


EDITS = {
    edit_missing: (
        "2 missing",
        "mtp_dspark.layers.1.attention.kv_a_norm.weight [32]",
        "mtp_dspark.markov_head.w2.weight [80, 5] = vocab_size x markov_rank",
    ),
    edit_unknown: (
        "3 unknown",
        "mtp_dspark.confidence_head.weight",
        "mtp_dspark.layers.0.attention.indexer.wk.weight [4, 48]",
        "mtp_dspark.output.weight [80, 48]",
    ),
    edit_misshapen: (
        "2 misshapen",
        "mtp_dspark.markov_head.joint_proj.weight: [15, 57], wanted [15, 58]",
        "mtp_dspark.norm.weight: [47], wanted [48] = dim",
    ),
    edit_twice: ("1 duplicate", "mtp_dspark.hidden_norm.weight and mtp_dspark.context_norm.weight"),
    edit_unsupported: ("1 unsupported", "mtp_dspark.markov_head.w1.weight: I64"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_tensors_that_do_not_fit_are_listed(edit: Any, tmp_path: Path, tensors: Tensors) -> None:
    edit(tensors)
    checkpoint, model = opened(tmp_path, tensors)
    assert model.draft is not None
    with pytest.raises(CheckpointError) as caught:
        load_draft(checkpoint, model.draft)
    for text in ("m: drafter: ", *EDITS[edit]):
        assert text in str(caught.value)
    # The decoder is not concerned.
    assert validate(checkpoint, model).unused_parts["drafter"][0] > 0


def test_to_the_decoder_the_drafter_is_an_unused_part(tmp_path: Path, tensors: Tensors) -> None:
    checkpoint, model = opened(tmp_path, tensors)
    count = sum(name.startswith(P) for name in tensors)
    plain = load_model_spec(checkpoint)
    assert plain.draft is None
    assert validate(checkpoint, plain).unused_parts["drafter"][0] == count
    with_it = [layer for layer, _ in load_layers(checkpoint, model)]
    assert with_it == [None, *plain.layers]


def test_a_checkpoint_without_its_drafter(tmp_path: Path, tensors: Tensors) -> None:
    without = {name: tensor for name, tensor in tensors.items() if not name.startswith(P)}
    with pytest.raises(CheckpointError, match=r"no tensor mtp_dspark\.\* is there"):
        opened(tmp_path, without)


def test_progress_counts_the_drafters_bytes(tmp_path: Path, tensors: Tensors) -> None:
    checkpoint, model = opened(tmp_path, tensors)
    assert model.draft is not None
    seen: list[tuple[int, int]] = []
    layers: list[LayerSpec | None] = []
    for layer, _ in load_draft(checkpoint, model.draft, progress=lambda *done: seen.append(done)):
        layers.append(layer)
    size = sum(t.nbytes for name, t in tensors.items() if name.startswith(P))
    assert seen[-1] == (size, size)
    with pytest.raises(ValueError, match=r"dtype torch\.float16"):
        load_draft(checkpoint, model.draft, torch.float16)
