"""Every direction between the formats: the bytes are those of the formats' own functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.formats import fp8_block, fp8_tensor, mxfp4, nvfp4
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.quantize import QuantizeOptions, quantize
from ml4core.models.seeded import make_seeded
from ml4core.models.tensors import load_model_spec, validate

FORMATS = ("bf16", "fp8_block", "nvfp4", "mxfp4")
KEPT = re.compile(
    r"tok_embeddings.*|output.*|.*norm.*|.*\.gate\..*|.*weights_proj.*|.*ssmax.*|.*rope_freqs.*|norm.*"
)
Tensors = dict[str, Tensor]


def bases(tensors: Tensors) -> list[str]:
    """Names, without suffix, of the matrices that may be quantised."""
    stems = (
        re.sub(r"\.(weight_packed|weight)$", "", name)
        for name in tensors
        if name.endswith((".weight", ".weight_packed"))
    )
    return [stem for stem in stems if not KEPT.fullmatch(f"{stem}.weight")]


def decoded(tensors: Tensors, base: str) -> Tensor:
    """The matrix as bf16, by the formats' functions."""
    scale = tensors.get(f"{base}.weight_scale")
    if (packed := tensors.get(f"{base}.weight_packed")) is not None:
        assert scale is not None
        multiplier = nvfp4.reciprocal(tensors[f"{base}.weight_global_scale"])
        return nvfp4.dequantize(packed, scale, multiplier=multiplier, dtype=torch.bfloat16)
    data = tensors[f"{base}.weight"]
    if (multiplier := tensors.get(f"{base}.weight_scale_2")) is not None:  # type: ignore[assignment]
        assert scale is not None
        return nvfp4.dequantize(data, scale, multiplier=multiplier, dtype=torch.bfloat16)
    if data.dtype == torch.uint8:
        assert scale is not None
        return mxfp4.dequantize(data, scale, torch.bfloat16)
    if data.dtype == torch.float8_e4m3fn:
        assert scale is not None
        return fp8_block.dequantize_weight(data, scale, dtype=torch.bfloat16)
    return data


def partners(base: str) -> tuple[str, ...]:
    """w1 and w3 share the global scale of NVFP4."""
    stem, _, leaf = base.rpartition(".")
    return (f"{stem}.w1", f"{stem}.w3") if leaf in ("w1", "w3") else (base,)


def encoded(tensors: Tensors, base: str, to: str, form: str, rule: str) -> Tensors:
    values = decoded(tensors, base)
    if to == "bf16":
        return {f"{base}.weight": values}
    if to == "fp8_block":
        data, scale = fp8_block.quantize_weight(values)
        return {f"{base}.weight": data, f"{base}.weight_scale": scale}
    if to == "mxfp4":
        data, scale = mxfp4.quantize(values, rule)
        return {f"{base}.weight": data, f"{base}.weight_scale": scale}
    together = torch.cat([decoded(tensors, one).flatten() for one in partners(base)])
    if form == "compressed-tensors":
        whole = nvfp4.global_divisor(together)
        data, scale = nvfp4.quantize(values, divisor=whole)
        names = ("weight_packed", "weight_scale", "weight_global_scale")
    else:
        whole = nvfp4.global_multiplier(together)
        data, scale = nvfp4.quantize(values, multiplier=whole)
        names = ("weight", "weight_scale", "weight_scale_2")
    return {f"{base}.{name}": part for name, part in zip(names, (data, scale, whole), strict=True)}


def check(source: Tensors, result: Tensors, chosen: Callable[[str], bool], **how: str) -> None:
    form, rule = how.get("form", "compressed-tensors"), how.get("rule", "even")
    wanted = dict(source)
    for base in filter(chosen, bases(source)):
        for name in [name for name in wanted if name.startswith(f"{base}.weight")]:
            del wanted[name]
        wanted |= encoded(source, base, how["to"], form, rule)
    assert result.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert result[name].nbytes == tensor.nbytes, name
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (result[name], tensor)]
        assert torch.equal(*raw), name


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("before", FORMATS)
def test_all_matrices(
    sources: dict[str, Path], convert: Any, tensors_of: Any, before: str, to: str
) -> None:
    source = sources[before]
    result = convert(source, to=to, parts="all")
    if before == to:
        assert (result / "consolidated.safetensors").read_bytes() == (
            source / "consolidated.safetensors"
        ).read_bytes()
    else:
        check(tensors_of(source), tensors_of(result), lambda base: True, to=to)
    opened = Checkpoint.open(result)
    report = validate(opened, load_model_spec(opened))
    matrices = {stem: matrix.format for stem, matrix in report.matrices.items()}
    for base in bases(tensors_of(result)):
        assert matrices[base] == to


