"""The example plugin goes from ``pip install`` to a verdict by the documented path."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ml4core_conformance.check import Status
from ml4core_conformance.results import load

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE = HERE / "example" / "ml4core_example"
WAIVED = "perf.steady_state[sync]"
OWN_CHECK = "x-ml4core-example.pages"

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def example(install: Callable[[str], Any]) -> Any:
    return install("example")


def test_it_imports_the_public_surface_alone() -> None:
    modules = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                modules.add(node.module or "")
    ours = {name for name in modules if name.split(".")[0] in ("ml4core", "ml4core_conformance")}
    assert ours
    assert all(name.split(".")[:2] in (["ml4core", "api"], ["ml4core", "formats"]) for name in ours)


def test_the_path_has_four_lines(documented: Sequence[str]) -> None:
    assert [line.split()[0] for line in documented] == ["pip", "ml4", "ml4", "pytest"]
    folders = documented[0].removeprefix("pip install ").split()
    here = [(HERE / "example" / folder).resolve() for folder in folders]
    assert here == [ROOT, ROOT / "conformance", HERE / "example"]


def test_it_is_listed(example: Any, documented: Sequence[str]) -> None:
    done = example.ml4(*documented[1].split()[1:])
    assert done.returncode == 0, done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("example"))
    assert "ml4core-example" in line
    assert "ok" in line


def test_the_command_judges_it(example: Any, documented: Sequence[str]) -> None:
    """Every check of the suite: a run is as short as what the plugin declares is little."""
    done = example.ml4(*documented[2].split()[1:], "--json", "result.json")
    assert done.returncode == 0, done.stdout
    result = load(example.checkout / "result.json")
    assert result.verdict == "conformant with waivers"
    assert result.complete
    ends = {each.id: each.status for each in result.results}
    assert [id for id, status in ends.items() if status is Status.WAIVED] == [WAIVED]
    own = (
        *("ops.topk[topk/scores]", "ops.elements[sparse_mla/fp32+fp32]", "layout.private"),
        *(OWN_CHECK, "system.fail_stop[stall]", "system.fail_stop[device]"),
    )
    assert {ends[id] for id in own} == {Status.PASS}
    # Heads beyond its limit, and what it leaves undeclared, are refused, not judged.
    assert ends["ops.elements[sparse_mla/fp8_ds_mla+bf16]"] is Status.UNSUPPORTED


def test_its_own_tests_judge_it(example: Any, documented: Sequence[str]) -> None:
    words = "topk or private or steady_state or waivers"
    done = example.run(
        *(
            "-m",
            *documented[3].split(),
            "-q",
            "-p",
            "no:cacheprovider",
            "--junit-xml=tests.xml",
            "-k",
            words,
        )
    )
    assert done.returncode == 0, done.stdout
    cases = ElementTree.parse(example.checkout / "tests.xml").getroot().iter("testcase")
    ends = {case.get("name"): [child.tag for child in case] for case in cases}
    assert "skipped" in ends[f"test_check[{WAIVED}]"]  # pytest writes an expected failure so
    assert "skipped" not in ends["test_check[ops.topk[topk/scores]]"]
    assert "test_waivers" in ends


def test_its_own_check_is_listed_and_explained(example: Any) -> None:
    listed = example.ml4("conformance", "list", "-k", "x-*", "--backend", "example")
    assert f"system   {OWN_CHECK}\n" in listed.stdout
    told = example.ml4("conformance", "explain", OWN_CHECK, "--backend", "example")
    assert told.returncode == 0
    assert "columns of eight tokens" in told.stdout


WITHOUT = """
import sys
from importlib.abc import MetaPathFinder
class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ml4core_conformance":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Absent())
"""
"""Python in which the suite isn't installed."""


def test_it_loads_where_the_suite_is_not_installed(example: Any) -> None:
    code = (
        f"{WITHOUT}\nfrom ml4core.registry import load_plugin\n"
        "print(load_plugin('example').backend.name)\nimport ml4core_conformance"
    )
    done = example.run("-c", code)
    assert done.stdout.startswith("example\n"), done.stdout
    assert "No module named 'ml4core_conformance'" in done.stdout


def test_a_harness_that_does_nothing_is_found_out(example: Any) -> None:
    file = example.checkout / "ml4core_example" / "conformance.py"  # where it is run from
    text = file.read_text("utf-8")
    broken = text.replace("session.executor.before_step = ", "").replace("session.failed = ", "")
    assert len(broken) < len(text) - 30
    file.write_text(broken, "utf-8")
    try:
        done = example.ml4("conformance", "run", "--backend", "example", "-k", "fail_stop")
    finally:
        file.write_text(text, "utf-8")
    assert done.returncode == 1, done.stdout
    assert "2 FAIL" in done.stdout, done.stdout


def test_without_its_waiver_it_is_not_conformant(example: Any, tmp_path: Path) -> None:
    none = tmp_path / "none.toml"
    none.write_text("")
    done = example.ml4(
        *("conformance", "run", "--backend", "example", "-k", WAIVED, "--waivers", none)
    )
    assert done.returncode == 1
    assert "aten::item" in done.stdout


def test_a_waiver_that_is_not_needed_fails_the_run(example: Any, tmp_path: Path) -> None:
    text = (example.checkout / "conformance.toml").read_text("utf-8")
    needless = tmp_path / "needless.toml"
    needless.write_text(text.replace(WAIVED, "ops.topk[topk/scores]"), "utf-8")
    done = example.ml4(
        *("conformance", "run", "--backend", "example", "-k", "ops.topk", "--waivers", needless)
    )
    assert done.returncode == 1
    assert "unexpected PASS" in done.stdout
