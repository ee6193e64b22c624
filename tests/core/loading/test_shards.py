"""Ranks together have the model, each reads its part only, and their partial results add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ml4core.api import Weight
from ml4core.compose.ops.gemms import gemm, head_gemm, silu_mul
from ml4core.compose.ops.moe import moe_experts
from ml4core.models.seeded import FORMATS, make_seeded
from ml4core.models.shards import Shard, shard_spec
from ml4core.models.tensors import load_model_spec

from .formats import Loaded, load, values

# Eight ranks have whole blocks of 128: of heads, of w1's rows and of w2's columns. A head of wkv_b
# has 64 + 128 = 192 rows, so that no head but every other begins with a block.
DIMS: dict[str, Any] = {
    "layers": 3,
    "nope_every": 2,
    "hidden": 128,
    "heads": 8,
    "nope_dim": 64,
    "nope_layer_dim": 128,
    "rope_dim": 64,
    "v_dim": 128,
    "kv_lora_rank": 128,
    "topk": 16,
    "experts": 3,
    "experts_per_token": 2,
    "expert_width": 1024,
    "dense_width": 1024,
    "vocab": 320,
}
SHARDS = [(2, 1), (8, 1), (2, 2), (1, 3)]
"""(tensor-parallel size, expert-parallel size)."""


@pytest.fixture(scope="module", params=FORMATS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeded(tmp_path_factory.mktemp("shards") / "m", format=request.param, **DIMS)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Loaded:
    return load(folder)[0]


def ranks(folder: Path, tp: int, ep: int) -> list[Loaded]:
    """One for each rank; with expert parallelism alone a rank is an expert rank."""
    count = max(tp, ep)
    return [
        load(folder, shard=Shard(r % tp, tp, r % ep if ep > 1 else 0, ep))[0] for r in range(count)
    ]


def joined(parts: list[Any], axis: int) -> Tensor:
    return torch.cat([values(part) for part in parts], dim=axis)


def halves(parts: list[Weight]) -> Tensor:
    """w1 of all ranks above w3 of all ranks."""
    both = [values(part).chunk(2, dim=-2) for part in parts]
    return torch.cat([torch.cat([part[half] for part in both], dim=-2) for half in (0, 1)], dim=-2)


@pytest.mark.parametrize("tp", [2, 8])
def test_ranks_make_up_the_layers(folder: Path, whole: Loaded, tp: int) -> None:
    parts = ranks(folder, tp, 1)
    for layer in (0, 1, 2):
        full, each = whole[layer], [rank[layer] for rank in parts]
        assert all(rank.keys() == full.keys() for rank in each)
        for name, value in full.items():
            mine = [rank[name] for rank in each]
            if isinstance(value, Weight):
                assert {part.format for part in mine} == {value.format}, name
            if name in ("wq", "w_uk", "w_uv", "ssmax_scale", "ssmax_bias"):
                assert torch.equal(joined(mine, 0), values(value)), name
            elif name in ("wo", "experts_w2", "shared_w2", "dense_w2"):
                assert torch.equal(joined(mine, -1), values(value)), name
            elif name in ("experts_w13", "shared_w13", "dense_w13"):
                assert torch.equal(halves(mine), values(value)), name
            else:
                assert all(torch.equal(values(part), values(value)) for part in mine), name


@pytest.mark.parametrize("tp", [2, 8])
def test_vocabulary_is_filled_up(folder: Path, whole: Loaded, tp: int) -> None:
    parts = ranks(folder, tp, 1)
    rows = {2: 256, 8: 128}[tp]
    for name in ("embedding", "output"):
        mine = [rank[None][name] for rank in parts]
        assert {values(part).shape for part in mine} == {(rows, 128)}
        together = joined(mine, 0)
        assert torch.equal(together[:320], values(whole[None][name]))
        assert not together[320:].any()


@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (1, 2), (1, 3)])
def test_experts_by_range(folder: Path, whole: Loaded, tp: int, ep: int) -> None:
    parts = ranks(folder, tp, ep)
    for name in ("experts_w13", "experts_w2"):
        mine = [rank[1][name] for rank in parts]
        assert [len(values(part)) for part in mine] == {2: [2, 1], 3: [1, 1, 1]}[ep]
        assert torch.equal(joined(mine, 0), values(whole[1][name]))
        scale = f"{name}_input_scale"
        if scale in whole[1]:  # B084: all of them on every rank
            assert all(torch.equal(rank[1][scale], whole[1][scale]) for rank in parts)
    shared = [rank[1]["shared_w2"] for rank in parts]
    if tp == 1:
        assert all(torch.equal(values(part), values(whole[1]["shared_w2"])) for part in shared)
    else:
        assert torch.equal(joined(shared, -1), values(whole[1]["shared_w2"]))


def moe(x: Tensor, w: dict[str, Any], weights: Tensor, ids: Tensor, first: int) -> Tensor:
    """The share of the experts that a rank has, from number `first` on."""
    local = ids - first
    here = (local >= 0) & (local < w["experts_w13"].shape[0])
    weights, local = torch.where(here, weights, 0.0), torch.where(here, local, 0)
    return moe_experts(x, w["experts_w13"], w["experts_w2"], weights, local)


def block(x: Tensor, w: dict[str, Any], name: str) -> Tensor:
    return gemm(silu_mul(gemm(x, w[f"{name}_w13"])), w[f"{name}_w2"])


@pytest.mark.parametrize(("tp", "ep"), SHARDS)
def test_partial_results_add_up(folder: Path, whole: Loaded, tp: int, ep: int) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(9, 128, generator=generator)
    ids = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(9)])
    odds = torch.rand(9, 2, generator=generator)
    parts, full = ranks(folder, tp, ep), whole
    attended = torch.randn(9, 8, 128, generator=generator)  # latents, by head

    def attention(w: dict[str, Any], heads: slice) -> Tensor:
        out = head_gemm(attended[:, heads], w["w_uv"]).flatten(1)
        return gemm(out, w["wo"])

    cut = 8 // tp
    wanted = {
        "attention": attention(full[1], slice(0, 8)),
        "experts": moe(x, full[1], odds, ids, 0),
        "shared": block(x, full[1], "shared"),
        "dense": block(x, full[0], "dense"),
    }
    got = dict.fromkeys(wanted, torch.zeros(9, 128))
    by_heads = parts if tp > 1 else parts[:1]
    for rank, w in enumerate(by_heads):
        got["attention"] = got["attention"] + attention(w[1], slice(cut * rank, cut * (rank + 1)))
        got["shared"] = got["shared"] + block(x, w[1], "shared")
        got["dense"] = got["dense"] + block(x, w[0], "dense")
    for rank, w in enumerate(parts):
        first = Shard(ep_rank=rank % ep, ep_size=ep).experts(3).start
        got["experts"] = got["experts"] + moe(x, w[1], odds, ids, first)
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=name)
    queries = torch.cat([gemm(x, w[1]["wq"]) for w in by_heads], dim=-1)
    torch.testing.assert_close(queries, gemm(x, full[1]["wq"]))
    logits = torch.cat([gemm(x, w[None]["output"]) for w in by_heads], dim=-1)[:, :320]
    torch.testing.assert_close(logits, gemm(x, full[None]["output"]))


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (8, 1), (1, 3), (2, 2)])
def test_each_rank_reads_its_part(folder: Path, tp: int, ep: int) -> None:
    """B084: near 1/ranks of what is cut; nothing of other ranks' experts but activation scales."""
    checkpoint = load(folder)[2]
    experts = sum(
        info.nbytes
        for name, info in checkpoint.tensors.items()
        if ".experts." in name and "input" not in name
    )
    count = max(tp, ep)
    read = [
        load(folder, shard=Shard(r % tp, tp, r % ep if ep > 1 else 0, ep))[2].bytes_read
        for r in range(count)
    ]
    whole = checkpoint.bytes_read
    assert max(read) < whole
    # Experts are most of this checkpoint: what is saved is at least their share on other ranks,
    # less the one scale of a matrix that all ranks of a cut matrix read.
    for rank, found in enumerate(read):
        share = len(Shard(ep_rank=rank % ep, ep_size=ep).experts(3)) / 3 if ep > 1 else 1 / tp
        assert found <= whole - experts * (1 - share) + 256


