"""Steps as graphs of the device, cut at the calls that have to run eagerly.

The first call of a shape runs as it is, on the graph's own input buffers, so that kernels are
compiled and libraries have their handles; the second is captured; from then on it is replayed. A
replay copies the plan's tensors into the input buffers and launches what was recorded, in order.
All of it is queued on one stream: what is sent for the next step reaches the buffers behind the
step that still reads them.

Memory. Input buffers are shared by all graphs: only one step runs at a time. So are the graphs'
temporaries, by one pool: results live until the next call of any shape, which the contract of
``StepExecutor`` allows, and are held by address, so that the pool may give their memory to the next
capture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from math import prod
from time import perf_counter
from typing import TypeVar, cast

import torch
from torch import Tensor

from ml4core.api import Capture, DraftStep, StepBuckets, StepOutput, StepPlan, StepShape
from ml4core_triton.buckets import MAX_ROWS, captured
from ml4core_triton.fault import FaultWord
from ml4core_triton.graphs import Graphs

F = TypeVar("F", bound=Callable[..., object])
Step = Callable[..., StepOutput]
Plan = StepPlan | DraftStep

_logger = logging.getLogger(__name__)


class EagerExecutor:
    """A step is itself."""

    def compile(self, step: Step, shape: StepShape) -> Step:
        return step

    def eager_break(self, function: F) -> F:
        return function


class Inputs:
    """Buffers of all plans by tensor name: each shape has a view of the same memory."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}

    def like(self, plan: Plan) -> dict[str, Tensor]:
        """Dense buffers of the plan's shapes, at addresses that stay those of this shape."""
        return {name: self._view(name, tensor) for name, tensor in plan.tensors().items()}

    def _view(self, name: str, tensor: Tensor) -> Tensor:
        size = prod(tensor.shape)
        memory = self._memory.get((name, tensor.dtype))
        if memory is None or memory.numel() < size:
            # Graphs of smaller shapes keep the memory that they were captured with.
            memory = torch.zeros(
                max(1, 1 << (size - 1).bit_length()) if size else 1,
                dtype=tensor.dtype,
                device=tensor.device,
            )
            self._memory[name, tensor.dtype] = memory
        return memory[:size].view(tensor.shape)


