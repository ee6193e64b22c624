"""What metadata alone tells, and what it forbids."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING

import pytest

from ml4core.api import SUPPORTED_API_VERSIONS, Refused
from ml4core.registry import PluginRecord, discover, find

if TYPE_CHECKING:
    from conftest import Site

SERVED = ", ".join(map(str, sorted(SUPPORTED_API_VERSIONS)))


def only(site: Site) -> PluginRecord:
    (record,) = site.records()
    return record


def reason(record: PluginRecord) -> str:
    (refusal,) = record.refusals
    return str(refusal)


def test_record_tells_what_the_metadata_tells(site: Site) -> None:
    module = site.plugin("chip", version="2.5", source="raise AssertionError('imported')")
    assert only(site) == PluginRecord("chip", "dist-chip", "2.5", module, (1, 1))
    assert module not in sys.modules
    assert only(site).to_json() == {
        "name": "chip",
        "distribution": "dist-chip",
        "version": "2.5",
        "target": module,
        "api": "1-1",
    }


@pytest.mark.parametrize(
    "keywords",
    [
        "ml4core-api:1-1",
        "fast,ml4core-api:1-1,llm",
        "fast, ml4core-api:1-1",
        "fast ml4core-api:1-1 llm",
        "ml4core-api:1-1,ml4core-api:1-1",
        "ml4core-api-notes:7,ml4core-api:1-1",
    ],
)
def test_keywords_divided_by_commas_or_spaces(site: Site, keywords: str) -> None:
    site.plugin("chip", keywords=keywords)
    assert only(site).api == (1, 1)
    assert not only(site).refusals


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        (None, "states no API range: its metadata lacks the keyword ml4core-api:LOW-HIGH"),
        ("fast,llm", "states no API range: its metadata lacks the keyword ml4core-api:LOW-HIGH"),
        ("ml4core-api:1", "malformed API range 'ml4core-api:1'"),
        ("ml4core-api:2-1", "malformed API range 'ml4core-api:2-1'"),
        ("ml4core-api:1-x", "malformed API range 'ml4core-api:1-x'"),
        ("ml4core-api", "malformed API range 'ml4core-api'"),
        ("ml4core-api:1-1,ml4core-api:2-3", "several API ranges: ml4core-api:1-1, ml4core-api:2-3"),
    ],
)
def test_missing_or_malformed_range_is_refused(
    site: Site, keywords: str | None, expected: str
) -> None:
    site.plugin("chip", keywords=keywords)
    assert only(site).api is None
    assert expected in reason(only(site))
    assert f"(works: a release of dist-chip whose range includes API {SERVED})" in reason(
        only(site)
    )


def test_range_without_a_served_version_names_all_three(site: Site) -> None:
    site.plugin("chip", version="3.1", keywords="ml4core-api:9-9")
    assert only(site).api == (9, 9)
    assert f"dist-chip 3.1 supports API 9-9, this core serves {SERVED}" in reason(only(site))


def test_range_that_reaches_a_served_version(site: Site) -> None:
    site.plugin("chip", keywords=f"ml4core-api:{max(SUPPORTED_API_VERSIONS)}-99")
    assert not only(site).refusals


@pytest.mark.parametrize("name", ["Chip", "1chip", "-chip", "chip.x", "auto"])
def test_name_that_no_flag_may_have(site: Site, name: str) -> None:
    site.plugin(name, distribution="dist")
    assert "dist 1.0 offers a backend whose name" in reason(only(site))


def test_two_plugins_of_one_name_are_both_refused(site: Site) -> None:
    """B122: two claims are refused, and both are listed."""
    site.plugin("chip", distribution="dist-a", version="1.0")
    site.plugin("chip", distribution="dist-b", version="2.0")
    assert [record.distribution for record in site.records()] == ["dist-a", "dist-b"]
    for record in site.records():
        assert "dist-a 1.0 (plug_dist_a) and dist-b 2.0 (plug_dist_b)" in reason(record)
        assert "(works: pip uninstall dist-a or dist-b)" in reason(record)
    with pytest.raises(Refused, match=r"--backend chip is refused for 1 reason:") as refused:
        find("chip")
    assert "dist-a" in str(refused.value)
    assert "dist-b" in str(refused.value)


def test_a_rival_of_a_refused_plugin_is_refused_too(site: Site) -> None:
    site.plugin("chip", distribution="dist-a", keywords=None)
    site.plugin("chip", distribution="dist-b")
    with pytest.raises(Refused) as refused:
        find("chip")
    assert "states no API range" in str(refused.value)
    assert "several plugins claim this name" in str(refused.value)


def test_first_distribution_on_the_path_hides_others_of_its_name(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("chip", version="1.0")
    later = tmp_path / "later"
    later.mkdir()
    type(site)(later).metadata("Dist_Chip", "2.0", None, {"chip": "elsewhere"})
    monkeypatch.setattr(sys, "path", [*sys.path, str(later)])
    (record,) = (record for record in discover() if record.name == "chip")
    assert (record.version, record.refusals) == ("1.0", ())


def test_other_groups_are_not_ours(site: Site) -> None:
    site.raw_metadata("other", "1.0", None, "[console_scripts]\nthis is no entry point\n")
    assert site.records() == ()


def test_unreadable_entry_points_refuse_that_distribution_alone(site: Site) -> None:
    site.raw_metadata("garbled", "1.0", "ml4core-api:1-1", "[ml4core.backends]\nno equals sign\n")
    site.plugin("chip")
    garbled, chip = sorted(site.records(), key=lambda record: record.name != "garbled")
    assert "entry_points.txt can't be read" in reason(garbled)
    assert not chip.refusals


def test_leftovers_of_an_install_are_passed_over(site: Site) -> None:
    (site.folder / "~ip-1.0.dist-info").mkdir()
    (site.folder / "empty-1.0.dist-info").mkdir()
    (site.folder / "empty-1.0.dist-info" / "METADATA").write_text("", "utf-8")
    site.plugin("chip")
    assert not only(site).refusals


def test_unknown_name_lists_the_installed_and_tells_how_to_install(site: Site) -> None:
    """B122: a plugin that is asked for and not installed."""
    site.plugin("chip")
    with pytest.raises(Refused) as refused:
        find("gizmo")
    (refusal,) = refused.value.refusals
    assert "no installed plugin offers this backend; installed: " in refusal.reason
    assert "chip" in refusal.reason
    assert refusal.remedy.startswith("pip install ml4core-gizmo")


def test_a_slip_of_the_pen_gets_the_right_word_and_no_install_line(site: Site) -> None:
    site.plugin("gizmo")
    with pytest.raises(Refused) as refused:
        find("gzimo", site.records())
    assert refused.value.refusals[0].remedy == "--backend gizmo"


def test_a_short_word_is_not_taken_for_another(site: Site) -> None:
    site.plugin("cpu")
    with pytest.raises(Refused) as refused:
        find("tpu", site.records())
    assert refused.value.refusals[0].remedy.startswith("pip install ml4core-tpu")


def test_a_word_that_no_plugin_can_have_gets_no_install_line() -> None:
    with pytest.raises(Refused) as refused:
        find("no such; thing", [])
    assert "pip" not in refused.value.refusals[0].remedy
    assert "installed: none" in refused.value.refusals[0].reason


def test_discovering_imports_neither_plugins_nor_torch(
    site: Site, python: Callable[[str], CompletedProcess[str]]
) -> None:
    module = site.plugin("chip")
    done = python(
        "import sys\n"
        "from ml4core.registry import discover\n"
        "assert 'chip' in [record.name for record in discover()]\n"
        f"print(sorted({{'torch', 'triton', 'jax', {module!r}}} & set(sys.modules)))"
    )
    assert done.stdout.strip() == "[]", done.stderr
