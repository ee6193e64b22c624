"""Published relatives by their own params.json, scaled down: they load and generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import open_engine
from ml4core.engine.sampling_params import SamplingParams
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.layer_table import build_model_spec
from ml4core.models.seeded import SeededFormat, seed_checkpoint
from ml4core.models.tensors import load_model_spec

# As they are published, but for vision. Nothing here is a key of ours.
LARGE_3: dict[str, Any] = {
    "dim": 7168,
    "n_layers": 61,
    "head_dim": 192,
    "hidden_dim": 16384,
    "n_heads": 128,
    "n_kv_heads": 128,
    "norm_eps": 1e-6,
    "vocab_size": 131072,
    "tied_embeddings": False,
    "max_position_embeddings": 294912,
    "rope_theta": 10000.0,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "sliding_window": None,
    "yarn": {
        "original_max_position_embeddings": 8192,
        "factor": 36,
        "beta": 32,
        "alpha": 1,
        "apply_scale": False,
    },
    "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
    "moe": {
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "num_shared_experts": 1,
        "expert_hidden_dim": 4096,
        "first_k_dense_replace": 3,
        "route_every_n": 1,
        "routed_scale": 1.0,
        "num_expert_groups": 1,
        "num_expert_groups_per_tok": 1,
        "expert_parallel": 1,
        "expert_model_parallel": 1,
    },
}
SMALL_4: dict[str, Any] = {
    **LARGE_3,
    "dim": 4096,
    "n_layers": 36,
    "head_dim": 128,
    "hidden_dim": 12288,
    "n_heads": 32,
    "n_kv_heads": 32,
    "max_position_embeddings": 1048576,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "yarn": {**LARGE_3["yarn"], "factor": 128},
    "moe": {**LARGE_3["moe"], "expert_hidden_dim": 2048, "first_k_dense_replace": 0},
}
RELATIVES = {"Large 3": LARGE_3, "Small 4": SMALL_4}


def scaled_down(params: dict[str, Any]) -> dict[str, Any]:
    """The same shape of model with fewer and narrower layers: 1/32 of the widths, 8 experts."""
    small = {
        key: params[key] // 32
        for key in ("dim", "hidden_dim", "n_heads", "n_kv_heads", "vocab_size", "q_lora_rank")
    }
    # Blocks of NVFP4 and cache rows in tiles need what is left of these widths.
    small |= {"n_layers": params["moe"]["first_k_dense_replace"] + 2, "vocab_size": 512}
    moe = params["moe"] | {"num_experts": 8, "expert_hidden_dim": 128}
    return params | small | {"moe": moe}


@pytest.mark.parametrize("name", RELATIVES)
def test_published_params(name: str) -> None:
    spec = build_model_spec(RELATIVES[name])
    layer = spec.layers[-1]
    assert layer.topk_source is None  # no indexer
    assert layer.q_lora_rank is not None
    assert layer.softmax_scale == pytest.approx((layer.nope_dim + 64) ** -0.5)
    assert layer.ssmax.kind == "llama4"
    assert layer.moe is not None
    assert layer.moe.shared_width == layer.moe.expert_width
    assert sum(layer.moe is None for layer in spec.layers) == (3 if name == "Large 3" else 0)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("Large 3", "fp8_tensor"),
        ("Large 3", "nvfp4_ct"),
        ("Small 4", "fp8_block"),
        ("Small 4", "mxfp4"),
    ],
)
def test_greedy_generation(tmp_path: Path, name: str, format: SeededFormat) -> None:
    folder = seed_checkpoint(tmp_path / "m", scaled_down(RELATIVES[name]), format=format)
    spec = load_model_spec(Checkpoint.open(folder))
    assert spec.layers[0].heads == RELATIVES[name]["n_heads"] // 32
    args = EngineArgs(model=str(folder), backend="cpu", max_model_len=64)
    engine = open_engine(args, sequences=2)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        prompts = [[5, 99, 311, 7], [12, 480]]
        first, again = (engine.generate(prompts, params) for _ in range(2))
    finally:
        engine.close()
    tokens = [list(completion.token_ids) for completion in first]
    assert [len(ids) for ids in tokens] == [6, 6]
    assert tokens == [list(completion.token_ids) for completion in again]
    assert len({token for ids in tokens for token in ids}) > 2  # it does not repeat one token
