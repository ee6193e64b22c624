"""Probes run in children: whatever a plugin does there is told, and harms no one."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ml4core.api import Capabilities, Device, Refusal, Refused
from ml4core.registry import FoundDevice, ProbeResult, find, probe

if TYPE_CHECKING:
    from conftest import Site


def broken(name: str, timeout: float | None = None) -> str:
    result = probe(name, timeout)
    assert (result.state, result.devices) == ("broken", ())
    (refusal,) = result.refusals
    assert refusal.source == name
    return str(refusal)


def test_answer_comes_back_whole(site: Site) -> None:
    module = site.plugin("chip", priority=-3)
    assert probe("chip") == ProbeResult(
        "ok",
        devices=(
            FoundDevice(
                Device("real", "a chip", "arch1", "cpu", 0, 2**30, {"library": "3.2"}),
                Capabilities(frozenset({"op:topk"}), {"kv": "bf16"}, {"max_topk": 64}),
            ),
        ),
        priority=-3,
    )
    assert module not in sys.modules


def test_takes_a_record_too(site: Site) -> None:
    site.plugin("chip")
    assert probe(find("chip")).state == "ok"


def test_reasons_of_a_backend_without_device(site: Site) -> None:
    refusals = (
        "return Probe(refusals=(Refusal('chip', 'driver', 'absent', 'one'),"
        " Refusal('chip', 'kernels', 'none yet')))"
    )
    site.plugin("chip", probe=refusals)
    assert probe("chip") == ProbeResult(
        "unavailable",
        refusals=(
            Refusal("chip", "driver", "absent", "one"),
            Refusal("chip", "kernels", "none yet"),
        ),
        priority=10,
    )


@pytest.mark.parametrize(
    "noise",
    [
        'print(\'{"state": "ok"}\')',
        "os.write(1, b'\\xff\\x00 not text'); os.write(2, b'noise')",
        "sys.stdout.close(); sys.stderr.close()",
        "subprocess.run(['echo', 'from a child'])",
        "os.close(1)",
    ],
)
def test_noise_does_not_spoil_the_answer(site: Site, noise: str) -> None:
    site.plugin("chip", probe=f"{noise}\nreturn Probe(devices=(DEVICE,))", top="print('hello')")
    assert probe("chip").state == "ok"


def test_nothing_to_read_on_stdin(site: Site) -> None:
    site.plugin("chip", probe="assert sys.stdin.read() == ''\nreturn Probe(devices=(DEVICE,))")
    assert probe("chip").state == "ok"


@pytest.mark.parametrize("end", ["os.kill, os.getpid(), signal.SIGSEGV", "time.sleep, 600"])
def test_failure_after_the_answer_no_longer_matters(site: Site, end: str) -> None:
    site.plugin("chip", top=f"import atexit\natexit.register({end})")
    start = time.monotonic()
    assert probe("chip", timeout=120).state == "ok"
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise RuntimeError('no such ioctl')", "its probe raised RuntimeError: no such ioctl (at"),
        ("sys.exit(4)", "its probe raised SystemExit: 4 (at"),
        ("import gone_library", "its probe raised ModuleNotFoundError: No module named 'gone_lib"),
        ("return None", "its probe returned None, not a Probe"),
        ("return Probe()", "found no device and gave no reason"),
        ("return Probe(devices=('cpu',))", "returned 'cpu' among its devices"),
        ("return Probe(devices=None)", "whose parts are no tuples"),
        ("return Probe(refusals=('no',))", "returned 'no' among its refusals"),
        (
            "return Probe(devices=(Device('virtual', 'v', 'a', 'cpu'),))",
            "returned 'v' of kind 'virtual'; kinds are real, interpreted, fake, source",
        ),
        (
            "return Probe(devices=(Device('real', 'v', 'a', ''),))",
            "returned a device whose torch_device is ''; works: a text",
        ),
        (
            "return Probe(devices=(Device('real', 'v', 'a', 'cpu', 0, '8 GiB'),))",
            "returned 'v' whose memory_bytes is '8 GiB'; works: a whole number from 0",
        ),
        (
            "return Probe(devices=(Device('real', 'v', 'a', 'cpu', -1),))",
            "returned 'v' whose index is -1; works: a whole number from 0",
        ),
        ("return Probe(refusals=(Refusal('chip', 'x', OSError()),))", "what JSON can't hold"),
    ],
)
def test_wrong_probe(site: Site, code: str, expected: str) -> None:
    site.plugin("chip", probe=code)
    assert expected in broken("chip")


@pytest.mark.parametrize("priority", ["high", True, None, 1.5])
def test_priority_is_an_integer(site: Site, priority: object) -> None:
    site.plugin("chip", priority=priority)
    assert f"has the priority {priority!r}, which is no integer" in broken("chip")


def test_import_error_comes_back_with_its_text(site: Site) -> None:
    site.plugin("chip", source="raise ImportError('libchip.so.4: cannot open shared object file')")
    assert "ImportError: libchip.so.4: cannot open shared object file" in broken("chip")


@pytest.mark.parametrize(
    ("code", "death"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL"),
        ("os.abort()", "signal SIGABRT"),
        ("os._exit(7)", "exit code 7"),
        ("os._exit(0)", "exit code 0"),
    ],
)
def test_death_is_told_with_its_last_words(site: Site, code: str, death: str) -> None:
    site.plugin("chip", probe=f"os.write(2, b'chip: no firmware\\n')\n{code}")
    told = broken("chip")
    assert f"its probe died before it answered: {death}" in told
    assert "chip: no firmware" in told
    assert "within" not in told


def test_crash_tells_where(site: Site) -> None:
    module = site.plugin("chip", probe="os.kill(os.getpid(), signal.SIGSEGV)")
    told = broken("chip")
    assert "Fatal Python error: Segmentation fault" in told
    assert f'{module}.py", line' in told
    assert "in probe" in told


def test_death_while_it_is_imported(site: Site) -> None:
    site.plugin("chip", source="import os\nos._exit(9)")
    assert "exit code 9" in broken("chip")


@pytest.mark.alone
def test_hang_is_ended_at_the_limit_and_tells_where(site: Site) -> None:
    module = site.plugin("chip", probe="time.sleep(600)")
    start = time.monotonic()
    told = broken("chip", timeout=2)
    assert time.monotonic() - start < 10
    assert "its probe gave no answer within 2 s and was ended" in told
    assert f'{module}.py", line' in told
    assert "works: a larger ML4_PROBE_TIMEOUT" in told


@pytest.mark.alone
def test_hang_that_ignores_signals_takes_its_children_along(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(file)!r}, 'w').write(str(child.pid))\n"
        "child.wait()"
    )
    site.plugin("chip", probe=code)
    assert "within 2 s" in broken("chip", timeout=2)
    status = Path("/proc") / file.read_text() / "stat"
    # A process that was ended and that no one reaps stays behind as a zombie.
    deadline = time.monotonic() + 5
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "a child of the probe is still alive"
        time.sleep(0.01)


def test_slow_but_in_time(site: Site) -> None:
    site.plugin("chip", probe="time.sleep(0.5)\nreturn Probe(devices=(DEVICE,))")
    assert probe("chip", timeout=30).state == "ok"


@pytest.mark.alone
def test_limit_of_the_environment(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.plugin("chip", probe="time.sleep(600)")
    monkeypatch.setenv("ML4_PROBE_TIMEOUT", "1.5")
    assert "within 1.5 s" in broken("chip")


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf"])
def test_wrong_limit_is_an_error(site: Site, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    site.plugin("chip")
    monkeypatch.setenv("ML4_PROBE_TIMEOUT", value)
    with pytest.raises(Refused) as refused:
        probe("chip")
    expected = f"[core] ML4_PROBE_TIMEOUT: {value!r} is no number of seconds above 0 (works: 30)"
    assert expected in str(refused.value)


def test_child_imports_what_the_parent_would(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("chip", top="import only_here")
    library = tmp_path / "library"
    library.mkdir()
    (library / "only_here.py").write_text("", "utf-8")
    assert "No module named 'only_here'" in broken("chip")
    monkeypatch.setattr(sys, "path", [*sys.path, str(library)])
    assert probe("chip").state == "ok"


def test_no_interpreter_to_start(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.plugin("chip")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "its probe can't be started: FileNotFoundError" in broken("chip")


def test_device_without_capabilities_is_left_out(site: Site) -> None:
    two = "return Probe(devices=(DEVICE, Device('real', 'old', 'arch0', 'cpu')))"
    only_new = (
        "if device.arch == 'arch0': raise KeyError(device.arch)\nreturn Capabilities(frozenset())"
    )
    site.plugin("chip", probe=two, capabilities=only_new)
    result = probe("chip")
    assert result.state == "ok"
    assert [found.device.name for found in result.devices] == ["a chip"]
    assert "old: capabilities() raised KeyError: 'arch0'" in str(result.refusals[0])


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("return {'op:topk'}", "returned {'op:topk'}"),
        ("return Capabilities(frozenset({'op:tpok'}))", "unknown capability words ['op:tpok']"),
    ],
)
def test_wrong_capabilities(site: Site, code: str, expected: str) -> None:
    site.plugin("chip", capabilities=code)
    assert expected in broken("chip")


def test_refused_and_unknown_are_not_started(site: Site) -> None:
    site.plugin("chip", keywords=None)
    with pytest.raises(Refused, match="states no API range"):
        probe("chip")
    with pytest.raises(Refused, match="no installed plugin"):
        probe("gizmo")


def test_leaves_no_file_behind(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    site.plugin("chip", probe="os._exit(1)")
    broken("chip")
    assert os.listdir(temporary) == []
