"""Stop strings: found in the text as it is made, across the borders of tokens."""

from __future__ import annotations

from typing import Protocol

from ml4core.engine.sampling_params import SamplingParams


class TextDecoder(Protocol):
    """Text of ids as they come, in whole characters."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class StopChecker:
    """The text of one sequence, up to its stop.

    The text is read a character at a time: the first character that completes a stop string ends
    it, and if it completes several, the longest counts. So the result does not depend on how the
    text is divided into tokens, nor the tokens into steps. A stop completed by one of the first
    ``min_tokens`` tokens is passed over.

    Attributes:
        stop: the stop string that was found.
        num_tokens: tokens that belong to the output: those pushed, up to the one that completed
            the stop. Ids and logprobs behind it are to be dropped.
    """

    def __init__(self, params: SamplingParams, decoder: TextDecoder | None) -> None:
        """``decoder`` is of this sequence alone; it may be None only without ``detokenize``."""
        if params.detokenize and decoder is None:
            raise ValueError("a decoder is needed for detokenize=True")
        self.stop: str | None = None
        self.num_tokens = 0
        self._decoder = decoder if params.detokenize else None
        self._matchers = [_Matcher(text) for text in dict.fromkeys(params.stop)]
        self._min_tokens = params.min_tokens
        self._include = params.include_stop_str_in_output
        self._held = ""  # the end of the text, which may be the beginning of a stop

    def push(self, *token_ids: int) -> str:
        """The text that these ids make safe to give away. Ids behind a stop are ignored."""
        given = []
        for token in token_ids:
            if self.stop is not None:
                break
            self.num_tokens += 1
            if self._decoder is not None:
                given.append(self._read(self._decoder.push(token)))
        return "".join(given)

    def finish(self, stop_token_id: int | None = None) -> str:
        """The rest of the text, for a sequence that ended otherwise than by a stop string.

        ``stop_token_id`` is the id that ended it, if one did, and was not pushed. It counts as a
        token; its text is given if stops are to be included.
        """
        if self.stop is not None:
            return ""
        text, self._held = self._held, ""
        if stop_token_id is not None:
            self.num_tokens += 1
        if self._decoder is None:
            return text
        if stop_token_id is not None and self._include:
            text += self._decoder.push(stop_token_id)
        return text + self._decoder.flush()

    def _read(self, text: str) -> str:
        """Takes the text of the token counted last; returns what may be given away."""
        if not self._matchers:
            return text
        ignored = self.num_tokens <= self._min_tokens
        for i, character in enumerate(text):
            done = [m for m in self._matchers if m.step(character)]
            if done and not ignored:
                self.stop = max((m.text for m in done), key=len)
                read = self._held + text[: i + 1]
                self._held = ""
                return text[: i + 1] if self._include else read[: len(read) - len(self.stop)]
        if self._include:
            return text
        read = self._held + text
        safe = len(read) - max(m.matched for m in self._matchers)
        self._held = read[safe:]
        return read[:safe]


class _Matcher:
    """Knuth-Morris-Pratt: how much of ``text`` the characters read so far end with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # For each length of a prefix: the longest shorter prefix that it ends with.
        self._shorter = [0] * (len(text) + 1)
        for length in range(2, len(text) + 1):
            self._shorter[length] = self._advance(self._shorter[length - 1], text[length - 1])

    def step(self, character: str) -> bool:
        """Reads one; True if it completes the text. ``matched`` is then of what may follow."""
        self.matched = self._advance(self.matched, character)
        if self.matched < len(self.text):
            return False
        self.matched = self._shorter[self.matched]
        return True

    def _advance(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._shorter[matched]
        return matched + (self.text[matched] == character)
