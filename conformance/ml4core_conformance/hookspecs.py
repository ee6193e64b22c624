"""The suite's own two hooks, of pluggy's project ``ml4core``.

A backend marks what it has of them ``@hookimpl(optionalhook=True)``, so that it loads where the
suite isn't installed. Neither needs an import of the suite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ml4core.api import hookspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ml4core.api import Backend, Session
    from ml4core_conformance.subject import Subject


class Register(Protocol):
    """What ``ml4core_conformance_checks`` calls for each check."""

    def __call__(
        self,
        family: str,
        run: Callable[[Subject], None],
        doc: str,
        *,
        variant: str = "",
        profile: str = "system",
        requires: Iterable[str] = (),
        isolated: bool = False,
        timeout_s: float = 120.0,
        bugs: Iterable[str] = (),
    ) -> None:
        """Adds a check; arguments as in ``ml4core_conformance.check.Check``.

        Args:
            family: begins with ``x-<distribution>.``, so none of the suite's can be replaced.
            run: passes by returning. An ``AssertionError`` is a FAIL with its text; any other
                exception is an ERROR.

        Raises ``ValueError`` for a check that can't be.
        """
        ...


class Harness(Protocol):
    """What only the backend can do to its device, for the suite's sake. Each member may be missing;
    what would need it is then judged from without, or not at all.
    """

    def stall(self, session: Session) -> Callable[[], None]:
        """From now on no step of the session ends, until the callable that this returns is called:
        a kernel waits on the device, or the host for the device.
        """
        ...

    def fail(self, session: Session) -> None:
        """From the next step on ``session.fault()`` tells a fault with code ``device``, as if the
        driver had told of one.
        """
        ...

    def launches(self, session: Session) -> int:
        """Kernels of the backend that the session has started on its device so far."""
        ...

    def seconds(self, session: Session, call: Callable[[], object]) -> float:
        """Time that a call takes on the device."""
        ...


@hookspec
def ml4core_conformance_checks(register: Register) -> None:
    """Adds checks of the plugin's own by ``register``. They count in its verdict as the suite's do.
    Called in each process that judges, and only if one of them is to be judged there.
    """


@hookspec(firstresult=True)
def ml4core_conformance_harness(backend: Backend) -> Harness | None:
    """A harness for the backend, which may be one of the suite's that wraps the plugin's own."""
