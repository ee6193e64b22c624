"""Probes that a test process makes once: each starts another that imports torch, for two seconds of
a core.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from ml4core.registry import PluginRecord, ProbeResult, _selection
from ml4core.registry._probing import probe_all

_found: dict[tuple[PluginRecord, tuple[str, ...]], ProbeResult] = {}
"""By plugin and path: the results of this process's tests, in whichever files they are."""


@contextmanager
def remembered() -> Iterator[None]:
    """Meanwhile backends are selected by real probes, of which each is made but once. Not for tests
    in whose course what a probe finds may change.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_selection, "probe_all", _probe_all)
        yield


def _probe_all(
    records: Sequence[PluginRecord], timeout: float | None = None
) -> tuple[ProbeResult, ...]:
    keys = [(record, tuple(sys.path)) for record in records]
    new = {key: key[0] for key in keys if key not in _found}
    _found.update(zip(new, probe_all(list(new.values()), timeout), strict=True))
    return tuple(_found[key] for key in keys)
