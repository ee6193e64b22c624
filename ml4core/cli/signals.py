"""What a process manager sends to end a run, as an exception: what is half done is undone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGTERM, signal.SIGHUP)


class Terminated(BaseException):
    """A signal asked the process to end. No error that a plugin's guard may take for its own."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


@contextmanager
def raised() -> Iterator[None]:
    """Meanwhile the first of ``ENDING`` raises ``Terminated`` in the main thread, and the rest are
    ignored: GNU timeout sends two, and the second would end the clean-up.

    A signal that the caller ignores, as under nohup, or handles, is left to it.
    """
    if threading.current_thread() is not threading.main_thread():  # only that one has handlers
        yield
        return
    ours = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> NoReturn:
        for one in ours:
            signal.signal(one, signal.SIG_IGN)
        raise Terminated(number)

    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
