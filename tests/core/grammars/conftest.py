"""The tiny tokenizer with its grammars, and the tiny model with and without drafts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from ml4core.serving.grammars import LLGrammars
from ml4core.serving.llm import LLM
from ml4core.serving.tokenizer import Tokenizer
from support.probes import remembered

TINY = Path(str(resources.files("ml4core") / "assets" / "ml4-tiny" / "tekken.json"))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> LLGrammars:
    pytest.importorskip("llguidance")
    return LLGrammars(tokenizer)


@pytest.fixture(scope="session")
def plain() -> Iterator[LLM]:
    pytest.importorskip("llguidance")
    with remembered():
        made = LLM(max_model_len=512, max_num_seqs=8, step_timeout_s=0.0)
    with made:
        yield made


@pytest.fixture(scope="session")
def drafting() -> Iterator[LLM]:
    pytest.importorskip("llguidance")
    config = {"method": "dspark", "num_speculative_tokens": 3}
    flags = {"max_model_len": 512, "max_num_seqs": 8, "step_timeout_s": 0.0}
    with remembered():
        made = LLM(speculative_config=config, **flags)
    with made:
        yield made
