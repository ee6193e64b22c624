"""Which backend runs, and what is told about the others."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import TYPE_CHECKING

import pytest

from ml4core.api import Refused
from ml4core.registry import AUTO, Choice, discover, report, select

if TYPE_CHECKING:
    from conftest import Site

NONE = "return Probe(refusals=(Refusal({name!r}, 'device', 'there is none'),))"
FAKE = "return Probe(devices=(Device('fake', 'a fake', 'arch1', 'cpu'),))"
MIXED = (
    "return Probe(devices=(Device('interpreted', 'slow', 'arch1', 'cpu'), DEVICE,"
    " Device('real', 'second', 'arch1', 'cpu', 1)),"
    " refusals=(Refusal('chip', 'old chip', 'too old'),))"
)


def automatic(site: Site, **options: str) -> Choice:
    return select(AUTO, records=site.records(), **options)  # type: ignore[arg-type]


def trace(choice: Choice) -> dict[str, str]:
    return {name: "; ".join(map(str, reasons)) for name, reasons in choice.trace}


def test_named_backend_runs(site: Site) -> None:
    site.plugin("chip", probe=MIXED)
    choice = select("chip")
    assert choice.backend.name == "chip"
    assert choice.device.name == "a chip"
    assert [found.device.name for found in choice.devices] == ["a chip", "second"]
    assert "op:topk" in choice.capabilities
    assert [refusal.reason for refusal in choice.notes] == ["too old"]
    assert choice.trace == ()
    assert [name for name, _ in choice.manager.list_name_plugin()] == ["chip"]


def test_named_backend_has_no_substitute(site: Site) -> None:
    """B124: a forced choice that can't serve ends with every reason it was given."""
    site.plugin("spare", priority=99)
    module = site.plugin(
        "chip",
        probe="return Probe(refusals=(Refusal('chip', 'a', 'one'), Refusal('chip', 'b', 'two')))",
    )
    with pytest.raises(Refused, match=r"^--backend chip is refused for 2 reasons:") as refused:
        select("chip")
    assert [refusal.reason for refusal in refused.value.refusals] == ["one", "two"]
    assert module not in sys.modules


def test_auto_goes_by_priority_then_by_name(site: Site) -> None:
    site.plugin("a", priority=1)
    site.plugin("z", priority=7)
    site.plugin("m", priority=7)
    choice = automatic(site)
    assert choice.backend.name == "m"
    assert [name for name, _ in choice.trace] == ["z", "a"]
    assert "m comes before it: by priority, then by name, cpu last" in trace(choice)["a"]


def test_auto_takes_cpu_last(site: Site) -> None:
    site.plugin("cpu", priority=1000)
    site.plugin("chip", priority=-5)
    assert automatic(site).backend.name == "chip"


def test_auto_imports_the_chosen_one_alone(site: Site) -> None:
    chosen = site.plugin("chip", priority=5)
    others = [site.plugin("less", priority=1), site.plugin("none", probe=NONE.format(name="none"))]
    automatic(site)
    assert chosen in sys.modules
    assert not set(others) & set(sys.modules)


