"""The suite as tests: ``pytest --pyargs ml4core_conformance --ml4-backend NAME``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ml4core_conformance.check import Check
    from ml4core_conformance.results import CheckResult, Result

_HERE = Path(__file__).parent
_SUITE = _HERE / "suite.py"
_WAIVERS = "conformance.toml"

backend_key = pytest.StashKey[str]()
run_key = pytest.StashKey["_Run"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ml4core conformance")
    group.addoption("--ml4-backend", default="", help="word of the backend to judge")
    group.addoption("--ml4-device", default="real", help="real, interpreted, fake or source")
    group.addoption("--ml4-profile", action="append", default=[], help="may be repeated")
    group.addoption("--ml4-seeds", type=int, default=1, help="inputs are drawn for this many seeds")
    group.addoption("--ml4-jobs", type=int, default=None, help="worker processes")
    group.addoption("--ml4-waivers", default="", help=f"known faults; else {_WAIVERS} of the root")
    parser.addini("ml4_backend", "word of the backend to judge", default="")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """The suite's own module, where it is asked for by its package."""
    if file_path == _SUITE and parent.config.getoption("--ml4-backend"):
        module: pytest.Collector = pytest.Module.from_parent(parent, path=file_path)
        return module
    return None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Nothing else of the package is a test, whatever patterns are set."""
    inside = _HERE in collection_path.parents
    return True if inside and collection_path != _SUITE else None


def chosen_checks(config: pytest.Config, named: str = "") -> Sequence[Check]:
    """The checks of the profiles that were asked for, and what backend they are for."""
    from ml4core.api import Refused
    from ml4core_conformance.catalog import choose
    from ml4core_conformance.verify import find, served_api

    backend = config.getoption("--ml4-backend") or named or config.getini("ml4_backend")
    if not backend:
        raise pytest.UsageError(
            "no backend to judge; works: --ml4-backend NAME, ML4_BACKEND in the test module, or "
            "ml4_backend in pytest's ini file"
        )
    if run_key in config.stash:
        if config.stash[run_key].name != backend:
            raise pytest.UsageError(
                f"one backend a run; asked for are {config.stash[run_key].name} and {backend}"
            )
        return config.stash[run_key].checks
    try:
        found = find(
            backend,
            device_kind=config.getoption("--ml4-device"),
            seeds=tuple(range(config.getoption("--ml4-seeds"))),
        )
        checks = choose(
            found.checks,
            profiles=config.getoption("--ml4-profile"),
            api=served_api(found),
        )
    except (Refused, ValueError) as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[run_key] = _Run(config, backend, found, checks)
    return checks


class _Run:
    """What one pytest session judges; nothing runs until a test asks."""

    def __init__(
        self, config: pytest.Config, name: str, found: Any, checks: Sequence[Check]
    ) -> None:
        self.name = name
        self.checks = checks
        self._config = config
        self._found = found
        self._result: Result | None = None

    def result(self, items: Sequence[pytest.Item]) -> Result:
        """The run of the checks that pytest selected, made once."""
        if self._result is None:
            from ml4core_conformance.results import Selection
            from ml4core_conformance.verify import examine, served_api
            from ml4core_conformance.waivers import load

            calls = [getattr(item, "callspec", None) for item in items]
            wanted = {
                call.params["ml4_check"].id for call in calls if call and "ml4_check" in call.params
            }
            file = Path(self._config.getoption("--ml4-waivers") or self._default_waivers())
            self._result = examine(
                self._found,
                Selection(
                    tuple(self._config.getoption("--ml4-profile")),
                    api=served_api(self._found),
                    seeds=self._found.target.seeds,
                ),
                jobs=self._config.getoption("--ml4-jobs"),
                waivers=load(file) if file.is_file() else (),
                only=wanted,
            )
            if not self._result.complete:
                raise KeyboardInterrupt
        return self._result

    def _default_waivers(self) -> Path:
        return self._config.rootpath / _WAIVERS


@pytest.fixture(scope="session")
def ml4_results(request: pytest.FixtureRequest) -> Callable[[Check], CheckResult]:
    """The result of a check."""
    run = request.config.stash[run_key]
    found = {result.id: result for result in run.result(request.session.items).results}
    return lambda check: found[check.id]


@pytest.fixture(scope="session")
def ml4_waiver_problems(request: pytest.FixtureRequest) -> Callable[[], Sequence[str]]:
    """What is wrong with waivers, after the checks have run."""
    run = request.config.stash.get(run_key, None)
    return lambda: run.result(request.session.items).problems if run else ()
