"""The vision block of params.json: both places, every key, every fault."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest

from ml4core.api import VisionSpec
from ml4core.models.errors import CheckpointError
from ml4core.models.layer_table import build_model_spec
from ml4core.models.pixtral import vision_spec

from .support import BLOCK, WIDTH

WANTED = VisionSpec(
    hidden_size=72,
    layers=3,
    heads=3,
    head_dim=24,
    ffn_width=112,
    patch_size=4,
    channels=3,
    image_size=48,
    rope_theta=1e4,
    spatial_merge_size=2,
    patch_merger=True,
    pre_projector_norm=True,
    adapter_bias=True,
    norm_eps=1e-5,
    output_size=WIDTH,
)


def parse(**changes: Any) -> VisionSpec | None:
    """The spec of `BLOCK` with keys replaced, or taken out where the value is `...`."""
    block = {key: value for key, value in {**BLOCK, **changes}.items() if value is not ...}
    return vision_spec({"vision_encoder": block}, WIDTH, "m/params.json")


def test_both_places_of_the_block() -> None:
    block = dict(BLOCK)
    assert parse() == WANTED
    inner = {"multimodal": {"vision_encoder_args": block}}
    assert vision_spec(inner, WIDTH) == WANTED
    assert vision_spec({**inner, "vision_encoder": block}, WIDTH) == WANTED


@pytest.mark.parametrize(
    "blocks",
    [
        {},
        {"vision_encoder": None},
        {"multimodal": None},
        {"multimodal": {"whisper_model_args": {}}},
        {"multimodal": {"vision_encoder_args": None}},
    ],
)
def test_no_encoder(blocks: dict[str, Any]) -> None:
    assert vision_spec(blocks, WIDTH) is None


def test_the_large_model() -> None:
    path = resources.files("ml4core") / "assets" / "published" / "params.json"
    model = build_model_spec(json.loads(path.read_text("utf-8")))
    assert model.vision is None  # images are not served yet
    spec = vision_spec(model.extras, model.hidden_size)
    assert spec is not None
    assert (spec.layers, spec.heads, spec.head_dim, spec.ffn_width) == (48, 16, 104, 8192)
    assert (spec.cell_size, spec.patch_dim, spec.row_pairs) == (28, 588, 26)
    assert (spec.output_size, spec.adapter_bias, spec.pre_projector_norm) == (6144, False, True)


def test_keys_with_defaults() -> None:
    optional = dict.fromkeys(
        [
            "max_image_size",
            "spatial_merge_size",
            "mm_projector_id",
            "add_pre_mm_projector_layer_norm",
            "adapter_bias",
            "image_token_id",
            "image_break_token_id",
            "image_end_token_id",
        ],
        ...,
    )
    spec = parse(**optional)
    assert spec is not None
    assert (spec.spatial_merge_size, spec.patch_merger, spec.image_size) == (1, False, 48)
    assert (spec.adapter_bias, spec.pre_projector_norm) == (True, False)


def test_merger_follows_the_projector() -> None:
    def merger(**changes: Any) -> tuple[int, bool]:
        spec = parse(**changes)
        assert spec is not None
        return spec.spatial_merge_size, spec.patch_merger

    assert merger(mm_projector_id=...) == (2, True)
    assert merger(spatial_merge_size=1) == (1, True)
    assert merger(spatial_merge_size=1, mm_projector_id="") == (1, False)


def test_the_smaller_limit_of_the_image_size_holds() -> None:
    spec = parse(max_image_size=40)
    assert spec is not None
    assert spec.image_size == 40


def test_token_ids_may_be_left_to_the_tokenizer() -> None:
    assert parse(image_break_token_id=-1, image_end_token_id=-1) == WANTED


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"patch_size": ...}, r"vision_encoder\.patch_size: missing"),
        ({"rope_theta": ...}, r"vision_encoder\.rope_theta: missing"),
        ({"patch_size": 0}, r"vision_encoder\.patch_size: 0; .*greater than or equal to 1"),
        ({"patch_size": 4.0}, r"vision_encoder\.patch_size: 4\.0; .*integer"),
        ({"patch_size": True}, r"vision_encoder\.patch_size: True; .*integer"),
        ({"rope_theta": 1}, r"vision_encoder\.rope_theta: 1; .*greater than 1"),
        ({"adapter_bias": "no"}, r"vision_encoder\.adapter_bias: 'no'; .*boolean"),
        ({"image_token_id": -2}, r"vision_encoder\.image_token_id: -2"),
        ({"mm_projector_id": "mlp"}, r"vision_encoder\.mm_projector_id: 'mlp'; .*'patch_merge'"),
        ({"mm_projector_id": ""}, "mm_projector_id: ''; spatial_merge_size 2 needs 'patch_merge'"),
        ({"hidden_sise": 1}, r"vision_encoder\.hidden_sise: unknown key; accepted: hidden_size, "),
        ({"hidden_size": 75}, r"hidden_size: 75; must be a multiple of .*, 6"),
        ({"max_image_size": 49}, "max_image_size: 49; at most image_size, 48"),
    ],
)
def test_faults_name_key_value_and_cure(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text) as error:
        parse(**changes)
    assert str(error.value).startswith("m/params.json: 1 problem\n")


def test_all_faults_at_once() -> None:
    with pytest.raises(CheckpointError, match="3 problems") as error:
        parse(patch_size=-1, image_size=..., colour=2)
    for key in ("patch_size", "image_size", "colour"):
        assert f"vision_encoder.{key}: " in str(error.value)


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ({"vision_encoder": [1]}, r"vision_encoder: \[1\]; must be an object"),
        ({"multimodal": 3}, "multimodal: 3; must be an object"),
        (
            {"multimodal": {"vision_encoder_args": 3}},
            r"multimodal\.vision_encoder_args: 3; must be an object",
        ),
        (
            {"multimodal": {"vision_encoder_args": {**BLOCK, "patch_size": 0}}},
            r"multimodal\.vision_encoder_args\.patch_size: 0",
        ),
        (
            {"multimodal": {"vision_encoder_args": dict(BLOCK)}, "vision_encoder": {}},
            "vision_encoder: differs from multimodal.vision_encoder_args; leave one out",
        ),
    ],
)
def test_faults_of_the_place(blocks: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        vision_spec(blocks, WIDTH)
