"""Log-probabilities in the forms of the two endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ml4core.engine.sampler_io import Logprob
from ml4core.serving.http.choice import TokenLogprobs
from ml4core.serving.tokenizer import Tokenizer

LEAST = -9999.0
"""In place of minus infinity, which JSON has no number for."""


def of_chat(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    """``choices[].logprobs``. ``top``: alternatives of each token to tell."""
    return {"content": [_chat_token(tokenizer, entry, top) for entry in entries]}


def of_completion(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None], ids: Sequence[int], offset: int
) -> dict[str, Any]:
    """``choices[].logprobs``: lists with a place for each of ``ids``.

    ``offset``: characters of the text before the first. An entry of None is that of a prompt's
    first token.
    """
    offsets, tokens, own, tops = [], [], [], []
    for token, entry in zip(ids, entries, strict=True):
        text = tokenizer.decode([token], skip_special_tokens=False)
        offsets.append(offset)
        offset += len(tokenizer.decode([token]))
        tokens.append(text)
        own.append(None if entry is None else _value(entry[token]))
        tops.append(None if entry is None else _top(tokenizer, entry))
    return {
        "text_offset": offsets,
        "token_logprobs": own,
        "tokens": tokens,
        "top_logprobs": tops,
    }


def of_prompt(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None]) -> list[Any]:
    """``prompt_logprobs``, as vLLM has them: an object by token id for each token, null for the
    first.
    """
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": _value(one),
                "rank": one.rank,
                "decoded_token": tokenizer.decode([token], skip_special_tokens=False),
            }
            for token, one in entry.items()
        }
        for entry in entries
    ]


def _chat_token(tokenizer: Tokenizer, entry: TokenLogprobs, top: int) -> dict[str, Any]:
    token = next(iter(entry))
    ranked = sorted(entry.items(), key=lambda item: item[1].rank)[:top]
    told = _token(tokenizer, token, entry[token])
    return told | {"top_logprobs": [_token(tokenizer, other, one) for other, one in ranked]}


def _token(tokenizer: Tokenizer, token: int, one: Logprob) -> dict[str, Any]:
    return {
        "token": tokenizer.decode([token], skip_special_tokens=False),
        "logprob": _value(one),
        "bytes": list(tokenizer.piece(token, skip_special_tokens=False)),
    }


def _top(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, one in sorted(entry.items(), key=lambda item: item[1].rank):
        # Parts of characters all read alike: the likeliest of them stands.
        found.setdefault(tokenizer.decode([token], skip_special_tokens=False), _value(one))
    return found


def _value(one: Logprob) -> float:
    return max(one.logprob, LEAST)
