"""Imports one plugin and takes its backend; the only module that knows pluggy's manager."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import NoReturn, cast

import pluggy

from ml4core.api import BACKENDS_GROUP, PROJECT, Backend, Refusal, Refused, hookspecs
from ml4core.registry._discovery import find
from ml4core.registry._records import PluginRecord
from ml4core.registry._text import describe, one_line

_MEMBERS = ("name", "priority", "probe", "capabilities", "open")


@dataclass(frozen=True)
class LoadedPlugin:
    """A plugin that was imported here. ``manager`` holds its hooks, and no other plugin's."""

    record: PluginRecord
    backend: Backend
    manager: pluggy.PluginManager


def load(name: str) -> Backend:
    """The backend of that name. Raises ``Refused``; never falls back to another."""
    return load_plugin(name).backend


def load_plugin(
    plugin: str | PluginRecord, *, hook_specs: Sequence[ModuleType] = ()
) -> LoadedPlugin:
    """Import one plugin, and nothing of any other.

    Args:
        plugin: the backend's name, or its record.
        hook_specs: modules of further hook specifications; a plugin may implement those too.

    Raises:
        Refused: unknown, refused for its metadata, or broken: with the type, text and place of the
            error that its import or hook raised.
    """
    record = find(plugin) if isinstance(plugin, str) else find(plugin.name, [plugin])
    manager = pluggy.PluginManager(PROJECT)
    for specs in (hookspecs, *hook_specs):
        manager.add_hookspecs(specs)
    _register(record, manager, _import(record))
    return LoadedPlugin(record, _backend(record, manager), manager)


def _refuse(record: PluginRecord, subject: str, reason: str, remedy: str = "") -> NoReturn:
    reason = f"{record.distribution} {record.version} {reason}"
    raise Refused([Refusal(record.name, subject, reason, remedy)], what=f"--backend {record.name}")


def _import(record: PluginRecord) -> object:
    entry_point = EntryPoint(record.name, record.target, BACKENDS_GROUP)
    try:
        return cast(object, entry_point.load())
    except (Exception, SystemExit) as error:
        _refuse(record, record.target, f"can't be imported: {describe(error)}")


def _register(record: PluginRecord, manager: pluggy.PluginManager, plugin: object) -> None:
    known = sorted(name for name in vars(manager.hook) if name.startswith(PROJECT))
    names = ", ".join(known)
    try:
        if plugin is not None:  # None would block the name
            manager.register(plugin, name=record.name)
    except (Exception, SystemExit) as error:
        _refuse(record, "hooks", f"can't be registered: {describe(error)}", f"the hooks {names}")
    callers = (manager.get_hookcallers(plugin) or []) if plugin is not None else []
    if not callers:
        unmarked = [name for name in known if callable(getattr(plugin, name, None))]
        found = f"{', '.join(unmarked)} not marked" if unmarked else f"a {type(plugin).__name__}"
        _refuse(
            record,
            record.target,
            f"offers no hook: its entry point {record.target!r} holds {found}",
            f"a module or instance with functions marked @ml4core.api.hookimpl, of {names}",
        )
    try:
        manager.check_pending()
    except pluggy.PluginValidationError:
        unknown = sorted(
            caller.name
            for caller in callers
            if not caller.has_spec()
            and any(not impl.optionalhook for impl in caller.get_hookimpls())
        )
        _refuse(
            record,
            "hooks",
            f"implements unknown hooks: {', '.join(unknown)}",
            f"{names}; or a mark @hookimpl(optionalhook=True) on what another host calls",
        )


def _backend(record: PluginRecord, manager: pluggy.PluginManager) -> Backend:
    try:
        answers = manager.hook.ml4core_backends()
    except (Exception, SystemExit) as error:
        _refuse(record, "ml4core_backends", f"can't offer its backends: {describe(error)}")
    offered: list[object] = []
    for answer in answers:
        if not isinstance(answer, Iterable) or isinstance(answer, str):
            found = one_line(repr(answer))
            _refuse(record, "ml4core_backends", f"returned {found}, not a sequence of backends")
        offered.extend(answer)
    names = [_name(record, backend) for backend in offered]
    matching = [
        backend for name, backend in zip(names, offered, strict=True) if name == record.name
    ]
    if len(matching) != 1:
        count = "no backend" if not matching else f"{len(matching)} backends"
        _refuse(
            record,
            "ml4core_backends",
            f"offers {count} named {record.name!r}; it offers {', '.join(names) or 'none'}",
            "one Backend whose name is that of the entry point",
        )
    try:
        lacking = [member for member in _MEMBERS if not hasattr(matching[0], member)]
    except (Exception, SystemExit) as error:  # a property of its class may raise anything
        _refuse(record, "ml4core_backends", f"offers a broken Backend: {describe(error)}")
    if lacking:
        kind = type(matching[0]).__name__
        _refuse(
            record, "ml4core_backends", f"offers a {kind} that is no Backend: it lacks {lacking}"
        )
    return cast(Backend, matching[0])


def _name(record: PluginRecord, backend: object) -> str:
    try:
        return str(backend.name)  # type: ignore[attr-defined]
    except Exception as error:
        kind = type(backend).__name__
        _refuse(record, "ml4core_backends", f"offers a {kind} without a name: {describe(error)}")
