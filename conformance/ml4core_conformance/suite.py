"""Every check as a test of a plugin's own: ``from ml4core_conformance.suite import *``.

The backend is that of ``--ml4-backend``, of ``ML4_BACKEND`` in the importing module, or of the ini
option ``ml4_backend``. Checks run in worker processes, all that pytest selected at the first of
them; each test then tells its own result.
"""

from __future__ import annotations

from typing import Any

import pytest

from ml4core_conformance.check import Check, Status
from ml4core_conformance.results import CheckResult

__all__ = ["pytest_generate_tests", "test_check", "test_waivers"]


def pytest_generate_tests(metafunc: Any) -> None:
    """One test a check."""
    if "ml4_check" not in metafunc.fixturenames:
        return
    from ml4core_conformance.pytest_plugin import chosen_checks

    module = metafunc.module
    checks = chosen_checks(metafunc.config, getattr(module, "ML4_BACKEND", ""))
    metafunc.parametrize("ml4_check", checks, ids=[check.id for check in checks])


def test_check(ml4_check: Check, ml4_results: Any, record_property: Any) -> None:
    result: CheckResult = ml4_results(ml4_check)
    record_property("status", str(result.status))
    for judged in result.measures:
        text = f"error={judged.error!r} bound={judged.bound!r} where={judged.where}"
        record_property(f"measure.{judged.what}", text)
    if result.status is Status.PASS:
        return
    told = f"{result.status}: {result.reason}"
    if result.status is Status.UNSUPPORTED:
        pytest.skip(told)
    if result.status is Status.WAIVED:
        pytest.xfail(f"{result.waiver}: {result.reason}")
    if not result.gates:
        pytest.xfail(f"provisional {told}")
    pytest.fail(told, pytrace=False)


def test_waivers(ml4_waiver_problems: Any) -> None:
    """Each waiver is of a check that exists, is needed, and has not expired."""
    if problems := ml4_waiver_problems():
        pytest.fail("\n".join(problems), pytrace=False)
