"""What params.json says about the result, and what goes along with the tensors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ml4core.models.quantize import QuantizeOptions, quantize

EXPERTS = {
    f"layers.{layer}.experts.{e}.w{n}" for layer in (1, 2, 3) for e in (0, 1) for n in (1, 2, 3)
}


def members(group: dict[str, Any], stems: set[str]) -> set[str]:
    """The stems that a group's targets mean."""
    found: set[str] = set()
    for target in group["targets"]:
        if target.startswith("re:"):
            matched = {stem for stem in stems if re.fullmatch(target[3:], stem)}
            assert matched, target
            found |= matched
        else:
            assert target in stems
            found.add(target)
    return found


def test_experts(bf16: Path, convert: Any, params_of: Any, tensors_of: Any) -> None:
    before = params_of(bf16)
    after = params_of(convert(bf16, to="mxfp4", mxfp4_rule="roundup"))
    block = after.pop("quantization")
    assert after == before
    (group,) = block["config_groups"].values()
    assert (block["quant_method"], block["format"], group["format"]) == ("quark", "mxfp4", "mxfp4")
    assert group["weights"]["group_size"] == 32
    assert group["weights"]["scale_calculation_mode"] == "roundup"
    stems = {name.removesuffix(".weight") for name in tensors_of(bf16)}
    assert members(group, stems) == EXPERTS


@pytest.mark.parametrize(
    ("form", "method", "name"),
    [
        ("compressed-tensors", "compressed-tensors", "nvfp4-pack-quantized"),
        ("modelopt", "modelopt", "nvfp4"),
    ],
)
def test_two_groups(
    bf16: Path, convert: Any, params_of: Any, tensors_of: Any, form: str, method: str, name: str
) -> None:
    result = convert(bf16, to="nvfp4", nvfp4_form=form, rest="fp8_block")
    block = params_of(result)["quantization"]
    assert (block["quant_method"], block["format"]) == (method, "mixed-precision")
    groups = {group["format"]: group for group in block["config_groups"].values()}
    assert groups.keys() == {name, "float-quantized"}
    stems = {name.removesuffix(".weight") for name in tensors_of(bf16)}
    fp8 = {n.removesuffix(".weight") for n, t in tensors_of(result).items()
           if t.dtype == torch.float8_e4m3fn and n.endswith(".weight")}  # fmt: skip
    assert members(groups[name], stems) == EXPERTS
    assert members(groups["float-quantized"], stems) == fp8
    assert groups["float-quantized"]["weights"]["block_structure"] == [128, 128]
    assert groups[name]["weights"]["group_size"] == 16


def test_the_block_goes_with_the_last_quantised_matrix(
    sources: dict[str, Path], convert: Any, params_of: Any
) -> None:
    assert "quantization" in params_of(sources["mxfp4"])
    assert "quantization" not in params_of(convert(sources["mxfp4"], to="bf16"))
    partly = params_of(convert(sources["fp8_block"], name="partly", to="bf16", parts="experts"))
    (group,) = partly["quantization"]["config_groups"].values()
    assert not any("experts\\.\\d" in target for target in group["targets"])


def test_the_block_keeps_its_key_and_what_is_not_about_weights(
    make: Any, convert: Any, params_of: Any
) -> None:
    params = {
        "dim": 32,
        "mtp": {"anything": [1]},
        "quantization_config": {"qformat_weight": "fp8_e4m3", "kv_cache_scheme": {"num_bits": 8}},
    }
    tensors = {"layers.1.experts.0.w1.weight": torch.randn(4, 32)}
    after = params_of(convert(make(tensors, params), to="mxfp4"))
    assert "quantization" not in after
    assert after["mtp"] == {"anything": [1]}
    assert after["quantization_config"]["kv_cache_scheme"] == {"num_bits": 8}
    assert "qformat_weight" not in after["quantization_config"]


@pytest.mark.parametrize("to", ["fp8_block", "nvfp4", "mxfp4"])
def test_again_copies_bytes(
    sources: dict[str, Path], convert: Any, content_of: Any, to: str
) -> None:
    assert content_of(convert(sources[to], to=to, parts="all")) == content_of(sources[to])


def test_another_rule_is_no_copy(
    sources: dict[str, Path], convert: Any, content_of: Any, params_of: Any, tensors_of: Any
) -> None:
    ceil = convert(sources["mxfp4"], name="ceil", to="mxfp4", mxfp4_rule="ceil", parts="all")
    (group,) = params_of(ceil)["quantization"]["config_groups"].values()
    assert group["weights"]["scale_calculation_mode"] == "ceil"
    name = "layers.1.experts.0.w1.weight_scale"
    assert not torch.equal(tensors_of(ceil)[name], tensors_of(sources["mxfp4"])[name])
    again = convert(ceil, name="again", to="mxfp4", mxfp4_rule="ceil", parts="all")
    assert content_of(again) == content_of(ceil)


def test_no_rule_is_quarks(sources: dict[str, Path], tmp_path: Path, tensors_of: Any) -> None:
    source = tmp_path / "quark"
    source.mkdir()
    (source / "model.safetensors").symlink_to(sources["mxfp4"] / "consolidated.safetensors")
    params = json.loads((sources["mxfp4"] / "params.json").read_text())
    del params["quantization"]
    (source / "params.json").write_text(json.dumps(params))
    (source / "config.json").write_text('{"quantization_config": {"old": 1}, "other": 2}')
    quantize(source, tmp_path / "same", QuantizeOptions(to="mxfp4"))
    assert tensors_of(tmp_path / "same").keys() == tensors_of(source).keys()
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()
    assert (tmp_path / "same" / "params.json").read_text() == (source / "params.json").read_text()
    quantize(source, tmp_path / "other", QuantizeOptions(to="bf16"))
    assert json.loads((tmp_path / "other" / "config.json").read_text()) == {"other": 2}


def test_small_files_come_along(make: Any, convert: Any, tmp_path: Path) -> None:
    source = make({"layers.1.experts.0.w1.weight": torch.randn(4, 32)})
    (source / "tekken.json").write_text("{}")
    (source / "README.md").write_text("read me")
    (source / ".cache").write_text("no")
    (source / "pytorch_model.bin").write_bytes(b"no")
    (source / "original").mkdir()
    report = quantize(source, tmp_path / "t", QuantizeOptions(to="mxfp4"))
    names = sorted(path.name for path in (tmp_path / "t").iterdir())
    assert names == ["README.md", "consolidated.safetensors", "params.json", "tekken.json"]
    assert (tmp_path / "t" / "README.md").read_text() == "read me"
    assert report.notes == ("not copied: pytorch_model.bin",)
    assert report.matrices == {("fp32", "mxfp4"): 1}
