"""How tokens are chosen and when a sequence ends. Names and defaults are vLLM's."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ml4core.engine.errors import RequestError
from ml4core.engine.structured_outputs import StructuredOutputsParams

MAX_N = 16384
"""Sequences that one request may ask for."""

FP32_MAX = 3.4028234663852886e38
FP32_TINY = 2.0**-126
"""The least number of fp32 that every device divides by."""


@dataclass(frozen=True)
class SamplingParams:
    """Choices of one request. Lists are kept as tuples; what needs the model is checked by
    ``check``.

    Attributes:
        n: sequences to make of one prompt.
        presence_penalty: taken from the logit of every token in the output, -2 to 2.
        frequency_penalty: taken once for each time that a token is in the output, -2 to 2.
        repetition_penalty: divides positive logits, and multiplies others, of tokens in the prompt
            or the output; above 0, 1 does nothing.
        temperature: 0 takes the likeliest token, and top_k, top_p and min_p do nothing.
        top_p: keeps the likeliest tokens up to this probability, above 0, at most 1.
        top_k: keeps this many tokens; 0 or -1 keeps all.
        min_p: keeps tokens of at least this share of the likeliest one's probability, 0 to 1.
        seed: of the request's noise; None takes one that the engine derives.
        stop: texts that end the output.
        stop_token_ids: ids that end the output, beside the tokenizer's end of sequence.
        ignore_eos: go on after the end of sequence.
        max_tokens: tokens to make at most; None up to the end of the context.
        min_tokens: no stop, of any kind, before this many tokens are made.
        logprobs: likeliest tokens to report beside each token made; None reports nothing, 0 the
            token made alone. Of the model's own distribution, before any processing.
        prompt_logprobs: the same for the tokens of the prompt.
        logit_bias: added to the logits of these ids.
        allowed_token_ids: the only ids that may be made.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop in the text.
        detokenize: make text.
        structured_outputs: the form that the answer is to have; it ends when that is complete, even
            before ``min_tokens``.
        bad_words: not served; anything but empty is refused.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    bad_words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # else its characters would be taken for the stops
            object.__setattr__(self, "stop", (self.stop,))
        for field in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            object.__setattr__(self, field, _tuple(field, getattr(self, field)))
        self._check_shape_of_law()
        self._check_ids()
        self._check_ends()
        self._check_form()
        _integer("seed", self.seed, -(2**63), 2**63 - 1, "a signed 64-bit integer", optional=True)
        for field in ("logprobs", "prompt_logprobs"):
            _integer(field, getattr(self, field), 0, None, "None, or 0 or above", optional=True)
        if self.bad_words:
            raise RequestError(
                "bad_words", self.bad_words, "none: they are not served; logit_bias forbids ids"
            )

    def _check_shape_of_law(self) -> None:
        """The fields that say how one token is drawn."""
        up_to = f"{FP32_MAX:.8g}, the largest of fp32"
        _number("temperature", self.temperature, f"0 to {up_to}", low=0, high=FP32_MAX)
        _number("top_p", self.top_p, "above 0, at most 1", above=0, high=1)
        _integer("top_k", self.top_k, -1, None, "1 or above; 0 or -1 for no limit")
        _number("min_p", self.min_p, "0 to 1", low=0, high=1)
        for field in ("presence_penalty", "frequency_penalty"):
            _number(field, getattr(self, field), "-2 to 2", low=-2, high=2)
        penalty, least = self.repetition_penalty, f"{FP32_TINY:.8g}"
        works = f"above 0: {least} to {up_to}"
        _number("repetition_penalty", penalty, works, low=FP32_TINY, high=FP32_MAX)
        _integer("n", self.n, 1, MAX_N, f"1 to {MAX_N}")
        if self.n > 1 and self.temperature == 0:
            raise RequestError(
                "n",
                self.n,
                "1 at temperature 0, which makes every sequence alike; or a temperature",
            )

    def _check_ids(self) -> None:
        for field in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, field) or ():
                _integer(field, token, 0, None, "token ids, 0 or above")
        if self.allowed_token_ids == ():
            raise RequestError("allowed_token_ids", "empty", "at least one id, or None for all")
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError("logit_bias", self.logit_bias, "a mapping from token ids to numbers")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, None, "token ids, 0 or above, as integers")
            field = f"logit_bias of token {token}"
            _number(field, bias, "a finite fp32 number", low=-FP32_MAX, high=FP32_MAX)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _check_ends(self) -> None:
        for text in self.stop:
            if not isinstance(text, str):
                raise RequestError("stop", text, "texts")
            if not text:
                raise RequestError("stop", '""', "texts of at least one character")
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop",
                self.stop,
                "detokenize=True, since stops are looked for in the text; or stop_token_ids",
            )
        _integer("max_tokens", self.max_tokens, 1, None, "1 or above", optional=True)
        _integer("min_tokens", self.min_tokens, 0, None, "0 or above")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}"
            )

    def _check_form(self) -> None:
        form = self.structured_outputs
        if form is None:
            return
        if not isinstance(form, StructuredOutputsParams):
            raise RequestError("structured_outputs", form, "StructuredOutputsParams(...)")
        if self.ignore_eos:
            works = "false with structured_outputs: a form that is complete ends the answer"
            raise RequestError("ignore_eos", True, works)
        if self.allowed_token_ids is not None:
            works = "None with structured_outputs, which say what may come"
            raise RequestError("allowed_token_ids", self.allowed_token_ids, works)

    def check(self, vocab_size: int, max_model_len: int) -> None:
        """Raises ``RequestError`` for what this model can't serve."""
        ids = f"ids from 0 to {vocab_size - 1}"
        for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            bad = [token for token in getattr(self, field) or () if token >= vocab_size]
            if bad:
                raise RequestError(field, bad[0], ids)
        for field in ("logprobs", "prompt_logprobs"):
            count = getattr(self, field)
            if count is not None and count > vocab_size:
                raise RequestError(field, count, f"at most the vocabulary, {vocab_size}")
        if self.min_tokens >= max_model_len:
            raise RequestError(
                "min_tokens",
                self.min_tokens,
                f"at most {max_model_len - 1}: the context is {max_model_len} tokens, and the "
                "prompt needs one",
            )

    def length_limit(self, prompt_len: int, max_model_len: int) -> int:
        """Tokens that a sequence may reach, its prompt included."""
        if self.max_tokens is None:
            return max_model_len
        return min(prompt_len + self.max_tokens, max_model_len)

    @cached_property
    def edits(self) -> bool:
        """Whether logits are changed before the temperature."""
        return bool(
            self.logit_bias
            or self.allowed_token_ids is not None
            or self.min_tokens
            or self.penalises
        )

    @cached_property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens before."""
        neutral = (0, 0, 1)
        mine = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return mine != neutral

    @cached_property
    def truncates(self) -> bool:
        """Whether a draw leaves unlikely tokens out."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def child_seed(seed: int, i: int) -> int:
    """The seed, a signed 64-bit integer, of sequence ``i`` of a request with this seed.

    Sequence 0 keeps the seed, so that it is the one that n=1 makes. The others are hashed: sums
    would give requests of neighbouring seeds the same sequences.
    """
    if i == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{i}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _tuple(field: str, value: Any) -> tuple[Any, ...] | None:
    if value is None:
        return None if field == "allowed_token_ids" else ()
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise RequestError(field, value, "a list")
    return tuple(value)


def _number(
    field: str,
    value: Any,
    remedy: str,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
) -> None:
    """Raises unless the value is a finite number within the bounds."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        good = good and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        good = False
    if (
        not good
        or (low is not None and value < low)
        or (above is not None and value <= above)
        or (high is not None and value > high)
    ):
        raise RequestError(field, value, remedy)


def _integer(
    field: str,
    value: Any,
    low: int,
    high: int | None,
    remedy: str,
    *,
    optional: bool = False,
) -> None:
    """Raises unless the value is an integer within the bounds, or None if that may be."""
    if value is None and optional:
        return
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or value < low or (high is not None and value > high):
        raise RequestError(field, value, remedy)