class GraphExecutor:
    """Captures the shapes of ``buckets`` and runs others eagerly.

    Attributes:
        captures: what each capture cost, in order.
    """

    def __init__(
        self, graphs: Graphs, buckets: StepBuckets, fault: FaultWord, most_rows: int = MAX_ROWS
    ) -> None:
        """``most_rows``: of a step that is captured."""
        self.captures: list[Capture] = []
        self._graphs = graphs
        self._buckets = buckets
        self._most_rows = most_rows
        self._fault = fault
        self._inputs = Inputs()
        self._recording: list[Callable[[], object]] | None = None
        self._in_break = False
        self._closed = False

    def compile(self, step: Step, shape: StepShape) -> Step:
        """A callable for this shape. It takes the weights, a plan and the caches; a graph serves
        the weights and caches that it was captured with, others run eagerly.
        """
        program = _Program(self, step, shape) if self.captures_shape(shape) else step

        def call(weights: object, plan: Plan, kv: object) -> StepOutput:
            if self._closed:
                raise RuntimeError("the session of this step is closed")
            try:
                output = program(weights, plan, kv)
                self._fault.publish()
            except torch.AcceleratorError as error:
                self._fault.fail(str(error).partition("\n")[0])
                raise
            return output

        return call

    def eager_break(self, function: F) -> F:
        """While a step is captured, a call of it ends the graph, runs, and begins the next one; a
        replay calls it again with the same arguments. Breaks within a break are plain calls.
        """

        @wraps(function)
        def call(*args: object, **named: object) -> object:
            if self._recording is None or self._in_break:
                return function(*args, **named)

            def again() -> None:
                if function(*args, **named) is not None:
                    raise TypeError(
                        f"{getattr(function, '__qualname__', function)} returned something, which "
                        "no replay could pass on; works: writing into out= arguments"
                    )

            self._recording.append(self._graphs.end())
            self._in_break = True
            try:
                self._graphs.suspended(again)
            finally:
                self._in_break = False
                self._graphs.begin()
            self._recording.append(again)
            return None

        return cast(F, call)

    def captures_shape(self, shape: StepShape) -> bool:
        return captured(shape, self._buckets, self._most_rows)

    def drop(self) -> None:
        """Forgets what was captured; its memory goes with the programs that the engine held."""
        self.captures = []
        self._inputs = Inputs()
        self._graphs.drop()

    def close(self) -> None:
        """Gives the input buffers back; graphs go with the programs that the engine holds."""
        self._closed = True
        self._inputs = Inputs()

    def record(
        self, shape: StepShape, step: Callable[[], StepOutput]
    ) -> tuple[list[Callable[[], object]], StepOutput]:
        """The pieces of a step, to be called in order, and the results that these write."""
        started, before = perf_counter(), self._graphs.allocated()
        pieces: list[Callable[[], object]] = []
        self._recording = pieces
        try:
            self._graphs.begin()
            output = _dense(step())
            pieces.append(self._graphs.end())
        except BaseException as error:
            try:
                self._graphs.end()
            except RuntimeError as broken:  # a capture that failed can't be ended well either
                _logger.debug("the broken capture says: %s", broken)
            if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                raise RuntimeError(
                    f"the step of {shape} can't be captured as a graph: {error} "
                    "(works: --enforce-eager)"
                ) from error
            raise
        finally:
            self._recording = None
        weak = self._graphs.weak
        held = StepOutput(
            weak(output.logits), tuple(weak(tap) for tap in output.taps), weak(output.fault)
        )
        spent = Capture(
            shape,
            perf_counter() - started,
            max(0, self._graphs.allocated() - before),
            sum(1 for piece in pieces if piece.__name__ != "again"),
        )
        self.captures.append(spent)
        _logger.info(
            "captured a step of %d rows in %.2f s, %.1f MiB, %d graphs",
            shape.rows,
            spent.seconds,
            spent.nbytes / 2**20,
            spent.segments,
        )
        return pieces, held

    def inputs(self, plan: Plan) -> dict[str, Tensor]:
        return self._inputs.like(plan)


def _dense(output: StepOutput) -> StepOutput:
    """Results whose addresses say all; a copy is part of the graph."""
    taps = tuple(tap.contiguous() for tap in output.taps)
    return StepOutput(output.logits.contiguous(), taps, output.fault.contiguous())


class _Program:
    """One shape: run, then captured, then replayed."""

    def __init__(self, executor: GraphExecutor, step: Step, shape: StepShape) -> None:
        self._executor = executor
        self._step = step
        self._shape = shape
        self._inputs: dict[str, Tensor] = {}
        self._pieces: list[Callable[[], object]] | None = None
        self._output: StepOutput | None = None
        self._weights: object = None
        self._kv: object = None

    def __call__(self, weights: object, plan: Plan, kv: object) -> StepOutput:
        first = not self._inputs
        if first:
            self._inputs = self._executor.inputs(plan)
            self._weights, self._kv = weights, kv
        elif self._weights is not weights or self._kv is not kv:
            return self._step(weights, plan, kv)
        given = plan.tensors()
        # A launch for each dtype, not for each tensor.
        torch._foreach_copy_(
            [self._inputs[name] for name in given], list(given.values()), non_blocking=True
        )
        held = plan.replace_tensors(self._inputs)
        if first:
            return self._step(weights, held, kv)
        if self._pieces is None:
            self._pieces, self._output = self._executor.record(
                self._shape, lambda: self._step(weights, held, kv)
            )
        for piece in self._pieces:
            piece()
        assert self._output is not None
        return self._output
