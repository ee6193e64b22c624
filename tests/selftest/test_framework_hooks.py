"""The suite's two hooks: checks that a plugin adds, and its harness."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ml4core.api import Refused
from ml4core.registry import PluginRecord, find, load_plugin
from ml4core_conformance import hookspecs
from ml4core_conformance.catalog import BROKEN, all_checks
from ml4core_conformance.check import Check, CheckFailed, Status
from ml4core_conformance.checks import perf
from ml4core_conformance.checks.plugin import metadata
from ml4core_conformance.checks.system import device_honesty
from ml4core_conformance.own_checks import harness, own_checks, resolved, told_checks
from ml4core_conformance.results import CheckResult
from ml4core_conformance.subject import Subject
from ml4core_conformance.verify import verify

PLUGIN = """
import os, time
from ml4core.api import hookimpl
from ml4core.cpu.backend import CpuBackend


class Hooked(CpuBackend):
    name = "hooked"


def passes(subject):
    assert subject.capabilities.features


def fails(subject):
    assert 1 + 1 == 3, "sums are off by one"


def raises(subject):
    raise KeyError("no sum")


def dies(subject):
    os._exit(7)


class Harness:
    def __init__(self, backend):
        self.backend = backend


@hookimpl
def ml4core_backends():
    return [Hooked()]
"""
CHECKS = """
@hookimpl(optionalhook=True)
def ml4core_conformance_checks(register):
{body}
"""
FOUR = """
    register("x-ml4-hooked.sums", passes, "Sums are right.", variant="a", profile="ops")
    register("x-ml4-hooked.sums", fails, "Sums are right.", variant="b", bugs=["B001"])
    register("x-ml4-hooked.raises", raises, "It raises nothing.")
    register("x-ml4-hooked.dies", dies, "It lives.", isolated=True, timeout_s=30)
    register("x-ml4-hooked.pp", passes, "With ranks.", requires=["parallel:pp"])
"""
HARNESS = """
@hookimpl(optionalhook=True)
def ml4core_conformance_harness(backend):
    return Harness(backend)
"""

Install = Callable[..., PluginRecord]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a plugin ``hooked`` that has these hooks too."""

    def make(*more: str, checks: str = "") -> PluginRecord:
        text = PLUGIN + (CHECKS.format(body=checks) if checks else "") + "".join(more)
        (tmp_path / "ml4_hooked.py").write_text(text, "utf-8")
        info = tmp_path / "ml4_hooked-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: ml4-hooked\nVersion: 1.0\nKeywords: ml4core-api:1-1\n"
        )
        (info / "entry_points.txt").write_text("[ml4core.backends]\nhooked = ml4_hooked\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.delitem(sys.modules, "ml4_hooked", raising=False)
        return find("hooked")

    return make


@pytest.fixture(autouse=True)
def forgotten() -> object:
    yield None
    sys.modules.pop("ml4_hooked", None)


def ends(results: list[CheckResult]) -> dict[str, Status]:
    return {result.id: result.status for result in results}


@pytest.mark.multiprocess
@pytest.mark.parametrize("jobs", [1, 0])
def test_a_plugins_checks_are_run_with_the_suites(install: Install, jobs: int) -> None:
    install(checks=FOUR)
    results = verify("hooked", expression="x-ml4-hooked or plugin.metadata", jobs=jobs)
    alone = Status.FAIL if jobs else Status.NOT_RUN
    assert ends(results) == {
        "plugin.metadata": Status.PASS,
        "x-ml4-hooked.sums[a]": Status.PASS,
        "x-ml4-hooked.sums[b]": Status.FAIL,
        "x-ml4-hooked.raises": Status.ERROR,
        "x-ml4-hooked.dies": alone,
        "x-ml4-hooked.pp": Status.UNSUPPORTED,
    }
    told = {result.id: result for result in results}
    assert told["x-ml4-hooked.sums[b]"].reason == "sums are off by one"
    assert told["x-ml4-hooked.sums[b]"].raised == "CheckFailed"
    assert "KeyError" in told["x-ml4-hooked.raises"].reason
    assert "exit code 7" in told["x-ml4-hooked.dies"].reason or not jobs


def test_they_are_told_without_an_import_here(install: Install) -> None:
    record = install(checks=FOUR)
    found = told_checks(record)
    assert "ml4_hooked" not in sys.modules
    here = own_checks(record)
    assert [check.id for check in found] == [check.id for check in here]
    for name in ("profile", "doc", "requires", "isolated", "timeout_s", "bugs", "unit"):
        assert [getattr(one, name) for one in found] == [getattr(one, name) for one in here]
    assert {check.profile for check in found} == {"ops", "system"}


def test_most_plugins_add_none(install: Install) -> None:
    record = install()
    assert told_checks(record) == own_checks(record) == ()
    assert harness(record, object()) is None
    assert harness(None, object()) is None


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ('register("ops.elements", passes, "doc")', "x-ml4-hooked.<name>, not 'ops.elements'"),
        ('register("x-other.sums", passes, "doc")', "x-ml4-hooked.<name>, not 'x-other.sums'"),
        ('register("x-ml4-hooked.", passes, "doc")', "x-ml4-hooked.<name>, not"),
        ('register("x-ml4-hooked.a", passes, "doc", profile="fast")', "no profile 'fast'"),
        ('register("x-ml4-hooked.a", passes, "doc", requires=["op:fft"])', "op:fft"),
        ('[register("x-ml4-hooked.a", passes, "d") for _ in "ab"]', "two checks have this id"),
        ('raise KeyError("odd")', "KeyError: 'odd'"),
        ("os._exit(3)", "ended with 3"),
    ],
)
def test_one_that_cannot_be_is_an_error(install: Install, call: str, why: str) -> None:
    """Checks that are missing must not pass for green."""
    record = install(checks=f"    {call}")
    (check,) = told_checks(record)
    assert check.id == f"{BROKEN}[hooked]"
    with pytest.raises(RuntimeError) as raised:
        check.run(None)  # type: ignore[arg-type]
    assert why in str(raised.value)


