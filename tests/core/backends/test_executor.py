"""Steps as graphs, with a stand-in that records instead of a device that does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import (
    DRAFT_GROUP,
    Deployment,
    Device,
    DraftPlan,
    DraftStep,
    Sampling,
    Segment,
    StepBuckets,
    StepOutput,
    StepPlan,
    StepShape,
)
from ml4core.models.dspark import draft_spec
from ml4core.models.layer_table import build_model_spec
from ml4core.models.seeded_config import PRESETS
from ml4core_triton.buckets import (
    FEWEST_PAGES,
    MAX_ROWS,
    captured,
    most_rows,
    sizes,
    step_buckets,
    verify_rows,
    widths,
)
from ml4core_triton.executor import GraphExecutor, Inputs
from ml4core_triton.fault import FaultWord

NONE = Segment(0, 0, 0)


@dataclass
class Recorder:
    """Work that is queued while it records is kept, and runs when it is replayed.

    Attributes:
        log: what ran, in order.
    """

    log: list[str] = field(default_factory=list)
    segment: list[Callable[[], None]] | None = None
    held: int = 0

    def queue(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            self.log.append(name)
            work()

        if self.segment is None:
            run()
        else:
            self.segment.append(run)

    def begin(self) -> None:
        assert self.segment is None, "graphs don't nest"
        self.segment = []

    def end(self) -> Callable[[], None]:
        work, self.segment = self.segment, None
        if work is None:
            raise RuntimeError("nothing is recorded")
        self.held += 100

        def replay() -> None:
            for run in work:
                run()

        return replay

    def suspended(self, call: Callable[[], object]) -> None:
        assert self.segment is None
        call()

    def weak(self, tensor: Tensor) -> Tensor:
        return tensor

    def allocated(self) -> int:
        return self.held

    def drop(self) -> None:
        self.held = 0


def shape(decode: int = 2, prefill: int = 0) -> StepShape:
    chunk = Segment(1, prefill, prefill) if prefill else NONE
    return StepShape(Segment(decode, decode, 1), NONE, chunk, (("latent", 4),), decode)


def plan(of: StepShape, first: int = 0) -> StepPlan:
    rows, requests = of.rows, of.requests
    ints = torch.arange(first, first + rows)
    return StepPlan(
        of,
        ints,
        ints + 1,
        torch.arange(rows),
        torch.arange(requests + 1).int(),
        ints.int(),
        {"latent": torch.full((requests, 4), first).int()},
        {"latent": ints * 2},
        torch.arange(of.logits),
    )


@pytest.fixture
def graphs() -> Recorder:
    return Recorder()


@pytest.fixture
def executor(graphs: Recorder) -> GraphExecutor:
    buckets = StepBuckets(decode=(1, 2, 4), pages=(1, 2, 4), logits=(1, 2, 4))
    return GraphExecutor(graphs, buckets, FaultWord(torch.device("cpu")))


class Step:
    """logits = token ids + positions + slots, by way of a call that may be a break."""

    def __init__(self, graphs: Recorder, middle: Callable[..., Any]) -> None:
        self.graphs = graphs
        self.middle = middle
        self.calls = 0

    def __call__(self, weights: Any, plan: StepPlan, kv: Any) -> StepOutput:
        self.calls += 1
        half = torch.zeros(plan.shape.rows)
        whole = torch.zeros(plan.shape.rows)
        queue = self.graphs.queue
        queue("before", lambda: half.copy_(plan.token_ids + plan.positions))
        self.middle(half, out=half)
        queue("after", lambda: whole.copy_(half + plan.slots["latent"]))
        return StepOutput(whole, (half,), torch.zeros((), dtype=torch.bool))


def double(x: Tensor, *, out: Tensor) -> None:
    out.copy_(x * 2)


def want(of: StepPlan) -> Tensor:
    return ((of.token_ids + of.positions) * 2 + of.slots["latent"]).float()


def test_run_then_captured_then_replayed(graphs: Recorder, executor: GraphExecutor) -> None:
    step = Step(graphs, executor.eager_break(double))
    call = executor.compile(step, shape())
    weights, kv = object(), object()
    for first in (0, 10, 20, 30):
        given = plan(shape(), first)
        assert torch.equal(call(weights, given, kv).logits, want(given))
    assert step.calls == 2  # once eagerly, once to be captured
    assert graphs.log == ["before", "after"] * 4
    (capture,) = executor.captures
    assert (capture.segments, capture.nbytes, capture.shape) == (2, 200, shape())
    assert capture.seconds > 0


def test_breaks_run_between_graphs_each_time(graphs: Recorder, executor: GraphExecutor) -> None:
    seen: list[float] = []

    def middle(x: Tensor, *, out: Tensor) -> None:
        inner(x, out=out)
        seen.append(float(x[0]))

    inner = executor.eager_break(double)  # within a break: a plain call
    call = executor.compile(Step(graphs, executor.eager_break(middle)), shape())
    weights, kv = object(), object()
    for first in (0, 10, 20):
        call(weights, plan(shape(), first), kv)
    # The second call: once while it is captured, on what the buffer holds then, and once replayed.
    assert len(seen) == 4
    assert (seen[0], seen[2], seen[3]) == (2.0, 42.0, 82.0)


def test_a_break_that_returns_something_is_refused(
    graphs: Recorder, executor: GraphExecutor
) -> None:
    def answers(x: Tensor, *, out: Tensor) -> int:
        return 1

    call = executor.compile(Step(graphs, executor.eager_break(answers)), shape())
    weights, kv = object(), object()
    call(weights, plan(shape()), kv)
    with pytest.raises(TypeError, match=r"answers returned something.*out= arguments"):
        call(weights, plan(shape()), kv)


def test_other_caches_and_shapes_beyond_buckets_run_eagerly(
    graphs: Recorder, executor: GraphExecutor
) -> None:
    step = Step(graphs, double)
    call = executor.compile(step, shape())
    weights = object()
    kept = object()
    call(weights, plan(shape()), kept)
    other = plan(shape(), 5)
    assert torch.equal(call(weights, other, object()).logits, want(other))
    assert executor.captures == []
    for odd in (shape(3), shape(1, prefill=7)):
        eager = executor.compile(step, odd)
        for _ in range(3):
            assert torch.equal(eager(weights, plan(odd), kept).logits, want(plan(odd)))
    assert executor.captures == []


def test_a_capture_that_fails_names_the_way_out(graphs: Recorder, executor: GraphExecutor) -> None:
    def fails(x: Tensor, *, out: Tensor) -> None:
        if graphs.segment is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    call = executor.compile(Step(graphs, fails), shape())
    weights, kv = object(), object()
    call(weights, plan(shape()), kv)
    with pytest.raises(RuntimeError, match=r"not permitted.*\(works: --enforce-eager\)"):
        call(weights, plan(shape()), kv)
    assert graphs.segment is None


def test_a_capture_without_memory_says_so(graphs: Recorder, executor: GraphExecutor) -> None:
    def full(x: Tensor, *, out: Tensor) -> None:
        if graphs.segment is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    call = executor.compile(Step(graphs, full), shape())
    weights, kv = object(), object()
    call(weights, plan(shape()), kv)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory"):
        call(weights, plan(shape()), kv)
    assert graphs.segment is None


@pytest.mark.parametrize("broken", ["begin", "end"])
def test_after_a_capture_that_breaks_breaks_are_plain_calls(
    graphs: Recorder, executor: GraphExecutor, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fails() -> None:
        graphs.segment = None
        raise RuntimeError("the driver refuses")

    again = executor.eager_break(double)
    call = executor.compile(Step(graphs, again), shape())
    weights, kv = object(), object()
    call(weights, plan(shape()), kv)
    with monkeypatch.context() as patch:
        patch.setattr(graphs, broken, fails)
        with pytest.raises(RuntimeError, match=r"driver refuses \(works: --enforce-eager\)"):
            call(weights, plan(shape()), kv)
    out = torch.zeros(2)
    again(torch.ones(2), out=out)
    assert out.tolist() == [2.0, 2.0]
    assert executor.captures == []


def test_results_that_are_views_are_made_dense_within_the_graph(
    graphs: Recorder, executor: GraphExecutor
) -> None:
    def step(weights: Any, plan: StepPlan, kv: Any) -> StepOutput:
        tap = torch.ones(plan.shape.rows, 8)[:, :4]
        return StepOutput(torch.ones(2, 6)[:, ::2], (tap,), torch.zeros((), dtype=torch.bool))

    call = executor.compile(step, shape())
    weights, kv = object(), object()
    for _ in range(2):
        found = call(weights, plan(shape()), kv)
    assert found.logits.is_contiguous()
    assert found.taps[0].is_contiguous()


def test_what_is_dropped_is_captured_anew(graphs: Recorder, executor: GraphExecutor) -> None:
    weights, kv, other = object(), object(), object()
    first = executor.compile(Step(graphs, executor.eager_break(double)), shape())
    for _ in range(3):
        first(weights, plan(shape()), kv)
    kept = executor.inputs(plan(shape()))
    executor.drop()
    assert (executor.captures, graphs.held) == ([], 0)
    call = executor.compile(Step(graphs, executor.eager_break(double)), shape())
    for start in (0, 10, 20):
        given = plan(shape(), start)
        assert torch.equal(call(weights, given, other).logits, want(given))
    assert len(executor.captures) == 1
    fresh = executor.inputs(plan(shape()))
    assert all(one.data_ptr() != kept[name].data_ptr() for name, one in fresh.items())


def drafting(requests: int, rows: int, first: int = 0, depth: int = 3) -> DraftStep:
    """Blocks behind a step of so many rows."""
    ints = torch.arange(first, first + requests)
    of = StepShape(
        NONE,
        Segment(requests, requests * depth, depth),
        Segment(1, rows, rows),
        ((DRAFT_GROUP, 4),),
        requests * depth,
    )
    slots = ints.unsqueeze(-1).expand(-1, depth).contiguous()
    sampling = Sampling(ints.float(), ints, ints + 1)
    context = torch.arange(first, first + rows)
    table = torch.full((requests, 4), first).int()
    given = DraftPlan(context, context * 2, ints, slots, table, sampling)
    return DraftStep(of, given, (context.unsqueeze(-1).float(), context.unsqueeze(-1) + 0.5))


def test_a_drafters_block_is_captured_on_buffers_of_its_own(
    graphs: Recorder, executor: GraphExecutor
) -> None:
    def block(weights: Any, step: DraftStep, kv: Any) -> StepOutput:
        made, ids = torch.zeros(2, 3, 1), torch.zeros(2, 3, dtype=torch.int64)
        rows = sum(step.taps)
        graphs.queue("logits", lambda: made.fill_(float(rows.sum())))
        graphs.queue("ids", lambda: ids.copy_(step.plan.anchors.unsqueeze(-1) + step.plan.slots))
        return StepOutput(made, (ids,), torch.zeros((), dtype=torch.bool))

    one = drafting(2, 2)
    assert executor.captures_shape(one.shape)
    call = executor.compile(block, one.shape)
    weights, kv = object(), object()
    for first in (0, 5, 9):
        given = drafting(2, 2, first)
        output = call(weights, given, kv)
        assert torch.equal(output.taps[0], given.plan.anchors.unsqueeze(-1) * 2 + torch.zeros(3))
    assert [one.shape.pages for one in executor.captures] == [((DRAFT_GROUP, 4),)]


def test_nothing_runs_after_close(graphs: Recorder, executor: GraphExecutor) -> None:
    call = executor.compile(Step(graphs, double), shape())
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        call(object(), plan(shape()), object())


def test_inputs_of_shapes_share_memory_and_keep_addresses() -> None:
    inputs = Inputs()
    large, small = inputs.like(plan(shape(4))), inputs.like(plan(shape(1)))
    again = inputs.like(plan(shape(4)))
    for name, tensor in large.items():
        assert tensor.is_contiguous()
        assert tensor.shape == plan(shape(4)).tensors()[name].shape
        assert tensor.data_ptr() == again[name].data_ptr() == small[name].data_ptr()


def test_what_is_captured() -> None:
    buckets = StepBuckets(decode=(1, 2, 4), verify=(1, 2), pages=(1, 2, 4), logits=(4,))
    assert captured(shape(2), buckets)
    assert not captured(shape(3), buckets)
    assert not captured(shape(2, prefill=9), buckets)
    verify = StepShape(NONE, Segment(2, 8, 4), NONE, (("latent", 2),), 8)
    assert captured(verify, buckets)
    long = StepShape(NONE, Segment(2, 8, 4), NONE, (("latent", 3),), 8)
    assert not captured(long, buckets)
    assert not captured(StepShape(NONE, NONE, NONE, (), 0), buckets)


@pytest.mark.parametrize("largest", [1, 3, 16, 256, 257, 1000])
def test_sizes_ascend_to_the_largest(largest: int) -> None:
    found = sizes(largest)
    assert found[-1] == largest
    assert list(found) == sorted(set(found))
    StepBuckets(decode=found)


def test_the_first_fault_stays() -> None:
    word = FaultWord(torch.device("cpu"))
    assert word.read() is None
    word.word.fill_(1)
    assert word.read() is None  # not published yet
    word.publish()
    fault = word.read()
    assert fault is not None
    assert (fault.code, fault.step) == ("timeout", 1)
    word.fail("later")
    word.word.fill_(0)
    word.publish()
    assert word.read() == fault


def deployment(drafts: int = 0, **more: Any) -> Deployment:
    params = PRESETS["micro"].params()
    spec = build_model_spec(params)
    settings: dict[str, Any] = {"max_model_len": 100_000, "block_size": 64, "max_num_seqs": 256}
    if drafts:
        layers = {"target_layers": [0, 1, 2], "n_layers": 2, "depth": 3, "markov_rank": 16}
        spec = replace(spec, draft=draft_spec(build_model_spec(params | {"mtp": layers})))
        settings["speculative_config"] = {"num_speculative_tokens": drafts}
    return Deployment(spec, Device("real", "GPU", "sm_90", "cuda:0"), **(settings | more))


def test_sizes_of_steps_without_and_with_drafts() -> None:
    plain = step_buckets(deployment())
    assert plain.decode == sizes(256)
    assert plain.pages == (25, 98, 391, 1563)
    drafting = deployment(3)
    assert verify_rows(drafting) == 4
    windows = step_buckets(drafting)
    assert max(windows.verify) * 4 == MAX_ROWS
    assert windows.pages[-1] == -(-100_003 // 64), "a block may go beyond the longest context"
    for count in (1, 3, 7, 100, 128):
        requests = windows.padded("verify", count)
        rows = requests * 4
        assert windows.padded("logits", rows) == rows
        of = StepShape(NONE, Segment(requests, rows, 4), NONE, (("latent", 25),), rows)
        assert captured(of, windows)


def test_sizes_by_flag_are_rows() -> None:
    asked = step_buckets(deployment(3, cudagraph_capture_sizes=(1, 6, 16, 2000)))
    assert asked.verify == (1, 2, 4)
    assert asked.decode == (1, 6, 16)
    assert {4, 8, 16} <= set(asked.logits)
    beyond = step_buckets(deployment(3, cudagraph_capture_sizes=(2000,), max_num_seqs=8))
    assert (beyond.decode, beyond.verify) == ((8,), (8,))


@pytest.mark.parametrize("drafts", [0, 3])
def test_sizes_by_flag_are_captured_whatever_they_are(drafts: int) -> None:
    asked = deployment(drafts, cudagraph_capture_sizes=(1000,), max_num_seqs=1000)
    most, buckets, window = most_rows(asked), step_buckets(asked), 1 + drafts
    requests = 1000 // window
    rows = Segment(requests, requests * window, window)
    kinds = (NONE, rows) if drafts else (rows, NONE)
    of = StepShape(*kinds, NONE, (("latent", buckets.pages[-1]),), rows.rows)
    assert most == 1000
    assert captured(of, buckets, most)
    assert not captured(of, buckets, most_rows(deployment(drafts)))


@pytest.mark.parametrize("largest", [1, 5, 16, 17, 65, 16384])
def test_widths_of_tables_grow_by_four(largest: int) -> None:
    found = widths(largest)
    assert found[-1] == largest
    assert list(found) == sorted(set(found))
    assert all(4 * low >= high for low, high in pairwise(found))
    assert found[0] <= 4 * FEWEST_PAGES
    StepBuckets(pages=found)


def test_blocks_that_are_captured() -> None:
    buckets = StepBuckets(decode=(1, 2, 4), verify=(1, 2, 4), pages=(4,), logits=(4,))
    assert captured(drafting(2, 2).shape, buckets)
    assert captured(drafting(2, 8).shape, buckets)
    assert not captured(drafting(2, 9).shape, buckets)
    assert not captured(drafting(3, 3).shape, buckets)
    assert not captured(drafting(1, 300).shape, buckets)
