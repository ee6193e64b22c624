"""The `mtp` block, and the drafter's tensors, as the drafter's dimensions."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest

from ml4core.api import DraftSpec
from ml4core.models.dspark import draft_spec
from ml4core.models.dspark_names import draft_name, inner_name
from ml4core.models.dspark_weights import expected_draft_tensors
from ml4core.models.errors import CheckpointError
from ml4core.models.layer_table import build_model_spec
from ml4core.models.tensor_names import TensorName

from .checkpoints import MTP, TARGET, params_of, target_of
from .rig import LAYER, draft_of

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def shapes_of(draft: DraftSpec) -> Shapes:
    return {
        name: ("BF16", entry.shapes[0]) for name, entry in expected_draft_tensors(draft).items()
    }


def test_the_published_drafter() -> None:
    text = (resources.files("ml4core") / "assets/published/params.json").read_text("utf-8")
    model = build_model_spec(json.loads(text))
    draft = draft_spec(model)
    assert draft.taps == model.taps == (1, 18, 36, 54, 71)
    assert (draft.depth, draft.mask_rows, draft.anchor_vector) == (3, 2, "none")
    assert (draft.window, draft.window_mode, draft.markov_rank) == (2048, "row", 512)
    assert len(draft.layers) == 3
    for index, layer in enumerate(draft.layers):
        assert (layer.index, layer.kind) == (index, "rope+kv_owner+no_index+dense")
        assert (layer.kv_lora_rank, layer.rope_dim, layer.ssmax.kind) == (512, 64, "none")
    table = {n: entry.shapes for n, entry in expected_draft_tensors(draft, False).items()}
    assert table["mtp_dspark.fc.weight"] == ((6144, 30720),)
    assert table["mtp_dspark.mask_embeddings.weight"] == ((2, 6144),)
    assert table["mtp_dspark.markov_head.joint_proj.weight"] == ((1536, 7168),)
    assert table["mtp_dspark.markov_head.joint_proj.bias"] == ((1536,),)
    assert table["mtp_dspark.markov_head.w1.weight"] == ((model.vocab_size, 512),)
    assert "mtp_dspark.layers.2.attention.wkv_a_with_mqa.weight" in table
    assert not [name for name in table if "tok_embeddings" in name or "output" in name]


def test_what_is_not_stated_is_on_the_record() -> None:
    record = draft_spec(target_of()).assumptions
    assert set(record) >= {"A18/mtp.mask_rows", "A18/mtp.window_mode", "A18/mtp.rope_theta"}
    assert not set(record) & {f"A18/mtp.{key}" for key in MTP}
    assert record["A18/mtp.mask_rows"] == (
        "2: not stated; the default. Checked by: rows of mask_embeddings"
    )
    assert record["A18/mtp.v_head_dim"].startswith("10: not stated; as the target. ")


STATED: dict[str, tuple[Any, str, Any]] = {
    "sliding_window": (9, "window", 9),
    "window_mode": ("block", "window_mode", "block"),
    "depth": (5, "depth", 5),
    "mask_rows": (3, "anchor_vector", "add"),
    "head_input": ("residual", "normed_head_input", False),
    "norm_eps": (1e-4, "norm_eps", 1e-4),
}


@pytest.mark.parametrize(("key", "case"), STATED.items(), ids=STATED.keys())
def test_each_key_is_followed(key: str, case: tuple[Any, str, Any]) -> None:
    value, name, wanted = case
    draft = draft_spec(target_of(**{key: value}))
    assert getattr(draft, name) == wanted
    assert f"A18/mtp.{key}" not in draft.assumptions


def test_keys_of_the_layers_are_followed() -> None:
    stated = {
        "n_heads": 4,
        "q_lora_rank": 11,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 7,
        "qk_rope_head_dim": 6,
        "v_head_dim": 9,
        "hidden_dim": 33,
        "rope_theta": 500.0,
        "rope_interleave": False,
        "yarn": None,
        "lerope": None,
    }
    layer = draft_spec(target_of(**stated)).layers[1]
    assert layer.rope is not None
    assert (layer.heads, layer.q_lora_rank, layer.kv_lora_rank) == (4, 11, 24)
    assert (layer.nope_dim, layer.rope_dim, layer.v_dim, layer.dense_width) == (7, 6, 9, 33)
    assert layer.softmax_scale == 13**-0.5
    assert layer.rope == replace(
        layer.rope, dim=6, theta=500.0, interleaved=False, yarn=None, lerope="none"
    )


def test_rope_follows_the_target() -> None:
    target = target_of()
    rope = draft_spec(target).layers[0].rope
    assert rope == target.layers[0].rope
    assert rope is not None
    assert (rope.lerope, rope.lerope_scope) == ("multiplier", "global")
    own = draft_spec(target_of(lerope={"storage": "log", "scope": "layer"})).layers[0].rope
    assert own is not None
    assert (own.lerope, own.lerope_scope) == ("log", "layer")
    stretched = draft_spec(target_of(yarn={"factor": 2.0})).layers[0].rope
    assert stretched is not None
    assert stretched.yarn is not None
    assert (stretched.yarn.factor, stretched.yarn.original_max_position) == (2.0, 1024)


OPEN = ("n_layers", "markov_rank", "hidden_dim", "v_head_dim", "kv_lora_rank", "mask_rows")


@pytest.mark.parametrize(
    "fields",
    [
        {"v_head_dim": 9, "kv_lora_rank": 24, "mask_rows": 3, "qk_nope_head_dim": 7},
        {"q_lora_rank": 11, "qk_rope_head_dim": 6, "n_layers": 4},
        {"lerope": {"storage": "multiplier", "scope": "layer"}},
    ],
)
def test_what_is_left_open_is_taken_from_the_tensors(fields: dict[str, Any]) -> None:
    stated = draft_spec(target_of(**fields))
    tensors = shapes_of(stated)
    seen = draft_spec(target_of(**dict.fromkeys((*OPEN, *fields), ...)), tensors)
    assert seen == stated or replace(seen, assumptions=stated.assumptions) == stated
    for key in fields:
        assert f"mtp.{key}" in " ".join(seen.assumptions)


def test_a_target_with_q_lora_and_a_drafter_without() -> None:
    model = build_model_spec(replace(TARGET, q_lora_rank=13).params() | {"mtp": dict(MTP)})
    assert draft_spec(model).layers[0].q_lora_rank == 13
    assert draft_spec(target_of(q_lora_rank=None)).layers[0].q_lora_rank is None
    plain = shapes_of(draft_spec(target_of()))
    assert draft_spec(model, plain).layers[0].q_lora_rank is None


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"sliding_windw": 5}, "mtp.sliding_windw: unknown key; did you mean sliding_w"),
    "experts": ({"moe": {"num_experts": 4}}, "mtp.moe: unknown key"),
    "depth 0": ({"depth": 0}, "mtp.depth: 0; must be 1 or more"),
    "too many layers": ({"n_layers": 10**12}, "mtp.n_layers: 1000000000000; must be at most 1000"),
    "depth as text": ({"depth": "3"}, "mtp.depth: '3'; must be a whole number"),
    "mode": ({"window_mode": "both"}, "mtp.window_mode: 'both'; must be one of 'row' or 'block'"),
    "head": ({"markov_head": "gated"}, "mtp.markov_head: 'gated'; must be one of 'rnn'"),
    "inner key": ({"yarn": {"factor": 2.0, "betta": 1}}, "mtp.yarn.betta: unknown key; did you m"),
    "width": ({"dim": 64}, "mtp.dim: 64; the target's dim is 48"),
    "vocabulary": ({"vocab_size": 8}, "mtp.vocab_size: 8; the target's vocab_size is 80"),
    "no taps": ({"target_layers": ...}, "mtp.target_layers: None; the target's layers whose"),
    "too few vectors": ({"mask_rows": 1}, "mtp.mask_rows: 1; a depth of 3 has 2 learned vectors"),
    "too many vectors": ({"mask_rows": 4}, "mtp.mask_rows: 4; a depth of 3 has 2 learned vectors"),
    "own vector": ({"anchor_vector": "add"}, "mtp.anchor_vector: 'add'; with 2 learned vectors"),
    "its absence": (
        {"mask_rows": 3, "anchor_vector": "none"},
        "mtp.anchor_vector: 'none'; with 3 learned vectors for a depth of 3",
    ),
    "odd rope": ({"qk_rope_head_dim": 5}, "mtp.qk_rope_head_dim: 5 is odd"),
}


@pytest.mark.parametrize(("mtp", "message"), WRONG.values(), ids=WRONG.keys())
def test_each_fault_is_named(mtp: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        draft_spec(target_of(**mtp), where="here/params.json")
    assert "here/params.json: 1 problem" in str(caught.value)
    assert message in str(caught.value)


def test_all_faults_are_in_one_error() -> None:
    with pytest.raises(CheckpointError) as caught:
        draft_spec(target_of(dim=64, vocab_size=8, mask_rows=9))
    assert "3 problems" in str(caught.value)
    with pytest.raises(CheckpointError, match="2 problems"):
        draft_spec(target_of(depth=0, sliding_window=-1))


def test_taps_must_be_layers_of_the_target() -> None:
    model = target_of()
    short = replace(model, layers=model.layers[:3])
    with pytest.raises(
        CheckpointError, match=r"mtp.target_layers: \[0, 3\]; the target has layers 0 to 2"
    ):
        draft_spec(short)
    twice = replace(model, extras={"mtp": MTP | {"target_layers": [1, 1]}})
    with pytest.raises(CheckpointError, match=r"mtp.target_layers: \[1, 1\] names a layer twice"):
        draft_spec(twice)
    both = replace(model, extras={"mtp": MTP | {"taps": [1]}})
    with pytest.raises(CheckpointError, match=r"mtp\.taps: differs from"):
        draft_spec(both)


def test_taps_is_another_name() -> None:
    assert draft_spec(target_of(target_layers=..., taps=[3, 1])).taps == (3, 1)


@pytest.mark.parametrize(("block", "message"), [(None, "mtp: missing"), ([1], r"mtp: \[1\]; must")])
def test_no_block(block: Any, message: str) -> None:
    model = replace(target_of(), extras={} if block is None else {"mtp": block})
    with pytest.raises(CheckpointError, match=message):
        draft_spec(model)


MISFIT: dict[str, tuple[str, tuple[int, int], str]] = {
    "width": (
        "fc.weight",
        (64, 128),
        "mtp_dspark.fc.weight [64, 128]: for a dim of 64; the target's",
    ),
    "vocabulary": (
        "markov_head.w1.weight",
        (96, 5),
        "mtp_dspark.markov_head.w1.weight [96, 5]: for a vocab_size of 96; the target's vocab_size",
    ),
    "taps": (
        "fc.weight",
        (48, 144),
        "mtp.target_layers: [0, 3] are 2 layers, but mtp_dspark.fc.weight [48, 144] joins 3",
    ),
}


@pytest.mark.parametrize(("name", "shape", "message"), MISFIT.values(), ids=MISFIT.keys())
def test_a_drafter_of_another_target_is_refused(
    name: str, shape: tuple[int, int], message: str
) -> None:
    tensors = shapes_of(draft_spec(target_of()))
    tensors["mtp_dspark." + name] = ("BF16", shape)
    with pytest.raises(CheckpointError) as caught:
        draft_spec(target_of(), tensors)
    assert message in str(caught.value)


def test_names() -> None:
    inner = {
        "fc.weight": ("fc", "weight"),
        "context_proj.weight_scale": ("fc", "weight_scale"),
        "hidden_norm.weight": ("context_norm", "weight"),
        "mask_embeddings": ("mask_embeddings", "weight"),
        "markov_head.w1": ("markov_head.w1", "weight"),
        "markov_head.joint_proj.weight": ("markov_head.joint_proj", "weight"),
        "markov_head.joint_proj.bias": ("markov_head.joint_proj.bias", ""),
        "layers.1.self_attn.q_proj.weight": ("layers.1.attention.wq", "weight"),
        "norm.weight": ("norm", "weight"),
        "rope_freqs": ("rope_freqs", ""),
    }
    for name, (stem, suffix) in inner.items():
        assert inner_name(f"mtp_dspark.{name}") == TensorName(stem, suffix)
        assert draft_name(f"mtp_dspark.{name}") == TensorName(f"mtp_dspark.{stem}", suffix)
    for name in ("norm.weight", "mtp_dspark.fc.bias", "mtp_dspark.markov_head.w3.weight"):
        assert inner_name(name) is draft_name(name) is None


BAD_SPECS: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": ({"layers": 0}, "layers of the drafter is empty"),
    "no taps": ({"taps": ()}, "taps of the drafter is empty"),
    "depth": ({"depth": 0}, "depth of the drafter is 0; it must be 1 or more"),
    "window": ({"window": 0}, "window of the drafter is 0; it must be 1 or more"),
    "rank": ({"markov_rank": 0}, "markov_rank of the drafter is 0"),
    "head": ({"head": "gated"}, "head of the drafter is 'gated'; known: rnn"),
    "mode": ({"window_mode": "A"}, "window_mode of the drafter is 'A'; known: row, block"),
    "vectors": ({"depth": 4, "mask_rows": 2}, "mask_rows of the drafter is 2; a depth of 4 with"),
    "own vector": ({"anchor_vector": "add", "mask_rows": 2}, "anchor_vector 'add' needs 3"),
    "selection": ({"layer": replace(LAYER, topk_source=0)}, "draft layer 0 has index, kv_source"),
    "width": ({"layer": replace(LAYER, hidden_size=8)}, "draft layer 0 has hidden_size 8"),
}


@pytest.mark.parametrize(("fields", "message"), BAD_SPECS.values(), ids=BAD_SPECS.keys())
def test_a_spec_that_can_not_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draft_of(**fields)


def test_draft_layers_share_a_layout() -> None:
    layers = draft_of(2).layers
    with pytest.raises(ValueError, match="draft layer 1 has rows of 8"):
        replace(draft_of(2), layers=(layers[0], replace(layers[1], kv_lora_rank=8)))


def test_a_shorter_block_of_the_same_drafter() -> None:
    draft = draft_spec(target_of())
    assert replace(draft, depth=2).mask_rows == 2
    with pytest.raises(ValueError, match="mask_rows"):
        replace(draft, depth=4)


def test_the_text_path_asks_nothing_of_the_block() -> None:
    assert build_model_spec(params_of(anything=1)).draft is None
