"""Measured sizes and rules as data: read, written, missing, stale."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType

import pytest

from ml4core_cuda import ops, rules, tuned
from ml4core_cuda.tuned import Entry, Table

GPU = "NVIDIA X"


@dataclass(frozen=True)
class Tiling:
    rows: int
    warps: int


DEFAULT = Tiling(16, 4)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Table]]:
    found: dict[str, Table] = {}
    monkeypatch.setattr(tuned, "measured", lambda: found)
    monkeypatch.setattr(rules, "measured", lambda: found)
    monkeypatch.setattr(ops, "measured", lambda: found)
    return found


def entry(source: str = "", **sizes: int) -> Entry:
    return Entry(sizes, 3.0, 4.0, source or tuned.source_of("topk"))


def test_the_committed_file_is_well_formed() -> None:
    tables = tuned.parse(tuned.DATA.read_text("utf-8"))
    assert tuned.parse(tuned.render(tables)) == tables
    for table in tables.values():
        assert table.taken
        assert all(why for rules in table.rules.values() for _, _, why in rules)


def test_sizes_are_those_measured_or_the_default(tables: dict[str, Table]) -> None:
    assert tuned.sizes_for("topk", GPU, "8 rows", DEFAULT) == DEFAULT
    tables[GPU] = Table("today", {"topk": {"8 rows": entry(warps=8), "9 rows": entry()}})
    assert tuned.sizes_for("topk", GPU, "8 rows", DEFAULT) == Tiling(16, 8)
    for kernel, device, shape in (
        ("topk", GPU, "9 rows"),
        ("topk", GPU, "7 rows"),
        ("topk", "another", "8 rows"),
        ("router", GPU, "8 rows"),
    ):
        assert tuned.sizes_for(kernel, device, shape, DEFAULT) == DEFAULT
    with tuned.forced("topk", "8 rows", {"rows": 32}):
        assert tuned.sizes_for("topk", GPU, "8 rows", DEFAULT) == Tiling(32, 4)
        assert tuned.sizes_for("topk", GPU, "9 rows", DEFAULT) == DEFAULT
    assert tuned.sizes_of(DEFAULT) == {"rows": 16, "warps": 4}


def test_what_is_missing_or_of_another_source_is_told(tables: dict[str, Table]) -> None:
    (none,) = tuned.told(GPU, ["topk"])
    assert none == f"no sizes were measured on {GPU}; there are those of: none"
    tables[GPU] = Table("today", {"topk": {"8 rows": entry()}})
    assert tuned.told(GPU, ["topk"]) == ()
    tables[GPU] = replace(tables[GPU], kernels={"topk": {"8 rows": entry("0ld")}})
    missing, stale = tuned.told(GPU, ["topk", "router"])
    assert "no sizes were measured for router" in missing
    assert "the sizes of topk were measured with another source" in stale


def test_a_source_is_what_is_compiled_and_not_how_it_is_told(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {len(tuned.source_of(kernel)) for kernel in tuned.SOURCES} == {12}
    same, other = (tuned.source_of.__wrapped__(name) for name in ("topk", "router"))
    assert same == tuned.source_of("topk")
    assert same != other


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"format": 9, "devices": {}}, "of format 9, not 1"),
        ({"format": 1, "devices": {GPU: {"kernels": {"tpok": {}}}}}, "no kernel 'tpok'"),
    ],
)
def test_a_file_that_is_not_understood_is_refused(facts: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        tuned.parse(json.dumps(facts))


def test_rules_go_by_device_and_rows(tables: dict[str, Table]) -> None:
    assert rules.rule_for("select", GPU, 0).provider == rules.OURS
    assert GPU in rules.rule_for("select", GPU, 1).measured
    found = {
        "sparse_mla/64 heads": ((1, "triton", "9 against 17 us"), (64, "FlashMLA", "75 against 80"))
    }
    tables[GPU] = Table("today", MappingProxyType({}), found)
    assert [rules.rule_for("sparse_mla", GPU, rows, 64).provider for rows in (0, 63, 64, 999)] == [
        "triton",
        "triton",
        "FlashMLA",
        "FlashMLA",
    ]
    assert rules.rule_for("sparse_mla", GPU, 64, 8).provider == rules.OURS
    assert rules.rule_for("select", GPU, 64).provider == rules.OURS
