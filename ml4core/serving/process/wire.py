"""What a server and its engine's process tell each other, and how it goes over a socket.

A message is a pickle behind its length; the server may send several as one list. Both ends are
processes of one server, and nobody else holds the socket.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ml4core.engine.image_inputs import PlacedImage
from ml4core.engine.outputs import EngineStats, SequenceOutput
from ml4core.engine.sampling_params import SamplingParams

_LENGTH = struct.Struct("!Q")


# From the server.


class Start(NamedTuple):
    """The first message. ``open`` gives what is served: ``(Facts, Opened engine)``."""

    open: Callable[[], Any]


class Add(NamedTuple):
    """A request. ``id``: one that was never used."""

    id: int
    prompt_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    images: tuple[PlacedImage, ...] = ()


class Abort(NamedTuple):
    """Ends a request, or one of its answers. Those that have ended stay as they are."""

    id: int
    answer: int | None = None


class Stop(NamedTuple):
    """Close the engine and end."""


# From the engine's process.


@dataclass(frozen=True)
class Facts:
    """What a server has to know of the engine.

    Attributes:
        folder: of the model.
        tokenizer: its file.
        max_model_len: tokens of a prompt with its answer at most.
        max_num_seqs: sequences that run together at most.
        room: tokens of one sequence that the page pools hold at most.
        report: the start-up report, JSON-able.
    """

    folder: str
    tokenizer: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    room: int
    report: dict[str, Any] = field(repr=False)


class Failed(NamedTuple):
    """It could not be opened. ``kind`` of ``arguments`` is the error."""

    kind: Callable[..., BaseException]
    arguments: tuple[Any, ...]


class Made(NamedTuple):
    """What steps made.

    Attributes:
        outputs: fields of ``SequenceOutput``, its request's id as a number.
        started: (request, seconds that it waited) of each request that took its first row.
        stats: where some time has passed since the last.
        steps: of the engine, up to now.
    """

    outputs: list[tuple[Any, ...]]
    started: list[tuple[int, float]]
    stats: EngineStats | None
    steps: int


class Rejected(NamedTuple):
    """A request that can't be served; nothing of it was taken. See ``RequestError``; without a
    ``field`` it is the engine that is at fault.
    """

    id: int
    field: str
    value: str
    remedy: str


class Stopped(NamedTuple):
    """The engine serves no more: ``code`` and ``text`` of its fault."""

    code: str
    text: str


def frame(message: object) -> bytes:
    """A message as it goes over the socket."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Messages out of a stream of bytes."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that these bytes complete."""
        held = self._bytes
        held += data
        start = 0
        try:
            while len(held) - start >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(held, start)
                end = start + _LENGTH.size + size
                if len(held) < end:
                    return
                body = bytes(memoryview(held)[start + _LENGTH.size : end])
                start = end
                yield pickle.loads(body)
        finally:
            del held[:start]


def packed(output: SequenceOutput) -> tuple[Any, ...]:
    """An output for ``Made``. A tuple costs a third of what the object costs to pickle."""
    return (
        int(output.request_id),
        output.index,
        output.token_ids,
        output.finish_reason,
        output.prompt_tokens,
        output.cached_tokens,
        output.output_tokens,
        output.logprobs,
        output.prompt_logprobs,
        None if output.drafts is None else output.drafts.copy(),
    )