def test_progress_ends_where_it_says(folder: Path) -> None:
    from ml4core.models.checkpoint import Checkpoint
    from ml4core.models.weights import load_layers

    checkpoint = Checkpoint.open(folder)
    calls: list[tuple[int, int]] = []
    shard = Shard(1, 2, 1, 2)
    for _ in load_layers(
        checkpoint,
        load_model_spec(checkpoint),
        shard=shard,
        progress=lambda done, total: calls.append((done, total)),
    ):
        pass
    assert calls[-1][0] == calls[-1][1]


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (8, 1), (2, 2)])
def test_layers_are_the_ranks_own(folder: Path, tp: int, ep: int) -> None:
    shard = Shard(1, tp, 1 % ep, ep)
    weights, layers, checkpoint = load(folder, shard=shard)
    spec = load_model_spec(checkpoint)
    assert tuple(layers.values()) == shard_spec(spec, shard).layers
    for index, layer in layers.items():
        found = cast(Any, weights[index])
        assert layer.heads == 8 // tp == found["w_uk"].shape[0]
        assert found["wq"].shape[0] == layer.heads * layer.q_dim
        assert found["wo"].shape[1] == layer.heads * layer.v_dim
        if layer.moe is None:
            assert found["dense_w2"].shape[1] == layer.dense_width == 1024 // tp
        else:
            assert layer.moe.experts == len(found["gate"]) == 3
            assert layer.moe.expert_width == (1024 if ep > 1 else 1024 // tp)
            assert found["experts_w2"].shape[2] == layer.moe.expert_width
            assert found["shared_w2"].shape[1] == layer.moe.shared_width == 1024 // tp
    assert shard_spec(spec, Shard()) is spec
