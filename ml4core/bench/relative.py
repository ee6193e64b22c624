"""A model that Hugging Face transformers runs too: Mistral Small 4's shape, made small, with random
weights. Each side reads the same folder.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ml4core.api import Refusal, Refused

NAME = "transformers"
INSTALL = "pip install 'ml4core[test]'"
"""The line that brings it, in the version that tests hold our numbers against."""
DESCRIPTION = (
    "mistral4: 8 layers, width 512, 4 heads, latent 256, 16 experts of width 256, 4 a token"
)

VOCAB = 8192
MAX_POSITION = 8192


def check_installed() -> None:
    """Raises ``Refused`` where transformers is missing, or has no such model."""
    reason = ""
    if importlib.util.find_spec(NAME) is None:
        reason = "is not installed"
    elif not hasattr(importlib.import_module(NAME), "Mistral4ForCausalLM"):
        reason = f"{version()} has no Mistral4ForCausalLM"
    if reason:
        raise Refused([Refusal("core", NAME, reason, INSTALL)], "--compare")


def version() -> str:
    return metadata.version(NAME)


@contextmanager
def silent() -> Iterator[None]:
    """Without its log and progress bars, which go to stderr."""
    logging = importlib.import_module(NAME).logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def make_model(seed: int = 0) -> Any:
    """Mistral Small 4 (36 layers of width 4096, 128 experts) at an eighth of its width and experts,
    with 8 layers, in fp32 and ready to run. The latent and a head keep their widths.
    """
    transformers = importlib.import_module(NAME)
    config = transformers.Mistral4Config(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1536,
        moe_intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_shared_experts=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        first_k_dense_replace=0,
        q_lora_rank=128,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=MAX_POSITION,
        tie_word_embeddings=False,
        use_cache=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": MAX_POSITION // 8,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = transformers.Mistral4ForCausalLM(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # activations near 1, and experts that are told apart
                parameter.normal_(std=1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
    return model


def save(model: Any, folder: Path) -> Path:
    """A checkpoint by Hugging Face's writer."""
    model.save_pretrained(folder)
    return folder
