"""What a device is asked between checks, and what counts as an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ml4core.api import Device
from ml4core_conformance import device_state
from ml4core_conformance.device_state import DeviceState

CHIP = Device("real", "toy chip", "toy1", "privateuseone:1")
HOST = Device("interpreted", "host", "toy1", "cpu")


class Chip:
    """Stands for torch's accelerator: ``wait`` is what waiting for the device does."""

    def __init__(self) -> None:
        self.found = True
        self.asked: list[Any] = []
        self.wait: Callable[[], None] = lambda: None

    def synchronize(self, device: torch.device) -> None:
        self.asked.append(device)
        self.wait()


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Chip:
    chip = Chip()
    accelerator = SimpleNamespace(
        current_accelerator=lambda: torch.device("privateuseone"),
        is_available=lambda: chip.found,
        synchronize=chip.synchronize,
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    return chip


def test_a_device_that_answers_is_not_lost(chip: Chip) -> None:
    assert DeviceState().lost(CHIP) == ""
    assert chip.asked == [torch.device("privateuseone", 1)]


def test_what_waiting_raises_is_the_reason(chip: Chip) -> None:
    def illegal() -> None:
        raise RuntimeError("illegal memory access\nSearch for it")

    chip.wait = illegal
    assert DeviceState().lost(CHIP).startswith("RuntimeError: illegal memory access")
    chip.found = False
    assert DeviceState().lost(CHIP) == "torch no longer finds 'privateuseone:1'"


def test_a_device_that_hangs_is_lost(chip: Chip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_state, "ANSWER_S", 0.05)
    chip.wait = lambda: time.sleep(1.0)
    assert DeviceState().lost(CHIP) == "it does not answer within 0.05 s"


def test_a_fresh_process_computes_there(chip: Chip) -> None:
    assert "privateuseone" in DeviceState().unusable(CHIP)  # torch alone has no such device


@pytest.mark.parametrize("device", [HOST, Device("real", "other", "x", "xla:0")])
def test_what_is_no_accelerator_is_asked_nothing(
    chip: Chip, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_state, "_asked", lambda question: pytest.fail("asked"))
    assert DeviceState().lost(device) == DeviceState().unusable(device) == ""


def test_without_an_accelerator_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(current_accelerator=lambda: None))
    monkeypatch.setattr(device_state, "_asked", lambda question: pytest.fail("asked"))
    assert DeviceState().lost(CHIP) == ""
