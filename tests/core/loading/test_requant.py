"""Experts in FP8 that become MXFP4 while they are read: bytes, order, ranks, memory, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import Weight
from ml4core.compose.ops.gemms import silu_mul
from ml4core.compose.ops.moe import moe_experts
from ml4core.formats import fp8_block, mxfp4
from ml4core.models.checkpoint import Checkpoint, CheckpointWriter
from ml4core.models.errors import CheckpointError
from ml4core.models.quantize import QuantizeOptions, quantize
from ml4core.models.requant import Requant, formats_after, peak
from ml4core.models.seeded import make_seeded
from ml4core.models.shards import Shard
from ml4core.models.tensors import load_model_spec, validate
from ml4core.models.weights import load_layers

from .conftest import DIMS
from .formats import values

Loaded = dict[int | None, dict[str, Any]]
EXPERTS = ("experts_w13", "experts_w2")


EVEN = Requant()


def load(folder: Path, requant: Requant | None = EVEN, **more: Any) -> Loaded:
    checkpoint = Checkpoint.open(folder)
    spec = load_model_spec(checkpoint)
    layers = load_layers(checkpoint, spec, torch.bfloat16, requant=requant, **more)
    return {layer and layer.index: weights for layer, weights in layers}


def parts(loaded: Loaded) -> Iterator[tuple[str, Tensor]]:
    """Every array by name."""
    for layer, weights in loaded.items():
        for name, value in weights.items():
            if isinstance(value, Weight):
                for part, tensor in value.parts.items():
                    yield f"{layer} {name} {part}", tensor
            else:
                yield f"{layer} {name}", value


def same(one: Loaded, other: Loaded) -> None:
    ours, theirs = dict(parts(one)), dict(parts(other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def wanted(tensors: dict[str, Tensor], stem: str, rule: str) -> tuple[Tensor, Tensor]:
    """FP8, then bfloat16, then MXFP4, of one matrix of a checkpoint."""
    data = tensors[f"{stem}.weight"].float()
    scale = tensors.get(f"{stem}.weight_scale", tensors.get(f"{stem}.qscale_weight"))
    assert scale is not None
    if scale.dim():
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        scale = scale[: data.shape[0], : data.shape[1]]
    return mxfp4.quantize((data * scale).to(torch.bfloat16), rule)


@pytest.fixture(scope="module", params=["fp8_block", "fp8_tensor"])
def fp8(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("requant") / "m"
    return make_seeded(folder, format=request.param, **(DIMS | {"layers": 4}))


@pytest.mark.parametrize("rule", mxfp4.RULES)
def test_bytes_are_those_of_the_way_by_bfloat16(fp8: Path, rule: str) -> None:
    source = Checkpoint.open(fp8)
    tensors = {name: source.read(name) for name in source.tensors}
    loaded, plain = load(fp8, Requant(rule)), load(fp8, None)
    for layer in (1, 2, 3):
        for name, stems in (("experts_w13", ("w1", "w3")), ("experts_w2", ("w2",))):
            weight = loaded[layer][name]
            assert weight.format == "mxfp4"
            assert weight.shape == plain[layer][name].shape
            for expert in range(3):
                found = [
                    wanted(tensors, f"layers.{layer}.experts.{expert}.{s}", rule) for s in stems
                ]
                assert torch.equal(weight.data[expert], torch.cat([one[0] for one in found]))
                scale = torch.cat([one[1] for one in found])
                assert torch.equal(weight.parts["scale"][expert], scale)
    for weights in (*loaded.values(), *plain.values()):
        for name in EXPERTS:
            weights.pop(name, None)
    same(loaded, plain)  # nothing else is touched


def test_loading_gives_what_converting_the_checkpoint_gives(fp8: Path, tmp_path: Path) -> None:
    quantize(fp8, tmp_path / "quark", QuantizeOptions(to="mxfp4", parts="experts"))
    same(load(fp8), load(tmp_path / "quark", None))


def test_what_is_mxfp4_already_loads_as_it_is(fp8: Path, tmp_path: Path) -> None:
    """Converting twice is converting once, whatever rule the second time asks for."""
    quantize(fp8, tmp_path / "quark", QuantizeOptions(to="mxfp4", parts="experts"))
    same(load(tmp_path / "quark", Requant("ceil")), load(tmp_path / "quark", None))


def rewritten(source: Path, target: Path, order: Callable[[list[str]], list[str]]) -> Path:
    checkpoint = Checkpoint.open(source)
    with CheckpointWriter(target, max_shard_bytes=1 << 18) as writer:
        assert checkpoint.params is not None
        writer.add_json("params.json", checkpoint.params)
        for name in order(list(checkpoint.tensors)):
            writer.add(name, checkpoint.read(name))
    return target


def test_the_order_of_tensors_in_files_is_of_no_matter(fp8: Path, tmp_path: Path) -> None:
    backwards = rewritten(fp8, tmp_path / "b", lambda names: names[::-1])
    # Scales before all values, and layers among each other: no layer's tensors stand together.
    mixed = rewritten(fp8, tmp_path / "m", lambda n: sorted(n, key=lambda one: one[::-1]))
    loaded = load(fp8)
    same(loaded, load(backwards))
    same(loaded, load(mixed))


def test_a_file_that_is_missing_or_cut_is_refused_before_anything_is_read(
    fp8: Path, tmp_path: Path
) -> None:
    """B080, with the conversion on."""
    folder = rewritten(fp8, tmp_path / "m", lambda names: names)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    kept = files[1].read_bytes()
    files[1].write_bytes(kept[:-5])
    with pytest.raises(CheckpointError, match=files[1].name):
        load(folder)
    files[1].unlink()
    with pytest.raises(CheckpointError, match=files[1].name):
        load(folder)


def edited(folder: Path, target: Path, edit: Callable[[dict[str, Tensor]], None]) -> Path:
    source = Checkpoint.open(folder)
    tensors = {name: source.read(name) for name in source.tensors}
    edit(tensors)
    with CheckpointWriter(target) as writer:
        assert source.params is not None
        writer.add_json("params.json", source.params)
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    return target


def test_a_lost_scale_is_refused_by_name(fp8: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for suffix in ("weight_scale", "qscale_weight"):
            tensors.pop(f"layers.2.experts.1.w3.{suffix}", None)

    with pytest.raises(CheckpointError, match=r"layers\.2\.experts\.1\.w3\.weight"):
        load(edited(fp8, tmp_path / "m", edit))


def test_a_file_that_shrinks_meanwhile_ends_the_load(fp8: Path, tmp_path: Path) -> None:
    """And layers that were handed out before are whole."""
    folder = rewritten(fp8, tmp_path / "m", sorted)
    checkpoint = Checkpoint.open(folder)
    spec = load_model_spec(checkpoint)
    layers = load_layers(checkpoint, spec, torch.bfloat16, requant=Requant())
    before = [next(layers) for _ in range(3)]
    last = checkpoint.tensors["layers.3.experts.2.w2.weight"].file
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=last.name):
        list(layers)
    weights = before[-1][1]
    assert {weights[name].format for name in EXPERTS} == {"mxfp4"}  # type: ignore[union-attr]


def test_values_without_a_number_are_refused_by_name(fp8: Path, tmp_path: Path) -> None:
    name = "layers.1.experts.2.w1"

    def nan(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}.weight"].view(torch.uint8)[5, 7] = 0x7F

    def huge(tensors: dict[str, Tensor]) -> None:
        for suffix in ("weight_scale", "qscale_weight"):
            if f"{name}.{suffix}" in tensors:
                tensors[f"{name}.{suffix}"] = tensors[f"{name}.{suffix}"] * 0 + 3e38

    with pytest.raises(CheckpointError, match=r"layers\.1\.experts\.2\.w1\.weight.*NaN"):
        load(edited(fp8, tmp_path / "nan", nan))
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.experts\.2\.w1\.weight.*beyond bfloat16"
    ):
        load(edited(fp8, tmp_path / "huge", huge))


NARROW: dict[str, Any] = {
    "layers": 2,
    "nope_every": 2,
    "heads": 8,
    "nope_dim": 64,
    "nope_layer_dim": 128,
    "rope_dim": 64,
    "v_dim": 128,
    "kv_lora_rank": 128,
    "topk": 16,
    "experts": 3,
    "experts_per_token": 2,
    "dense_width": 1024,
    "vocab": 320,
}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parts of 96 rows or columns on two ranks: no whole block of FP8, three groups of MXFP4."""
    folder = tmp_path_factory.mktemp("narrow") / "m"
    return make_seeded(
        folder, format="fp8_block", hidden=128, expert_width=192, shared_experts=0, **NARROW
    )


