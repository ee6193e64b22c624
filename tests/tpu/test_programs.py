"""Buckets, programs that are made once, and what is told of those made too late."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from ml4core.api import Deployment, Device, ModelSpec
from ml4core_tpu.buckets import buckets_of, doubling
from ml4core_tpu.compilation import compilation_refusals, warms_up
from ml4core_tpu.programs import Programs, RecompilationWarning


class Lowered:
    """Counts its compilations."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self) -> Lowered:
        return self

    def compile(self) -> str:
        self.compiled += 1
        return "program"


@pytest.mark.parametrize(
    ("least", "most", "sizes"),
    [(16, 100, (16, 32, 64, 100)), (16, 64, (16, 32, 64)), (16, 8, (16,)), (8, 8, (8,))],
)
def test_sizes_double_and_end_with_the_most(least: int, most: int, sizes: tuple[int, ...]) -> None:
    assert doubling(least, most) == sizes


def test_buckets_of_a_deployment(device: Device, published: ModelSpec) -> None:
    found = buckets_of(
        Deployment(
            published,
            device,
            block_size=128,
            max_model_len=1000,
            max_num_seqs=20,
            max_num_batched_tokens=100,
        )
    )
    assert found.tokens == (64, 100)
    assert found.requests == (8, 16, 20)
    assert found.pages == 8
    assert [found.tables(count) for count in (1, 18, 20, 21)] == [20, 20, 20, 32]
    assert [found.rows(count) for count in (1, 16, 17, 65, 100, 101)] == [64, 64, 64, 100, 100, 128]


def test_a_program_is_made_once_and_none_is_late_before_the_warm_up() -> None:
    programs, one = Programs(), Lowered()
    assert programs.get("a", "one", one) == programs.get("a", "one", one) == "program"
    assert one.compiled == 1
    assert programs.recompiled == 0


def test_after_the_warm_up_a_new_program_is_counted_and_warned_of() -> None:
    programs, known, new = Programs(), Lowered(), Lowered()
    told: list[tuple[int, int]] = []
    programs.warm_up([("a", "one", known)] * 3, lambda *done: told.append(done))
    assert told == [(0, 1), (1, 1)]
    assert known.compiled == 1
    programs.get("a", "one", known)
    assert programs.recompiled == 0
    with pytest.warns(RecompilationWarning, match="two was compiled after the warm-up"):
        programs.get("b", "two", new)
    assert programs.recompiled == 1
    assert [(one.name, one.late) for one in programs.made] == [("one", False), ("two", True)]


def test_caches_of_another_size_need_other_programs_of_layers() -> None:
    """Those that there were are let go, and what they have cost is still told. Images stay."""
    programs, layer, images = Programs(), Lowered(), Lowered()
    wanted = [("a", "moe, 16 rows", layer), ("b", "images, 64 patches", images)]
    programs.warm_up(wanted, lambda *done: None)
    programs.cool()
    for key, name, lower in wanted:
        programs.get(key, name, lower)
    assert (layer.compiled, images.compiled) == (2, 1)
    assert [(one.name, one.late) for one in programs.made] == [
        (name, False) for name in ("moe, 16 rows", "images, 64 patches", "moe, 16 rows")
    ]


def test_one_that_fails_ends_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have not begun are not compiled first."""
    programs, rest, cancelled = Programs(), [Lowered() for _ in range(5)], threading.Event()
    shutdown = ThreadPoolExecutor.shutdown

    def told(pool: ThreadPoolExecutor, wait: bool = True, *, cancel_futures: bool = False) -> None:
        shutdown(pool, wait=False, cancel_futures=cancel_futures)
        cancelled.set()
        shutdown(pool, wait=wait)

    def fails() -> Lowered:
        raise MemoryError("no room")

    def waits() -> Lowered:
        cancelled.wait()
        return Lowered()

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", told)
    wanted = [("a", "one", fails), ("b", "two", waits), *((one, "rest", one) for one in rest)]
    with pytest.raises(MemoryError, match="no room"):
        programs.warm_up(wanted, lambda *done: None, threads=1)
    assert [one.compiled for one in rest] == [0] * 5


@pytest.mark.parametrize("own", [{"warm_up": "yes"}, {"compilation_cache": 3}])
def test_switches_of_another_type_are_refused(
    own: dict[str, Any], device: Device, published: ModelSpec
) -> None:
    found = compilation_refusals(Deployment(published, device, additional_config={"tpu": own}))
    assert [one.subject for one in found] == [f"--additional-config tpu.{next(iter(own))}"]


def test_tpus_warm_up_and_the_host_does_when_it_is_asked_to(
    device: Device, published: ModelSpec
) -> None:
    plain = Deployment(published, device)
    assert not warms_up(plain)
    assert warms_up(replace(plain, additional_config={"tpu": {"warm_up": True}}))
    assert warms_up(replace(plain, device=replace(device, kind="real")))
