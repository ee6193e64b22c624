"""Engines that step together: in steps of one size, with work or without, and never alone."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ml4core.api import (
    DraftOutput,
    Fault,
    FaultError,
    Refused,
    Segment,
    StepBuckets,
    StepOutput,
    StepShape,
)
from ml4core.engine.deadline import TimedSteps
from ml4core.engine.images import ImageEncoder
from ml4core.engine.kv_groups import KVGroup
from ml4core.engine.layout import EXACT
from ml4core.engine.padding import padding_step
from ml4core.engine.replicas import lock_step as lock_steps
from ml4core.engine.replicas.launch import differences
from ml4core.engine.replicas.lock_step import LockStep, ReplicaLostError
from ml4core.engine.replicas.together import Together
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.speculation import Drafting, Speculation
from ml4core.serving.engine_thread import EngineThread

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LIMIT_S = 30.0
"""Of a test that waits for what never comes."""


def groups(depth: int) -> tuple[KVGroup, ...]:
    block = KVGroup("draft", window=6, required=False, ahead=depth)
    return KVGroup("latent"), KVGroup("index"), block


def together(works: list[Callable[[], Any]]) -> list[Any]:
    """What each returns, or the exception that it raises; each in a thread."""
    found: list[Any] = [None] * len(works)

    def run(place: int) -> None:
        try:
            found[place] = works[place]()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "it waits"
    return found


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
    return found


Open = Callable[..., list[LockStep]]


@pytest.fixture
def meet(port: int) -> Iterator[Open]:
    """Lock steps of so many replicas."""
    opened: list[LockStep] = []

    def begin(size: int = 2, seconds: float = LIMIT_S) -> list[LockStep]:
        def one(rank: int) -> LockStep:
            lock_step = LockStep("127.0.0.1", port, rank, size, seconds)
            opened.append(lock_step)
            assert lock_step.meet(rank) == list(range(size))
            return lock_step

        return together([lambda rank=rank: one(rank) for rank in range(size)])

    yield begin
    for one in sorted(opened, key=lambda one: -one.rank):
        one.close()


def drive(rig: Any, done: threading.Event, late: list[Any]) -> None:
    """Runs a rig until all are done, adding what comes late, as a server does."""
    rng, end = random.Random(len(late)), time.monotonic() + LIMIT_S
    while not done.is_set() or rig.core.has_work:
        assert time.monotonic() < end
        if late and rng.random() < 0.4:
            name, prompt = late.pop()
            rig.core.add_request(name, prompt, GREEDY)
        if rig.core.has_work:
            rig.step()
            assert rig.core.fault is None, rig.core.fault
        else:
            time.sleep(0.001)


BUCKETS = StepBuckets(
    decode=(1, 4, 8),
    verify=(2, 8),
    prefill_requests=(2, 8),
    prefill_rows=(8, 16),
    pages=(4, 16, 64),
    logits=(4, 16, 64),
)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("buckets", [EXACT, BUCKETS], ids=["exact", "padded"])
def test_all_run_steps_of_one_size(
    meet: Open, make_rig: Any, expect: Any, overlap: bool, drafts: int, buckets: StepBuckets
) -> None:
    """One replica is busy, one has two requests, one none; each makes its own tokens."""
    more: dict[str, Any] = {"groups": groups(drafts), "drafts": drafts} if drafts else {}
    rigs = [
        make_rig(together=Together(one, buckets, "cpu"), overlap=overlap, buckets=buckets, **more)
        for one in meet(3)
    ]
    rng = random.Random(3)
    prompts = [[rng.randrange(900) for _ in range(rng.randrange(1, 30))] for _ in range(14)]
    loads = [[(str(i), one) for i, one in enumerate(prompts[:12])], [("12", prompts[12])], []]
    loads[1].append(("13", prompts[13]))
    for rig in rigs:
        rig.runner.keep_plans = True
    done = threading.Event()

    def count() -> None:
        while sum(len(rig.ends) for rig in rigs) < 14 and not done.wait(0.005):
            pass
        done.set()

    threading.Thread(target=count, daemon=True).start()
    works = [lambda i=i: drive(rigs[i], done, loads[i]) for i in range(3)]
    assert together(works) == [None] * 3
    for rig in rigs:
        for (name, _), tokens in rig.tokens.items():
            assert tokens == expect(prompts[int(name)], GREEDY)
        rig.assert_empty()
    assert [len(rig.ends) for rig in rigs] == [12, 2, 0]
    shapes = [[plan.shape for plan in rig.runner.plans] for rig in rigs]
    assert shapes[0] == shapes[1] == shapes[2]
    assert any(shape.prefill.rows and shape.decode.rows + shape.verify.rows for shape in shapes[2])
    if buckets is BUCKETS:
        assert {shape.decode.requests for shape in shapes[0]} <= {0, 1, 4, 8}
        assert {shape.logits for shape in shapes[0]} <= {4, 16, 64}


def test_nobody_steps_for_nothing(meet: Open, make_rig: Any) -> None:
    first, second = meet()
    rigs = [make_rig(together=Together(one, EXACT, "cpu")) for one in (first, second)]
    for rig in rigs:
        assert not rig.core.has_work
        assert rig.step() == []
    assert [rig.runner.steps for rig in rigs] == [0, 0]
    assert not first.pending


def test_a_fault_stops_all_and_names_its_replica(meet: Open, make_rig: Any) -> None:
    rigs = [make_rig(together=Together(one, EXACT, "cpu")) for one in meet()]
    rigs[1].runner.fail_at = 2
    rigs[0].core.add_request("a", [1, 2, 3], GREEDY)

    def run(rig: Any) -> Any:
        end = time.monotonic() + LIMIT_S
        while rig.core.fault is None and time.monotonic() < end:
            if rig.core.has_work:
                rig.step()
        return rig.core.fault

    here, there = together([lambda: run(rigs[0]), lambda: run(rigs[1])])
    assert (there.code, there.message) == ("null", "made to fail")
    assert (here.code, here.message) == ("null", "replica 1 of 2: made to fail")
    assert rigs[0].ends == {("a", 0): "error"}
    with pytest.raises(FaultError, match="replica 1 of 2"):
        rigs[0].core.step()


def test_one_that_ends_stops_all(meet: Open, make_rig: Any) -> None:
    for ended in (0, 1):
        lock_step = meet()
        rig = make_rig(together=Together(lock_step[1 - ended], EXACT, "cpu"))
        lock_step[ended].close()
        end = time.monotonic() + LIMIT_S
        while not rig.core.has_work and time.monotonic() < end:
            time.sleep(0.001)
        rig.step()
        assert rig.core.fault is not None
        assert rig.core.fault.code == "replica"
        assert rig.core.fault.message.startswith(f"replica {ended} of 2: was closed")
        lock_step[1 - ended].close()


def test_a_step_that_waits_for_one_that_has_gone_is_given_up(meet: Open, make_rig: Any) -> None:
    """At once, not after the time that a step may take."""
    first, second = meet()
    inside, end = threading.Event(), threading.Event()

    class Stuck:
        def launch(self, step: Any) -> Any:
            inside.set()
            end.wait(LIMIT_S)

    steps = TimedSteps(Stuck(), LIMIT_S)
    rig = make_rig(together=Together(first, EXACT, "cpu", steps), wrap=lambda runner: steps)
    rig.core.add_request("a", [1, 2, 3], GREEDY)

    def leave() -> None:
        while not second.pending:
            time.sleep(0.001)
        assert Together(second, EXACT, "cpu").idle(0) is not None
        inside.wait(LIMIT_S)
        second.close()

    began = time.monotonic()
    outputs, _ = together([rig.step, leave])
    assert time.monotonic() - began < LIMIT_S / 2
    assert [one.finish_reason for one in outputs] == ["error"]
    assert rig.core.fault.message.startswith("replica 1 of 2: was closed")
    assert not steps.close()  # it is still inside
    end.set()
    assert steps.close(LIMIT_S)


def test_one_that_is_late_is_named(meet: Open, make_rig: Any, monkeypatch: Any) -> None:
    """It lives, and comes to no step that others want."""
    first, _ = meet(seconds=0.2)
    rig = make_rig(together=Together(first, EXACT, "cpu"))
    rig.core.add_request("a", [1, 2, 3], GREEDY)
    rig.step()
    fault = rig.core.fault
    assert fault is not None
    assert fault.code == "timeout"
    assert "replica 1 of 2: came to no step within 0.2 s; --step-timeout-s" in fault.message


def test_a_thread_is_woken(meet: Open, make_rig: Any) -> None:
    """That has nothing to do, by another replica that has, and by its end."""
    first, second = meet()
    rigs = [make_rig(together=Together(one, EXACT, "cpu")) for one in (first, second)]
    faults: list[Fault] = []

    class Engine:
        core = rigs[0].core
        watch = staticmethod(first.watch)

        def close(self) -> None:
            pass

        def tell_fault(self) -> None:
            faults.append(self.core.fault)

    thread = EngineThread(Engine())  # type: ignore[arg-type]
    rigs[1].core.add_request("a", [1, 2, 3], GREEDY)
    rigs[1].run()
    end = time.monotonic() + LIMIT_S
    while rigs[0].runner.steps < rigs[1].runner.steps and time.monotonic() < end:
        time.sleep(0.001)
    assert rigs[0].runner.steps == rigs[1].runner.steps > 5
    second.close()
    while not thread.ended and time.monotonic() < end:
        time.sleep(0.001)
    thread.close()
    assert [fault.code for fault in faults] == ["replica"]


def test_those_that_do_not_come_are_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_steps, "MEET_S", 0.3)
    lock_step = LockStep("127.0.0.1", port, 0, 3, LIMIT_S)
    with pytest.raises(Refused, match=rf"replicas 1 and 2 came to 127.0.0.1:{port} within 0.3 s"):
        lock_step.meet(0)
    lock_step.close()
    with pytest.raises(Refused, match=rf"no replica 0 at 127.0.0.1:{port} within 0.3 s"):
        LockStep("127.0.0.1", port, 1, 3, LIMIT_S)


def test_launches_of_another_size_or_the_same_rank(port: int) -> None:
    def launch(rank: int, size: int) -> None:
        lock_step = LockStep("127.0.0.1", port, rank, size, LIMIT_S)
        try:
            lock_step.meet(rank)
        finally:
            lock_step.close()

    told = "--data-parallel-size is 2 on replica 0 and 3 on replica 1"
    for error in together([lambda: launch(0, 2), lambda: launch(1, 3)]):
        assert isinstance(error, Refused)
        assert told in str(error)
    first = LockStep("127.0.0.1", port, 0, 2, LIMIT_S)
    twin = LockStep("127.0.0.1", port, 1, 2, LIMIT_S)
    with pytest.raises(Refused, match="there are two launches with --data-parallel-start-rank 1"):
        launch(1, 2)
    assert together([lambda: first.meet(0), lambda: twin.meet(1)]) == [[0, 1]] * 2
    with pytest.raises(Refused, match=f"--data-parallel-rpc-port {port}"):
        LockStep("127.0.0.1", port, 0, 2, LIMIT_S)
    twin.fail("start", "CheckpointError: no such file")
    with pytest.raises(ReplicaLostError, match="replica 1 of 2: CheckpointError: no such file"):
        first.exchange(None)
    first.close()
    twin.close()


def test_strangers_change_nothing(meet: Open, port: int) -> None:
    first, second = meet()
    for words in (b"GET / HTTP/1.1\r\n\r\n", b'["wish", null]\n', b'["hello", 1, 2, "x"]\n'):
        with socket.create_connection(("127.0.0.1", port)) as guest:
            guest.sendall(words)
            assert guest.recv(100) == b""
    twin = LockStep("127.0.0.1", port, 1, 2, LIMIT_S)
    with pytest.raises(Refused, match="two launches"):
        twin.meet(0)
    twin.close()
    assert together([lambda: first.exchange(5), lambda: second.exchange(6)]) == [[5, 6]] * 2


def test_what_differs_is_told_with_its_replicas() -> None:
    one = {"--dtype": "float32", "--block-size": "16", "the model": "a"}
    found = differences([one, one | {"--dtype": "bfloat16"}, one | {"the model": "b" * 90}])
    assert [refusal.subject for refusal in found] == ["--dtype", "the model"]
    assert found[0].reason == "replicas differ: float32 on replicas 0 and 2; bfloat16 on replica 1"
    assert "on replica 2" in found[1].reason
    assert len(found[1].reason) < 140
    assert differences([one, dict(one)]) == []


SHAPE = StepShape(
    Segment(2, 2, 1), Segment(1, 3, 3), Segment(1, 4, 4), (("latent", 2), ("draft", 2)), 3
)


@pytest.mark.parametrize("others_draw", [False, True])
def test_an_idle_replica_drafts_along(others_draw: bool) -> None:
    """In a step of the size that drafts have where there are some; else it stores rows alone."""
    seen: list[tuple[int, bool]] = []

    class Proposer:
        def propose(self, drafting: Drafting) -> DraftOutput:
            requests = drafting.anchors.shape[0]
            seen.append((requests, bool(drafting.drafts.any() or drafting.accepted.any())))
            return DraftOutput(
                torch.zeros(requests, 2, dtype=torch.int64), torch.zeros(requests, 2, 10)
            )

    config: Any = SimpleNamespace(num_speculative_tokens=2, drawn=True, block=False)
    speculation = Speculation(Proposer(), lambda shape: pytest.fail("nothing to judge"), config, 10)
    step = replace(padding_step(SHAPE, "cpu", GREEDY, draws=0), others_draw=others_draw)
    output = StepOutput(torch.zeros(3, 10), (), torch.tensor(False))
    made, draws = speculation.run(step, output, SimpleNamespace(origin=""))  # type: ignore[arg-type]
    assert draws == []
    assert made.drafts is not None
    assert made.drafts.shape == (0, 2)
    assert seen == [(SHAPE.requests if others_draw else 0, False)]


def test_a_replica_without_images_has_room_for_those_of_another() -> None:
    runner: Any = SimpleNamespace(
        spec=SimpleNamespace(hidden_size=6), dtype=torch.bfloat16, device="cpu"
    )
    encoder = ImageEncoder(runner, None)  # type: ignore[arg-type]
    step = padding_step(replace(SHAPE, images=4), "cpu", GREEDY, draws=0)
    plan = encoder.place(step.plan, [])
    assert plan.shape.images == 4
    assert plan.image_embeddings is not None
    assert (plan.image_embeddings.shape, plan.image_embeddings.dtype) == ((4, 6), torch.bfloat16)
    assert plan.image_index is not None
    assert (plan.image_index == -1).all()
