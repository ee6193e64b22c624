"""One step of the engine as tensors of fixed shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of consecutive requests that are handled alike.

    Attributes:
        requests: padded count of requests.
        rows: padded count of rows.
        max_rows: rows of one request at most.
    """

    requests: int
    rows: int
    max_rows: int


@dataclass(frozen=True)
class StepShape:
    """Everything about a step that a compiled program depends on.

    Rows stand in the order [1-row decodes][verify windows][prefill chunks, shortest first].

    Attributes:
        pages: padded pages a request, by KV group.
        logits: rows whose logits are wanted, padded.
        images: rows of ``StepPlan.image_embeddings``, padded; 0 in a step without images.
    """

    decode: Segment
    verify: Segment
    prefill: Segment
    pages: tuple[tuple[str, int], ...]
    logits: int
    images: int = 0

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments that have rows, in row order."""
        return tuple(s for s in (self.decode, self.verify, self.prefill) if s.rows)

    @property
    def rows(self) -> int:
        return self.decode.rows + self.verify.rows + self.prefill.rows

    @property
    def requests(self) -> int:
        return self.decode.requests + self.verify.requests + self.prefill.requests

    @property
    def kind(self) -> str:
        """``decode``, ``verify``, ``prefill`` or ``mixed``: the step kinds that providers are bound
        for.
        """
        names = [n for n in ("decode", "verify", "prefill") if getattr(self, n).rows]
        return names[0] if len(names) == 1 else "mixed"


@dataclass(frozen=True)
class StepBuckets:
    """The sizes that a session compiles steps for: each of a step's is padded to the smallest that
    holds it. One beyond the largest keeps its exact size, as does each where there are none; what
    is empty, such as a segment without rows, stays empty.

    All are ascending, from 1. Raises ``ValueError`` for what isn't.

    Attributes:
        decode, verify: requests of these segments.
        prefill_requests, prefill_rows: of the prefill segment. With rows stated, its ``max_rows``
            is the padded count of its rows.
        pages: pages a request.
        logits: rows whose logits are wanted.
    """

    decode: tuple[int, ...] = ()
    verify: tuple[int, ...] = ()
    prefill_requests: tuple[int, ...] = ()
    prefill_rows: tuple[int, ...] = ()
    pages: tuple[int, ...] = ()
    logits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            sizes = getattr(self, name)
            if any(size <= before for before, size in zip((0, *sizes), sizes, strict=False)):
                raise ValueError(f"{name} of the step buckets are {sizes}; they must ascend from 1")

    def padded(self, name: str, size: int) -> int:
        """What a size of this name is padded to."""
        if size == 0:
            return 0
        return next((bucket for bucket in getattr(self, name) if bucket >= size), size)


@dataclass(frozen=True)
class StepPlan:
    """The input of a forward. ``T`` rows, ``R`` requests, ``B`` pages, ``J`` logit rows; all padded
    to ``shape``.

    Padding leaves no trace: a padded row has slot -1 and visible length 0, a padded request has
    page 0 only, and results of padded rows are finite and unused. Page 0 of every group is the null
    page: never written, never shared out. In the decode and verify segments a padded request holds
    its padded rows, so that ``query_start`` is the same for any count of real ones; in the prefill
    segment it holds none, and padded rows at the end belong to no request.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, global, from 0.
        row_request: [T] int64, the request of each row.
        query_start: [R + 1] int32, first row of each request.
        visible: [T] int32, keys that a row may see: position + 1.
        block_tables: by group, [R, B] int32 page ids.
        slots: by group, [T] int64 where a row's token is written: page * block_size + offset.
        logits_indices: [J] int64 rows.
        image_index: [T] int64, the row of ``image_embeddings`` that stands for a row's token; -1
            for a row whose token stands for itself. None, as the next one, in a step without
            images.
        image_embeddings: [M, H], ``M`` being ``shape.images``; rows of padding are taken by none.
    """

    shape: StepShape
    token_ids: Tensor
    positions: Tensor
    row_request: Tensor
    query_start: Tensor
    visible: Tensor
    block_tables: Mapping[str, Tensor]
    slots: Mapping[str, Tensor]
    logits_indices: Tensor
    image_index: Tensor | None = None
    image_embeddings: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, in one order for all plans; those of groups are
        ``block_tables.<group>`` and ``slots.<group>``.
        """
        found = {name: getattr(self, name) for name in _PLAIN}
        if self.image_index is not None:
            found |= {name: getattr(self, name) for name in _IMAGES}
        for name in _GROUPED:
            found |= {f"{name}.{group}": one for group, one in getattr(self, name).items()}
        return found

    def replace_tensors(self, tensors: Mapping[str, Tensor]) -> StepPlan:
        """The plan of the same shape with these tensors in place of its own, by the names of
        ``tensors()``; those that are not named stay. Raises ``ValueError`` for other names.
        """
        if unknown := sorted(tensors.keys() - self.tensors().keys()):
            raise ValueError(f"{unknown} are no tensors of a plan; it has {list(self.tensors())}")
        plain: dict[str, Any] = {
            name: one for name, one in tensors.items() if name in (*_PLAIN, *_IMAGES)
        }
        grouped: dict[str, Any] = {
            name: {
                group: tensors.get(f"{name}.{group}", one)
                for group, one in getattr(self, name).items()
            }
            for name in _GROUPED
        }
        return replace(self, **plain, **grouped)


