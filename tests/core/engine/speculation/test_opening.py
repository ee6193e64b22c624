"""What is asked of speculation and can't be is refused by name; what is served is in the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ml4core.api import Refused
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import ArgumentsError
from ml4core.engine.llm import open_engine
from ml4core.models.checkpoint import Checkpoint, CheckpointError
from ml4core.models.seeded import make_seeded
from ml4core.planning.model import checkpoint_model
from ml4core.planning.plan import PlanOptions, make_plan
from ml4core.registry import select

pytestmark = pytest.mark.usefixtures("probed_once")

DSPARK: dict[str, Any] = {"method": "dspark"}


@pytest.fixture(scope="module")
def choice() -> Any:
    return select("cpu")


@pytest.fixture
def opened(folder: Path, choice: Any) -> Callable[..., Any]:
    def opened(chip: Any = None, where: Path = folder, **config: Any) -> Any:
        args = EngineArgs(str(where), backend="cpu", speculative_config=DSPARK | config)
        return open_engine(args, choice=chip or choice, tokens_each=64)

    return opened


def declaring(choice: Any, **changes: Any) -> Any:
    found = choice.devices[0]
    capabilities = replace(found.capabilities, **changes)
    return replace(choice, devices=(replace(found, capabilities=capabilities),))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"method": "eagle"}, "method: 'eagle'; works: dspark"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens: 0; works: a whole number, 1"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens: True"),
        ({"num_speculative_tokens": "3"}, "num_speculative_tokens: '3'"),
        ({"draft_sample_method": "x"}, "draft_sample_method: 'x'; works: greedy or probabilistic"),
        ({"rejection_sample_method": "fly"}, "rejection_sample_method: 'fly'; works: standard or"),
        ({"method": None}, "method: None"),
    ],
)
def test_values_that_mean_nothing(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentsError) as refused:
        EngineArgs("m", speculative_config=DSPARK | config)
    assert f"--speculative-config: {told}" in str(refused.value)


def test_a_config_names_its_method() -> None:
    with pytest.raises(ArgumentsError, match=r"--speculative-config: no method; works: .*dspark"):
        EngineArgs("m", speculative_config={"num_speculative_tokens": 3})


def test_unknown_keys_and_a_depth_beyond_the_drafters_are_refused_together(opened: Any) -> None:
    with pytest.raises(Refused) as refused:
        opened(num_speculative_tokens=4, tokens=3, synthetic_acceptance_length=2)
    subjects = {r.subject: r for r in refused.value.refusals}
    assert subjects.keys() == {
        "--speculative-config tokens",
        "--speculative-config synthetic_acceptance_length",
        "--speculative-config num_speculative_tokens 4",
    }
    depth = subjects["--speculative-config num_speculative_tokens 4"]
    assert (depth.reason, depth.remedy) == ("the checkpoint's drafter makes 3 drafts", "1 to 3")
    assert "num_speculative_tokens" in subjects["--speculative-config tokens"].remedy


def test_a_depth_that_the_backend_can_not_verify_is_refused(opened: Any, choice: Any) -> None:
    chip = declaring(choice, limits={"max_verify_rows": 3})
    with pytest.raises(Refused, match=r"takes 4 rows, and .*declares max_verify_rows 3"):
        opened(chip)
    opened(chip, num_speculative_tokens=2).close()


def test_a_window_that_no_step_has_rows_for_is_refused(folder: Path, choice: Any) -> None:
    """Its drafts would be made at each step, and never judged."""

    def opened(rows: int) -> Any:
        flags = {"max_num_seqs": 1, "max_num_batched_tokens": rows, "speculative_config": DSPARK}
        return open_engine(EngineArgs(str(folder), **flags), choice=choice, tokens_each=64)

    told = r"takes 4 rows, and a step has at most --max-num-batched-tokens 3 .works: 1 to 2"
    with pytest.raises(Refused, match=told):
        opened(3)
    opened(4).close()


@pytest.mark.parametrize(
    ("word", "config"),
    [
        ("spec:dspark", {}),
        ("spec:probabilistic_drafts", {"draft_sample_method": "probabilistic"}),
        ("spec:block_verification", {"rejection_sample_method": "block"}),
        ("kv:bf16", {}),
    ],
)
def test_a_mode_that_the_backend_does_not_declare_is_refused(
    opened: Any, choice: Any, word: str, config: dict[str, Any]
) -> None:
    words = choice.devices[0].capabilities.features - {word}
    chip = declaring(choice, features=words, defaults={"kv": "fp32", "dtype": "float32"})
    with pytest.raises(Refused, match=f"{word}: needed, and not declared"):
        opened(chip, **config)


def test_a_model_without_a_drafter_is_refused(opened: Any, tmp_path: Path) -> None:
    plain = make_seeded(tmp_path / "plain", "micro", layers=4, vocab=320)
    with pytest.raises(CheckpointError, match=r"(?s)^--speculative-config: .*mtp"):
        opened(where=plain)


def test_a_drafter_that_does_not_fit_its_target_is_refused(
    opened: Any, folder: Path, tmp_path: Path
) -> None:
    for file in folder.iterdir():
        if file.name != "params.json":
            (tmp_path / file.name).symlink_to(file)
    params = json.loads((folder / "params.json").read_text())
    params["mtp"] |= {"dim": 64, "vocab_size": 99}
    (tmp_path / "params.json").write_text(json.dumps(params))
    with pytest.raises(CheckpointError) as refused:
        opened(where=tmp_path)
    text = str(refused.value)
    assert text.startswith("--speculative-config: ")
    assert "mtp.dim: 64; the target's dim is 128" in text
    assert "mtp.vocab_size: 99; the target's vocab_size is 320" in text


def test_the_report_shows_how_drafts_are_made_and_who_serves_them(opened: Any) -> None:
    engine = opened(draft_sample_method="probabilistic", num_speculative_tokens=2)
    report = json.loads(json.dumps(engine.report()))
    told = report["speculation"]
    drafter = told.pop("drafter")
    assert told == {
        "method": "dspark",
        "num_speculative_tokens": 2,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "standard",
    }
    assert (drafter["layers"], drafter["depth"], drafter["window"]) == (2, 3, 24)
    assert report["kv"]["layouts"]["draft"] == "bf16"
    assert report["kv"]["owners"]["draft"] == 2
    served = {part["part"]: part["provider"] for part in report["parts"]}
    assert served["draft_block"] == served["verify_and_sample"] == "compose"
    assert {part["step_kind"] for part in report["parts"]} >= {"verify", "prefill", "*"}
    spec = engine.deployment.model
    caches = [*engine.runner.kv.latent.values(), *engine.runner.kv.index_keys.values()]
    caches += engine.runner.draft_kv
    assert sum(cache.nbytes for cache in caches) == engine.kv_plan.nbytes
    assert len(engine.runner.draft_kv) == len(spec.draft.layers)
    engine.close()


def test_without_the_flag_there_is_no_drafter(folder: Path, choice: Any) -> None:
    engine = open_engine(EngineArgs(str(folder), backend="cpu"), choice=choice, tokens_each=64)
    assert engine.report()["speculation"] is None
    assert engine.runner.draft_weights is None
    assert engine.core.stats().drafts is None
    assert "draft" not in engine.runner.pools
    engine.close()


def test_the_draft_pool_is_the_planned_one_and_bounded_by_sequences(
    folder: Path, choice: Any
) -> None:
    flags: dict[str, Any] = {"block_size": 16, "max_num_seqs": 3, "max_model_len": 200}
    flags |= {"speculative_config": DSPARK, "kv_cache_memory_bytes": 6_000_000}
    args = EngineArgs(str(folder), backend="cpu", kv_cache_dtype="fp8_ds_mla", **flags)
    engine = open_engine(args, choice=choice, sequences=3)
    plan = make_plan(checkpoint_model(Checkpoint.open(folder)), args, PlanOptions(decoded=True))
    assert plan.pools is not None
    assert engine.kv_plan.blocks == plan.pools.blocks
    assert engine.kv_plan.nbytes == plan.pools.nbytes <= 6_000_000
    # ceil((23 + 3 + 2 * 4) / 16) = 3, and one for where the window begins.
    assert engine.kv_plan.blocks["draft"] == 3 * 4 + 1
    assert engine.core.scheduler.config.max_num_batched_tokens >= 3 * 4
    engine.close()
