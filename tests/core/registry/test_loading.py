"""Loading the one plugin that is named: what is broken says so, with the loader's own text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from subprocess import CompletedProcess
from types import ModuleType
from typing import TYPE_CHECKING

import pluggy
import pytest

from ml4core.api import PROJECT, Refusal, Refused
from ml4core.registry import find, load, load_plugin

if TYPE_CHECKING:
    from conftest import Site


def refusal_of(name: str) -> Refusal:
    with pytest.raises(Refused, match=f"^--backend {name} is refused for 1 reason:") as refused:
        load(name)
    (refusal,) = refused.value.refusals
    assert refusal.source == name
    assert refusal.reason.startswith(f"dist-{name} 1.0 ")
    return refusal


def test_loads_the_named_plugin_and_no_other(site: Site) -> None:
    module = site.plugin("chip")
    neighbour = site.plugin("broken", source="raise AssertionError('imported')")
    backend = load("chip")
    assert (backend.name, backend.priority) == ("chip", 10)
    assert module in sys.modules
    assert neighbour not in sys.modules


def test_loads_again_with_hooks_of_its_own(site: Site) -> None:
    site.plugin("chip")
    first, second = load_plugin("chip"), load_plugin(find("chip"))
    assert first.manager is not second.manager
    assert [name for name, _ in first.manager.list_name_plugin()] == ["chip"]
    assert len(second.manager.hook.ml4core_backends()) == 1


def test_one_plugin_may_offer_several_names(site: Site) -> None:
    two = "first, second = Backend(), Backend(); second.name = 'chip2'; return [first, second]"
    module = site.plugin("chip", backends=two)
    site.metadata("alias", "1.0", "ml4core-api:1-1", {"chip2": module})
    assert load("chip").name == "chip"
    assert load("chip2").name == "chip2"


def test_an_instance_may_hold_the_hooks(site: Site) -> None:
    bottom = (
        "class Plugin:\n"
        "    @hookimpl\n"
        "    def ml4core_backends(self):\n"
        "        return (Backend(),)\n"
        "plugin = Plugin()\n"
    )
    site.plugin("chip", target="plug_dist_chip:plugin", bottom=bottom)
    assert load("chip").name == "chip"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import gone_library", "ModuleNotFoundError: No module named 'gone_library'"),
        ("\nraise ImportError('libgone.so: cannot open')", "ImportError: libgone.so: cannot open"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def broken(:", "SyntaxError: invalid syntax (plug_dist_chip.py, line 1)"),
        (
            "try:\n    import gone_library\nexcept ImportError as error:\n"
            "    raise RuntimeError('no driver') from error",
            "RuntimeError: no driver",
        ),
    ],
)
def test_import_error_keeps_the_loaders_text(site: Site, source: str, expected: str) -> None:
    """B122: a plugin that raises while it is imported."""
    site.plugin("chip", source=source)
    assert f"can't be imported: {expected}" in refusal_of("chip").reason


def test_import_error_tells_the_place_and_the_cause(site: Site) -> None:
    module = site.plugin(
        "chip",
        source="try:\n    import gone_library\nexcept ImportError:\n    raise KeyError('driver')",
    )
    file = site.folder / f"{module}.py"
    assert refusal_of("chip").reason.endswith(
        f"KeyError: 'driver' (at {file}:4), "
        f"caused by ModuleNotFoundError: No module named 'gone_library' (at {file}:2)"
    )


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("no_such_module", "No module named 'no_such_module'"),
        ("plug_dist_chip:missing", "has no attribute 'missing'"),
        ("not a target", "can't be imported"),
        ("plug_dist_chip:NUMBER", "holds a int"),
        ("plug_dist_chip:TEXT", "holds a str"),
        ("plug_dist_chip:NOTHING", "holds a NoneType"),
    ],
)
def test_entry_point_without_hooks(site: Site, target: str, expected: str) -> None:
    """B122: an entry point that is nothing to call."""
    site.plugin("chip", target=target, bottom="NUMBER, TEXT, NOTHING = 7, 'seven', None")
    assert expected in refusal_of("chip").reason


def test_unmarked_hook_is_pointed_at(site: Site) -> None:
    site.plugin("chip", source="def ml4core_backends():\n    return []\n")
    refusal = refusal_of("chip")
    assert "holds ml4core_backends not marked" in refusal.reason
    assert "@ml4core.api.hookimpl" in refusal.remedy


def test_misspelt_hook_is_named_beside_the_known_ones(site: Site) -> None:
    bottom = (
        "@hookimpl\ndef ml4core_refusal(deployment):\n    return []\n"
        "@hookimpl\ndef ml4core_faults(fault):\n    pass\n"
    )
    site.plugin("chip", bottom=bottom)
    refusal = refusal_of("chip")
    assert refusal.reason.endswith("implements unknown hooks: ml4core_faults, ml4core_refusal")
    assert "ml4core_backends, ml4core_fault, ml4core_refusals" in refusal.remedy


def test_hook_of_another_host_is_optional(site: Site) -> None:
    bottom = "@hookimpl(optionalhook=True)\ndef ml4core_other_host(x):\n    return x\n"
    site.plugin("chip", bottom=bottom)
    assert load("chip").name == "chip"


def test_another_host_adds_its_hook_specifications(site: Site) -> None:
    host = ModuleType("host")

    @pluggy.HookspecMarker(PROJECT)
    def ml4core_other_host(x: int) -> None: ...

    host.ml4core_other_host = ml4core_other_host  # type: ignore[attr-defined]
    bottom = "@hookimpl\ndef ml4core_other_host(x):\n    return x + 1\n"
    site.plugin("chip", bottom=bottom)
    plugin = load_plugin("chip", hook_specs=[host])
    assert plugin.manager.hook.ml4core_other_host(x=1) == [2]
    assert "ml4core_other_host" in refusal_of("chip").reason


def test_hook_with_an_unknown_argument(site: Site) -> None:
    bottom = "@hookimpl\ndef ml4core_fault(fault, colour):\n    pass\n"
    site.plugin("chip", bottom=bottom)
    assert "can't be registered: PluginValidationError" in refusal_of("chip").reason
    assert "colour" in refusal_of("chip").reason


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        ("return []", "offers no backend named 'chip'; it offers none"),
        (
            "b = Backend(); b.name = 'other'; return [b]",
            "offers no backend named 'chip'; it offers other",
        ),
        ("return [Backend(), Backend()]", "offers 2 backends named 'chip'; it offers chip, chip"),
        ("return Backend()", "not a sequence of backends"),
        ("return 'chip'", "returned 'chip', not a sequence of backends"),
        ("return None", "offers no backend named 'chip'"),
        ("return [object()]", "offers a object without a name: AttributeError"),
        ("raise OSError('no driver')", "can't offer its backends: OSError: no driver"),
        (
            "del Backend.probe, Backend.open; return [Backend()]",
            "is no Backend: it lacks ['probe', 'open']",
        ),
    ],
)
def test_wrong_backends(site: Site, backends: str, expected: str) -> None:
    site.plugin("chip", backends=backends)
    assert expected in refusal_of("chip").reason


def test_plugin_without_the_backends_hook(site: Site) -> None:
    source = "from ml4core.api import hookimpl\n@hookimpl\ndef ml4core_fault(fault):\n    pass\n"
    site.plugin("chip", source=source)
    assert "offers no backend named 'chip'; it offers none" in refusal_of("chip").reason


def test_refused_metadata_is_never_imported(site: Site) -> None:
    module = site.plugin("chip", keywords="ml4core-api:9-9")
    (record,) = site.records()
    for plugin in ("chip", record):
        with pytest.raises(Refused, match="supports API 9-9"):
            load_plugin(plugin)
    assert module not in sys.modules


def test_loading_imports_no_torch(
    site: Site, python: Callable[[str], CompletedProcess[str]]
) -> None:
    site.plugin("chip")
    done = python(
        "import sys\n"
        "from ml4core.registry import load\n"
        "assert load('chip').name == 'chip'\n"
        "print(sorted({'torch', 'triton', 'jax', 'torch_xla'} & set(sys.modules)))"
    )
    assert done.stdout.strip() == "[]", done.stderr