@pytest.mark.multiprocess
def test_and_the_run_says_so(install: Install) -> None:
    install(checks='    raise KeyError("odd")')
    results = verify("hooked", expression="suite.loads or plugin.metadata", jobs=1)
    assert ends(results) == {"plugin.metadata": Status.PASS, f"{BROKEN}[hooked]": Status.ERROR}
    assert "KeyError: 'odd'" in results[-1].reason


def test_a_check_that_is_gone_is_an_error(install: Install) -> None:
    record = install(checks=FOUR)
    suite = {check.id: check for check in all_checks()}
    first = next(iter(suite))
    mine, theirs, gone = resolved([first, "x-ml4-hooked.dies", "x-ml4-hooked.gone"], record, suite)
    assert mine is suite[first]
    assert theirs.doc == "It lives."
    with pytest.raises(RuntimeError, match="gives no such check here"):
        gone.run(None)  # type: ignore[arg-type]


def test_a_harness_is_of_the_backend_that_is_judged(install: Install) -> None:
    record = install(HARNESS)
    backend = load_plugin(record).backend
    device = backend.probe().devices[0]
    found = Subject(backend, device, record=record).harness
    assert found is not None
    assert found.backend is backend  # type: ignore[attr-defined]


COUNTS = """
Harness.launches = lambda self, session: {count}
Harness.seconds = lambda self, session, call: call() and 0.25
"""


def test_a_harness_counts_kernels(install: Install) -> None:
    """A step that starts none computes elsewhere."""
    record = install(HARNESS, COUNTS.format(count="3"))
    backend = load_plugin(record).backend
    with pytest.raises(CheckFailed, match="a step starts no kernel on the device"):
        device_honesty(Subject(backend, backend.probe().devices[0], record=record))


def test_a_harness_measures_time(install: Install) -> None:
    record = install(HARNESS, COUNTS.format(count="3"))
    backend = load_plugin(record).backend
    subject = Subject(backend, backend.probe().devices[0], record=record)
    calls: list[int] = []
    times = perf._seconds(subject, subject.session, lambda: calls.append(1) or True)
    assert times == [0.25]
    assert len(calls) == 2 + perf.TURNS


def test_it_loads_where_nobody_knows_the_hooks(install: Install) -> None:
    """As where the suite isn't installed: core alone knows three."""
    record = install(HARNESS, checks=FOUR)
    assert load_plugin(record).backend.name == "hooked"


def test_unmarked_it_is_refused_there(install: Install) -> None:
    record = install(HARNESS.replace("(optionalhook=True)", ""))
    with pytest.raises(Refused, match="unknown hooks: ml4core_conformance_harness"):
        load_plugin(record)
    assert load_plugin(record, hook_specs=(hookspecs,)).backend.name == "hooked"


def test_a_misspelt_one_is_noticed(install: Install) -> None:
    record = install(HARNESS.replace("harness", "harnes"))
    backend = load_plugin(record).backend
    subject = Subject(backend, backend.probe().devices[0], record=record)
    with pytest.raises(CheckFailed, match="nobody calls ml4core_conformance_harnes;"):
        metadata(subject)


def test_checks_of_the_suite_have_other_names() -> None:
    taken: list[Check] = [check for check in all_checks() if check.family.startswith("x-")]
    assert not taken
