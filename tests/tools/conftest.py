"""A small shape of the trained model's pattern, and the runner that serves what is exported."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ml4core.api import Deployment, StepOutput
from ml4core.cpu.backend import CpuBackend
from ml4core.engine import resolve
from ml4core.engine.runner import ModelRunner
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.dspark import with_drafter
from ml4core.models.tensors import load_model_spec
from ml4core.models.weights import load_layers
from support.stepping import Sequence, build_plan, plan_pools

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.train_tiny.config import TINY, Shape  # noqa: E402
from tools.train_tiny.data import Corpus  # noqa: E402
from tools.train_tiny.retrieval import Needles  # noqa: E402

BLOCK = 16


def small_params() -> dict[str, Any]:
    """Every kind of layer of the trained model, all dimensions small and unlike each other."""
    params: dict[str, Any] = json.loads(TINY.read_text())
    params |= {
        "dim": 48,
        "n_layers": 8,
        "n_heads": 2,
        "n_kv_heads": 2,
        "head_dim": 26,
        "hidden_dim": 40,
        "vocab_size": 256,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 16,
        "v_head_dim": 14,
        "nope_layers": [3, 7],
        "nope_qk_head_dim": 12,
        "kv_sharing": {"7": 3},
        "max_position_embeddings": 256,
    }
    stretch = {"original_max_position_embeddings": 64, "factor": 4.0, "apply_scale": False}
    params["yarn"] = stretch
    params["indexer"] |= {"n_heads": 3, "head_dim": 32, "topk": 16}
    params["indexer"]["types"] = ["full", "full", "shared", "full"] + ["full", "shared"] * 2
    params["indexer"]["types"][7] = "full"
    params["moe"] |= {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "expert_hidden_dim": 20,
        "shared_expert_hidden_dim": 24,
    }
    params["mtp"] |= {
        "target_layers": [1, 3, 4, 6, 7],
        "sliding_window": 40,
        "dim": 48,
        "vocab_size": 256,
        "markov_rank": 18,
        "n_heads": 2,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 16,
        "v_head_dim": 14,
        "hidden_dim": 36,
        "yarn": stretch,
    }
    return params


@pytest.fixture
def shape() -> Shape:
    return Shape(small_params())


def scramble(module: nn.Module, seed: int) -> None:
    """Move every weight away from where training starts, so that none is one or zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p += torch.randn(p.shape, generator=generator) * 0.1


@pytest.fixture(name="scramble")
def scramble_fixture() -> Callable[[nn.Module, int], None]:
    return scramble


class Served:
    """An exported checkpoint, run by the project's own forward in fp32."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = Checkpoint.open(folder)
        spec = load_model_spec(self.checkpoint)
        if spec.extras.get("mtp"):
            spec = with_drafter(self.checkpoint, spec)
        self.spec = spec
        backend = CpuBackend()
        device = backend.probe().devices[0]
        deployment = Deployment(
            model=spec,
            device=device,
            dtype="float32",
            kv_layout="fp32",
            index_layout="fp32",
            block_size=BLOCK,
        )
        self.runner = ModelRunner(
            backend.open(deployment), "cpu", deployment, backend.capabilities(device)
        )
        self.runner.load(load_layers(self.checkpoint, spec, torch.float32))
        layouts = {"latent": resolve.latent(deployment), "index": resolve.index(deployment)}
        self.runner.allocate_kv(plan_pools(spec, layouts, BLOCK, 512, 4))

    def step(self, ids: list[int]) -> StepOutput:
        """A whole prefill: logits and taps of every position."""
        sequence = Sequence(list(ids), len(ids))
        sequence.grow(self.runner.pools, len(ids), BLOCK)
        plan = build_plan([(sequence, len(ids))], tuple(self.runner.pools), BLOCK, all_logits=True)
        output = self.runner.step(plan)
        found = StepOutput(output.logits.clone(), tuple(t.clone() for t in output.taps), None)  # type: ignore[arg-type]
        sequence.release(self.runner.pools)
        return found


@pytest.fixture
def serve() -> Callable[[Path], Served]:
    return Served


@pytest.fixture
def corpus() -> Corpus:
    """Text that counts up, by steps of one or of three, and chats of it."""
    random = np.random.default_rng(0)

    def text(size: int) -> list[int]:
        start, step = int(random.integers(64, 256)), int(random.choice([1, 3]))
        return [64 + (start + step * i) % 192 for i in range(size)]

    books = [i for _ in range(60) for i in (1, *text(60), 2)]
    chats = [i for _ in range(60) for i in (1, 3, *text(9), 4, *text(30), 2)]
    arrays = {"books": books, "chat_basics": chats}
    return Corpus.of({name: np.array(ids, dtype=np.uint16) for name, ids in arrays.items()})


@pytest.fixture
def needles(tmp_path):
    entries = [
        {
            "sentence": [80 + i, 90, 10, 10, 10, 10, 91],
            "question": [92, 80 + i],
            "answer": [80 + i, 10, 10, 10, 10, 91],
        }
        for i in range(6)
    ]
    content = {
        "digits": list(range(10, 20)),
        "ends": [91],
        "chat_prefix": [1, 36, 37, 3],
        "needles": entries,
    }
    (tmp_path / "needles.json").write_text(json.dumps(content))
    return Needles(tmp_path)
