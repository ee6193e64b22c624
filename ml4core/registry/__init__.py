"""Finds backend plugins, loads the one that is named, isolates the broken, explains each choice.

``discover`` reads metadata and imports nothing. ``probe`` loads a plugin in a child process with a
time limit. Only the plugin that is chosen is imported here. A named backend runs or is refused; no
other takes its place.

This is the only package that knows pluggy's manager. ``select`` and ``load_plugin`` hand it out as
``manager``, for ``check`` and ``notify_fault``.
"""

from ml4core.registry._checking import check, notify_fault
from ml4core.registry._discovery import AUTO, discover, find
from ml4core.registry._loading import LoadedPlugin, load, load_plugin
from ml4core.registry._probing import DEFAULT_TIMEOUT, TIMEOUT_VARIABLE, probe
from ml4core.registry._records import (
    BackendReport,
    FoundDevice,
    PassedOver,
    PluginRecord,
    ProbeResult,
    State,
)
from ml4core.registry._selection import EMBEDDED, Choice, report, select
from ml4core.registry._session import open_session
from ml4core.registry._text import describe, lacks_memory

__all__ = [
    "AUTO",
    "DEFAULT_TIMEOUT",
    "EMBEDDED",
    "TIMEOUT_VARIABLE",
    "BackendReport",
    "Choice",
    "FoundDevice",
    "LoadedPlugin",
    "PassedOver",
    "PluginRecord",
    "ProbeResult",
    "State",
    "check",
    "describe",
    "discover",
    "find",
    "lacks_memory",
    "load",
    "load_plugin",
    "notify_fault",
    "open_session",
    "probe",
    "report",
    "select",
]
