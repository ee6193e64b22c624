"""Four processes and a stand-in for the kernel: what one of them does, all of them end with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ml4core_rocm.latency.mailbox import PAIR, Mailbox
from ml4core_rocm.latency.protocol import Peers, assert_alive, reset
from ml4core_rocm.latency.tags import Tags

from . import ranks

PROGRAM = Path(__file__).with_name("ranks.py")
RANKS, STEPS, FAULTY, STALLED = ranks.RANKS, ranks.STEPS, ranks.FAULTY, ranks.STALLED

Told = list[list[dict[str, Any]]]


def run(folder: Path, scenario: str) -> Told:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    variables = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), str(rank), scenario],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    ended = [process.communicate(timeout=240) for process in processes]
    for process, (_, error) in zip(processes, ended, strict=True):
        assert process.returncode == 0, error
    return [[json.loads(line) for line in out.splitlines()] for out, _ in ended]


def tokens(told: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(line["step"], line["token"]) for line in told if "token" in line]


def alone() -> list[tuple[int, int]]:
    """Steps and tokens of all ranks' sums, made by one process."""
    parts, token, made = [ranks.weights(rank) for rank in range(RANKS)], 0, []
    for step in range(STEPS):
        state = ranks.first(token)
        for layer in range(ranks.LAYERS):
            total = torch.zeros(1, ranks.HIDDEN)
            for part in parts:
                total += (state @ part[layer]).to(torch.bfloat16)
            state = ranks.after(total)
        token = int(state.argmax())
        made.append((step, token))
    return made


@pytest.mark.multiprocess
def test_ranks_compute_alike_and_a_reset_changes_nothing(tmp_path: Path) -> None:
    told = run(tmp_path, "reset")
    wanted = alone()
    assert len({token for _, token in wanted}) > 1
    assert [tokens(lines) for lines in told] == [wanted] * RANKS
    assert all(lines[-1] == {"state": "closed"} for lines in told)


@pytest.mark.multiprocess
def test_a_rank_that_stalls_stops_all(tmp_path: Path) -> None:
    """No token of the failed step leaves any rank, and no step follows."""
    told, wanted = run(tmp_path, "stall"), alone()
    box, tags = Mailbox(RANKS, 1, ranks.HIDDEN), Tags(ranks.LAYERS + 1)
    records = []
    for lines in told:
        assert tokens(lines) == wanted[:FAULTY]
        (failed,) = (line for line in lines if "failed" in line)
        assert failed["failed"] == FAULTY
        assert failed["words"][0] == 1
        assert failed["words"][1] != STALLED  # it is the others who gave up
        assert failed["words"][2:] == [FAULTY, 1]
        stopped(lines)
        records += [line["record"] for line in lines if "record" in line]
    assert not records[STALLED][0]
    gave_up = [record for record in records if record[0]]
    assert gave_up  # a rank that waited says for what
    for record in gave_up:
        tag = tags.tag(FAULTY, 1)
        assert record[1] == box.region(f"sum.{tag % 2}").id
        assert record[3] == tag


@pytest.mark.multiprocess
def test_a_host_that_fails_behind_a_launch_stops_all(tmp_path: Path) -> None:
    """Who has not looked at the step before may lose that one, too; none keeps a later one."""
    told, wanted = run(tmp_path, "host error"), alone()
    for rank, lines in enumerate(told):
        (failed,) = (line for line in lines if "failed" in line)
        assert failed["failed"] in ({FAULTY} if rank == STALLED else {FAULTY - 1, FAULTY})
        assert tokens(lines) == wanted[: failed["failed"]]
        assert failed["words"] == [1, STALLED, FAULTY, 0]
        stopped(lines)


def stopped(lines: list[dict[str, Any]]) -> None:
    (after,) = (line for line in lines if "refused_step" in line)
    assert after == {"refused_step": "a step was planned in state faulted", "waited": False}
    assert lines[-1] == {"state": "closed"}


@pytest.mark.multiprocess
def test_a_reason_of_one_rank_refuses_all_before_memory_is_opened(tmp_path: Path) -> None:
    told = run(tmp_path, "partition")
    assert len({json.dumps(lines) for lines in told}) == 1
    (line,) = told[0]
    assert line["opened"] == 0
    assert line["refused"] == [
        "[rocm] compute units: it has 128 of 256 (on rank 1 of 4) (works: an unpartitioned GPU)"
    ]


