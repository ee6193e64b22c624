"""What libtpu is told of its compiler's stacks."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError

import pytest

from ml4core_tpu import compiler_stacks
from ml4core_tpu.compiler_stacks import FLAG, STACK_BYTES, VARIABLE, larger_stacks


def told(monkeypatch: pytest.MonkeyPatch, given: str, libtpu: str = "0.0.42.1") -> str:
    """The variable, once the size was asked for twice."""
    monkeypatch.setattr(compiler_stacks, "version", lambda name: libtpu)
    monkeypatch.setenv(VARIABLE, given)
    larger_stacks()
    larger_stacks()
    return os.environ.get(VARIABLE, "")


def test_a_size_is_asked_for_once_beside_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = f"{FLAG}={STACK_BYTES}"
    assert told(monkeypatch, "") == asked
    assert told(monkeypatch, "--xla_tpu_x=1") == f"--xla_tpu_x=1 {asked}"
    assert told(monkeypatch, f"{FLAG}=7 --y=2") == f"{FLAG}=7 --y=2"


def test_a_libtpu_that_may_not_know_the_flag_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the process."""
    assert told(monkeypatch, "", libtpu="0.0.99") == ""
    assert told(monkeypatch, "--y=2", libtpu="0.1") == "--y=2"

    def none(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(compiler_stacks, "version", none)
    monkeypatch.setenv(VARIABLE, "")
    larger_stacks()
    assert not os.environ[VARIABLE]
