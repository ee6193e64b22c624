"""The start of an engine on a device with memory of its own: sizes, refusals, graphs, figures."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ml4core.api import FaultError, Refused
from ml4core.engine import graph_capture
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import RequestError
from ml4core.engine.llm import Engine, open_engine
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.steps import ModelSteps, StepInput
from ml4core.registry import Choice
from support.metered import FIRST_GRAPH_BYTES, GRAPH_BYTES, MIB, ROW_BYTES, Metered

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MOST_ROWS = 33  # three decodes, padded to four, beside a chunk of 29 rows
PROMPTS = [[5] * 20, [7, 8, 9], list(range(100, 140)), [3]]
Start = Callable[..., Engine]


def weight_bytes(engine: Engine) -> int:
    return int(engine.report()["memory"]["weights"]["taken"])


def page_bytes(engine: Engine) -> int:
    return engine.kv_plan.bytes_per_token * engine.kv_plan.block_size


def test_caches_take_what_is_left_of_the_share(start: Start, meter: Any) -> None:
    engine = start(gpu_memory_utilization=0.5)
    share = meter.total // 2
    captured = 2 * 3  # two widths of tables, three sizes
    graphs = FIRST_GRAPH_BYTES + (captured - 1) * GRAPH_BYTES
    left = share - weight_bytes(engine) - MOST_ROWS * ROW_BYTES - graphs
    assert 0 <= left - engine.kv_plan.nbytes < page_bytes(engine)
    told = json.loads(json.dumps(engine.report()))["memory"]
    assert told["agrees"]
    assert told["pools"] == {"planned": engine.kv_plan.nbytes, "taken": engine.kv_plan.nbytes}
    assert told["graphs"]["planned"] == told["graphs"]["taken"] == graphs
    assert told["graphs"]["estimate"] > 0
    assert told["activations"]["planned"] == told["activations"]["taken"] == MOST_ROWS * ROW_BYTES
    assert told["activations"]["estimate"] > 0
    assert told["weights"]["estimate"] == pytest.approx(told["weights"]["taken"], rel=0.5)
    assert told["in_all"]["off_percent"] < 1
    assert meter.figures().allocated + meter.driver <= share
    assert {step["name"] for step in told["steps"]} == {"prefill", "mixed", "decode"}


def test_all_shapes_are_captured_before_the_first_request(
    start: Start,
    sessions: Any,
    plain: Choice,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[tuple[str, int, int]] = []
    engine = start(told=lambda *one: said.append(one))
    executor = sessions[0].executor
    shapes = [(one.shape.rows, one.shape.pages[0][1]) for one in executor.captures]
    assert shapes == [(4, 7), (4, 2), (2, 7), (2, 2), (1, 7), (1, 2)], "largest first"
    assert executor.drops == 1, "those of the trial go"
    assert ("capturing graphs", 0, 6) in said
    assert ("capturing graphs", 6, 6) in said
    assert any(what == "warming up" for what, _, _ in said)
    made = [one.token_ids for one in engine.generate(PROMPTS, GREEDY)]
    assert len(executor.captures) == 6, "nothing is left to be captured"
    monkeypatch.undo()
    args = EngineArgs(str(folder), backend="cpu", dtype=engine.deployment.dtype, block_size=16)
    other = open_engine(args, choice=plain, sequences=4, tokens_each=64)
    assert made == [one.token_ids for one in other.generate(PROMPTS, GREEDY)]
    other.close()
    told = engine.report()["start_up"]
    assert told["captures"] == 6
    assert told["capture_s"] > 0
    assert told["warm_up_s"] > 0
    assert told["warm_up_steps"] >= 10


def test_a_key_of_the_configuration_is_as_its_flag() -> None:
    config = {graph_capture.SIZES: [1, 3]}
    assert (
        graph_capture.capture_sizes((), config) == graph_capture.capture_sizes((3, 1), {}) == (1, 3)
    )
    eager = {graph_capture.MODE: graph_capture.NONE}
    assert [graph_capture.is_eager(*one) for one in ((False, eager), (True, {}), (False, {}))] == [
        True, True, False
    ]  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({"cudagraph_capture_sizes": (3, 1)}, marks=pytest.mark.slow),
        {"compilation_config": {"cudagraph_capture_sizes": [1, 3]}},
    ],
)
def test_sizes_by_flag(start: Start, sessions: Any, flags: dict[str, Any]) -> None:
    start(**flags)
    assert [one.shape.rows for one in sessions[0].executor.captures] == [3, 3, 1, 1]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({"enforce_eager": True}, marks=pytest.mark.slow),
        {"compilation_config": {"cudagraph_mode": "NONE"}},
    ],
)
def test_without_graphs_decode_is_warmed_up(
    start: Start, sessions: Any, flags: dict[str, Any]
) -> None:
    engine = start(**flags)
    executor = sessions[0].executor
    assert executor.captures == []
    assert executor.drops == 0
    told = engine.report()
    assert told["start_up"]["captures"] == 0
    assert told["memory"]["graphs"]["taken"] == 0
    assert "estimate" not in told["memory"]["graphs"]
    assert {shape.rows for shape in executor.ran if not shape.prefill.rows} >= {1, 2, 3, 4}


def test_what_lies_in_pieces_is_for_no_caches(start: Start, meter: Any) -> None:
    meter.pieces = 8 * MIB
    engine = start(gpu_memory_utilization=0.97)  # of 256 MiB, of which others have 6
    left = meter.figures().free - MOST_ROWS * ROW_BYTES
    assert 0 <= left < page_bytes(engine)


def test_a_share_that_is_not_free_is_refused_before_loading(start: Start, meter: Any) -> None:
    meter.others = meter.total // 2
    with pytest.raises(RequestError, match=r"--gpu-memory-utilization: 0\.9 .*at most 0\.5"):
        start()
    assert meter.peak == 0
    start(gpu_memory_utilization=0.4)


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        (-MIB, ("loading the weights needs", "a device with more memory")),
        (MIB, ("a step of the largest size needs", "MiB", "a smaller --max-num-batched-tokens")),
        (3 * MIB, ("capturing graphs needs", "--enforce-eager", "--cudagraph-capture-sizes")),
    ],
)
def test_memory_that_runs_out_is_named(
    start: Start, meter: Any, folder: Path, rest: int, words: tuple[str, ...]
) -> None:
    """``rest``: what the device has beside the weights, which this backend holds as fp32."""
    meter.others = 0
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    meter.total = 2 * stored + rest
    with pytest.raises(MemoryError, match=r"needs .*, and .* are free .works: ") as error:
        start(fill=False)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("stalled", [False, True])
def test_a_start_that_fails_leaves_no_thread_and_no_open_session(
    start: Start, sessions: Any, monkeypatch: pytest.MonkeyPatch, stalled: bool
) -> None:
    """But for a step that never ends: its session is left to it."""
    before, released, closed = set(threading.enumerate()), threading.Event(), list[Metered]()

    def broken(self: ModelSteps, step: StepInput) -> Any:
        if stalled:
            released.wait()
        raise ValueError("odd")

    monkeypatch.setattr(ModelSteps, "launch", broken)
    monkeypatch.setattr(Metered, "close", lambda self: closed.append(self), raising=False)
    try:
        with pytest.raises(FaultError if stalled else ValueError):
            start(step_timeout_s=0.02 if stalled else 60.0)
        assert closed == ([] if stalled else sessions)
        if not stalled:
            assert not set(threading.enumerate()) - before
    finally:
        released.set()


def test_a_step_that_runs_out_of_memory_stops_the_engine_by_name(start: Start, meter: Any) -> None:
    engine = start(fill=False)
    meter.total = meter.tensors + meter.driver + meter.others
    engine.core.add_request("a", [1] * 30, GREEDY)
    while engine.core.has_work:
        engine.core.step()
    fault = engine.core.fault
    assert fault is not None
    assert fault.code == "memory"
    for word in ("Tried to allocate", "--gpu-memory-utilization", "--max-num-batched-tokens"):
        assert word in fault.message
    assert isinstance(engine.core.cause, torch.OutOfMemoryError)


def test_caches_that_are_larger_than_planned_are_told(
    start: Start, spoils: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    spoils.add("caches")
    with caplog.at_level(logging.WARNING, "ml4core.engine"):
        engine = start(gpu_memory_utilization=0.5)
    assert any("caches took" in message and "5.0% off" in message for message in caplog.messages)
    told = engine.report()["memory"]
    assert not told["agrees"]
    assert told["pools"]["taken"] > told["pools"]["planned"]


def test_a_device_without_figures_refuses_the_share(plain: Choice, folder: Path) -> None:
    args = EngineArgs(str(folder), backend="cpu", gpu_memory_utilization=0.5)
    with pytest.raises(Refused, match=r"--gpu-memory-utilization: backend 'cpu' tells nothing"):
        open_engine(args, choice=plain, tokens_each=16)
    args = EngineArgs(str(folder), backend="cpu", num_gpu_blocks_override=9, block_size=16)
    engine = open_engine(args, choice=plain, tokens_each=16, fill=True)
    assert set(engine.kv_plan.blocks.values()) == {9}
    assert "memory" not in engine.report()
    engine.close()


def test_captured_sizes_on_a_device_without_graphs_are_refused(plain: Choice, folder: Path) -> None:
    args = EngineArgs(str(folder), backend="cpu", cudagraph_capture_sizes=(1, 2))
    with pytest.raises(Refused, match="feature:graph_capture"):
        open_engine(args, choice=plain, tokens_each=16)