_PLAIN = (
    "token_ids",
    "positions",
    "row_request",
    "query_start",
    "visible",
    "logits_indices",
)
_IMAGES = ("image_index", "image_embeddings")
_GROUPED = ("block_tables", "slots")


class StepOutput(NamedTuple):
    """The result of a forward. An executor may give the same memory in each step, see
    ``StepExecutor``.

    Attributes:
        logits: [J, vocab] fp32.
        taps: the summed residual [T, H] after each tapped layer, in the spec's order.
        fault: [] bool: a real row saw a NaN score, or a wanted logit is NaN.
    """

    logits: Tensor
    taps: tuple[Tensor, ...]
    fault: Tensor


class StepExecutor(Protocol):
    """Turns a step into what runs for one shape: itself on a CPU, a captured graph, or a compiled
    program. Steps are the forward, with a ``StepPlan``, and a drafter's block behind it, with a
    ``DraftStep``; an executor knows of both that they have ``tensors`` and ``replace_tensors``.

    What a compiled callable returns lives until the executor's next call, of any shape: the engine
    queues all that reads it, or copies it, on the same stream before. The plan's tensors belong to
    the engine, which may write to them once the call has returned: a graph copies them into
    buffers of its own (``StepPlan.tensors``), in the order of the stream. What it copies may be a
    result of the call before.

    It may be a ``CapturingExecutor``.
    """

    def compile(
        self, step: Callable[..., StepOutput], shape: StepShape
    ) -> Callable[..., StepOutput]:
        """A callable with ``step``'s arguments (weights, plan, caches) that runs it at this
        shape.
        """
        ...

    def eager_break(self, function: F) -> F:
        """Marks a call that stays outside of a captured graph. It writes into ``out=`` arguments
        and returns nothing.
        """
        ...


@dataclass(frozen=True)
class Capture:
    """What a capture cost.

    Attributes:
        seconds: of the host.
        nbytes: what the allocator took for it; little after the first, where they share a pool.
        segments: graphs that the step was cut into.
    """

    shape: StepShape
    seconds: float
    nbytes: int
    segments: int


class CapturingExecutor(StepExecutor, Protocol):
    """An executor that records steps and replays them. The engine has it capture as it starts:
    largest shapes first, by two calls of a program with a plan of padding.
    """

    @property
    def captures(self) -> Sequence[Capture]:
        """What each capture has cost, in order, since ``drop``."""
        ...

    def captures_shape(self, shape: StepShape) -> bool:
        """Whether a program of this shape is captured, in its second call at the latest."""
        ...

    def drop(self) -> None:
        """Gives back what was captured. Programs made before are not called any more."""
        ...
