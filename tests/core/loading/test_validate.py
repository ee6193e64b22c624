"""A checkpoint that lacks a tensor, has one too many, or misshapes one is refused, by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml4core.api import ModelSpec
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.errors import CheckpointError
from ml4core.models.layer_table import build_model_spec
from ml4core.models.safetensors_file import TensorInfo
from ml4core.models.seeded_config import PRESETS, SeededConfig
from ml4core.models.tensors import format_counts, load_model_spec, validate

Headers = dict[str, TensorInfo]
MakeHeaders = Callable[..., Headers]
MakeInfo = Callable[[str, str, tuple[int, ...]], TensorInfo]


def check(tensors: Headers, spec: ModelSpec) -> Any:
    return validate(Checkpoint(Path("/models/m"), tensors), spec)


def refusal(tensors: Headers, spec: ModelSpec) -> str:
    with pytest.raises(CheckpointError) as caught:
        check(tensors, spec)
    message = str(caught.value)
    assert message.startswith("/models/m: the tensors are not those of the model in params.json: ")
    return message


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("quantised", [False, True])
def test_right_checkpoints_pass(preset: str, quantised: bool, make_headers: MakeHeaders) -> None:
    spec = build_model_spec(PRESETS[preset].params())
    tensors = make_headers(spec, quantised)
    report = check(tensors, spec)
    assert report.nbytes == sum(info.nbytes for info in tensors.values())
    assert report.formats == ({"bf16", "fp8_block"} if quantised else {"bf16"})
    assert report.notes == ()
    assert sum(count for count, _ in format_counts(report).values()) == len(report.matrices)


@pytest.mark.parametrize("quantised", [False, True])
def test_each_tensor_is_missed(spec: ModelSpec, quantised: bool, make_headers: MakeHeaders) -> None:
    # B080: of quantised checkpoints too, scales too.
    tensors = make_headers(spec, quantised)
    for name in tensors:
        rest = {other: info for other, info in tensors.items() if other != name}
        message = refusal(rest, spec)
        assert "1 missing" in message, name
        assert name in message
        assert "unknown" not in message, name


@pytest.mark.parametrize("quantised", [False, True])
def test_each_tensor_is_missed_under_another_name(
    spec: ModelSpec, quantised: bool, make_headers: MakeHeaders, make_info: MakeInfo
) -> None:
    tensors = make_headers(spec, quantised)
    for name, info in tensors.items():
        changed = {other: value for other, value in tensors.items() if other != name}
        changed[f"x.{name}"] = make_info(f"x.{name}", info.dtype, info.shape)
        message = refusal(changed, spec)
        assert "1 missing, 1 unknown" in message
        assert f"'x.{name}' {list(info.shape)}" in message


@pytest.mark.parametrize("quantised", [False, True])
def test_each_shape_is_compared(
    spec: ModelSpec, quantised: bool, make_headers: MakeHeaders, make_info: MakeInfo
) -> None:
    tensors = make_headers(spec, quantised)
    for name, info in tensors.items():
        wrong = [(*info.shape[:-1], info.shape[-1] + 1), (info.shape[0] + 1, *info.shape[1:])]
        wrong.append((*info.shape, 1))
        if not name.endswith("_scale"):  # one number is a scale of the whole matrix
            wrong.append(())
        if len(info.shape) == 2 and info.shape[0] != info.shape[1]:
            wrong.append(info.shape[::-1])
        for shape in wrong:
            message = refusal(tensors | {name: make_info(name, info.dtype, shape)}, spec)
            assert name in message, shape


@given(data=st.data())
def test_any_set_of_faults_is_listed_whole(
    data: st.DataObject, spec: ModelSpec, make_headers: MakeHeaders, make_info: MakeInfo
) -> None:
    tensors = make_headers(spec)
    names = data.draw(
        st.lists(st.sampled_from(sorted(tensors)), min_size=1, max_size=12, unique=True)
    )
    counts = {"missing": 0, "unknown": 0, "misshapen": 0}
    for name in names:
        kind = data.draw(st.sampled_from(sorted(counts)))
        counts[kind] += 1
        if kind == "missing":
            del tensors[name]
        elif kind == "unknown":
            tensors[f"y.{name}"] = make_info(f"y.{name}", "BF16", (1,))
        else:
            shape = tuple(size + 1 for size in tensors[name].shape)
            tensors[name] = make_info(name, "BF16", shape)
    message = refusal(tensors, spec)
    for name in names:
        assert name in message
    for kind, count in counts.items():
        assert (f"{count} {kind}" in message) == (count > 0)


def test_shapes_are_told_in_words(
    spec: ModelSpec, make_headers: MakeHeaders, make_info: MakeInfo
) -> None:
    tensors = make_headers(spec)
    name = "layers.3.attention.wq.weight"
    tensors[name] = make_info(name, "BF16", (448, 128))
    assert (
        f"{name}: [448, 128], wanted [192, 128] = n_heads 4 * (q.k dims 48 + rope 0) x dim"
        in refusal(tensors, spec)
    )


def test_long_lists_are_cut_and_counted(spec: ModelSpec, make_headers: MakeHeaders) -> None:
    tensors = {name: info for name, info in make_headers(spec).items() if ".experts." not in name}
    message = refusal(tensors, spec)
    assert "63 missing" in message
    assert "and 39 more" in message
    assert len(message.splitlines()) < 32


def test_an_empty_checkpoint(spec: ModelSpec) -> None:
    assert "missing" in refusal({}, spec)


REASONS = [
    # a tensor that has a known name but no place, and why
    ("layers.2.attention.indexer.wk.weight", (128, 128), "layer 2 uses the selection of layer 1"),
    ("layers.8.attention_norm.weight", (128,), "params.json has layers 0 to 7"),
    ("layers.0.experts.0.w1.weight", (256, 128), "layer 0 is dense"),
    ("layers.0.gate.weight", (3, 128), "layer 0 is dense"),
    ("layers.1.experts.3.w1.weight", (256, 128), "moe.num_experts is 3"),
    ("layers.1.feed_forward.w1.weight", (384, 128), "layer 1 is a MoE layer"),
    ("layers.1.gate.bias", (3,), "load-balancing bias is not supported"),
    ("layers.3.attention.rope_freqs", (32,), "layer 3 is a NoPE layer"),
    ("layers.1.attention.kv_fake_quantizer.qscale_act", (4,), "only a single number, qscale_act"),
    ("layers.1.attention.wq.bias", (384,), ""),
    ("layers.1.attention_norm.bias", (128,), ""),
    ("layers.1.attention_norm.weight_scale", (1, 1), ""),
]


@pytest.mark.parametrize(("name", "shape", "reason"), REASONS, ids=[name for name, *_ in REASONS])
def test_tensors_without_a_place(
    spec: ModelSpec,
    name: str,
    shape: tuple[int, ...],
    reason: str,
    make_headers: MakeHeaders,
    make_info: MakeInfo,
) -> None:
    message = refusal(make_headers(spec) | {name: make_info(name, "BF16", shape)}, spec)
    assert "1 unknown" in message
    assert f"{name} {list(shape)}" in message
    assert reason in message


def test_tied_embeddings_have_no_output(make_headers: MakeHeaders, make_info: MakeInfo) -> None:
    spec = build_model_spec(PRESETS["micro"].params() | {"tied_embeddings": True})
    tensors = make_headers(spec)
    assert "output.weight" not in tensors
    check(tensors, spec)
    tensors["output.weight"] = make_info("output.weight", "BF16", (8192, 128))
    assert "params.json says tied_embeddings" in refusal(tensors, spec)


def test_a_consumer_may_bring_a_latent_along(
    spec: ModelSpec, make_headers: MakeHeaders, make_info: MakeInfo
) -> None:
    tensors = make_headers(spec)
    for name, shape in (("wkv_a_with_mqa.weight", (512, 128)), ("kv_a_norm.weight", (512,))):
        full = f"layers.7.attention.{name}"
        assert full not in tensors
        tensors[full] = make_info(full, "BF16", shape)
    (note,) = check(tensors, spec).notes
    assert "left unread" in note
    assert "layers.7.attention.wkv_a_with_mqa.weight" in note


def test_a_consumer_needs_its_own_wkv_b(spec: ModelSpec, make_headers: MakeHeaders) -> None:
    tensors = make_headers(spec)
    del tensors["layers.7.attention.wkv_b.weight"]
    assert "layers.7.attention.wkv_b.weight [384, 512]" in refusal(tensors, spec)


def test_an_owner_needs_its_latent(make_headers: MakeHeaders) -> None:
    # B046 the other way round: without kv_sharing in params.json, layer 7 is an owner.
    params = SeededConfig(layers=8).params()
    tensors = make_headers(build_model_spec(params))
    del params["kv_sharing"]
    message = refusal(tensors, build_model_spec(params))
    assert "2 missing" in message
    assert "layers.7.attention.wkv_a_with_mqa.weight" in message
    assert "layers.7.attention.kv_a_norm.weight" in message


def test_wide_latents_of_nope_layers(make_headers: MakeHeaders) -> None:
    params = SeededConfig(layers=8).params()
    narrow = build_model_spec(params)
    wide = build_model_spec(params | {"nope_wkv_a_rope_rows": True})
    check(make_headers(wide), wide)
    message = refusal(make_headers(wide), narrow)
    assert "layers.3.attention.wkv_a_with_mqa.weight: [576, 256], wanted [512, 256]" in message


def test_two_names_of_one_tensor(
    spec: ModelSpec, make_headers: MakeHeaders, make_info: MakeInfo
) -> None:
    tensors = make_headers(spec)
    alias = "model.layers.1.self_attn.o_proj.weight"
    tensors[alias] = make_info(alias, "BF16", (128, 192))
    message = refusal(tensors, spec)
    assert "1 duplicate" in message
    assert f"layers.1.attention.wo.weight and {alias}" in message


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("mtp_dspark.norm.weight", "mtp"),
        ("vision_encoder.ln_pre.weight", "vision_encoder"),
        ("vision_language_adapter.w_in.weight", "multimodal"),
        ("patch_merger.merging_layer.weight", "vision_encoder"),
        ("pre_mm_projector_norm.weight", "vision_encoder"),
    ],
)
def test_other_parts_need_their_block(
    name: str, block: str, make_headers: MakeHeaders, make_info: MakeInfo
) -> None:
    params = PRESETS["micro"].params()
    spec = build_model_spec(params)
    tensors = make_headers(spec) | {name: make_info(name, "BF16", (7, 7))}
    assert f"'{name}': of a " in refusal(tensors, spec)
    report = check(tensors, build_model_spec(params | {block: {}}))
    ((part, (count, size)),) = report.unused_parts.items()
    assert (count, size) == (1, 98)
    assert report.notes == (f"unused part: {part}, 1 tensors",)
    assert report.nbytes == sum(info.nbytes for info in tensors.values()) - 98


@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_encoder_of_hugging_face_is_left_unread(
    prefix: str, make_headers: MakeHeaders, make_info: MakeInfo
) -> None:
    spec = build_model_spec(PRESETS["micro"].params())
    tensors = make_headers(spec)
    for name in ("vision_tower.ln_pre.weight", "multi_modal_projector.linear_1.weight"):
        tensors[prefix + name] = make_info(prefix + name, "BF16", (7, 7))
    assert "params.json has no vision_config block" in refusal(tensors, spec)
    seen = replace(spec, extras={**spec.extras, "vision_config": {}})
    (note,) = check(tensors, seen).notes
    assert note == "unused part: Hugging Face vision encoder, 2 tensors"


# Number formats. Each is (tensors to put in place of w2 of expert 1 in layer 1, what is said).
WEIGHT = "layers.1.experts.1.w2"
SHAPE = (128, 256)
FORMATS: dict[str, tuple[dict[str, tuple[str, tuple[int, ...]]], str]] = {
    "scale of a tensor, not one number": (
        {"weight": ("F8_E4M3", SHAPE), "qscale_weight": ("F32", (1, 2))},
        f"{WEIGHT}.qscale_weight: [1, 2], wanted [], one scale",
    ),
    "per row": (
        {"weight": ("F8_E4M3", SHAPE), "weight_scale": ("F32", (128, 1))},
        f"{WEIGHT}.weight, {WEIGHT}.weight_scale: FP8 with a scale a row, not supported",
    ),
    "fixed activation scale by block": (
        {
            "weight": ("F8_E4M3", SHAPE),
            "weight_scale": ("F32", (1, 2)),
            "input_scale": ("F32", (2,)),
        },
        f"{WEIGHT}.input_scale: [2], wanted [] or [1]",
    ),
    "two activation scales": (
        {
            "weight": ("F8_E4M3", SHAPE),
            "qscale_weight": ("F32", ()),
            "qscale_act": ("F32", ()),
            "input_scale": ("F32", ()),
        },
        f"{WEIGHT}.input_scale and {WEIGHT}.qscale_act: two scales of one matrix",
    ),
    "packed and not": (
        {"weight": ("BF16", SHAPE), "weight_packed": ("U8", (128, 128))},
        f"{WEIGHT}.weight and {WEIGHT}.weight_packed: two tensors of values for one matrix",
    ),
    "packed in words": (
        {"weight_packed": ("I32", (128, 32)), "weight_scale": ("BF16", (128, 8))},
        f"{WEIGHT}.weight_packed: dtype I32, not supported",
    ),
    "nvfp4 without global scale": (
        {"weight_packed": ("U8", (128, 128)), "weight_scale": ("F8_E4M3", (128, 16))},
        f"{WEIGHT}.weight_global_scale or {WEIGHT}.weight_scale_2, the global scale of NVFP4",
    ),
    "nvfp4 with two global scales": (
        {
            "weight": ("U8", (128, 128)),
            "weight_scale": ("F8_E4M3", (128, 16)),
            "weight_scale_2": ("F32", ()),
            "weight_global_scale": ("F32", ()),
        },
        f"{WEIGHT}.weight_global_scale and {WEIGHT}.weight_scale_2: two scales of one matrix",
    ),
    "nvfp4 with groups of 32": (
        {
            "weight_packed": ("U8", (128, 128)),
            "weight_scale": ("F8_E4M3", (128, 8)),
            "weight_global_scale": ("F32", (1,)),
        },
        f"{WEIGHT}.weight_scale: [128, 8], wanted [128, 16]: one scale for each 16 of 128 x 256 "
        "values of NVFP4",
    ),
    "nvfp4 of another width": (
        {
            "weight_packed": ("U8", (128, 64)),
            "weight_scale": ("F8_E4M3", (128, 8)),
            "weight_global_scale": ("F32", (1,)),
        },
        f"{WEIGHT}.weight_packed: [128, 64] of [128, 128] values, wanted [128, 256]",
    ),
    "nvfp4 without scales": (
        {"weight_packed": ("U8", (128, 128)), "weight_global_scale": ("F32", (1,))},
        f"{WEIGHT}.weight_scale, the scales of {WEIGHT}.weight_packed",
    ),
    "mxfp4 with groups of 16": (
        {"weight": ("U8", (128, 128)), "weight_scale": ("U8", (128, 16))},
        f"{WEIGHT}.weight_scale: [128, 16], wanted [128, 8]: one scale for each 32",
    ),
    "mxfp4 with scales in floats": (
        {"weight": ("U8", (128, 128)), "weight_scale": ("F32", (128, 8))},
        f"{WEIGHT}.weight_scale: dtype F32; scales must be one of U8, F8_E8M0",
    ),
    "part of another format": (
        {
            "weight": ("U8", (128, 128)),
            "weight_scale": ("U8", (128, 8)),
            "weight_scale_inv": ("U8", (128, 8)),
        },
        f"{WEIGHT}.weight_scale_inv: no part of MXFP4",
    ),
    "bytes alone": ({"weight": ("U8", SHAPE)}, f"{WEIGHT}.weight: dtype U8, not supported"),
    "other float8": ({"weight": ("F8_E5M2", SHAPE)}, "dtype F8_E5M2, not supported"),
    "other flavour": ({"weight": ("F8_E4M3FNUZ", SHAPE)}, "dtype F8_E4M3FNUZ, not supported"),
    "double": ({"weight": ("F64", SHAPE)}, "dtype F64, not supported"),
    "integers": ({"weight": ("I32", SHAPE)}, "dtype I32, not supported"),
    "no scale": (
        {"weight": ("F8_E4M3", SHAPE)},
        f"{WEIGHT}.weight_scale or {WEIGHT}.weight_scale_inv, the scales of {WEIGHT}.weight",
    ),
    "two scales": (
        {
            "weight": ("F8_E4M3", SHAPE),
            "weight_scale": ("F32", (1, 2)),
            "weight_scale_inv": ("F32", (1, 2)),
        },
        "two scales of one matrix; remove one",
    ),
    "scale of no need": (
        {"weight": ("BF16", SHAPE), "weight_scale": ("F32", (1, 2))},
        f"{WEIGHT}.weight: BF16 needs no scale, but there is {WEIGHT}.weight_scale",
    ),
    "scale transposed": (
        {"weight": ("F8_E4M3", SHAPE), "weight_scale": ("F32", (2, 1))},
        f"{WEIGHT}.weight_scale: [2, 1], wanted [1, 2]",
    ),
    "scale of another type": (
        {"weight": ("F8_E4M3", SHAPE), "weight_scale": ("F8_E8M0", (1, 2))},
        f"{WEIGHT}.weight_scale: dtype F8_E8M0; scales must be one of F32",
    ),
    "global scale": (
        {
            "weight": ("F8_E4M3", SHAPE),
            "weight_scale": ("F32", (1, 2)),
            "weight_global_scale": ("F32", (1,)),
        },
        f"{WEIGHT}.weight_global_scale: no part of FP8 in blocks",
    ),
    "scale without weight": (
        {"weight_scale": ("F32", (1, 2))},
        f"{WEIGHT}.weight, which {WEIGHT}.weight_scale belongs to",
    ),
}


@pytest.mark.parametrize("case", FORMATS)
def test_forms_that_cannot_be_loaded(
    spec: ModelSpec, case: str, make_headers: MakeHeaders, make_info: MakeInfo
) -> None:
    parts, says = FORMATS[case]
    tensors = make_headers(spec)
    del tensors[f"{WEIGHT}.weight"]
    for suffix, (dtype, shape) in parts.items():
        tensors[f"{WEIGHT}.{suffix}"] = make_info(f"{WEIGHT}.{suffix}", dtype, shape)
    message = refusal(tensors, spec)
    assert says in message
    # One fault, told once.
    assert sum(line.startswith("    ") for line in message.splitlines()) == 1


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
def test_names_and_types_of_block_scales(
    spec: ModelSpec, dtype: str, suffix: str, make_headers: MakeHeaders, make_info: MakeInfo
) -> None:
    tensors = make_headers(spec)
    tensors[f"{WEIGHT}.weight"] = make_info(f"{WEIGHT}.weight", "F8_E4M3", SHAPE)
    tensors[f"{WEIGHT}.{suffix}"] = make_info(f"{WEIGHT}.{suffix}", dtype, (1, 2))
    report = check(tensors, spec)
    assert report.formats == {"bf16", "fp8_block"}
    assert report.matrices[WEIGHT].format == "fp8_block"


def test_the_ragged_block_has_a_scale(
    spec: ModelSpec, make_headers: MakeHeaders, make_info: MakeInfo
) -> None:
    tensors = make_headers(spec, True)
    name = "layers.1.attention.wkv_a_with_mqa.weight_scale"
    assert tensors[name].shape == (5, 1)  # of 576 rows
    tensors[name] = make_info(name, "F32", (4, 1))
    assert f"{name}: [4, 1], wanted [5, 1]" in refusal(tensors, spec)


@pytest.mark.parametrize("name", ["tok_embeddings", "layers.1.gate"])
def test_some_matrices_are_never_quantised(
    spec: ModelSpec, name: str, make_headers: MakeHeaders, make_info: MakeInfo
) -> None:
    tensors = make_headers(spec)
    shape = tensors[f"{name}.weight"].shape
    scale = (-(-shape[0] // 128), -(-shape[1] // 128))
    tensors[f"{name}.weight"] = make_info(f"{name}.weight", "F8_E4M3", shape)
    tensors[f"{name}.weight_scale"] = make_info(f"{name}.weight_scale", "F32", scale)
    assert f"{name}.weight: F8_E4M3; it must be one of BF16, F32, F16" in refusal(tensors, spec)


def test_norms_are_never_quantised(
    spec: ModelSpec, make_headers: MakeHeaders, make_info: MakeInfo
) -> None:
    tensors = make_headers(spec)
    tensors["norm.weight"] = make_info("norm.weight", "F8_E4M3", (128,))
    assert "norm.weight: dtype F8_E4M3; must be one of BF16, F32, F16" in refusal(tensors, spec)


def test_index_query_norm_may_differ_by_head(
    spec: ModelSpec, make_headers: MakeHeaders, make_info: MakeInfo
) -> None:
    for shape in ((128,), (512,), (4, 128)):
        tensors = make_headers(spec)
        for part in ("weight", "bias"):
            name = f"layers.1.attention.indexer.q_norm.{part}"
            tensors[name] = make_info(name, "F32", shape)
        check(tensors, spec)


def test_table_of_an_opened_checkpoint(bf16_folder: Path, spec: ModelSpec) -> None:
    loaded = load_model_spec(Checkpoint.open(bf16_folder))
    assert loaded.layers == spec.layers
    assert loaded.name == "m"
    assert not loaded.assumptions


def test_table_without_tensors(bf16_folder: Path, spec: ModelSpec) -> None:
    checkpoint = Checkpoint.open(bf16_folder / "params.json", require_tensors=False)
    assert load_model_spec(checkpoint).layers == spec.layers


def test_neither_params_nor_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither params\.json nor config\.json"):
        load_model_spec(Checkpoint(tmp_path, {}))


def test_faults_of_params_name_the_file(bf16_folder: Path) -> None:
    source = Checkpoint.open(bf16_folder)
    assert source.params is not None
    broken = Checkpoint(bf16_folder, source.tensors, params=source.params | {"dim": 0})
    with pytest.raises(CheckpointError, match=rf"^{bf16_folder}/params.json: 1 problem"):
        load_model_spec(broken)
