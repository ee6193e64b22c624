"""Who sums over ranks: AITER's all-reduce for what its window takes, torch for the rest; and the
other collectives, between two processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ml4core.api import Deployment
from ml4core_rocm import collectives
from ml4core_rocm.capabilities import capabilities
from ml4core_rocm.devices import REFERENCE
from ml4core_rocm.kernels.aiter_all_reduce import (
    MAX_SIZE,
    MIN_SIZE,
    POOL_BYTES,
    AiterAllReduce,
    takes,
    weakly_contiguous,
    window,
)
from ml4core_rocm.switches import Switches, read

from .control.conftest import deployment
from .fake_aiter import Fake

AITER = "VLLM_ROCM_USE_AITER"
CPU = torch.device("cpu")


@pytest.fixture
def deploy() -> Callable[..., Deployment]:
    return deployment


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process, which stands for one of any size."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def switches(deployment: Deployment, **environment: str) -> Switches:
    return read(deployment, capabilities(REFERENCE), environment)[0]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (None, 64 << 20),
        ("1048576", 1 << 20),
        ("134217728", 128 << 20),  # of the announcement
        ("0", 0),
        ("-5", 64 << 20),
        ("lots", 64 << 20),
        (str(2 << 30), 64 << 20),
        (str(POOL_BYTES), POOL_BYTES // 2),  # what a prompt may take: half of the pool
        (str(POOL_BYTES // 2 + 16), POOL_BYTES // 2),
    ],
)
def test_the_window(text: str | None, want: int) -> None:
    found = window({} if text is None else {MAX_SIZE: text})
    assert found == (0, want)
    x = torch.zeros(8, 16)
    assert takes(x, found) is bool(want)
    assert not takes(torch.zeros(3), (0, 1 << 20))  # 12 bytes
    assert not takes(x, (512, 1 << 20))  # the window begins above its first size
    assert takes(torch.empty(want // 2, dtype=torch.int16, device="meta"), found) is bool(want)
    assert not takes(torch.empty(want // 2 + 8, dtype=torch.int16, device="meta"), found)


def test_the_window_begins_above_a_size_that_may_be_stated() -> None:
    assert window({MIN_SIZE: "4096"}) == (4096, 64 << 20)
    assert window({MIN_SIZE: "-1"}) == window({MIN_SIZE: "few"}) == (0, 64 << 20)
    assert not takes(torch.zeros(1024), (4096, 1 << 20))
    assert takes(torch.zeros(1028), (4096, 1 << 20))


def test_weak_contiguity() -> None:
    """Side by side in whatever order; a view that isn't, or that ends before its memory, is not."""
    whole = torch.arange(96.0).view(6, 16)
    assert weakly_contiguous(whole[1:3])  # contiguous, within a larger memory
    assert weakly_contiguous(whole.T)
    assert weakly_contiguous(torch.zeros(2, 3, 4).permute(2, 0, 1))
    assert not weakly_contiguous(whole[::2])
    assert not weakly_contiguous(whole[:, :8])
    assert not weakly_contiguous(whole[1:3].T)  # what lies behind it is another's
    assert weakly_contiguous(whole[4:].T)
    assert not weakly_contiguous(whole.flatten().as_strided((8, 12), (0, 8)))


def test_what_the_window_takes_is_the_librarys(
    aiter: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MAX_SIZE, "1024")
    own = AiterAllReduce("group", CPU, lambda x: x + 100)
    assert torch.equal(own(torch.ones(4, 64)), 2 * torch.ones(4, 64))  # of the fake's two ranks
    assert torch.equal(own(torch.ones(5, 64)), torch.full((5, 64), 101.0))  # beyond the window
    assert torch.equal(own(torch.ones(3)), torch.full((3,), 101.0))
    assert torch.equal(own(torch.zeros(0, 64)), torch.zeros(0, 64))
    assert torch.equal(own(torch.ones(64, 4).T), 2 * torch.ones(4, 64))
    assert torch.equal(own(torch.ones(8, 64)[::2]), torch.full((4, 64), 101.0))
    assert aiter.names() == ["CustomAllreduce", "custom_all_reduce", "custom_all_reduce"]
    own.close()
    assert aiter.names()[-1] == "close"