class Clock:
    """Seconds that pass when a rank looks again."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def relax(self) -> None:
        self.now += 0.25


def two(deadline: float = 2.0) -> tuple[list[Peers], list[torch.Tensor], Mailbox, Clock]:
    """Both ranks in one process, which run one after the other."""
    box, clock = Mailbox(2, 1, 4), Clock()
    memory = [torch.zeros(box.nbytes // PAIR, dtype=torch.int64) for _ in range(2)]
    tags = Tags(3)
    peers = [Peers(rank, memory, box, tags, deadline, clock, clock.relax) for rank in range(2)]
    return peers, memory, box, clock


def test_a_wait_is_bounded_and_the_word_is_set_on_all() -> None:
    (one, other), memory, box, clock = two()
    one.all_reduce(0, 0, torch.ones(1, 4, dtype=torch.bfloat16))
    assert 2.0 < clock.now <= 2.5
    assert one.failed
    assert other.failed
    assert one.word.tolist() == other.word.tolist() == [1, 0, 0, 0]
    record = memory[0].view(torch.int32)[box.region("record").offset // 4 :][:8].tolist()
    assert record[:5] == [1, box.region("sum.1").id, 0, 1, 0]
    assert not memory[1].view(torch.int32)[box.region("record").offset // 4]
    before = clock.now
    other.all_reduce(0, 0, torch.ones(1, 4, dtype=torch.bfloat16))
    other.end_step(0)
    assert clock.now == before  # nothing waits once the word is set
    with pytest.raises(RuntimeError, match="results are void"):
        assert_alive(other.word)


def test_the_word_outlives_a_reset_and_the_first_failure_stays() -> None:
    (one, other), memory, box, _ = two()
    other.abort(5, 1)
    one.abort(6, 0)
    assert one.word.tolist() == other.word.tolist() == [1, 1, 5, 1]
    for each in memory:
        reset(each, box)
    assert one.failed
    assert other.failed
    assert_alive(torch.zeros(4, dtype=torch.int32))


def test_sums_are_in_rank_order_and_bits_alike() -> None:
    """Large terms that cancel tell the order of an addition."""
    (one, other), memory, box, _ = two()
    terms = [torch.tensor([[3e30, 1.0, -0.0, 5.0]]), torch.tensor([[-3e30, 2.0**-9, -0.0, 7.0]])]
    start = box.partial_sum(one.tags.tag(0, 0), 1) // PAIR
    theirs = terms[1].to(torch.bfloat16).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    memory[0][start : start + 2] = theirs.flatten() | (one.tags.tag(0, 0) << 32)
    found = one.all_reduce(0, 0, terms[0].to(torch.bfloat16))
    again = other.all_reduce(0, 0, terms[1].to(torch.bfloat16))
    wanted = torch.zeros(1, 4)
    for term in terms:
        wanted += term.to(torch.bfloat16)
    assert torch.equal(found, wanted)
    assert torch.equal(found.view(torch.int32), again.view(torch.int32))


def test_a_value_of_another_step_is_not_taken() -> None:
    (one, _), memory, box, _ = two()
    start = box.partial_sum(one.tags.tag(0, 0), 1) // PAIR
    memory[0][start : start + 2] = one.tags.tag(2, 0) << 32  # the same place, another tag
    one.all_reduce(0, 0, torch.ones(1, 4, dtype=torch.bfloat16))
    assert one.failed


@pytest.mark.parametrize("epoch", [0, 2**31 // 3 + 1, Tags(3).epochs - 1])
def test_steps_end_well_as_long_as_there_are_tags(epoch: int) -> None:
    """Tags have 32 bits: those of the later half make a pair of 64 negative."""
    (one, other), memory, box, _ = two()
    tag, term = one.tags.tag(epoch, 0), torch.full((1, 4), 3.0)
    assert tag >= 2**31 or not epoch
    words = term.to(torch.bfloat16).view(torch.int16).view(torch.int32).tolist()[0]
    start = box.partial_sum(tag, 1) // PAIR * 2
    memory[0].view(torch.int32)[start : start + 4] = torch.tensor(
        [words[0], tag, words[1], tag]
    ).to(torch.int32)
    assert torch.equal(one.all_reduce(epoch, 0, term.to(torch.bfloat16)), 2 * term)
    assert torch.equal(other.all_reduce(epoch, 0, term.to(torch.bfloat16)), 2 * term)
    place = box.end_mark(1) // PAIR * 2
    end = torch.tensor([0, one.tags.tag(epoch, 2)]).to(torch.int32)
    memory[0].view(torch.int32)[place : place + 2] = end
    for peer in (one, other):
        peer.end_step(epoch)
        assert not peer.failed


def test_the_end_of_a_step_has_no_sum() -> None:
    (one, _), _, _, _ = two()
    with pytest.raises(ValueError, match="exchange 2 is the end of a step"):
        one.all_reduce(0, 2, torch.ones(1, 4, dtype=torch.bfloat16))