@pytest.mark.parametrize("rule", mxfp4.RULES)
def test_experts_in_mxfp4(bf16: Path, convert: Any, tensors_of: Any, rule: str) -> None:
    result = tensors_of(convert(bf16, to="mxfp4", mxfp4_rule=rule))
    check(tensors_of(bf16), result, lambda base: ".experts." in base, to="mxfp4", rule=rule)


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
def test_experts_in_nvfp4(bf16: Path, convert: Any, tensors_of: Any, form: str) -> None:
    result = tensors_of(convert(bf16, to="nvfp4", nvfp4_form=form))
    check(tensors_of(bf16), result, lambda base: ".experts." in base, to="nvfp4", form=form)
    dtypes = {name.rsplit(".", 1)[1]: result[name].dtype for name in result if ".experts." in name}
    assert dtypes["weight_scale"] == torch.float8_e4m3fn
    shapes = {result[n].shape for n in result if n.endswith(("global_scale", "weight_scale_2"))}
    assert shapes == {torch.Size([1]) if form == "compressed-tensors" else torch.Size([])}


def test_the_rest_in_fp8(bf16: Path, convert: Any, tensors_of: Any) -> None:
    result = tensors_of(convert(bf16, to="mxfp4", rest="fp8_block"))
    middle = tensors_of(convert(bf16, name="middle", to="fp8_block", parts="all"))
    experts = tensors_of(convert(bf16, name="experts", to="mxfp4"))
    for name, tensor in result.items():
        other = experts if ".experts." in name else middle
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


def test_only_experts_decoded(sources: dict[str, Path], convert: Any, tensors_of: Any) -> None:
    source = tensors_of(sources["fp8_block"])
    result = tensors_of(convert(sources["fp8_block"], to="bf16", parts="experts"))
    check(source, result, lambda base: ".experts." in base, to="bf16")


def test_fp8_is_what_the_seeded_writer_makes(
    tmp_path: Path, convert: Any, tensors_of: Any, same: Any
) -> None:
    dims: dict[str, Any] = {"layers": 2, "hidden": 128, "heads": 2, "experts": 4, "vocab": 320}
    fp32 = make_seeded(tmp_path / "fp32", format="fp32", **dims)
    fp8 = tensors_of(make_seeded(tmp_path / "fp8", format="fp8_block", **dims))
    result = tensors_of(convert(fp32, to="fp8_block"))
    quantised = [name for name, tensor in fp8.items() if tensor.dtype == torch.float8_e4m3fn]
    assert result.keys() == fp8.keys()
    assert len(quantised) > 10
    assert all(same(result[n], fp8[n]) and same(result[f"{n}_scale"], fp8[f"{n}_scale"])
               for n in quantised)  # fmt: skip


@pytest.mark.parametrize("suffix", ["qscale_weight", "weight_scale", "weight_scale_inv"])
def test_fp8_with_one_scale(make: Any, convert: Any, tensors_of: Any, suffix: str) -> None:
    code = (torch.randn(64, 96) * 8).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.0123)
    base = "layers.1.experts.0.w2"
    source = make({f"{base}.weight": code, f"{base}.{suffix}": scale, f"{base}.qscale_act": scale})
    result = tensors_of(convert(source, to="mxfp4"))
    values = fp8_tensor.dequantize(code.view(torch.uint8), scale, dtype=torch.bfloat16)
    data, exponents = mxfp4.quantize(values)
    assert result.keys() == {f"{base}.weight", f"{base}.weight_scale"}  # the activation's is void
    assert torch.equal(result[f"{base}.weight"], data)
    assert torch.equal(result[f"{base}.weight_scale"], exponents)


def test_names_of_hugging_face_are_kept(make: Any, convert: Any, tensors_of: Any) -> None:
    prefix = "model.layers.1.mlp.experts.0."
    tensors = {f"{prefix}{name}.weight": torch.randn(32, 32) for name in ("gate_proj", "up_proj")}
    result = tensors_of(convert(make(tensors), to="nvfp4"))
    parts = ("weight_packed", "weight_scale", "weight_global_scale")
    assert result.keys() == {
        f"{name}_x".replace("weight_x", part) for name in tensors for part in parts
    }
    scales = [result[f"{prefix}{name}.weight_global_scale"] for name in ("gate_proj", "up_proj")]
    assert torch.equal(*scales)
    assert torch.equal(scales[0][0], nvfp4.global_divisor(torch.cat([*tensors.values()])))


