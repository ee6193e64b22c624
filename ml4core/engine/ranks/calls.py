"""What rank 0 says to the others, and they to it."""

from __future__ import annotations

from typing import Any, NamedTuple

from ml4core.api import Device
from ml4core.engine.args import EngineArgs
from ml4core.engine.ranks.failures import Failure
from ml4core.engine.ranks.group import Place


class Begin(NamedTuple):
    """The first message.

    Attributes:
        args: with the model as a local folder.
        backend: the plugin's name.
        threads: cores of the host that are this rank's.
    """

    args: EngineArgs
    backend: str
    device: Device
    place: Place
    threads: int


class Call(NamedTuple):
    """``name`` of a method of ``Worker``. ``number``: of the answer that is waited for; 0: none
    is.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    number: int = 0


class Answer(NamedTuple):
    number: int
    value: Any


FromRank = Answer | Failure
"""After a failure there is nothing more."""
