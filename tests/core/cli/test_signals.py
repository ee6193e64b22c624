"""A signal that asks the process to end is an exception, once; its exit code is the shell's."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from ml4core.cli import exits
from ml4core.cli.signals import ENDING, Terminated, raised


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As they are in a fresh process."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING)
def test_the_first_is_raised_and_the_clean_up_is_not_disturbed(number: signal.Signals) -> None:
    cleaned = []

    def work() -> None:
        with raised():
            try:
                signal.raise_signal(number)
            finally:
                for again in ENDING:  # GNU timeout sends its signal twice
                    signal.raise_signal(again)
                cleaned.append(True)

    with pytest.raises(Terminated) as ended:
        work()
    assert cleaned == [True]
    assert ended.value.number == number
    assert [signal.getsignal(one) for one in ENDING] == [signal.SIG_DFL] * len(ENDING)


def test_the_exit_code_is_the_shells(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.report(Terminated(signal.SIGTERM)) == 143
    assert capsys.readouterr() == ("", "ended by SIGTERM\n")
    assert exits.report(Terminated(signal.SIGHUP)) == 129


def test_it_is_no_error_that_a_guard_of_plugins_takes() -> None:
    assert not issubclass(Terminated, Exception | SystemExit | KeyboardInterrupt)


def test_a_signal_that_the_caller_ignores_stays_ignored() -> None:
    """As nohup does."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with raised():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_another_thread_leaves_them_alone() -> None:
    found = []

    def work() -> None:
        with raised():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]
