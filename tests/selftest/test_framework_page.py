"""The page in a real browser: drawn, filtered, opened by link and by keyboard, without network."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ml4core_conformance.check import Check, Status
from ml4core_conformance.report.page import write_page
from ml4core_conformance.results import (
    CheckResult,
    DeviceFacts,
    Judged,
    PluginFacts,
    Result,
    Selection,
)

NOW = datetime(2026, 7, 1, tzinfo=UTC)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

PROBE = Path(__file__).with_name("page_probe.js")


def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        reason = f"needs one of {', '.join(BROWSERS)}"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}; continuous integration has to install it")
        pytest.skip(reason)
    return found


def check(name: str) -> Check:
    family, _, variant = name.rstrip("]").partition("[")
    return Check(family, "ops", lambda subject: None, f"Doc of {name}.", variant=variant)


def made(name: str, status: Status, ratio: float | None = None, reason: str = "") -> CheckResult:
    family, _, variant = name.rstrip("]").partition("[")
    judged = () if ratio is None else (Judged("out", ratio * 2, 2.0, ratio, "case h8, head 3"),)
    return CheckResult(name, family, "ops", status, reason, judged, 0.25, variant)


CHECKS = ("a.x[rope/bf16]", "a.x[gemm/bf16]", "a.y[rope/fp32]", "a.z[topk/one]", "a.z[topk/two]")
EVIL = "</script><img src=x onerror='window.injected=true'><b>bold</b>"


def results() -> list[Result]:
    def run(backend: str, created: str, *checks: CheckResult) -> Result:
        device = DeviceFacts("real", f"{backend} chip", f"{backend}1", "cpu")
        plugin = PluginFacts(backend, f"{backend}-dist", "1.0")
        return Result(created, "0.1.0", "0.1.0", plugin, device, Selection(), checks)

    return [
        run(
            "toy",
            "2026-06-30T00:00:00Z",
            made("a.x[rope/bf16]", Status.PASS, 0.5),
            made("a.x[gemm/bf16]", Status.FAIL, 53.8, EVIL),
            made("a.y[rope/fp32]", Status.UNSUPPORTED, reason="op:rope: not declared"),
            made("a.z[topk/one]", Status.PASS, float("nan")),
            made("a.z[topk/two]", Status.PASS),
        ),
        run("other", "2026-01-01T00:00:00Z", made("a.x[rope/bf16]", Status.PASS, 0.1)),
    ]


def opened(path: Path, link: str = "") -> dict[str, Any]:
    page = path.read_text("utf-8").replace(
        "</body>", f"<script>{PROBE.read_text('utf-8')}</script></body>"
    )
    probed = path.with_name("probed.html")
    probed.write_text(page, "utf-8")
    done = subprocess.run(
        [
            *(browser(), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--no-first-run", f"--user-data-dir={path.parent / 'profile'}"),
            *("--virtual-time-budget=4000", f"{probed.as_uri()}{link}"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert "error" not in seen, seen["error"]
    return seen


def test_the_page_works_in_a_browser(tmp_path: Path) -> None:
    browser()
    path = tmp_path / "page.html"
    write_page(results(), path, checks=[check(name) for name in CHECKS], now=NOW)
    seen = opened(path, "#1/a.x%5Bgemm%2Fbf16%5D")  # columns are in order of name

    assert "a.x[gemm/bf16]" in seen["linked"]
    assert EVIL in seen["linked"]  # shown as the text that it is
    assert "out error 1.1e+2 of 2.0" in seen["linked"] or "out error 108 of 2" in seen["linked"]
    assert seen["closed"]
    other, toy = seen["cards"]
    assert "stale: 181 days" in other
    assert "incomplete" in other  # it lacks checks
    assert "not conformant" in toy
    assert "3 PASS, 1 FAIL, 1 UNSUPPORTED" in toy

    # The family with a failure is unfolded, its red row first.
    assert [row for row in seen["rows"] if "/" in row][:2] == ["gemm/bf16", "rope/bf16"]
    cells = {(name, classes.split()[1]): classes for name, classes in seen["cells"]}
    assert ("a.x[gemm/bf16]", "FAIL") in cells
    assert ("a.x[gemm/bf16]", "NOT-RUN") in cells
    assert "stale" in cells["a.x[rope/bf16]", "PASS"] or any(
        "stale" in classes for name, classes in seen["cells"] if name == "a.x[rope/bf16]"
    )
    assert any(op.startswith("gemm") and "54" in op for op in seen["ops"])
    assert any(op.startswith("topk") and "NaN" in op for op in seen["ops"])
    assert seen["over"] == 2
    assert seen["unnamed"] == 0


def test_the_page_is_filtered_and_driven_by_keys(tmp_path: Path) -> None:
    browser()
    path = tmp_path / "page.html"
    write_page(results(), path, checks=[check(name) for name in CHECKS], now=NOW)
    seen = opened(path)
    assert seen["linked"] is None
    assert seen["focus"] == "search"
    assert seen["searched"]
    assert all("rope" in row or row == "a.x" for row in seen["searched"])
    assert not any("rope" in row or "topk" in row for row in seen["failing"])
    assert any("gemm" in row for row in seen["failing"])
    assert seen["pressed"] == "true"
    assert seen["columns"] == 1
    assert seen["right"] == 2
    assert seen["down"]
    assert "ml4 conformance run --backend toy -k 'a.x[gemm/bf16]'" in seen["opened"]
    assert seen["hash"] == "#1/a.x%5Bgemm%2Fbf16%5D"
    assert seen["back"]
    assert seen["theme"]
    assert not seen["injected"]
    assert seen["fetched"] == 0


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page([], path, checks=[check("a")], now=NOW)
    page = path.read_text("utf-8")
    assert not re.search(r"(?:src|href)\s*=|https?:|@import|url\(", page)
    assert "default-src 'none'" in page
    assert "/*DATA*/" not in page
