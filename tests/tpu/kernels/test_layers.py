"""The shipped model with each layer a program: its tokens, what is compiled when, the report."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import Engine, open_engine
from ml4core.engine.sampling_params import SamplingParams
from ml4core.registry import select

PROMPTS = [list(range(300, 340)), list(range(7, 16)), [11] * 23]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
ROWS = 64
"""Of the one bucket: prompts come in chunks of as many."""


def start(backend: str, own: dict[str, Any] | None = None, **flags: Any) -> Engine:
    choice = select(backend, device_kind="real" if backend == "cpu" else "interpreted")
    config = {} if backend == "cpu" else {"device": "interpreted", "tpu": own or {}}
    args = EngineArgs(
        "ml4-tiny",
        backend=backend,
        dtype="float32",
        kv_cache_dtype="float32",
        max_num_batched_tokens=ROWS,
        max_num_seqs=3,
        additional_config=config,
        **flags,
    )
    return open_engine(args, choice=choice, sequences=3, tokens_each=64)


def answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [list(one.token_ids) for one in engine.generate(prompts, GREEDY)]


@pytest.fixture(scope="module")
def warm() -> Iterator[Engine]:
    engine = start("tpu", {"warm_up": True})
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    engine = start("cpu")
    try:
        return answers(engine, PROMPTS)
    finally:
        engine.close()


@pytest.mark.timeout(600)
def test_greedy_tokens_are_the_cpus_and_nothing_is_compiled_late(
    warm: Engine, wanted: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Three requests at once, of other lengths, in chunks and decodes of any mix: all of it in the
    programs of the warm-up. One that is compiled later is a warning, which is an error here.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answers(warm, PROMPTS) == wanted
        told = dict(warm.report()["switches"])
        assert "programs of layers for steps of 64 rows" in capsys.readouterr().err
        assert answers(warm, PROMPTS[1:]) == wanted[1:]
    assert warm.report()["switches"] == told
    assert told["token_buckets"] == str(ROWS)
    assert told["compiled_after_warm_up"] == "0"


@pytest.mark.timeout(600)
def test_every_layer_is_a_program_and_layers_of_a_kind_share_it(warm: Engine) -> None:
    report = warm.report()
    layers = [part for part in report["parts"] if part["part"] == "decoder_layer"]
    assert {part["provider"] for part in layers} == {"ml4core-tpu"}
    kinds = {part["layer_kind"] for part in layers}
    made = int(report["switches"]["programs"].split()[0])
    assert len(kinds) <= made <= len(kinds) + 2  # the first layer norms for itself


def test_enforce_eager_compiles_no_layer_and_says_so() -> None:
    engine = start("tpu", {"warm_up": True}, enforce_eager=True)
    try:
        report = engine.report()
    finally:
        engine.close()
    assert report["switches"] == {"device": "interpreted", "runtime": "jax"}
    layers = [part for part in report["parts"] if part["part"] == "decoder_layer"]
    assert {part["provider"] for part in layers} == {"parts"}
    reasons = {one["reason"] for part in layers for r in part["rejected"] for one in r["refusals"]}
    assert len(reasons) == 1
    assert "--enforce-eager" in reasons.pop()
