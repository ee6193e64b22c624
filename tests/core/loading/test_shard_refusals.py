"""What can't be cut is refused whole, before anything is read, on every rank with one text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import LayerSpec
from ml4core.compose.ops.gemms import gemm, silu_mul
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.errors import CheckpointError
from ml4core.models.seeded import make_seeded
from ml4core.models.shards import Shard, shard_spec
from ml4core.models.tensors import load_model_spec
from ml4core.models.weights import load_layers

from .formats import load

DIMS: dict[str, Any] = {
    "layers": 2,
    "nope_every": None,
    "hidden": 128,
    "heads": 8,
    "nope_dim": 64,
    "v_dim": 64,
    "kv_lora_rank": 128,
    "topk": 16,
    "experts": 3,
    "experts_per_token": 2,
    "expert_width": 768,
    "dense_width": 640,
    "vocab": 320,
}


def refusal(folder: Path, shard: Shard) -> str:
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError) as caught:
        load_layers(checkpoint, load_model_spec(checkpoint), shard=shard)
    assert checkpoint.bytes_read == 0
    return str(caught.value)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeded(tmp_path_factory.mktemp("fp8") / "m", format="fp8_block", **DIMS)


def test_merged_shards_that_are_no_blocks(fp8: Path) -> None:
    # B040: w1 and w3 of 640 rows over two ranks would be [320, 320].
    text = refusal(fp8, Shard(0, 2))
    assert f"{fp8}: can't be cut for tensor parallel size 2" in text
    assert (
        "layers.0.feed_forward.w1.weight (and 1 alike): 640 rows over 2 ranks are 320 each, not a "
        "multiple of 128, the block of fp8_block; TP sizes that work: 1, 5" in text
    )
    assert "layers.0.feed_forward.w2.weight: 640 columns over 2 ranks are 320 each" in text
    assert "layers.1.experts" not in text  # 384 are three blocks
    assert "TP sizes that work for every tensor: 1" in text


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_all_ranks_refuse_together(fp8: Path, size: int) -> None:
    assert len({refusal(fp8, Shard(rank, size)) for rank in range(size)}) == 1


def test_heads_that_do_not_divide(fp8: Path) -> None:
    text = refusal(fp8, Shard(0, 3))
    assert "layers.0.attention.wq.weight (and 1 alike): 1024 rows over 3 ranks are 341.333" in text
    assert "layers.0.attention.wkv_b.weight" in text
    assert "layers.0.attention.ssmax_scale (and 1 alike): 8 rows over 3 ranks are 2.66667" in text
    assert "not whole heads of 128; TP sizes that work: 1, 2, 4, 8" in text


@pytest.mark.parametrize(
    ("width", "sizes"),
    [(320, {1: True, 2: False}), (96, {1: True, 3: False}), (384, {1: True, 3: True})],
)
def test_right_or_refused(tmp_path: Path, width: int, sizes: dict[int, bool]) -> None:
    # B040, the other widths: at one rank a part that ends within a block is decoded.
    dims = {**DIMS, "heads": 6, "index_heads": 6, "dense_width": width, "expert_width": 384}
    folder = make_seeded(tmp_path / "m", format="fp8_block", **dims)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))

    def dense(weights: dict[str, Any]) -> Tensor:
        return gemm(silu_mul(gemm(x, weights["dense_w13"])), weights["dense_w2"])

    wanted = dense(load(folder)[0][0])
    for size, works in sizes.items():
        if not works:
            assert "layers.0.feed_forward.w1" in refusal(folder, Shard(size - 1, size))
            continue
        found = [load(folder, shard=Shard(rank, size))[0][0] for rank in range(size)]
        torch.testing.assert_close(
            torch.stack([dense(part) for part in found]).sum(0), wanted, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("format", "group", "width"), [("nvfp4_ct", 16, 32 * 5), ("mxfp4", 32, 32 * 5)]
)
def test_groups_of_four_bits(tmp_path: Path, format: str, group: int, width: int) -> None:
    dims = {**DIMS, "expert_width": width, "shared_experts": 0, "dense_layers": 1}
    folder = make_seeded(tmp_path / "m", format=format, **dims)  # type: ignore[arg-type]
    text = refusal(folder, Shard(0, 4))
    kind = format.partition("_")[0]
    valid = {16: "1, 2, 5, 10", 32: "1, 5"}[group]
    assert (
        "layers.1.experts.0.w2.weight (and 2 alike): 160 columns over 4 ranks are 40 each, not a "
        f"multiple of {group}, the block of {kind}; TP sizes that work: {valid}" in text
    )
    assert "layers.1.experts.0.w1" not in text  # rows of groups may be cut anywhere
    # With whole experts the width doesn't matter.
    assert "experts" not in refusal(folder, Shard(0, 4, 0, 2))


def test_more_expert_ranks_than_experts(fp8: Path) -> None:
    text = refusal(fp8, Shard(0, 1, 0, 4))
    assert "expert parallel size 4: a layer has 3 experts, so ranks would have none; 1 to 3" in text


def test_expert_ranks_without_experts(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path / "m", **{**DIMS, "dense_layers": 2})
    assert "no layer has experts" in refusal(folder, Shard(0, 1, 0, 2))


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0), (0, 1, 3, 3)])
def test_ranks_that_are_not_there(shard: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ranks are 0 to"):
        Shard(*shard)


def test_uneven_experts() -> None:
    # B078
    def ranges(count: int, size: int) -> list[range]:
        return [Shard(ep_rank=rank, ep_size=size).experts(count) for rank in range(size)]

    assert ranges(8, 3) == [range(0, 3), range(3, 6), range(6, 8)]
    assert [len(part) for part in ranges(128, 6)] == [22, 22, 21, 21, 21, 21]
    for count, size in ((128, 6), (7, 7), (5, 1)):
        assert [n for part in ranges(count, size) for n in part] == list(range(count))


def test_a_table_that_cannot_be_cut(fp8: Path) -> None:
    spec = load_model_spec(Checkpoint.open(fp8))
    with pytest.raises(ValueError, match="layer 0: heads 8 over 3 ranks"):
        shard_spec(spec, Shard(0, 3))
    layer: LayerSpec = shard_spec(spec, Shard(0, 2)).layers[1]
    assert layer.softmax_scale == spec.layers[1].softmax_scale


def test_bad_scale_is_named_by_its_place_in_the_file(tmp_path: Path, edited_copy: Any) -> None:
    # B032 on a rank that begins in the middle of the tensor.
    dims = {**DIMS, "dense_width": 768}
    folder = make_seeded(tmp_path / "m", format="mxfp4", **dims)

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["layers.1.experts.0.w1.weight_scale"][700, 3] = 0xFF
        tensors["layers.1.experts.0.w2.weight_scale"][100, 20] = 0xFF

    folder = edited_copy(folder, edit)
    load(folder, shard=Shard(0, 2))  # not this rank's
    with pytest.raises(CheckpointError, match=r"w1\.weight_scale: the scale of row 700, block 3"):
        load(folder, shard=Shard(1, 2))
