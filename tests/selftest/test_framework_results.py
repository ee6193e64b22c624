"""Results as files and as reports: schema, JUnit, differences, age."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from ml4core_conformance import verify
from ml4core_conformance.check import Check, Measure, Status
from ml4core_conformance.report.diff import diff, text
from ml4core_conformance.report.junit import to_junit
from ml4core_conformance.report.matrix import TITLES, to_markdown
from ml4core_conformance.report.merge import merge
from ml4core_conformance.results import (
    SCHEMA_FILE,
    CapabilityFacts,
    CheckResult,
    DeviceFacts,
    GitFacts,
    Judged,
    PluginFacts,
    Result,
    ResultError,
    Selection,
    json_schema,
    load,
)

NOW = datetime(2026, 7, 1, tzinfo=UTC)


def made(name: str, status: Status, *, error: float | None = None, **more: Any) -> CheckResult:
    family, _, variant = name.rstrip("]").partition("[")
    measures = () if error is None else (Judged("out", error, 2.0, error / 2, "case a"),)
    return CheckResult(
        name, family, "ops", status, variant=variant, measures=measures, seconds=0.5, **more
    )


def result(*checks: CheckResult, days: float = 0, **more: Any) -> Result:
    created = (NOW - timedelta(days=days)).strftime("%Y-%m-%dT%H:%M:%SZ")
    words = {"features": ["act:bf16", "kv:bf16", "op:topk"], "defaults": {}, "limits": {}}
    facts: dict[str, Any] = {
        "created": created,
        "suite": "0.1.0",
        "core": "0.1.0",
        "plugin": PluginFacts("toy", "toy-dist", "1.0", "toy", "1-1"),
        "device": DeviceFacts("real", "toy chip", "toy1", "cpu", 5, "8.1", {"driver": "8.1"}),
        "selection": Selection(),
        "results": checks,
        "git": {"toy": GitFacts("abc", True)},
        "capabilities": CapabilityFacts.of(words),
    }
    return Result(**(facts | more))


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    before = result(
        made("a[x]", Status.FAIL, error=math.inf, reason="bad", raised="CheckFailed"),
        made("b", Status.PASS, error=math.nan, bugs=("B001",), requires=("op:topk",)),
    )
    path = tmp_path / "new" / "r.json"
    before.save(path)
    after = load(path)
    assert after.results[0] == before.results[0]
    assert math.isnan(after.results[1].measures[0].error)
    assert replace(after, results=()) == replace(before, results=())
    assert [file.name for file in path.parent.iterdir()] == ["r.json"]
    assert json.loads(path.read_text())["schema"] == 1


def test_the_shipped_schema_is_that_of_the_code_and_holds(tmp_path: Path) -> None:
    schema = json.loads(SCHEMA_FILE.read_text("utf-8"))
    assert schema == json_schema()
    written = json.loads(result(made("a", Status.FAIL, error=math.inf)).to_json())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(written, schema)
    for spoil in (
        lambda r: r.pop("device"),
        lambda r: r.update(schema=2),
        lambda r: r.update(unheard=1),
        lambda r: r["results"][0].update(status="GREEN"),
        lambda r: r["results"][0]["measures"][0].update(error="many"),
    ):
        bad = json.loads(json.dumps(written))
        spoil(bad)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)
        path = tmp_path / "bad.json"
        path.write_text(json.dumps(bad))
        with pytest.raises(ResultError, match=r"bad\.json: no conformance result of schema 1"):
            load(path)


@pytest.mark.parametrize("content", ["", "[]", "{", "null", "\x00\xff", '{"schema": 1}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content, "utf-8")
    with pytest.raises(ResultError, match=r"x\.json"):
        load(path)


def test_only_the_worst_measure_of_a_kind_is_kept() -> None:
    check = Check("a", "ops", lambda subject: None, "doc")
    measures = [
        Measure("out", 1.0, 4.0, "first"),
        Measure("out", 3.0, 4.0, "second"),
        Measure("lse", 0.0, 0.0, "third"),
    ]
    kept = CheckResult.of(check, Status.PASS, measures=measures)
    assert [(m.what, m.ratio, m.where) for m in kept.measures] == [
        ("out", 0.75, "second"),
        ("lse", 0.0, "third"),
    ]
    assert kept.worst == kept.measures[0]


def test_junit_says_every_status() -> None:
    odd = made("a[x]", Status.FAIL, error=3.0, reason="bad \x00 \x1b[31m & <here>\nmore")
    tree = ElementTree.fromstring(
        to_junit(
            result(
                odd,
                made("b", Status.PASS),
                made("c", Status.UNSUPPORTED, reason="refused"),
                made("d", Status.WAIVED, waiver="bug: known"),
                made("e", Status.NOT_RUN, reason="no device"),
                made("f", Status.FAIL, provisional=True),
                made("g", Status.ERROR, reason="boom", raised="KeyError"),
                problems=("waiver of z: expired on 2026-01-01",),
            )
        )
    )
    suite, waivers = tree
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "7", "failures": "1", "errors": "2", "skipped": "3"}
    assert waivers.get("failures") == "1"
    ids = "properties/property[@name='id']"
    cases = {case.find(ids).get("value"): case for case in suite.iter("testcase")}  # type: ignore[union-attr]
    failure = cases["a[x]"].find("failure")
    assert failure is not None
    assert "& <here>" in (failure.text or "")
    assert "\x1b" not in (failure.text or "")
    measure = cases["a[x]"].find("properties/property[@name='measure.out']")
    assert measure is not None
    assert measure.get("value") == "error=3.0 bound=2.0 ratio=1.5 where=case a"
    assert [child.tag for child in cases["b"]] == ["properties"]
    for id, tag in {"c": "skipped", "d": "skipped", "e": "error", "f": "skipped"}.items():
        assert cases[id].find(tag) is not None, id
    error = cases["g"].find("error")
    assert error is not None
    assert error.get("type") == "KeyError"


def test_diff_names_verdicts_first_then_errors() -> None:
    before = result(
        made("a", Status.PASS, error=1.0),
        made("b", Status.PASS, error=0.5),
        made("c", Status.PASS, error=1.0),
        made("gone", Status.PASS),
        made("still", Status.FAIL),
    )
    after = result(
        made("a", Status.PASS, error=1.1),
        made("b", Status.PASS, error=1.5),
        made("c", Status.FAIL, error=8.0, reason="too large"),
        made("new", Status.PASS),
        made("still", Status.FAIL),
        libraries={"torch": "9"},
    )
    changes = diff(before, after)
    assert {change.id for change in changes} == {"b", "c", "gone", "new"}
    assert [change.id for change in changes if change.worse] == ["c", "gone"]
    assert changes[-1].id == "b"
    told = text(before, after, changes)
    assert "PASS -> FAIL  c\n    too large\n    out: error 1 -> 8, times 8" in told
    assert "out: error 0.5 -> 1.5, times 3" in told
    assert "torch: none -> 9" in told
    assert "3 verdicts differ, 1 more have other errors" in told
    assert "nothing differs" in text(before, before, diff(before, before))


def check(name: str, **more: Any) -> Check:
    family, _, variant = name.rstrip("]").partition("[")
    return Check(family, "ops", lambda subject: None, "doc", variant=variant, **more)


def test_merging_takes_the_newest_of_each_check() -> None:
    old = result(made("a", Status.FAIL), made("b", Status.PASS), days=9)
    new = result(made("a", Status.PASS), days=2)
    halted = result(made("b", Status.NOT_RUN), days=1, complete=False)
    matrix = merge([new, halted, old], [check("a"), check("b")], now=NOW)
    (column,) = matrix.columns
    assert column.newest is halted
    assert {id: cell.result.status for id, cell in column.cells.items()} == {
        "a": Status.PASS,
        "b": Status.PASS,
    }
    assert column.verdict == "conformant"
    assert 8.9 < column.age_days < 9.1
    assert not column.stale


def test_what_was_never_run_is_not_green_and_old_is_stale() -> None:
    matrix = merge([result(made("a", Status.PASS), days=40)], [check("a"), check("new")], now=NOW)
    assert matrix.columns[0].verdict == "incomplete"
    assert matrix.columns[0].stale
    assert [row.id for row in matrix.rows] == ["a", "new"]
    young = merge([result(made("a", Status.PASS), days=40)], [check("a")], now=NOW, stale_days=50)
    assert young.columns[0].verdict == "conformant"
    assert not young.columns[0].stale


def test_columns_are_devices_and_suite_versions() -> None:
    green = made("a", Status.PASS)
    runs = [
        result(green),
        result(green, device=DeviceFacts("interpreted", "toy chip", "toy1")),
        result(green, suite="0.2.0"),
        result(green, days=3),
    ]
    matrix = merge(runs, [check("a")], now=NOW)
    assert [(column.name, column.newest.suite) for column in matrix.columns] == [
        ("toy · toy1", "0.1.0"),
        ("toy · toy1", "0.2.0"),
        ("toy · toy1 (interpreted)", "0.1.0"),
    ]


def test_the_matrix_says_what_was_proven_and_what_only_declared() -> None:
    page = to_markdown(
        [
            result(
                made("a", Status.PASS, requires=("act:bf16", "kv:bf16")),
                made("b", Status.FAIL, requires=("op:topk",)),
            )
        ],
        unseen=["far", "toy"],
    )
    lines = page.splitlines()
    assert (
        "| `toy` | toy chip toy1 | not conformant | 1 PASS, 1 FAIL | toy-dist 1.0 | 0.1.0 |" in page
    )
    assert "| `far` |  | NOT-RUN |  |  |  |  |" in lines
    assert "| `topk` | ✗ | ? |" in lines
    assert "| `bf16` | ✓ | ? |" in lines
    assert "| `gemm` | - | ? |" in lines
    assert "| `act:bf16` | ✓ |" in lines
    assert "`toy` |  | NOT-RUN" not in page


def test_the_matrix_says_what_runs_of_parts_asked_for() -> None:
    layouts = result(made("a", Status.PASS), selection=Selection(("layouts",)), days=2)
    few = result(made("b", Status.PASS), selection=Selection((), "b"), days=1)
    page = to_markdown([layouts, few])
    assert "| conformant (profile layouts; all profiles, -k 'b') | 2 PASS |" in page
    whole = result(made("a", Status.PASS), made("b", Status.PASS), days=3)
    # Of the whole run nothing counts any more.
    assert "(profile layouts; all profiles, -k 'b')" in to_markdown([whole, layouts, few])
    more = result(*(made(id, Status.PASS) for id in "abc"), days=3)
    assert "| conformant | 3 PASS |" in to_markdown([more, layouts, few])


def test_what_stood_for_a_device_is_no_run_of_the_device() -> None:
    """A backend that ran in an interpreter, or as a fake, is told as never run on its hardware."""
    passed = made("a", Status.PASS, requires=("op:topk",))
    facts = [DeviceFacts(kind, kind, "toy1") for kind in ("interpreted", "fake", "source", "real")]
    *stands, real = [result(passed, device=one) for one in facts]
    lines = to_markdown(stands, unseen=["toy"]).splitlines()
    assert "| `toy` | toy1 | NOT-RUN |  |  |  |  |" in lines
    assert sum(line.startswith("| `toy` |") and "1 PASS" in line for line in lines) == 3
    assert any("(source)" in line for line in lines)
    assert "| `topk` | ✓ | ✓ | ✓ | ? |" in lines
    assert any(line.endswith("| toy · toy1 |") for line in lines)
    assert "NOT-RUN" not in to_markdown([*stands, real], unseen=["toy"])


def test_what_a_check_was_made_with_is_shown_by_its_pass_alone() -> None:
    words = ("kv:bf16", "kv:fp32", "act:bf16", "spec:dspark", "weights:bf16", "feature:images")
    run = result(
        made("a", Status.PASS, requires=("act:bf16",), exercises=("kv:bf16", "weights:bf16")),
        made("b", Status.FAIL, requires=("spec:dspark",), exercises=("kv:fp32", "act:bf16")),
        made("c", Status.UNSUPPORTED, requires=("feature:images", "weights:nvfp4")),
        capabilities=CapabilityFacts.of({"features": [*words], "defaults": {}, "limits": {}}),
    )
    page = to_markdown([run])
    single, _, pairs = page.partition("## What works together")

    def mark(word: str) -> str:
        prefix, _, name = word.partition(":")
        rows = single.partition(f"### {TITLES[prefix]}")[2].partition("###")[0].splitlines()
        return next(row for row in rows if row.startswith(f"| `{name}` |")).split()[3]

    assert {word: mark(word) for word in words} == {
        "kv:bf16": "✓",
        "kv:fp32": "○",  # of a failure it was no more than a part
        "act:bf16": "✓",
        "spec:dspark": "✗",
        "weights:bf16": "✓",
        "feature:images": "○",  # refused with another word, which proves nothing of it
    }
    (row,) = (line for line in pairs.splitlines() if line.startswith("| `spec:dspark` |"))
    (head,) = (line for line in pairs.splitlines() if line.startswith("|  |"))
    marks = dict(zip(head.split("|")[2:], row.split("|")[2:], strict=True))
    assert {key.strip(" `"): mark.strip() for key, mark in marks.items() if mark.strip()} == {
        "kv:bf16": "○",
        "kv:fp32": "✗",
        "act:bf16": "✗",
        "weights:bf16": "○",
    }


def test_a_run_keeps_what_it_found_while_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that one that is killed, which no handler sees, loses little."""
    monkeypatch.setattr(verify, "KEEP_S", 0.0)
    found = verify.find("cpu")
    chosen = Selection((), "plugin.", verify.served_api(found), (0,))
    kept: list[Result] = []

    def keep(result: Result) -> None:
        result.save(tmp_path / "r.json")
        kept.append(load(tmp_path / "r.json"))

    whole = verify.examine(found, chosen, jobs=0, keep=keep)
    assert len(kept) == len(whole.results) > 2
    for count, part in enumerate(kept, 1):
        assert not part.complete
        judged = [one for one in part.results if one.status is not Status.NOT_RUN]
        assert len(judged) == count
        assert [one.id for one in part.results] == [one.id for one in whole.results]
