"""How answers are written: text or JSON, as they come or at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ml4core.cli import output
from ml4core.engine.outputs import DraftCounts
from ml4core.serving.outputs import CompletionOutput, RequestOutput, TokenLogprobs

NO_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no number for."""


class InOrder:
    """Writes each output as soon as all before it are there: as JSON lines, or as text."""

    def __init__(self, count: int, *, as_json: bool) -> None:
        self._heads = count > 1
        self._as_json = as_json
        self._early: dict[int, RequestOutput] = {}
        self._next = 0

    def take(self, place: int, done: RequestOutput) -> None:
        self._early[place] = done
        while self._next in self._early:
            place, done = self._next, self._early.pop(self._next)
            self._next += 1
            output.write(self._lines(place, done) if self._as_json else self._text(place, done))

    @staticmethod
    def _lines(place: int, done: RequestOutput) -> str:
        return "".join(json.dumps(record) + "\n" for record in records(place, done))

    def _text(self, place: int, done: RequestOutput) -> str:
        several = len(done.outputs) > 1
        text = ""
        for one in done.outputs:
            answer = f", answer {one.index}" if several else ""
            head = f"==> prompt {place}{answer} <==\n" if several or self._heads else ""
            text += f"{head}{one.text}\n"
        return text


def records(place: int, done: RequestOutput) -> list[dict[str, Any]]:
    """JSON-able data of each answer to the prompt at a place; ``answer`` if there are several."""
    return [_record(place, done, one) for one in done.outputs]


def throughput(outputs: Sequence[RequestOutput], seconds: float) -> str:
    prompt = sum(len(done.prompt_token_ids) for done in outputs)
    made = sum(len(one.token_ids) for done in outputs for one in done.outputs)
    seconds = max(seconds, 1e-9)
    return (
        f"{len(outputs)} prompts in {seconds:.2f} s: {prompt / seconds:.1f} prompt tokens/s, "
        f"{made / seconds:.1f} output tokens/s{_acceptance(outputs)}"
    )


def _acceptance(outputs: Sequence[RequestOutput]) -> str:
    """What became of all drafts, if there were any."""
    total = DraftCounts()
    for done in outputs:
        for one in done.outputs:
            if one.drafts is not None:
                total.merge(one.drafts)
    if not total.drafts:
        return ""
    places = " ".join(f"{share:.2f}" for share in total.acceptance_by_position)
    return f"; drafts: {total.acceptance_length:.2f} tokens a step (accepted by place: {places})"


def _record(place: int, done: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {"index": place}
    if len(done.outputs) > 1:
        record["answer"] = one.index
    record |= {
        "prompt_tokens": len(done.prompt_token_ids),
        "token_ids": one.token_ids,
        "text": one.text,
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
    }
    if one.drafts is not None:
        record["drafts"] = {
            "judged": one.drafts.drafts,
            "draft_tokens": one.drafts.draft_tokens,
            "accepted_by_position": one.drafts.accepted,
            "acceptance_length": one.drafts.acceptance_length,
        }
    if one.logprobs is not None:
        record["cumulative_logprob"] = _finite(one.cumulative_logprob or 0.0)
        record["logprobs"] = [_entry(entry) for entry in one.logprobs]
    return record


def _entry(entry: TokenLogprobs) -> list[Mapping[str, Any]]:
    """The token made first, then the likeliest in order."""
    return [
        {
            "token_id": token,
            "token": one.decoded_token,
            "logprob": _finite(one.logprob),
            "rank": one.rank,
        }
        for token, one in entry.items()
    ]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else NO_LOGPROB
