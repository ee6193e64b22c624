"""A completion's token ids to text, as they come."""

from __future__ import annotations

from collections.abc import Sequence

from ml4core.engine.outputs import FinishReason
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.stops import StopChecker
from ml4core.serving.chat import Delta
from ml4core.serving.tokenizer import Tokenizer


class PlainStream:
    """Text alone; else as ``AnswerStream``."""

    num_reasoning_tokens = 0

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        decoder = tokenizer.stream(skip_special_tokens=params.skip_special_tokens)
        self._checker = StopChecker(params, decoder)
        # The end of sequence is no stop that the request named.
        self._unnamed = None if params.ignore_eos else tokenizer.eos_id

    @property
    def stop(self) -> str | None:
        return self._checker.stop

    @property
    def num_tokens(self) -> int:
        return self._checker.num_tokens

    def push(self, token_ids: Sequence[int], reason: FinishReason | None = None) -> Delta:
        if self.finish_reason is not None:
            return Delta()
        checker, before = self._checker, self._checker.num_tokens
        last = token_ids[-1] if reason == "stop" and token_ids else None
        text = checker.push(*(token_ids if last is None else token_ids[:-1]))
        if checker.stop is not None:
            self.finish_reason, self.stop_reason = "stop", checker.stop
        elif reason is not None:
            text += checker.finish(last)
            self.finish_reason = reason
            self.stop_reason = None if last == self._unnamed else last
        return Delta(text, tokens=checker.num_tokens - before)


class EmptyStream(PlainStream):
    """Of an answer that was to have no token: the one that the engine made is left out."""

    def push(self, token_ids: Sequence[int], reason: FinishReason | None = None) -> Delta:
        if reason is not None:
            self.finish_reason = "length"
        return Delta()
