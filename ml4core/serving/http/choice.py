"""One answer of a request: what came since it was told last."""

from __future__ import annotations

from dataclasses import dataclass, field

from ml4core.engine.outputs import DraftCounts, SequenceOutput
from ml4core.engine.sampler_io import Logprob
from ml4core.serving.chat import AnswerStream, ToolCallDelta
from ml4core.serving.http.plain_stream import PlainStream

TokenLogprobs = dict[int, Logprob]
"""The token that was made first, then the likeliest."""


@dataclass(slots=True)
class Piece:
    """What is to be told of an answer.

    Attributes:
        token_ids: that belong to it; what it ends with is among them.
        logprobs: an entry for each, if asked for.
        finish_reason: None while it goes on.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def __bool__(self) -> bool:
        """Whether it is worth a chunk."""
        return bool(self.content) or not self.plain

    @property
    def plain(self) -> bool:
        """Whether text is all that there is to tell, if anything."""
        return not (
            self.reasoning or self.tool_calls or self.logprobs or self.finish_reason is not None
        )


class Choice:
    """An answer on its way.

    Attributes:
        index: in the response.
        place: of its prompt in the request.
        prompt_logprobs: of its prompt's tokens, with the first answer to it, if asked for.
    """

    def __init__(self, index: int, place: int, stream: AnswerStream | PlainStream) -> None:
        self.index = index
        self.place = place
        self.stream = stream
        self.cached_tokens = 0
        self.drafts: DraftCounts | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._piece = Piece()
        self._content: list[str] = []

    @property
    def finished(self) -> bool:
        return self.stream.finish_reason is not None

    def take(self, output: SequenceOutput) -> bool:
        """Takes what the engine made; True if a stop string has ended the answer and the engine
        doesn't know.
        """
        stream, piece = self.stream, self._piece
        if stream.finish_reason is not None:
            return False
        delta = stream.push(output.token_ids, output.finish_reason)
        self.cached_tokens = output.cached_tokens
        self.drafts = output.drafts
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self._content.append(delta.content)
        piece.reasoning += delta.reasoning
        piece.tool_calls += delta.tool_calls
        piece.token_ids += output.token_ids[: delta.tokens]
        if output.logprobs is not None:
            piece.logprobs += output.logprobs[: delta.tokens]
        piece.finish_reason, piece.stop_reason = stream.finish_reason, stream.stop_reason
        return stream.finish_reason is not None and output.finish_reason is None

    def told(self) -> Piece:
        """What came since the last call. What is not worth a chunk is told with what follows."""
        piece = self._piece
        piece.content = "".join(self._content)
        self._content.clear()
        if piece:
            self._piece = Piece()
        return piece