def test_parts_that_are_no_whole_blocks(narrow: Path) -> None:
    """B040: what FP8 can't be cut to, its conversion can; each rank has its part of the whole."""
    with pytest.raises(CheckpointError, match="96 each, not a multiple of 128, the block of fp8_b"):
        load(narrow, None, shard=Shard(0, 2))
    whole = load(narrow)[1]
    ranks = [load(narrow, shard=Shard(rank, 2))[1] for rank in range(2)]
    for name in ("data", "scale"):
        found = torch.cat([rank["experts_w2"].parts[name] for rank in ranks], dim=-1)
        assert torch.equal(found, whole["experts_w2"].parts[name])
        halves = [rank["experts_w13"].parts[name].chunk(2, dim=1) for rank in ranks]
        found = torch.cat([torch.cat([one[half] for one in halves], 1) for half in (0, 1)], 1)
        assert torch.equal(found, whole["experts_w13"].parts[name])


def test_parts_that_are_no_whole_groups_are_refused_on_all_ranks_alike(narrow: Path) -> None:
    texts = set()
    for rank in range(4):
        with pytest.raises(CheckpointError) as error:
            load(narrow, shard=Shard(rank, 4))
        texts.add(str(error.value))
    (text,) = texts
    assert "experts.0.w2.weight" in text
    assert "192 columns over 4 ranks are 48 each, not a multiple of 32, the block of mxfp4" in text
    assert "TP sizes that work for every tensor: 1, 2" in text