def test_fp32_is_quantised_without_a_step_between(make: Any, convert: Any, tensors_of: Any) -> None:
    values = torch.randn(128, 64)
    name = "layers.1.experts.0.w2.weight"
    result = tensors_of(convert(make({name: values}), to="mxfp4"))
    assert torch.equal(result[name], mxfp4.quantize(values)[0])
    assert not torch.equal(result[name], mxfp4.quantize(values.bfloat16())[0])


def test_the_other_form_keeps_codes(bf16: Path, convert: Any, tensors_of: Any, same: Any) -> None:
    one = convert(bf16, name="one", to="nvfp4")
    two = convert(one, name="two", to="nvfp4", nvfp4_form="modelopt")
    back = tensors_of(convert(two, name="back", to="nvfp4"))
    first, second = tensors_of(one), tensors_of(two)
    for base in (base for base in bases(first) if ".experts." in base):
        assert same(first[f"{base}.weight_packed"], second[f"{base}.weight"])
        assert same(first[f"{base}.weight_scale"], second[f"{base}.weight_scale"])
        divisor, multiplier = first[f"{base}.weight_global_scale"], second[f"{base}.weight_scale_2"]
        assert torch.equal(multiplier.reshape(1), 1 / divisor)
        assert same(back[f"{base}.weight_packed"], first[f"{base}.weight_packed"])
    assert back.keys() == first.keys()


def test_activation_scales_follow_the_form(make: Any, convert: Any, tensors_of: Any) -> None:
    base = "layers.1.experts.0.w2"
    data, scale = nvfp4.quantize(torch.randn(16, 32), divisor=torch.tensor(700.0))
    source = make(
        {
            f"{base}.weight_packed": data,
            f"{base}.weight_scale": scale.view(torch.float8_e4m3fn),
            f"{base}.weight_global_scale": torch.tensor([700.0]),
            f"{base}.input_global_scale": torch.tensor([3.0]),
        }
    )
    result = tensors_of(convert(source, to="nvfp4", nvfp4_form="modelopt"))
    assert result.keys() == {
        f"{base}.{name}" for name in ("weight", "weight_scale", "weight_scale_2", "input_scale")
    }
    assert float(result[f"{base}.input_scale"]) == pytest.approx(1 / 3)


def test_excluded_parts_are_copied(make: Any, convert: Any, tensors_of: Any, same: Any) -> None:
    names = (
        "mtp_dspark.layers.0.experts.0.w1.weight",
        "vision_encoder.transformer.layers.0.attention.wq.weight",
        "layers.1.gate.weight",
        "layers.1.attention.indexer.weights_proj.weight",
        "tok_embeddings.weight",
        "output.weight",
        "something.unknown",
    )
    tensors = {name: torch.randn(32, 64).bfloat16() for name in names}
    tensors["layers.1.attention.wo.weight"] = torch.randn(32, 64).bfloat16()
    tensors["scalar"] = torch.tensor(3)
    tensors["empty"] = torch.zeros(0, 4)
    result = tensors_of(convert(make(tensors), to="fp8_block"))
    assert result.pop("layers.1.attention.wo.weight").dtype == torch.float8_e4m3fn
    assert result.pop("layers.1.attention.wo.weight_scale").shape == (1, 1)
    assert result.keys() == {*names, "scalar", "empty"}
    assert all(result[name].shape == tensors[name].shape for name in result)
    assert all(same(result[name], tensors[name]) for name in result)


def test_to_bf16_decodes_whatever_is_quantised(make: Any, convert: Any, tensors_of: Any) -> None:
    code, scale = fp8_block.quantize_weight(torch.randn(200, 130))
    tensors = {}
    for base in ("output", "mtp_dspark.fc", "layers.1.attention.wo"):
        tensors[f"{base}.weight"] = code.view(torch.float8_e4m3fn)
        tensors[f"{base}.weight_scale_inv"] = scale
    tensors["norm.weight"] = torch.randn(8)
    result = tensors_of(convert(make(tensors), to="bf16"))
    assert torch.equal(result.pop("norm.weight"), tensors["norm.weight"])
    assert len(result) == 3
    wanted = fp8_block.dequantize_weight(code, scale, dtype=torch.bfloat16)
    assert all(torch.equal(tensor, wanted) for tensor in result.values())


def test_same_bytes_each_time(bf16: Path, tmp_path: Path, content_of: Any) -> None:
    options = QuantizeOptions(to="nvfp4", rest="fp8_block", max_shard_bytes=200_000)
    for name in ("a", "b"):
        quantize(bf16, tmp_path / name, options)
    assert content_of(tmp_path / "a") == content_of(tmp_path / "b")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 3
