"""Core's compositions on whatever accelerator torch finds: what a new backend starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ml4core.api import Capabilities, Deployment, Device
from ml4core.compose.ops import COMPOSED
from ml4core.cpu.backend import CpuBackend
from ml4core.cpu.session import CpuSession
from ml4core.engine import resolve
from ml4core.engine.runner import ModelRunner
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.seeded import make_seeded
from ml4core.models.tensors import load_model_spec
from ml4core.models.weights import load_layers
from support.stepping import Sequence, build_plan, plan_pools

pytestmark = pytest.mark.accelerator


class TorchSession(CpuSession):
    """The embedded session with its arrays on another device."""

    def prepare_weights(self, weights, layer, part="decoder"):
        prepared = super().prepare_weights(weights, layer, part)
        return torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: t.to(self.device.torch_device), prepared
        )

    def alloc_kv(self, layout, blocks, block_size):
        cache = super().alloc_kv(layout, blocks, block_size)
        return torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: t.to(self.device.torch_device), cache
        )


@pytest.fixture(scope="module")
def accelerator() -> str:
    return str(torch.accelerator.current_accelerator())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeded(tmp_path_factory.mktemp("device") / "seeded", format="fp32", topk=16)


def run(folder: Path, torch_device: str, kv: str, index: str, dtype: str) -> torch.Tensor:
    """Logits of a mixed history: a prefill, a chunk, decodes."""
    opened = Checkpoint.open(folder)
    spec = load_model_spec(opened)
    device = Device("real", torch_device, torch_device, torch_device)
    deployment = Deployment(
        model=spec, device=device, dtype=dtype, kv_layout=kv, index_layout=index
    )
    capabilities = Capabilities(CpuBackend().capabilities(device).features)
    runner = ModelRunner(TorchSession(deployment), "device", deployment, capabilities)
    runner.load(load_layers(opened, spec, getattr(torch, dtype)))
    layouts = {"latent": resolve.latent(deployment), "index": resolve.index(deployment)}
    runner.allocate_kv(plan_pools(spec, layouts, 64, 256, 1))
    ids = torch.randint(64, 8192, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    sequence = Sequence(ids, len(ids))
    sequence.grow(runner.pools, len(ids), 64)
    found = []
    for rows in (90, 40, *[1] * 20):
        groups = tuple(runner.pools)
        plan = build_plan([(sequence, rows)], groups, 64, torch_device, all_logits=True)
        found.append(runner.step(plan).logits.cpu())
        sequence.computed += rows
    return torch.cat(found)


@pytest.fixture
def exact_matmuls():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("exact_matmuls")
@pytest.mark.parametrize("index", ["fp32", "planar_f32", "tiled16_f32"])
def test_the_model_gives_the_cpus_numbers(accelerator, folder, index):
    expected = run(folder, "cpu", "fp32", index, "float32")
    got = run(folder, accelerator, "fp32", index, "float32")
    error = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    # A score at the border of a selection may fall on the other side: few rows, then.
    assert error.median() < 1e-4
    assert (error > 1e-3).float().mean() < 0.1


@pytest.mark.parametrize("kv", ["fp8_ds_mla", "e4m3", "bf16"])
def test_every_layout_runs_in_bfloat16(accelerator, folder, kv):
    got = run(folder, accelerator, kv, "planar_f32", "bfloat16")
    expected = run(folder, "cpu", kv, "planar_f32", "bfloat16")
    assert torch.isfinite(got).all()
    error = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error[:16].median() < 0.1  # rows that see no more keys than the top-k


def test_every_op_is_on_the_device(accelerator):
    """No op makes a tensor on the host by itself."""
    x = torch.randn(3, 4, 64, device=accelerator)
    positions = torch.arange(3, device=accelerator)
    inv_freq = torch.rand(32, device=accelerator)
    assert COMPOSED["rope"](x, positions, inv_freq, True, 1.0).device.type == x.device.type
    scores = torch.randn(5, 300, device=accelerator)
    visible = torch.tensor([0, 1, 100, 300, 299], dtype=torch.int32, device=accelerator)
    found, lens, _ = COMPOSED["topk"](scores, visible, 64)
    on_host, host_lens, _ = COMPOSED["topk"](scores.cpu(), visible.cpu(), 64)
    assert torch.equal(found.cpu(), on_host)
    assert torch.equal(lens.cpu(), host_lens)
