"""The encoder's tensors: all that must be there, read layer by layer, apart from the decoder's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ml4core.api import (
    VISION_LAYER_WEIGHTS,
    VISION_WEIGHTS,
    VisionSpec,
    VisionWeights,
    Weight,
)
from ml4core.formats import fp8_block
from ml4core.models.checkpoint import Checkpoint, CheckpointWriter
from ml4core.models.errors import CheckpointError
from ml4core.models.pixtral import vision_spec
from ml4core.models.pixtral_images import patch_images
from ml4core.models.pixtral_weights import expected_vision_tensors, load_vision, validate_vision
from ml4core.models.seeded import make_seeded
from ml4core.models.tensors import load_model_spec, validate
from ml4core.models.weights import load_layers

from .support import (
    BLOCK,
    CELLS,
    encode,
    random_images,
    random_tensors,
    read,
    spec_of,
    write,
)

LAYER = "vision_encoder.transformer.layers.1."


def test_names_and_shapes() -> None:
    table = expected_vision_tensors(spec_of())
    shapes = {name: entry.shapes[0] for name, entry in table.items()}
    assert list(shapes)[:8] == [
        "vision_encoder.patch_conv.weight",
        "vision_encoder.ln_pre.weight",
        "pre_mm_projector_norm.weight",
        "patch_merger.merging_layer.weight",
        "vision_language_adapter.w_in.weight",
        "vision_language_adapter.w_in.bias",
        "vision_language_adapter.w_out.weight",
        "vision_language_adapter.w_out.bias",
    ]
    assert len(shapes) == 8 + 3 * 9
    assert shapes["vision_encoder.patch_conv.weight"] == (72, 3, 4, 4)
    assert shapes["patch_merger.merging_layer.weight"] == (72, 288)
    assert shapes["vision_language_adapter.w_in.weight"] == (40, 72)
    assert shapes["vision_language_adapter.w_out.weight"] == (40, 40)
    assert {name.removeprefix(LAYER) for name in shapes if name.startswith(LAYER)} == {
        f"{stem}.weight"
        for stem in (
            "attention_norm",
            "attention.wq",
            "attention.wk",
            "attention.wv",
            "attention.wo",
            "ffn_norm",
            "feed_forward.w1",
            "feed_forward.w2",
            "feed_forward.w3",
        )
    }
    assert shapes[f"{LAYER}feed_forward.w1.weight"] == (112, 72)
    assert shapes[f"{LAYER}feed_forward.w2.weight"] == (72, 112)


def test_the_large_encoder_has_two_and_a_half_billion_parameters() -> None:
    spec = replace(
        spec_of(adapter_bias=False),
        hidden_size=1664,
        layers=48,
        heads=16,
        head_dim=104,
        ffn_width=8192,
        patch_size=14,
        output_size=6144,
    )
    shapes = [torch.Size(e.shapes[0]) for e in expected_vision_tensors(spec).values()]
    layer = 4 * 1664**2 + 3 * 8192 * 1664 + 2 * 1664
    projector = 1664 + 1664 * 4 * 1664 + 6144 * 1664 + 6144**2
    assert sum(shape.numel() for shape in shapes) == 48 * layer + 1664 * 589 + projector
    assert sum(shape.numel() for shape in shapes) == 2_554_751_744


def test_weights_are_those_of_the_api(folder: Path, encoder) -> None:
    spec, tensors = encoder[0], random_tensors(encoder[0])
    loaded = list(load_vision(Checkpoint.open(folder), spec))
    assert [layer for layer, _ in loaded] == [None, 0, 1, 2]
    assert loaded[0][1].keys() == VISION_WEIGHTS.keys()
    assert all(weights.keys() == VISION_LAYER_WEIGHTS.keys() for _, weights in loaded[1:])
    top, layer = loaded[0][1], loaded[2][1]

    def same(weight: Tensor | Weight, *names: str) -> bool:
        assert isinstance(weight, Weight)
        assert weight.format == "fp32"
        assert weight.shape == tuple(weight.data.shape)
        return torch.equal(weight.data, torch.cat([tensors[f"{n}.weight"] for n in names]))

    conv = top["patch_conv"]
    assert isinstance(conv, Weight)
    assert torch.equal(conv.data, tensors["vision_encoder.patch_conv.weight"].flatten(1))
    assert same(top["merging_layer"], "patch_merger.merging_layer")
    assert same(layer["wqkv"], *(f"{LAYER}attention.{part}" for part in ("wq", "wk", "wv")))
    assert same(layer["w13"], *(f"{LAYER}feed_forward.{part}" for part in ("w1", "w3")))
    assert same(layer["w2"], f"{LAYER}feed_forward.w2")


def test_optional_weights_are_absent(tmp_path: Path) -> None:
    block = {
        **BLOCK,
        "spatial_merge_size": 1,
        "mm_projector_id": "",
        "add_pre_mm_projector_layer_norm": False,
        "adapter_bias": False,
    }
    _, weights = read(write(tmp_path / "m", random_tensors(spec_of(**block)), block))
    optional = {"pre_projector_norm", "merging_layer", "adapter_in_bias", "adapter_out_bias"}
    assert weights.top.keys() == VISION_WEIGHTS.keys() - optional


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_checkpoints(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: t.to(dtype) for name, t in random_tensors(spec_of()).items()}
    spec, narrow = read(write(tmp_path / "a", tensors))
    wide = {name: t.float() for name, t in tensors.items()}
    _, exact = read(write(tmp_path / "b", wide))
    batch = patch_images(spec, random_images(spec, CELLS))
    assert torch.equal(encode(spec, narrow, batch), encode(spec, exact, batch))
    format = "bf16" if dtype == torch.bfloat16 else "fp32"
    _, top = next(load_vision(Checkpoint.open(tmp_path / "a"), spec))
    assert {w.format for w in top.values() if isinstance(w, Weight)} == {format}


def test_fp8_matrices(tmp_path: Path) -> None:
    # Told by each tensor's dtype and scale: here all matrices but one.
    quantised: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}
    spec = spec_of()
    for name, tensor in random_tensors(spec).items():
        if tensor.dim() != 2 or name.startswith("patch_merger"):
            quantised[name] = decoded[name] = tensor
            continue
        code, scale = fp8_block.quantize_weight(tensor)
        quantised[name] = code.view(torch.float8_e4m3fn)
        quantised[f"{name}_scale"] = scale
        decoded[name] = fp8_block.dequantize_weight(code, scale, dtype=torch.float32)
    _, ours = read(write(tmp_path / "a", quantised))
    _, exact = read(write(tmp_path / "b", decoded))
    batch = patch_images(spec, random_images(spec, CELLS))
    assert torch.equal(encode(spec, ours, batch), encode(spec, exact, batch))
    loaded = list(load_vision(Checkpoint.open(tmp_path / "a"), spec, torch.float32))
    wo = loaded[1][1]["wo"]
    assert isinstance(wo, Weight)
    assert wo.format == "fp8_block"


def test_one_layer_at_a_time(folder: Path, encoder: tuple[VisionSpec, VisionWeights]) -> None:
    checkpoint = Checkpoint.open(folder)
    done: list[tuple[int, int]] = []
    layers = load_vision(checkpoint, encoder[0], progress=lambda *at: done.append(at))
    assert checkpoint.bytes_read == 0
    read_so_far = []
    for _, weights in layers:
        read_so_far.append(checkpoint.bytes_read)
        alive = [weakref.ref(w if isinstance(w, Tensor) else w.data) for w in weights.values()]
        del weights
        assert not any(ref() is not None for ref in alive)
    steps = {b - a for a, b in pairwise(read_so_far)}
    assert len(steps) == 1  # each layer is read when it is asked for
    assert done[-1] == (checkpoint.nbytes, checkpoint.nbytes)


Edit = Callable[[dict[str, Tensor]], None]


def rename(old: str, new: str) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[new] = tensors.pop(old)

    return edit


def put(name: str, tensor: Tensor) -> Edit:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("edit", "texts"),
    [
        (
            rename(f"{LAYER}attention.wk.weight", f"{LAYER}attention.wkk.weight"),
            [
                rf"{LAYER}attention.wk.weight: missing; wanted \[72, 72\] = hidden_size x hidden",
                rf"{LAYER}attention.wkk.weight \[72, 72\]: unknown.*layers 0 to 2",
            ],
        ),
        (
            rename("vision_encoder.ln_pre.weight", "vision_encoder.ln_post.weight"),
            ["ln_pre.weight: missing; wanted", r"ln_post.weight \[72\]: unknown"],
        ),
        (
            put(f"{LAYER}feed_forward.w2.weight", torch.zeros(112, 72)),
            [r"w2.weight: \[112, 72\], wanted \[72, 112\] = hidden_size x intermediate_size"],
        ),
        (
            put("vision_encoder.patch_conv.weight", torch.zeros(72, 48)),
            [r"patch_conv.weight: \[72, 48\], wanted \[72, 3, 4, 4\]"],
        ),
        (
            put("vision_encoder.ln_pre.weight", torch.zeros(72, dtype=torch.int32)),
            ["ln_pre.weight: dtype I32; must be one of BF16, F32, F16"],
        ),
        (
            put(f"{LAYER}attention.wq.bias", torch.zeros(72)),
            [r"wq.bias \[72\]: unknown.*without biases"],
        ),
        (
            put("vision_encoder.transformer.layers.3.ffn_norm.weight", torch.zeros(72)),
            [r"layers.3.ffn_norm.weight \[72\]: unknown.*layers 0 to 2"],
        ),
        (
            put(f"{LAYER}attention.wo.weight", torch.zeros(72, 72, dtype=torch.float8_e4m3fn)),
            [rf"missing: {LAYER}attention.wo.weight_scale"],
        ),
        (
            put(f"{LAYER}attention.wo.weight_scale", torch.zeros(1, 1)),
            [r"unsupported: .*wo.weight: F32 needs no scale"],
        ),
    ],
)
def test_faults_of_tensors(tmp_path: Path, edit: Edit, texts: list[str]) -> None:
    tensors = random_tensors(spec_of())
    edit(tensors)
    checkpoint = Checkpoint.open(write(tmp_path / "m", tensors))
    counted = f"vision encoder's tensors: {len(texts)} problem"
    with pytest.raises(CheckpointError, match=counted) as error:
        load_vision(checkpoint, spec_of())  # at the call, before anything is read
    for text in texts:
        assert error.match(text)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"adapter_bias": False}, r"w_out.bias \[40\]: unknown.*adapter_bias false"),
        (
            {"add_pre_mm_projector_layer_norm": False},
            "pre_mm_projector_norm.*: unknown.*no add_pre_mm_projector_layer_norm",
        ),
        (
            {"spatial_merge_size": 1, "mm_projector_id": ""},
            "merging_layer.*: unknown.*no mm_projector_id 'patch_merge'",
        ),
        ({"spatial_merge_size": 1}, r"merging_layer.weight: \[72, 288\], wanted \[72, 72\]"),
        ({"num_hidden_layers": 4}, "layers.3.attention.wq.weight: missing"),
    ],
)
def test_params_and_tensors_must_agree(folder: Path, changes: dict, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        validate_vision(Checkpoint.open(folder), spec_of(**changes))


def test_many_faults_are_cut(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path / "m", {"vision_encoder.x.weight": torch.ones(1)}))
    with pytest.raises(CheckpointError, match="and 12 more"):
        validate_vision(checkpoint, spec_of())


def test_fp8_is_not_decoded_to_other_dtypes(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"torch.float16; .* torch.float32 or torch.bfloat16"):
        load_vision(Checkpoint.open(folder), spec_of(), torch.float16)


def test_decoder_and_encoder_in_one_checkpoint(tmp_path: Path) -> None:
    text = Checkpoint.open(make_seeded(tmp_path / "text", "micro", layers=2, vocab=320))
    hidden = load_model_spec(text).hidden_size
    vision = replace(spec_of(), output_size=hidden)
    with CheckpointWriter(tmp_path / "both") as writer:
        writer.add_json("params.json", {**(text.params or {}), "vision_encoder": dict(BLOCK)})
        for name in text.tensors:
            writer.add(name, text.read(name))
        for name, tensor in random_tensors(vision).items():
            writer.add(name, tensor)
    both = Checkpoint.open(tmp_path / "both")
    spec = load_model_spec(both)
    report = validate(both, spec)
    assert report.unused_parts["vision encoder"][0] == len(expected_vision_tensors(vision))
    assert len(list(load_layers(both, spec, report=report))) == 3
    assert both.bytes_read == text.nbytes
    found = vision_spec(spec.extras, spec.hidden_size)
    assert found == vision
    assert len(list(load_vision(both, found))) == 1 + vision.layers
    assert both.bytes_read == both.nbytes