def test_auto_says_why_it_passed_over_each(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """B122: loud about what is broken, in one list with what was chosen."""
    site.plugin("cpu", priority=0)
    site.plugin("none", priority=50, probe=NONE.format(name="none"))
    site.plugin("crash", probe="os.kill(os.getpid(), signal.SIGSEGV)")
    site.plugin("import", source="raise ImportError('libgone.so')")
    site.plugin("old", keywords="ml4core-api:9-9")
    site.plugin("fake", probe=FAKE)
    site.plugin("twin", distribution="dist-a")
    site.plugin("twin", distribution="dist-b")
    with caplog.at_level(logging.INFO, logger="ml4core.registry"):
        choice = automatic(site)
    assert choice.backend.name == "cpu"
    told = trace(choice)
    assert told.keys() == {"none", "crash", "import", "old", "fake", "twin"}
    assert [name for name, _ in choice.trace].count("twin") == 2
    assert "there is none" in told["none"]
    assert "SIGSEGV" in told["crash"]
    assert "ImportError: libgone.so" in told["import"]
    assert "supports API 9-9" in told["old"]
    assert "kinds found: fake" in told["fake"]
    assert "dist-a 1.0 (plug_dist_a) and dist-b 1.0" in told["twin"]
    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    warned = [message for level, message in logged if level == "WARNING"]
    assert len(warned) == 5
    assert any("passed over import (from dist-import 1.0)" in message for message in warned)
    assert ("INFO", "--backend auto took cpu (from dist-cpu 1.0)") in logged


def test_auto_without_any_left_lists_every_reason(site: Site) -> None:
    site.plugin("none", probe=NONE.format(name="none"))
    site.plugin("crash", probe="os._exit(3)")
    with pytest.raises(Refused, match=r"^--backend auto is refused for 2 reasons:") as refused:
        automatic(site)
    assert "exit code 3" in str(refused.value)
    assert "there is none" in str(refused.value)


def test_auto_without_any_plugin() -> None:
    with pytest.raises(Refused, match="no backend plugin is installed"):
        select(AUTO, records=())


def test_auto_passes_over_what_loads_in_the_child_only(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plug_dist_chip", None)  # imports of it fail, here
    site.plugin("chip", priority=9)
    site.plugin("other", priority=1)
    choice = automatic(site)
    assert choice.backend.name == "other"
    assert "can't be imported" in trace(choice)["chip"]


def test_missing_symbol_is_seen_before_it_is_needed(site: Site) -> None:
    """B124: a library without the op; selection passes over it, a forced choice shows the text."""
    (site.folder / "chip_library.py").write_text("def sparse_attention(): ...\n", "utf-8")
    tries = "from chip_library import sparse_attention\nreturn Probe(devices=(DEVICE,))"
    site.plugin("chip", priority=9, probe=tries)
    site.plugin("spare", priority=1)
    assert automatic(site).backend.name == "chip"
    (site.folder / "chip_library.py").write_text("", "utf-8")
    text = "ImportError: cannot import name 'sparse_attention' from 'chip_library'"
    choice = automatic(site)
    assert choice.backend.name == "spare"
    assert text in trace(choice)["chip"]
    with pytest.raises(Refused) as refused:
        select("chip")
    assert text in str(refused.value)


def test_device_that_is_not_real_opens_only_when_asked_for(site: Site) -> None:
    site.plugin("chip", priority=9, probe=FAKE)
    site.plugin("spare", priority=1)
    assert automatic(site).backend.name == "spare"
    assert automatic(site, device_kind="fake").device.kind == "fake"
    with pytest.raises(Refused) as refused:
        select("chip")
    assert "has no real device; kinds found: fake" in str(refused.value)
    assert 'works: --additional-config \'{"device": "fake"}\'' in str(refused.value)
    assert select("chip", device_kind="fake").device.name == "a fake"


def test_kind_that_the_backend_lacks_is_refused(site: Site) -> None:
    site.plugin("chip", probe=MIXED)
    assert select("chip", device_kind="interpreted").device.name == "slow"
    with pytest.raises(Refused) as refused:
        select("chip", device_kind="fake")
    assert "has no fake device; kinds found: interpreted, real" in str(refused.value)
    assert "too old" in str(refused.value)


def test_kind_that_does_not_exist_is_refused(site: Site) -> None:
    site.plugin("chip")
    with pytest.raises(Refused, match="there is no device kind 'virtual'") as refused:
        select("chip", device_kind="virtual")
    assert "works: real, interpreted, fake, source" in str(refused.value)


@pytest.mark.parametrize("name", ["import", "gizmo", "number", "twin"])
def test_exit_code_and_cause_of_a_forced_choice(
    site: Site, python: Callable[[str], CompletedProcess[str]], name: str
) -> None:
    """B122: its four cases, each asked for by name, beside a backend that would serve."""
    site.plugin("spare")
    site.plugin("import", source="raise ImportError('libgone.so')")
    site.plugin("number", target="plug_dist_number:NUMBER", bottom="NUMBER = 7")
    site.plugin("twin", distribution="dist-a")
    site.plugin("twin", distribution="dist-b")
    cause = {
        "import": "ImportError: libgone.so",
        "gizmo": "no installed plugin offers this backend",
        "number": "holds a int",
        "twin": "several plugins claim this name",
    }
    done = python(f"from ml4core.registry import select\nselect({name!r})")
    assert done.returncode == 1
    assert f"--backend {name} is refused for 1 reason:" in done.stderr
    assert cause[name] in done.stderr


def test_report_has_a_line_for_every_plugin(site: Site) -> None:
    site.plugin("chip", probe=MIXED)
    site.plugin("none", priority=50, probe=NONE.format(name="none"))
    site.plugin("import", source="raise ImportError('libgone.so')")
    site.plugin("old", version="4.0", keywords="ml4core-api:9-9")
    lines = {each.record.name: each for each in report(records=site.records())}
    assert {name: each.result.state for name, each in lines.items()} == {
        "chip": "ok",
        "none": "unavailable",
        "import": "broken",
        "old": "refused",
    }
    told = json.loads(json.dumps([each.to_json() for each in lines.values()]))
    chip, broken, none, old = (
        next(line for line in told if line["name"] == name)
        for name in ("chip", "import", "none", "old")
    )
    assert chip["devices"][1] == {
        "kind": "real",
        "name": "a chip",
        "arch": "arch1",
        "torch_device": "cpu",
        "index": 0,
        "memory_bytes": 2**30,
        "details": {"library": "3.2"},
        "capabilities": {
            "features": ["op:topk"],
            "defaults": {"kv": "bf16"},
            "limits": {"max_topk": 64},
        },
    }
    assert [refusal["reason"] for refusal in chip["refusals"]] == ["too old"]
    assert (none["priority"], none["devices"]) == (50, [])
    assert broken["priority"] is None
    assert "libgone.so" in broken["refusals"][0]["reason"]
    assert (old["distribution"], old["version"], old["api"]) == ("dist-old", "4.0", "9-9")


def test_report_covers_all_that_is_installed(site: Site) -> None:
    site.plugin("zz-chip")
    names = [each.record.name for each in report(timeout=120)]
    assert names == [record.name for record in discover()]
    assert "zz-chip" in names


@pytest.mark.alone
def test_probes_run_side_by_side_and_each_has_its_own_limit(site: Site) -> None:
    for name in ("a", "b", "c", "d"):
        site.plugin(name, probe="time.sleep(600)")
    site.plugin("crash", probe="os._exit(5)")
    site.plugin("good")
    start = time.monotonic()
    results = {each.record.name: each.result for each in report(timeout=3, records=site.records())}
    assert time.monotonic() - start < 9
    for name in ("a", "b", "c", "d"):
        assert "within 3 s" in results[name].refusals[0].reason
    assert "exit code 5" in results["crash"].refusals[0].reason
    assert results["good"].state == "ok"
