"""A backend's own cache layout, named by ``--kv-cache-dtype``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ml4core.api import Refused
from ml4core.api.known_layouts import latent_layout
from ml4core.engine import cache_sizes
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import ArgumentsError
from ml4core.engine.llm import open_engine
from ml4core.models.seeded import make_seeded
from ml4core.registry import select

pytestmark = pytest.mark.usefixtures("probed_once")

OWN = "x-cpu/rows"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeded(tmp_path_factory.mktemp("private") / "micro", "micro")


@pytest.fixture(scope="module")
def choice() -> Any:
    return select("cpu")


@pytest.fixture
def declaring(choice: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The cpu backend, as if it had a layout of its own."""
    found = choice.devices[0]
    words = found.capabilities.features | {f"kv:{OWN}"}
    capabilities = replace(found.capabilities, features=words)
    monkeypatch.setattr(type(choice.backend), "capabilities", lambda self, device: capabilities)
    return replace(choice, devices=(replace(found, capabilities=capabilities),))


def test_an_undeclared_one_is_refused_with_what_there_is(folder: Any, choice: Any) -> None:
    with pytest.raises(Refused, match=f"kv:{OWN}: needed, and not declared; .* are kv:bf16, kv:e4"):
        open_engine(EngineArgs(str(folder), kv_cache_dtype=OWN), choice=choice)


def test_a_declared_one_is_served(
    folder: Any, declaring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_caches = cache_sizes.plan_caches
    own: dict[str, Any] = {}

    def with_own(args: Any, deployment: Any, private: Any, *more: Any) -> Any:
        layer = deployment.model.layers[0]
        rope = max(each.rope_dim for each in deployment.model.layers)
        made = latent_layout("bf16", layer.kv_lora_rank, rope)
        return plan_caches(args, deployment, {OWN: replace(made, id=OWN, **own)}, *more)

    monkeypatch.setattr("ml4core.engine.bring_up.plan_caches", with_own)
    args = EngineArgs(str(folder), kv_cache_dtype=OWN)
    engine = open_engine(args, choice=declaring, tokens_each=32)
    assert engine.report()["kv"]["layouts"]["latent"] == OWN
    engine.close()
    own["width"] = 7
    with pytest.raises(Refused, match="the session's rows have 7 values, the model's"):
        open_engine(args, choice=declaring, tokens_each=32)


@pytest.mark.parametrize("value", ["x-cpu", "x-/rows", "cpu/rows", "e5m2", "x-cpu/rows/more"])
def test_what_is_no_id_is_refused(value: str) -> None:
    with pytest.raises(ArgumentsError, match=r"is none of auto, .*, or x-<distribution>/<name>"):
        EngineArgs("m", kv_cache_dtype=value)
