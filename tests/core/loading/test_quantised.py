"""Every quantised format comes out of a checkpoint with the values that its bytes mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import WEIGHT_FORMATS
from ml4core.cpu import ml4core_backends
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.errors import CheckpointError
from ml4core.models.seeded import FORMATS, make_seeded
from ml4core.models.tensors import load_model_spec, validate

from .formats import KINDS, QUANTISED, load, meaning, raw, values

EditedCopy = Callable[[Path, Callable[[dict[str, Tensor]], None]], Path]
DIMS: dict[str, Any] = {
    "layers": 4,
    "hidden": 128,
    "heads": 4,
    "topk": 16,
    "experts": 3,
    "experts_per_token": 2,
    "expert_width": 256,
    "dense_width": 384,
    "v_dim": 48,
    "vocab": 320,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("formats")
    return {
        format: make_seeded(root / format, format=format, **DIMS)  # type: ignore[arg-type]
        for format in QUANTISED
    }


def close(ours: Tensor, theirs: Tensor) -> None:
    # A divisor is loaded as its reciprocal, rounded once.
    torch.testing.assert_close(ours.float(), theirs, rtol=3e-7, atol=0)


@pytest.mark.parametrize("format", QUANTISED)
def test_experts_keep_their_format_and_values(folders: dict[str, Path], format: str) -> None:
    loaded, tensors = load(folders[format])[0], raw(folders[format])
    for layer in (1, 3):
        w13, w2 = loaded[layer]["experts_w13"], loaded[layer]["experts_w2"]
        assert w13.format == w2.format == KINDS.get(format, format)
        assert (w13.shape, w2.shape) == ((3, 512, 128), (3, 128, 256))
        for expert in range(3):
            stem = f"layers.{layer}.experts.{expert}"
            close(values(w2)[expert], meaning(tensors, f"{stem}.w2"))
            if format == "fp8_tensor":
                continue  # its w1 and w3 share a scale; see below
            both = [meaning(tensors, f"{stem}.{part}") for part in ("w1", "w3")]
            close(values(w13)[expert], torch.cat(both))


@pytest.mark.parametrize("format", QUANTISED)
def test_the_rest_of_a_layer(folders: dict[str, Path], format: str) -> None:
    loaded, tensors = load(folders[format])[0], raw(folders[format])
    for layer in (0, 2, 3):
        weights, stem = loaded[layer], f"layers.{layer}.attention"
        close(values(weights["wq"]), meaning(tensors, f"{stem}.wq"))
        close(values(weights["wo"]), meaning(tensors, f"{stem}.wo"))
        heads = meaning(tensors, f"{stem}.wkv_b").unflatten(0, (4, -1))
        p = weights["w_uk"].shape[-1]
        close(values(weights["w_uk"]), heads[:, :p].transpose(1, 2))
        close(values(weights["w_uv"]), heads[:, p:])
    rest = "fp8_tensor" if format == "fp8_tensor" else "fp8_block"
    assert loaded[2]["shared_w2"].format == loaded[0]["wq"].format == rest
    assert loaded[None]["output"].format == "bf16"


def test_the_larger_scale_serves_both_halves(folders: dict[str, Path]) -> None:
    loaded, tensors = load(folders["fp8_tensor"])[0], raw(folders["fp8_tensor"])
    rounded = 0
    for expert in range(3):
        w13 = loaded[1]["experts_w13"]
        stem = f"layers.1.experts.{expert}"
        scales = [float(tensors[f"{stem}.{part}.qscale_weight"]) for part in ("w1", "w3")]
        assert float(w13.parts["scale"][expert]) == max(scales)
        for place, (part, scale) in enumerate(zip(("w1", "w3"), scales, strict=True)):
            half = w13.data[expert, 256 * place : 256 * (place + 1)]
            code = tensors[f"{stem}.{part}.weight"]
            if scale == max(scales):
                assert torch.equal(half, code.view(torch.uint8))
                continue
            rounded += 1
            anew = (code.float() * scale / max(scales)).to(torch.float8_e4m3fn)
            assert torch.equal(half, anew.view(torch.uint8))
    assert rounded == 3


@pytest.mark.parametrize("format", ["nvfp4_ct", "nvfp4_modelopt"])
def test_halves_keep_their_own_global_scales(folders: dict[str, Path], format: str) -> None:
    loaded, tensors = load(folders[format])[0], raw(folders[format])
    multiplier = loaded[1]["experts_w13"].parts["global_scale"]
    assert multiplier.shape == (3, 512)
    for expert in range(3):
        for rows, part in ((slice(0, 256), "w1"), (slice(256, 512), "w3")):
            stem = f"layers.1.experts.{expert}.{part}"
            stored = tensors.get(f"{stem}.weight_scale_2")
            if stored is None:
                stored = 1 / tensors[f"{stem}.weight_global_scale"]
            assert torch.equal(multiplier[expert, rows], stored.expand(256))
        assert multiplier[expert, 0] != multiplier[expert, 256]


def test_both_forms_of_nvfp4_mean_the_same(folders: dict[str, Path]) -> None:
    ct, modelopt = (load(folders[f])[0][1]["experts_w13"] for f in ("nvfp4_ct", "nvfp4_modelopt"))
    assert torch.equal(ct.data, modelopt.data)
    torch.testing.assert_close(values(ct), values(modelopt), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("format", "stored"), [("nvfp4_ct", 336.0), ("nvfp4_modelopt", 8 / 2688)])
def test_activation_scales_of_experts(
    folders: dict[str, Path], edited_copy: EditedCopy, format: str, stored: float
) -> None:
    suffix = "input_global_scale" if format == "nvfp4_ct" else "input_scale"

    def edit(tensors: dict[str, Tensor]) -> None:
        name = f"layers.1.experts.2.w3.{suffix}"
        assert float(tensors[name]) == pytest.approx(stored)
        tensors[name] = tensors[name] * (0.5 if format == "nvfp4_ct" else 2.0)

    loaded = load(edited_copy(folders[format], edit))[0]
    w13, w2 = (loaded[1][f"experts_{part}_input_scale"] for part in ("w13", "w2"))
    torch.testing.assert_close(w2, torch.full((3,), 8 / 2688))
    torch.testing.assert_close(w13, torch.tensor([8, 8, 16]) / 2688)  # the larger of w1's and w3's


def test_other_fixed_scales_are_reported(folders: dict[str, Path], edited_copy: EditedCopy) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [*tensors]:
            if name.endswith("qscale_weight") and ".experts." not in name:
                tensors[name.replace("qscale_weight", "qscale_act")] = torch.tensor(0.01)
        for layer in range(4):
            stem = f"layers.{layer}.attention.kv_fake_quantizer"
            tensors[f"{stem}.qscale_act"] = torch.tensor(0.5)

    folder = edited_copy(folders["fp8_tensor"], edit)
    checkpoint = Checkpoint.open(folder)
    report = validate(checkpoint, load_model_spec(checkpoint))
    notes = "\n".join(report.notes)
    assert "fixed activation scales (layers.0.attention.wq.qscale_act)" in notes
    assert "4 scales of a quantised KV cache (layers.0.attention.kv_fake_quantizer" in notes
    ours, theirs = load(folder)[0], load(folders["fp8_tensor"])[0]
    assert torch.equal(ours[1]["wq"].data, theirs[1]["wq"].data)
    assert "experts_w13_input_scale" not in ours[1]


def test_some_experts_without_an_activation_scale(
    folders: dict[str, Path], edited_copy: EditedCopy
) -> None:
    name = "layers.1.experts.2.w3.input_scale"
    folder = edited_copy(folders["nvfp4_modelopt"], lambda tensors: tensors.__delitem__(name))
    loaded, _, checkpoint = load(folder)
    report = validate(checkpoint, load_model_spec(checkpoint))
    assert any("left unread: 5 fixed activation scales" in note for note in report.notes)
    assert "experts_w13_input_scale" not in loaded[1]
    assert "experts_w2_input_scale" in loaded[1]


BAD_BYTES = [
    ("nvfp4_ct", "layers.1.experts.2.w3", 200, 5, 0x7F),
    ("nvfp4_modelopt", "layers.3.experts.0.w2", 3, 15, 0xFF),
    ("mxfp4", "layers.1.experts.1.w1", 17, 2, 0xFF),
]


@pytest.mark.parametrize(("format", "stem", "row", "block", "byte"), BAD_BYTES)
def test_scale_bytes_that_are_nan(
    folders: dict[str, Path],
    edited_copy: EditedCopy,
    format: str,
    stem: str,
    row: int,
    block: int,
    byte: int,
) -> None:
    # B032
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"{stem}.weight_scale"].view(torch.uint8)[row, block] = byte

    says = rf"{stem}\.weight_scale: the scale of row {row}, block {block} is the byte 0x{byte:02X}"
    with pytest.raises(CheckpointError, match=says):
        load(edited_copy(folders[format], edit))


@pytest.mark.parametrize(
    ("format", "suffix", "value", "says"),
    [
        ("nvfp4_ct", "weight_global_scale", 0.0, "a divisor is above 0"),
        ("nvfp4_ct", "weight_global_scale", float("nan"), "a divisor is above 0"),
        ("nvfp4_modelopt", "weight_scale_2", float("inf"), "a scale is finite and not negative"),
        ("nvfp4_modelopt", "input_scale", -1.0, "a scale is finite and not negative"),
        ("fp8_tensor", "qscale_weight", float("nan"), "a scale is finite and not negative"),
    ],
)
def test_whole_scales_that_are_none(
    folders: dict[str, Path],
    edited_copy: EditedCopy,
    format: str,
    suffix: str,
    value: float,
    says: str,
) -> None:
    name = f"layers.1.experts.1.w3.{suffix}"

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.full_like(tensors[name], value)

    with pytest.raises(CheckpointError, match=rf"{name}: {value}; {says}"):
        load(edited_copy(folders[format], edit))


def test_an_empty_matrix_of_fp8(folders: dict[str, Path], edited_copy: EditedCopy) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for part in ("w1", "w3"):
            tensors[f"layers.1.experts.0.{part}.qscale_weight"].zero_()

    w13 = load(edited_copy(folders["fp8_tensor"], edit))[0][1]["experts_w13"]
    assert not values(w13)[0].any()
    assert values(w13)[1].any()


@pytest.mark.parametrize("format", ["fp8_tensor", "nvfp4_ct", "mxfp4"])
def test_a_stack_of_two_formats_is_decoded(
    folders: dict[str, Path], edited_copy: EditedCopy, format: str
) -> None:
    other = raw(folders["fp8_block"])
    stem = "layers.1.experts.1.w3"

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [*tensors]:
            if name.startswith(f"{stem}."):
                del tensors[name]
        tensors |= {name: t for name, t in other.items() if name.startswith(f"{stem}.")}

    folder = edited_copy(folders[format], edit)
    loaded, _, checkpoint = load(folder)
    w13, tensors = loaded[1]["experts_w13"], raw(folder)
    assert w13.format == "fp32"
    assert load(folder, torch.bfloat16)[0][1]["experts_w13"].format == "bf16"
    for expert in range(3):
        both = [meaning(tensors, f"layers.1.experts.{expert}.{part}") for part in ("w1", "w3")]
        close(w13.data[expert], torch.cat(both))
    assert loaded[1]["experts_w2"].format == KINDS.get(format, format)  # another stack
    (note,) = (
        note
        for note in validate(checkpoint, load_model_spec(checkpoint)).notes
        if "experts in" in note
    )
    kind = KINDS.get(format, format)
    assert note.startswith(
        f"layers.1.experts.*.w1, w3: experts in {', '.join(sorted(['fp8_block', kind]))}"
    )


def test_names_of_other_writers(folders: dict[str, Path], edited_copy: EditedCopy) -> None:
    """MXFP4 under `weight_packed`, and E8M0 scales under their own dtype."""
    from ml4core.models.checkpoint import CheckpointWriter

    source = Checkpoint.open(folders["mxfp4"])
    folder = folders["mxfp4"].parent / "packed"
    with CheckpointWriter(folder, overwrite=True) as writer:
        assert source.params is not None
        writer.add_json("params.json", source.params)
        for name, info in source.tensors.items():
            tensor = source.read(name)
            if info.dtype == "U8" and name.endswith("_scale"):
                writer.add(name, tensor, "F8_E8M0")
            elif info.dtype == "U8":
                writer.add(f"{name}_packed", tensor)
            else:
                writer.add(name, tensor)
    ours, theirs = load(folder)[0], load(folders["mxfp4"])[0]
    for part in ("data", "scale"):
        assert torch.equal(ours[1]["experts_w2"].parts[part], theirs[1]["experts_w2"].parts[part])


def test_the_embedded_backend_declares_what_it_runs() -> None:
    (backend,) = ml4core_backends()
    (device,) = backend.probe().devices
    assert all(f"weights:{name}" in backend.capabilities(device) for name in WEIGHT_FORMATS)


def test_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'int8'; known are bf16, .*, mxfp4"):
        make_seeded(tmp_path, format="int8")  # type: ignore[arg-type]
    assert set(QUANTISED) | {"bf16", "fp32"} == set(FORMATS)


def test_bytes_are_counted_in_every_format(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        checkpoint = Checkpoint.open(folder)
        report = validate(checkpoint, load_model_spec(checkpoint))
        assert report.nbytes == checkpoint.nbytes
        assert load(folder)[2].bytes_read == checkpoint.nbytes
