"""One request on its way: what the engine made for it, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ml4core.engine.outputs import DraftCounts, FinishReason, SequenceOutput
from ml4core.engine.sampler_io import Logprob as RawLogprob
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.stops import StopChecker
from ml4core.serving.inputs import Prompt
from ml4core.serving.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from ml4core.serving.tokenizer import Tokenizer


class News(NamedTuple):
    """What an output of the engine came to.

    Attributes:
        text: further characters of the answer.
        stopped: a stop string has ended it, and the engine doesn't know: abort it there.
    """

    text: str
    stopped: bool


class Answers:
    """The answers to one prompt. Not thread-safe."""

    def __init__(
        self, request_id: str, prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer
    ) -> None:
        self.request_id = request_id
        self.params = params
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._answers = [_Answer(params, tokenizer) for _ in range(params.n)]
        self._cached: int | None = None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self._answers)

    def take(self, output: SequenceOutput) -> News:
        """Takes what a step made. Does nothing for an answer that has ended."""
        answer = self._answers[output.index]
        if answer.finish_reason is not None:
            return News("", False)
        if self._cached is None:
            self._cached = output.cached_tokens
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = [
                None if entry is None else self._told(entry) for entry in output.prompt_logprobs
            ]
        text = answer.take(output)
        answer.drafts = output.drafts
        new = output.token_ids[: answer.num_new]
        answer.token_ids += new
        if output.logprobs is not None:
            for token, entry in zip(new, output.logprobs, strict=False):
                answer.logprobs.append(self._told(entry))
                answer.logprob += entry[token].logprob
        return News(text, answer.finish_reason is not None and output.finish_reason is None)

    def output(self) -> RequestOutput:
        """All up to now; later steps do not change it."""
        return RequestOutput(
            self.request_id,
            self._prompt.text,
            self._prompt.token_ids,  # one list for all: a long prompt costs much a step
            self._prompt_logprobs,
            [self._completion(index, answer) for index, answer in enumerate(self._answers)],
            self.finished,
            self._cached,
        )

    def _completion(self, index: int, answer: _Answer) -> CompletionOutput:
        asked = self.params.logprobs is not None
        return CompletionOutput(
            index,
            answer.text,
            list(answer.token_ids),
            answer.logprob if asked else None,
            list(answer.logprobs) if asked else None,
            answer.finish_reason,
            answer.stop_reason,
            None if answer.drafts is None else answer.drafts.copy(),
        )

    def _told(self, entry: Mapping[int, RawLogprob]) -> TokenLogprobs:
        decode = self._tokenizer.decode
        return {
            token: Logprob(one.logprob, one.rank, decode([token], skip_special_tokens=False))
            for token, one in entry.items()
        }


class _Answer:
    """One of them. ``num_new``: tokens of the output taken last that belong to it."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.num_new = 0
        self.drafts: DraftCounts | None = None
        skip = params.skip_special_tokens
        decoder = tokenizer.stream(skip_special_tokens=skip) if params.detokenize else None
        self._checker = StopChecker(params, decoder)
        # The end of sequence is no stop that the request named.
        self._unnamed = None if params.ignore_eos else tokenizer.eos_id

    def take(self, output: SequenceOutput) -> str:
        ids, reason, checker = output.token_ids, output.finish_reason, self._checker
        before = checker.num_tokens
        last = ids[-1] if reason == "stop" else None
        text = checker.push(*(ids if last is None else ids[:-1]))
        if checker.stop is not None:
            self.finish_reason, self.stop_reason = "stop", checker.stop
        elif reason is not None:
            text += checker.finish(last)
            self.finish_reason = reason
            self.stop_reason = None if last == self._unnamed else last
        self.num_new = checker.num_tokens - before
        self.text += text
        return text