def test_a_library_that_declines_leaves_the_sum_to_torch(
    aiter: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its peers turn out not to be connected."""
    own = AiterAllReduce("group", CPU, lambda x: x + 100)
    monkeypatch.setattr(own._reduce, "custom_all_reduce", lambda x: None)
    assert torch.equal(own(torch.ones(4, 64)), torch.full((4, 64), 101.0))


@pytest.mark.parametrize(
    ("size", "changes", "environment", "reasons"),
    [
        (4, {}, {AITER: "1"}, []),
        (8, {}, {AITER: "1", MAX_SIZE: "134217728"}, []),
        (4, {}, {}, [f"{AITER} is not 1"]),
        (3, {}, {AITER: "1"}, ["2, 4, 6, 8 ranks, not for 3"]),
        (4, {"nnodes": 2}, {AITER: "1"}, ["peers of one host, and the ranks are on 2"]),
        (4, {}, {AITER: "1", MAX_SIZE: "0"}, [f"{MAX_SIZE} is 0, which turns it off"]),
        (5, {"nnodes": 2}, {MAX_SIZE: "0"}, ["not for 5", "are on 2", "turns it off", "is not 1"]),
    ],
)
def test_who_sums(
    alone: None,
    aiter: Fake,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    changes: dict[str, Any],
    environment: dict[str, str],
    reasons: list[str],
) -> None:
    monkeypatch.delenv(MAX_SIZE, raising=False)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: size)
    asks = deployment(tensor_parallel_size=size, **changes)
    found, told = collectives.joined(asks, switches(asks, **environment), CPU)
    assert found is not None
    x = torch.ones(4, 64)
    said = told["all-reduce"]
    if reasons:
        assert said.startswith("torch.distributed; not AITER all-reduce: ")
        assert [part in said for part in reasons] == [True] * len(reasons)
        assert torch.equal(found.all_reduce(x), x)  # of this process alone
        assert aiter.names() == []
    else:
        assert said == "AITER all-reduce 0.1.21"
        assert torch.equal(found.all_reduce(x), 2 * x)
        assert aiter.last("CustomAllreduce")["max_size"] == POOL_BYTES
    found.close()
    assert ("close" in aiter.names()) is not bool(reasons)


@pytest.fixture
def four(alone: None, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """A deployment of four ranks, whose sums are AITER's."""
    monkeypatch.delenv(MAX_SIZE, raising=False)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    return deployment(tensor_parallel_size=4)


def ended(group: Any) -> bool:
    """Whether torch knows a group no longer."""
    try:
        dist.get_backend(group)
    except ValueError:
        return True
    return False


def test_the_group_that_handles_are_traded_over_ends_with_the_collectives(
    four: Deployment, aiter: Fake
) -> None:
    found, _ = collectives.joined(four, switches(four, **{AITER: "1"}), CPU)
    assert found is not None
    group = aiter.last("CustomAllreduce")["group"]
    assert group is not dist.group.WORLD
    assert not ended(group)
    found.close()
    assert ended(group)
    assert aiter.names().count("close") == 1
    assert not ended(dist.group.WORLD)
    found.close()
    assert aiter.names().count("close") == 1


def test_it_ends_where_the_library_cant_be_started(
    four: Deployment, aiter: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def broken(group: Any, *_: Any) -> Any:
        given.append(group)
        raise RuntimeError("no peer memory")

    monkeypatch.setattr(collectives, "AiterAllReduce", broken)
    with pytest.raises(RuntimeError, match="no peer memory"):
        collectives.joined(four, switches(four, **{AITER: "1"}), CPU)
    assert [ended(group) for group in given] == [True]


def test_closing_after_all_groups_have_ended(
    aiter: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(MAX_SIZE, raising=False)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    four = deployment(tensor_parallel_size=4)
    found, _ = collectives.joined(four, switches(four, **{AITER: "1"}), CPU)
    assert found is not None
    dist.destroy_process_group()
    found.close()
    assert aiter.names()[-1] == "close"


def test_one_rank_has_no_group_and_others_need_theirs(alone: None) -> None:
    assert collectives.joined(deployment(), Switches(), CPU) == (None, {})
    with pytest.raises(RuntimeError, match="has joined a group of 1 ranks; works: torch"):
        collectives.joined(deployment(tensor_parallel_size=4), Switches(), CPU)


RANK = """
import json, sys, torch, torch.distributed as dist
from ml4core_rocm.collectives import GroupCollectives
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
x = torch.arange(12.0).view(2, 6) + 100 * rank
own, found = GroupCollectives(), {}
for dim in (0, 1):
    found[f"gather {dim}"] = own.all_gather(x, dim)
    found[f"scatter {dim}"] = own.reduce_scatter(x, dim)
    found[f"exchange {dim}"] = own.all_to_all(x, dim)
found["sum"] = own.all_reduce(x.T)
assert torch.equal(x, torch.arange(12.0).view(2, 6) + 100 * rank)
assert all(one.is_contiguous() for one in found.values())
try:
    own.all_to_all(torch.ones(3))
except ValueError as error:
    found["error"] = torch.tensor(float("don't divide among 2 ranks" in str(error)))
print(json.dumps({name: one.tolist() for name, one in found.items()}))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.multiprocess
def test_two_processes(tmp_path: Path) -> None:
    words = [sys.executable, "-W", "ignore", "-c", RANK]
    running = [
        subprocess.Popen(
            [*words, str(rank), f"{tmp_path}/store"], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=240)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    xs = [torch.arange(12.0).view(2, 6) + 100 * rank for rank in range(2)]
    for rank, line in enumerate(said):
        found = {name: torch.tensor(one) for name, one in json.loads(line).items()}
        for dim in (0, 1):
            assert torch.equal(found[f"gather {dim}"], torch.cat(xs, dim))
            assert torch.equal(found[f"scatter {dim}"], (xs[0] + xs[1]).chunk(2, dim)[rank])
            mine = torch.cat([x.chunk(2, dim)[rank] for x in xs], dim)
            assert torch.equal(found[f"exchange {dim}"], mine)
        assert torch.equal(found["sum"], (xs[0] + xs[1]).T)
        assert found["error"] == 1
