"""Names of the environment: the start-up report tells of each what becomes of it, and a name that
nobody knows is warned of.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ml4core import registry
from ml4core.api import Deployment, Device, Refused
from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import open_engine
from ml4core.models.seeded import seed_checkpoint
from ml4core_conformance import tiny
from ml4core_rocm.backend import RocmBackend
from ml4core_rocm.environment import (
    CORE,
    IDLE,
    KNOWN,
    LIBRARYS,
    PREFIXES,
    READ,
    TAKEN,
    UNKNOWN,
    told,
    warn,
)
from ml4core_rocm.switches import MOE_BOUND, VARIABLES

AITER, SPARSE, SIZE = VARIABLES.values()
REQUANT, ACT = CORE
FOO = "VLLM_ROCM_USE_AITER_FOO"
FAKE = Device("fake", "torch on the host", "gfx950", "cpu")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)


def test_each_name_is_told_by_what_becomes_of_it() -> None:
    stated = {AITER: "1", SIZE: "0", ACT: "a8w4", REQUANT: "mxfp4", MOE_BOUND: "0", "HOME": "/"}
    assert told(stated, use_aiter=True) == {
        TAKEN: f"{SIZE}, {REQUANT}, {ACT}, {AITER}",
        READ: MOE_BOUND,
    }
    assert told(stated, use_aiter=False)[IDLE] == MOE_BOUND
    assert told({AITER: "", FOO: ""}, use_aiter=False) == {}  # as if they weren't there
    assert told({}, use_aiter=True) == {}


@pytest.mark.parametrize("name", [FOO, "VLLM_ROCM_USE_AITRE", "VLLM_FP8_MOE_REQUANT_RULE"])
def test_a_name_that_is_not_known_is_told_with_those_that_are(name: str) -> None:
    found = told({name: "1", AITER: "1"}, use_aiter=True)
    assert found[TAKEN] == AITER
    assert found[UNKNOWN] == f"{name}: nothing here reads it; known: {', '.join(KNOWN)}"


def test_aiter_may_read_what_is_not_known_here() -> None:
    found = told({"AITER_FOO": "1"}, use_aiter=True)
    assert set(found) == {UNKNOWN}
    assert found[UNKNOWN].startswith("AITER_FOO: nothing here reads it; known: VLLM_ROCM_USE_AITER")
    assert found[UNKNOWN].endswith(f"of which these are known: {', '.join(LIBRARYS)}")


def test_what_is_known_is_what_is_looked_at() -> None:
    """Names of the table of switches and of core's, and none of them twice."""
    from ml4core.engine.switches import VARIABLES as core

    assert set(CORE) == set(core.values())
    assert len(set(KNOWN + LIBRARYS)) == len(KNOWN + LIBRARYS)
    assert all(name.startswith(PREFIXES) for name in KNOWN + LIBRARYS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeded") / "model"
    return seed_checkpoint(folder, tiny.CONFIG.params(), format="fp8_block")


@pytest.mark.parametrize("name", ["auto", "rocm"])
def test_the_report_of_an_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Whether the backend was named or found."""
    for variable, value in ((REQUANT, "mxfp4"), (AITER, "0"), (FOO, "1")):
        monkeypatch.setenv(variable, value)
    records = [one for one in registry.discover() if one.name in ("rocm", "cpu")]
    choice = registry.select(name, device_kind="fake", timeout=240, records=records)
    config = {"device": "fake"}
    args = EngineArgs(str(folder), backend=name, additional_config=config, max_model_len=64)
    with caplog.at_level(logging.WARNING, "ml4core_rocm.environment"):
        engine = open_engine(args, choice=choice, tokens_each=64)
    try:
        found: Any = engine.report()["switches"]
    finally:
        engine.close()
    assert found[TAKEN] == f"{REQUANT}, {AITER}"
    assert found["use_aiter"] == f"0 ({AITER})"
    assert found["fp8_moe_requant"] == "mxfp4"
    assert found[UNKNOWN].startswith(f"{FOO}: ")
    (warning,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert warning == f"{UNKNOWN}: {found[UNKNOWN]}"


def test_nothing_is_warned_of_where_nothing_is_unknown(
    deploy: Callable[..., Deployment],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(AITER, "0")
    session: Any = RocmBackend().open(deploy(device=FAKE))
    session.close()
    assert UNKNOWN not in session.switches
    assert not caplog.records


@pytest.mark.parametrize(("rank", "warnings"), [(0, 1), (1, 0)])
def test_one_of_several_ranks_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int, warnings: int
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    warn(told({FOO: "1"}, use_aiter=False))
    assert len(caplog.records) == warnings


def test_contradictions_are_refused_and_unknown_names_are_not(
    deploy: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOO, "1")
    monkeypatch.setenv(AITER, "0")
    config = {"rocm": {"use_aiter": True}}
    with pytest.raises(Refused) as refused:
        RocmBackend().open(deploy(device=FAKE, additional_config=config))
    assert AITER in {one.subject for one in refused.value.refusals}
    assert FOO not in str(refused.value)