@pytest.mark.parametrize("ep", [2, 3])
def test_experts_by_range_keep_all_scales(fp8: Path, ep: int) -> None:
    """B084: a rank reads its experts alone, and they are those of the whole."""
    whole = load(fp8)[2]
    ranks = [load(fp8, shard=Shard(0, 1, rank, ep))[2] for rank in range(ep)]
    for name in EXPERTS:
        for part in ("data", "scale"):
            found = torch.cat([rank[name].parts[part] for rank in ranks])
            assert torch.equal(found, whole[name].parts[part])


@pytest.mark.parametrize("hidden", [64, 160, 320])
@pytest.mark.parametrize("width", [64, 96, 192, 384])
def test_every_expert_is_its_own_product(tmp_path: Path, hidden: int, width: int) -> None:
    """B034: an offset that is off by padding would leave the first expert right alone."""
    dims = NARROW | {"hidden": hidden, "expert_width": width, "experts": 4}
    weights = load(make_seeded(tmp_path / "m", format="fp8_block", **dims))[1]
    w13, w2 = weights["experts_w13"], weights["experts_w2"]
    x = torch.randn(4, hidden, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(4).unsqueeze(-1)
    found = moe_experts(x, w13, w2, torch.ones(4, 1), ids)
    for expert in range(4):
        inner = silu_mul(x[expert] @ values(w13)[expert].float().T)
        torch.testing.assert_close(found[expert], inner @ values(w2)[expert].float().T)


def test_memory_that_holds_rubbish_leaves_no_trace(fp8: Path) -> None:
    """B036: every byte of a result is written; fresh memory is filled with 0xFF here."""
    plain = load(fp8)
    torch.use_deterministic_algorithms(True)  # this is what fills it
    try:
        assert int(torch.empty(3, dtype=torch.uint8).min()) == 0xFF
        poisoned = load(fp8)
    finally:
        torch.use_deterministic_algorithms(False)
    same(plain, poisoned)


def test_formats_are_known_before_anything_is_read(fp8: Path) -> None:
    checkpoint = Checkpoint.open(fp8)
    report = validate(checkpoint, load_model_spec(checkpoint))
    assert formats_after(report) == report.formats | {"mxfp4"}  # attention stays FP8
    with pytest.raises(ValueError, match=r"unknown MXFP4 scale rule 'best'; known: floor, even"):
        Requant("best")


def allocated(work: Callable[[], object]) -> tuple[int, int]:
    """Most bytes that torch's allocator had out during a call, and those at its end, as it
    counts them.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        kept = work()
    assert kept is not None
    result = profile.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in result.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most, live


def test_peak_is_the_model_one_layer_in_fp8_and_one_expert(tmp_path: Path) -> None:
    dims = {"layers": 4, "experts": 6, "expert_width": 1024, "hidden": 256, "vocab": 320}
    folder = make_seeded(tmp_path / "m", "micro", format="fp8_block", **dims)
    checkpoint = Checkpoint.open(folder)
    spec = load_model_spec(checkpoint)
    report = validate(checkpoint, spec)
    load(folder)  # what torch makes once is made
    kept = sum(tensor.nbytes for _, tensor in parts(load(folder)))
    bound = peak(kept, report)
    expert = 3 * 256 * 1024
    assert bound.expert == 2 * expert
    assert bound.layer == 6 * (expert + 3 * 4 * 2 * 8)  # codes, and fp32 scales of 2 x 8 blocks
    most, left = allocated(lambda: load(folder))
    assert left == pytest.approx(kept, rel=0.01)
    assert most <= bound.nbytes
    # Without the conversion a layer of FP8 more would lie there at the end.
    plain, _ = allocated(lambda: load(folder, None))
    assert plain > bound.nbytes
    moe = sum(layer.moe is not None for layer in spec.layers)
    assert kept < sum(tensor.nbytes for _, tensor in parts(load(folder, None))) - 0.4 * moe * (
        bound.layer
    )


def test_scales_of_fp8_blocks_are_read_as_they_are_named(tmp_path: Path) -> None:
    """``weight_scale_inv`` multiplies, too."""
    folder = make_seeded(tmp_path / "m", format="fp8_block", **(DIMS | {"layers": 2}))
    source = Checkpoint.open(folder)
    with CheckpointWriter(tmp_path / "inv") as writer:
        assert source.params is not None
        writer.add_json("params.json", source.params)
        for name in source.tensors:
            renamed = name.replace("weight_scale", "weight_scale_inv")
            writer.add(renamed, source.read(name))
    same(load(folder), load(tmp_path / "inv"))
    w2 = load(folder)[1]["experts_w2"]
    code = source.read("layers.1.experts.0.w2.weight").view(torch.uint8)
    scale = source.read("layers.1.experts.0.w2.weight_scale")
    near = fp8_block.dequantize_weight(code, scale).double()
    error = (values(w2)[0] - near).norm() / near.norm()
    assert float(error) < 0.14  # MXFP4 of a Gaussian by the rule even: 0.115
