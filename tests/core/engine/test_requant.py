"""Experts that are converted while an engine opens: by key, by variable, and when that can't be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ml4core.api import Refused
from ml4core.engine import switches
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import ArgumentsError
from ml4core.engine.llm import Engine, open_engine
from ml4core.engine.sampling_params import SamplingParams
from ml4core.models.quantize import QuantizeOptions, quantize
from ml4core.models.seeded import make_seeded
from ml4core.registry import select

pytestmark = pytest.mark.usefixtures("probed_once")

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = list(range(100, 140))
MXFP4 = {"fp8_moe_requant": "mxfp4"}


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeded(tmp_path_factory.mktemp("requant") / "m", "micro", format="fp8_block")


@pytest.fixture(scope="module")
def choice() -> Any:
    return select("cpu")


@pytest.fixture
def start(choice: Any) -> Iterator[Any]:
    opened: list[Engine] = []

    def start(folder: Path, **config: str) -> Engine:
        args = EngineArgs(str(folder), backend="cpu", additional_config=config)
        opened.append(open_engine(args, choice=choice, tokens_each=64))
        return opened[-1]

    yield start
    for engine in opened:
        engine.close()


def computed(engine: Engine) -> tuple[list[int], list[float]]:
    """Greedy tokens, and what experts weigh in each layer that has some."""
    (completion,) = engine.generate([PROMPT], GREEDY)
    assert engine.runner.weights is not None
    layers = engine.runner.weights.layers
    experts = [layer["experts_w13"].data for layer in layers if "experts_w13" in layer]
    return list(completion.token_ids), [float(one.double().abs().sum()) for one in experts]


def test_it_computes_what_the_converted_checkpoint_computes(
    start: Any, fp8: Path, tmp_path: Path
) -> None:
    quantize(fp8, tmp_path / "quark", QuantizeOptions(to="mxfp4", parts="experts"))
    plain, quark = start(fp8), start(tmp_path / "quark")
    converted = start(fp8, **MXFP4)
    assert computed(converted) == computed(quark)
    assert computed(converted) != computed(plain)
    again = start(tmp_path / "quark", **MXFP4)  # loads as it is
    assert computed(again) == computed(quark)
    told = converted.report()
    assert told["switches"] == {"fp8_moe_requant": "mxfp4", "fp8_moe_requant_rule": "even"}
    assert set(told["weights"]["formats"]) == {"bf16", "fp8_block", "mxfp4"}
    held, before = (one.report()["weights"]["bytes"] for one in (quark, plain))
    assert told["weights"]["bytes"] == held < before, "what must fit is what stays"


def test_the_rule_is_that_of_the_flag(start: Any, fp8: Path) -> None:
    even = computed(start(fp8, **MXFP4))
    assert computed(start(fp8, **MXFP4, fp8_moe_requant_rule="ceil")) != even


def test_the_variable_means_what_the_key_means(
    start: Any, fp8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_key = computed(start(fp8, **MXFP4))
    monkeypatch.setenv("VLLM_FP8_MOE_REQUANT", "mxfp4")
    engine = start(fp8)
    assert engine.deployment.additional_config == MXFP4
    assert "feature:load_time_mxfp4" in engine.deployment.needs
    assert computed(engine) == by_key


@pytest.mark.parametrize(
    ("environment", "config", "told"),
    [
        ({"VLLM_FP8_MOE_REQUANT": "nvfp4"}, {}, "VLLM_FP8_MOE_REQUANT: 'nvfp4'; works: mxfp4"),
        (
            {"VLLM_FP8_MOE_REQUANT_ACT": "a8w8"},
            MXFP4,
            "VLLM_FP8_MOE_REQUANT_ACT: 'a8w8'; works: a8w4 or a4w4",
        ),
        (
            {"VLLM_FP8_MOE_REQUANT_ACT": "a4w4"},
            MXFP4 | {"fp8_moe_requant_act": "a8w4"},
            "VLLM_FP8_MOE_REQUANT_ACT: 'a4w4', and --additional-config fp8_moe_requant_act is "
            "'a8w4'; works: one of the two, or both alike",
        ),
        ({"VLLM_FP8_MOE_REQUANT_ACT": "a4w4"}, {}, "VLLM_FP8_MOE_REQUANT_ACT: does nothing"),
        ({}, {"fp8_moe_requant_rule": "even"}, "fp8_moe_requant_rule: does nothing without"),
    ],
)
def test_contradictions_and_what_does_nothing(
    environment: dict[str, str], config: dict[str, str], told: str
) -> None:
    args = EngineArgs("x", additional_config=config)
    with pytest.raises(ArgumentsError) as error:
        switches.with_environment(args, environment)
    (problem,) = error.value.problems
    assert told in problem


def test_alike_twice_is_once() -> None:
    args = EngineArgs("x", additional_config=MXFP4)
    assert switches.with_environment(args, {"VLLM_FP8_MOE_REQUANT": "mxfp4"}) is args
    assert switches.with_environment(args, {"VLLM_FP8_MOE_REQUANT": ""}) is args


def test_other_experts_are_refused_by_name(start: Any, tmp_path: Path) -> None:
    folder = make_seeded(tmp_path / "m", "micro")
    with pytest.raises(Refused) as refused:
        start(folder, **MXFP4, fp8_moe_requant_act="a4w4")
    subjects = {refusal.subject: refusal.reason for refusal in refused.value.refusals}
    assert set(subjects) == {"VLLM_FP8_MOE_REQUANT mxfp4", "VLLM_FP8_MOE_REQUANT_ACT a4w4"}
    assert subjects["VLLM_FP8_MOE_REQUANT mxfp4"].endswith(
        "formats of this checkpoint's experts: bf16"
    )
    assert "act:mxfp4" in subjects["VLLM_FP8_MOE_REQUANT_ACT a4w4"]


def test_a_backend_that_lacks_it_is_refused_by_the_word(fp8: Path, start: Any) -> None:
    with pytest.raises(Refused) as refused:
        start(fp8, decode_backend="latency_specialized")
    assert [refusal.subject for refusal in refused.value.refusals] == ["feature:latency_decode"]
