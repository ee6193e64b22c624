"""Folders as Hugging Face's writer leaves them: its config.json, its names, its fused experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ml4core.models.checkpoint import Checkpoint

from . import judge
from .ours import Ours, chunks, run
from .relatives import VOCAB, Relative, deepseek_v32, glm_moe_dsa, mistral4

LENGTHS = (141, 33)

FOLDERS: dict[str, Callable[[], Relative]] = {
    "as published": mistral4,
    "other choices": lambda: mistral4(
        apply_scale=True,
        q_lora_rank=None,
        dense_layers=0,
        renormalize=False,
        routed_scale=2.5,
        tied=True,
        seed=1,
    ),
    "indexer of halves": lambda: deepseek_v32(topk=24),
    "indexer of pairs, shared": lambda: glm_moe_dsa(topk=24, types=("full", "shared"), seed=1),
}


def save(relative: Relative, folder: Path) -> Path:
    relative.model.save_pretrained(folder)  # type: ignore[operator]
    return folder


@pytest.mark.parametrize("case", FOLDERS)
def test_logits(case: str, tmp_path: Path) -> None:
    relative = FOLDERS[case]()
    folder = save(relative, tmp_path / "checkpoint")
    assert not (folder / "params.json").exists()
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    ours = Ours(folder)
    runner, _ = ours.runner(tokens=max(LENGTHS), sequences=len(LENGTHS), block_size=16)
    theirs = [judge.logits(relative.model, prompt) for prompt in prompts]
    judge.assert_equal_logits(run(runner, prompts, chunks), theirs)


@pytest.mark.parametrize("case", FOLDERS)
def test_the_table_is_the_one_that_params_json_makes(case: str, tmp_path: Path) -> None:
    relative = FOLDERS[case]()
    by_config = Ours(save(relative, tmp_path / "config")).spec
    by_params = Ours(relative.save(tmp_path / "params")).spec
    assert by_config.layers == by_params.layers
    for name in ("vocab_size", "norm_eps", "max_position", "tied_embeddings"):
        assert getattr(by_config, name) == getattr(by_params, name)


def test_experts_are_fused_in_the_folder(tmp_path: Path) -> None:
    """Else the comparison says nothing about fused experts."""
    tensors: Any = Checkpoint.open(save(mistral4(), tmp_path / "checkpoint")).tensors
    assert tensors["model.layers.1.mlp.experts.gate_up_proj"].shape == (16, 96, 96)
    assert tensors["model.layers.1.mlp.experts.down_proj"].shape == (16, 96, 48)
