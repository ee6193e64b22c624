"""The engine's process: ``python -c "... main(socket's descriptor)"``, with a pipe as stdin that
closes when the server goes.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

from ml4core.api import Refused
from ml4core.engine.errors import ArgumentsError, RequestError
from ml4core.models.errors import CheckpointError, shown
from ml4core.serving.process.channel import Channel, ChannelClosedError
from ml4core.serving.process.loop import EngineLoop
from ml4core.serving.process.memory import settle
from ml4core.serving.process.wire import Failed, Start, Stopped

GRACE_SECONDS = 5.0
"""How long a step may go on after the server has gone."""
FAULT = 4
"""Exit code after a fault of the engine."""


def main(descriptor: int) -> None:
    """Opens the engine that the first message asks for, and runs it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A terminal or a service manager tells all processes; it is the server that drains.
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_server, daemon=True).start()
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        code = _serve(channel)
    except ChannelClosedError:
        code = 1
    os._exit(code)  # what a backend's threads still do concerns nobody


def _serve(channel: Channel) -> int:
    start = next(_messages(channel))
    assert isinstance(start, Start)
    try:
        facts, engine = start.open()
    except Exception as error:
        channel.put(_portable(error))
        channel.drain(GRACE_SECONDS)
        return 1
    settle()
    try:
        channel.put(facts)
        channel.alarms = getattr(engine, "alarms", ())
        fault = EngineLoop(engine.core, channel, getattr(engine, "look", None)).run()
        if fault is not None:
            engine.tell_fault()
        channel.drain(GRACE_SECONDS)
        return 0 if fault is None else FAULT
    except ChannelClosedError:
        raise
    except Exception as error:  # a fault of this program
        channel.put(Stopped("exception", f"{type(error).__name__}: {error}"))
        channel.drain(GRACE_SECONDS)
        raise
    finally:
        engine.close()


def _messages(channel: Channel) -> Any:
    while True:
        yield from channel.receive(wait=True)


def _portable(error: Exception) -> Failed:
    """An error whose class takes other arguments than its text, such that it survives the way."""
    if isinstance(error, Refused):
        return Failed(Refused, (error.refusals, error.what))
    if isinstance(error, ArgumentsError):
        return Failed(ArgumentsError, (error.problems,))
    if isinstance(error, RequestError):
        value = error.value if isinstance(error.value, str) else shown(error.value)
        return Failed(RequestError, (error.field, value, error.remedy))
    for kind in (CheckpointError, MemoryError):
        if isinstance(error, kind):
            return Failed(kind, (str(error),))
    return Failed(RuntimeError, (f"the engine can't be opened: {type(error).__name__}: {error}",))


def _end_with_server() -> None:
    while os.read(0, 1):  # nothing is ever written to it
        pass
    time.sleep(GRACE_SECONDS)  # the loop sees it sooner, unless a step hangs
    os._exit(1)
