"""All experts of a layer in one tensor are the same weights as experts one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import Weight
from ml4core.models.checkpoint import Checkpoint, CheckpointWriter
from ml4core.models.errors import CheckpointError
from ml4core.models.seeded import make_seeded
from ml4core.models.shards import Shard
from ml4core.models.tensors import load_model_spec, validate

from .formats import load, values

DIMS: dict[str, Any] = {"layers": 2, "hidden": 128, "heads": 2, "vocab": 320, "experts": 3}
DIMS |= {"experts_per_token": 2, "expert_width": 256, "nope_every": None, "kv_lora_rank": 128}
DIMS |= {"nope_dim": 64, "v_dim": 128, "dense_width": 512}


def fused(source: Path, folder: Path, edit: Any = None) -> Path:
    """A copy whose experts are two tensors a layer, and two of scales."""
    checkpoint = Checkpoint.open(source)
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    experts = {name: tensors.pop(name) for name in [*tensors] if ".experts." in name}
    for suffix, theirs in (("weight", ""), ("weight_scale", "_scale_inv")):
        if f"layers.1.experts.0.w1.{suffix}" not in experts:
            continue

        def stack(*parts: str, suffix: str = suffix) -> Tensor:
            stems = [[f"layers.1.experts.{e}.{part}.{suffix}" for part in parts] for e in range(3)]
            dtype = experts[stems[0][0]].dtype
            raw = [torch.cat([experts[n].view(torch.uint8) for n in group]) for group in stems]
            return torch.stack(raw).view(dtype)

        prefix = "model.layers.1.mlp.experts"
        tensors[f"{prefix}.gate_up_proj{theirs}"] = stack("w1", "w3")
        tensors[f"{prefix}.down_proj{theirs}"] = stack("w2")
    if edit is not None:
        edit(tensors)
    with CheckpointWriter(folder) as writer:
        assert checkpoint.params is not None
        writer.add_json("params.json", checkpoint.params)
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    return folder


@pytest.mark.parametrize("format", ["bf16", "fp8_block"])
@pytest.mark.parametrize("shard", [None, Shard(1, 2), Shard(0, 1, 1, 2)])
def test_same_weights(tmp_path: Path, format: str, shard: Shard | None) -> None:
    source = make_seeded(tmp_path / "a", format=format, **DIMS)  # type: ignore[arg-type]
    ours, _, checkpoint = load(fused(source, tmp_path / "b"), shard=shard)
    theirs, _, single = load(source, shard=shard)
    assert ours[1].keys() == theirs[1].keys()
    for name in ("experts_w13", "experts_w2"):
        a, b = ours[1][name], theirs[1][name]
        assert isinstance(a, Weight)
        assert (a.format, a.shape) == (b.format, b.shape)
        assert all(torch.equal(part, b.parts[key]) for key, part in a.parts.items())
    assert checkpoint.bytes_read == single.bytes_read


def test_one_scale_an_expert(tmp_path: Path) -> None:
    source = make_seeded(tmp_path / "a", format="fp8_block", **DIMS)
    scales = {"gate_up_proj": torch.tensor([0.5, 1.0, 2.0]), "down_proj": torch.ones(3, 1, 1)}

    def edit(tensors: dict[str, Tensor]) -> None:
        for name, scale in scales.items():
            tensors[f"model.layers.1.mlp.experts.{name}_scale_inv"] = scale
            tensors[f"model.layers.1.mlp.experts.{name}_activation_scale"] = scale

    folder = fused(source, tmp_path / "b", edit)
    loaded = load(folder)[0]
    w13 = loaded[1]["experts_w13"]
    assert w13.format == loaded[1]["experts_w2"].format == "fp8_tensor"
    data = Checkpoint.open(folder).read("model.layers.1.mlp.experts.gate_up_proj").double()
    assert torch.equal(values(w13), data * scales["gate_up_proj"].view(3, 1, 1).double())
    assert torch.equal(loaded[1]["experts_w13_input_scale"], scales["gate_up_proj"])


def test_params_left_open_are_seen_in_fused_tensors(tmp_path: Path) -> None:
    source = make_seeded(tmp_path / "a", **DIMS)
    checkpoint = Checkpoint.open(fused(source, tmp_path / "b"))
    assert checkpoint.params is not None
    del checkpoint.params["moe"]["expert_hidden_dim"]
    moe = load_model_spec(checkpoint).layers[1].moe
    assert moe is not None
    assert moe.expert_width == 256


EDITS: dict[str, tuple[str, Tensor, str]] = {
    "experts too few": ("gate_up_proj", torch.ones(2, 512, 128), "experts.2.w1.weight [256, 128]"),
    "experts too many": ("down_proj", torch.ones(4, 128, 256), "moe.num_experts is 3"),
    "transposed": ("gate_up_proj", torch.ones(3, 128, 512), "[64, 512], wanted [256, 128]"),
    "an odd height": ("gate_up_proj", torch.ones(3, 511, 128), "2 matrices of equal height"),
    "one matrix": ("down_proj", torch.ones(128, 256), "wanted experts x rows x columns"),
}


@pytest.mark.parametrize("case", EDITS)
def test_fused_tensors_of_wrong_shape(tmp_path: Path, case: str) -> None:
    name, tensor, says = EDITS[case]
    source = make_seeded(tmp_path / "a", **DIMS)

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"model.layers.1.mlp.experts.{name}"] = tensor.bfloat16()

    checkpoint = Checkpoint.open(fused(source, tmp_path / "b", edit))
    with pytest.raises(CheckpointError) as caught:
        validate(checkpoint, load_model_spec(checkpoint))
    assert says in str(caught.value)
    assert f"experts.{name}" in str(caught.value) or case == "experts too few"


def test_fused_and_single_experts(tmp_path: Path) -> None:
    source = make_seeded(tmp_path / "a", **DIMS)

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["layers.1.experts.1.w3.weight"] = torch.ones(256, 128).bfloat16()

    checkpoint = Checkpoint.open(fused(source, tmp_path / "b", edit))
    with pytest.raises(CheckpointError, match="1 duplicate") as caught:
        validate(checkpoint, load_model_spec(checkpoint))
    assert "gate_up_proj (layers.1.experts.1.w3.weight)" in str(caught.value)


def test_blocks_that_lie_across_two_halves(tmp_path: Path) -> None:
    """192 rows of gate end within the second block of 384."""
    source = make_seeded(tmp_path / "a", format="fp8_block", **{**DIMS, "expert_width": 192})

    def edit(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.1.mlp.experts.gate_up_proj_scale_inv"
        tensors[name] = torch.ones(3, 3, 1)

    checkpoint = Checkpoint.open(fused(source, tmp_path / "b", edit))
    with pytest.raises(CheckpointError, match=r"half may end within a block of 128"):
        validate(checkpoint, load_model_spec(checkpoint))
