"""How many pages caches get, of a device of which it is known what the process takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ml4core.api import Deployment, MemoryFigures
from ml4core.engine.args import EngineArgs
from ml4core.engine.cache_sizes import Wanted, plan_caches
from ml4core.engine.errors import RequestError
from ml4core.engine.memory_plan import AGREES, Account, Profile, check_share
from ml4core.engine.resolve import resolve
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.tensors import load_model_spec
from ml4core.planning.kv import Pools
from ml4core.registry import Choice

MIB = 2**20
TAKEN = {"others": MIB, "weights": 20 * MIB, "activations": 4 * MIB, "runtime": 0, "graphs": MIB}


def profile(total: int = 100 * MIB, available: int = 99 * MIB, **more: int) -> Profile:
    return Profile(total, available=available, **(TAKEN | more))


Plan = Callable[..., Pools]


@pytest.fixture
def plan(folder: Path, plain: Choice) -> Plan:
    spec = load_model_spec(Checkpoint.open(folder))

    def plan(of: Profile | None, fill: bool = True, tokens: int | None = 64, **flags: Any) -> Pools:
        sizes = {"max_model_len": 96, "max_num_seqs": 4, "block_size": 16}
        args = EngineArgs(str(folder), backend="cpu", **(sizes | flags))
        device, words = plain.device, plain.capabilities
        deployment: Deployment = resolve(args, spec, frozenset(), 20 * MIB, device, words)
        return plan_caches(args, deployment, {}, Wanted(2, tokens, fill), of)

    return plan


@pytest.fixture
def page(plan: Plan) -> int:
    pools = plan(profile())
    return pools.bytes_per_token * pools.block_size


def test_all_that_is_left_of_the_share(plan: Plan, page: int) -> None:
    for share in (0.5, 0.9):
        left = int(100 * MIB * share) - 26 * MIB
        assert 0 <= left - plan(profile(), gpu_memory_utilization=share).nbytes < page


def test_no_more_than_is_free(plan: Plan, page: int) -> None:
    left = 40 * MIB - 25 * MIB  # others have theirs already
    assert 0 <= left - plan(profile(available=40 * MIB)).nbytes < page


def test_known_requests_get_what_they_need(plan: Plan) -> None:
    pools = plan(profile(), fill=False)
    assert set(pools.blocks.values()) == {2 * 4 + 1}
    assert pools.requests(64) == 2
    with pytest.raises(RequestError, match=r"--max-model-len: 64 .*(weights).* graphs"):
        plan(profile(available=25 * MIB), fill=False)


def test_a_share_without_room_for_a_context_names_what_would_do(plan: Plan, page: int) -> None:
    with pytest.raises(RequestError) as refused:
        plan(profile(), gpu_memory_utilization=0.2)
    for word in ("--max-model-len: 96", "a larger --gpu-memory-utilization than 0.2", "weights"):
        assert word in str(refused.value)
    share = (26 * MIB + 4 * page) / (100 * MIB)
    with pytest.raises(RequestError, match=r"works: \d+ or less") as refused:
        plan(profile(), gpu_memory_utilization=share)
    fits = int(re.search(r"works: (\d+) or less", str(refused.value))[1])  # type: ignore[index]
    assert plan(profile(), gpu_memory_utilization=share, max_model_len=fits).requests(fits) == 1


@pytest.mark.parametrize("flag", ["kv_cache_memory_bytes", "num_gpu_blocks_override"])
def test_a_size_by_flag_is_bounded_by_the_device_and_not_by_the_share(
    plan: Plan, page: int, flag: str
) -> None:
    unit = page if flag.startswith("kv") else 1
    few = plan(profile(), gpu_memory_utilization=0.1, **{flag: 20 * unit})
    assert set(few.blocks.values()) == {20}
    with pytest.raises(RequestError, match=r"at most \d+: the device has 104857600") as refused:
        plan(profile(), **{flag: 200_000 * unit})
    most = int(re.search(r"at most (\d+)", str(refused.value))[1])  # type: ignore[index]
    assert 0 <= 99 * MIB - 25 * MIB - plan(profile(), **{flag: most}).nbytes < page
    with pytest.raises(RequestError):
        plan(profile(), **{flag: most + 1})
    with pytest.raises(RequestError, match=r"at least \d+ for one sequence of 64") as refused:
        plan(profile(), **{flag: 3 * unit})
    least = int(re.search(r"at least (\d+)", str(refused.value))[1])  # type: ignore[index]
    assert plan(profile(), **{flag: least}).requests(64) == 1


def test_pages_by_flag_where_nothing_is_known_of_the_device(plan: Plan) -> None:
    assert set(plan(None, num_gpu_blocks_override=9).blocks.values()) == {9}


def test_a_share_that_is_not_free() -> None:
    figures = MemoryFigures(total=100, free=40, allocated=10, held=15, peak=15)
    check_share(figures, 0.55)
    with pytest.raises(RequestError, match=r"--gpu-memory-utilization: 0.56 .*at most 0.55:"):
        check_share(figures, 0.56)


def test_a_plan_that_came_true_and_one_that_did_not() -> None:
    planned = {"weights": 1000, "activations": 200, "runtime": 0, "graphs": 50, "pools": 8000}
    good = Account(planned, planned | {"graphs": 100})
    assert good.warnings() == []
    assert good.off_in_all < AGREES
    assert good.to_json()["agrees"]
    caches = Account(planned, planned | {"pools": 8090, "weights": 910})
    assert [text.split()[0] for text in caches.warnings()] == ["caches"]
    graphs = Account(planned, planned | {"graphs": 200})
    (text,) = graphs.warnings()
    assert "graphs 50 -> 200" in text
    assert "weights" not in text
    assert not graphs.to_json()["agrees"]
