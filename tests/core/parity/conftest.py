"""Comparisons with Hugging Face transformers, whose models none of this project's code shares."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def judge_is_installed() -> None:
    """Skips this folder where transformers is missing or lacks a model; fails there under CI."""
    try:
        from transformers import (  # noqa: F401
            DeepseekV32ForCausalLM,
            GlmMoeDsaForCausalLM,
            Mistral4ForCausalLM,
        )
    except ImportError as error:
        reason = f"needs transformers 5.24 (pip install 'ml4core[test]'): {error}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
