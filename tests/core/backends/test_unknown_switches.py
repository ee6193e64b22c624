"""A key of --additional-config that nothing reads is refused by name, by every backend alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ml4core.api import (
    CORE_SWITCHES,
    Capabilities,
    Deployment,
    Device,
    ModelSpec,
    Refused,
    refuse_missing,
    unknown_switches,
)
from ml4core.engine import switches
from ml4core.registry import PluginRecord, load, load_plugin

MODEL = ModelSpec("model", 8, 128, 1e-6, 128, False, ())
DEVICE = Device("fake", "none", "none", "cpu")


def deployment(given: Mapping[str, Any]) -> Deployment:
    return Deployment(MODEL, DEVICE, additional_config=dict(given))


def test_backends_and_the_engine_know_the_same_switches_of_core() -> None:
    assert set(CORE_SWITCHES) == set(switches.KEYS)


def test_what_core_and_the_backend_read_is_taken() -> None:
    given = dict.fromkeys(CORE_SWITCHES, "x") | {"mine": {"fast": 1}}
    assert unknown_switches(deployment(given), "mine", ["fast", "slow"]) == ()
    assert unknown_switches(deployment({}), "mine") == ()
    assert unknown_switches(deployment({"mine": {}}), "mine") == ()


@pytest.mark.parametrize(
    ("given", "subject", "remedy"),
    [
        ({"fest": 1}, "--additional-config fest", f"{', '.join(CORE_SWITCHES)}, mine"),
        ({"other": {"fast": 1}}, "--additional-config other", f"{', '.join(CORE_SWITCHES)}, mine"),
        ({"mine": {"fest": 1}}, "--additional-config mine.fest", "fast, slow"),
    ],
)
def test_all_else_is_refused_by_name_with_what_is_known(
    given: dict[str, Any], subject: str, remedy: str
) -> None:
    (reason,) = unknown_switches(deployment(given), "mine", ["fast", "slow"])
    assert (reason.source, reason.subject, reason.remedy) == ("mine", subject, remedy)
    assert reason.reason == "nothing of backend mine reads this key"


def test_a_backend_without_switches_says_so() -> None:
    (reason,) = unknown_switches(deployment({"mine": {"fast": 1}}), "mine")
    assert reason.remedy == "leave it out: backend mine has no switches"
    (reason,) = unknown_switches(deployment({"fast": 1}), "mine")
    assert reason.remedy == ", ".join(CORE_SWITCHES)
    (reason,) = unknown_switches(deployment({"mine": 3}), "mine")
    assert reason.reason == "3 is no JSON object"


def test_it_is_told_with_what_is_not_declared() -> None:
    asked = Deployment(MODEL, DEVICE, needs=frozenset({"op:topk"}), additional_config={"fest": 1})
    with pytest.raises(Refused) as refused:
        refuse_missing(asked, Capabilities(frozenset()), "mine")
    subjects = [reason.subject for reason in refused.value.refusals]
    assert subjects == ["--additional-config fest", "op:topk"]


def assert_refused(backend: Any) -> None:
    given = {"no_such_switch": 1, backend.name: {"nor_this_one": 2}}
    with pytest.raises(Refused) as refused:
        backend.open(deployment(given))
    subjects = [reason.subject for reason in refused.value.refusals]
    assert "--additional-config no_such_switch" in subjects
    assert f"--additional-config {backend.name}.nor_this_one" in subjects


def test_the_accelerators_refuse_it(record: PluginRecord) -> None:
    assert_refused(load_plugin(record).backend)


def test_the_embedded_backend_refuses_it() -> None:
    assert_refused(load("cpu"))
