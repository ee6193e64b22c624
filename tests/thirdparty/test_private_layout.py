"""An operator names the example's private cache layout by its id."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

COLUMNS = "x-ml4core-example/columns"
_OPEN = """
import json
from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import open_engine
from ml4core.engine.sampling_params import SamplingParams
from ml4core_conformance.rigs.engines import checkpoint

greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
told = {}
with checkpoint() as folder:
    for flag in ("float32", "x-ml4core-example/columns"):
        args = EngineArgs(str(folder), backend="example", kv_cache_dtype=flag, max_model_len=64)
        engine = open_engine(args)
        answers = engine.generate([[5, 9, 200, 31]], greedy)
        told[flag] = (engine.report()["kv"]["layouts"]["latent"], answers[0].token_ids)
        engine.close()
print(json.dumps(told))
"""

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def example(install: Callable[[str], Any]) -> Any:
    return install("example")


def test_the_flag_names_it(example: Any) -> None:
    done = example.run("-c", _OPEN)
    assert done.returncode == 0, done.stdout
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["float32"][0] == "fp32"
    assert told[COLUMNS][0] == COLUMNS
    assert len(told[COLUMNS][1]) == 4


def test_who_does_not_have_it_lists_what_it_has(example: Any) -> None:
    words = ("generate", "ml4-tiny", "--prompt", "a", "--kv-cache-dtype", COLUMNS)
    done = example.ml4(*words, "--backend", "cpu")
    assert done.returncode != 0
    said = f"kv:{COLUMNS}: needed, and not declared; declared with kv: are kv:bf16, kv:e4m3"
    assert said in " ".join(done.stdout.split()), done.stdout


def test_of_an_unknown_name_the_backend_lists_its_own(example: Any) -> None:
    words = ("generate", "ml4-tiny", "--prompt", "a", "--kv-cache-dtype", f"{COLUMNS}2")
    done = example.ml4(*words, "--backend", "example")
    assert done.returncode != 0
    assert f"declared with kv: are kv:fp32, kv:{COLUMNS}" in " ".join(done.stdout.split())


def test_what_is_no_id_is_refused_as_a_flag(example: Any) -> None:
    words = ("generate", "ml4-tiny", "--prompt", "a", "--kv-cache-dtype", "x-columns")
    done = example.ml4(*words)
    assert done.returncode != 0
    assert "or x-<distribution>/<name>" in " ".join(done.stdout.split())
