"""The ops of a session that can be judged, whatever else the backend lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ml4core.api import Capabilities, Session
from ml4core.compose.ops import COMPOSED
from ml4core_conformance.check import CheckFailed


class Offered(dict[str, Callable[..., Any]]):
    """Ops by name. One that isn't there fails the check that asks for it."""

    def __missing__(self, op: str) -> Callable[..., Any]:
        raise CheckFailed(
            f"op:{op} is declared, and the session offers no op {op!r}; it offers "
            f"{', '.join(sorted(self)) or 'none'}"
        )


def offered_ops(session: Session, capabilities: Capabilities) -> Mapping[str, Callable[..., Any]]:
    """The session's own ops, and core's compositions of the others if ``feature:compose`` is
    declared. Core itself binds all or nothing; here each is judged for itself.
    """
    composed = COMPOSED if "feature:compose" in capabilities else {}
    return Offered({**composed, **session.ops})
