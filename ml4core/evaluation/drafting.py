"""How many drafts a model accepts from its drafter, by what it writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ml4core.engine.args import EngineArgs
from ml4core.engine.outputs import DraftCounts
from ml4core.engine.sampling_params import SamplingParams
from ml4core.evaluation import tool_calls
from ml4core.evaluation.opened import Tell, batches, opened
from ml4core.serving.outputs import RequestOutput
from ml4core.serving.tokenizer import Tokenizer

LENGTH = 1024
TOKENS = 96
"""Made of each prompt, at most."""
OPENING = 64
"""Tokens of a text that is gone on with."""
PROMPTS = 6
"""Of each kind."""
DEFAULT_CONFIG: Mapping[str, Any] = MappingProxyType({"method": "dspark"})

STORIES = (
    "Tell me a story about a rabbit named Pip.",
    "Tell me a story about a girl who finds a key.",
    "Write a short story about a brave mouse.",
    "Tell me a bedtime story about a bear named Bruno.",
    "Please tell me a story about a boat and a storm.",
    "Tell me a story about two friends who share.",
)
SUMS = (
    "What is 12 + 30?",
    "Compute 90 - 18.",
    "Emma is 12 years old. Leo is 6 years older. How old is Leo?",
    "Tom has 6 balls. Ana gives Tom 3 more. How many balls does Tom have now?",
    "What is 8 times 7?",
    "What is the opposite of cold?",
)


@dataclass(frozen=True)
class Acceptance:
    """Of one kind of text, at temperature 0.

    Attributes:
        windows: that were judged.
        length: tokens that a window gives on average; 1 without drafts.
        by_position: part of the windows in which each place was accepted.
    """

    kind: str
    windows: int
    length: float
    by_position: tuple[float, ...]


def measure(
    args: EngineArgs,
    tokenizer: Tokenizer,
    texts: Mapping[str, str],
    limit: int | None,
    tell: Tell,
) -> list[Acceptance]:
    """At most ``limit`` prompts of each kind. Without --speculative-config the drafter's own depth
    holds. Raises as ``open_engine`` does, if the checkpoint has no drafter.
    """
    kinds = {
        kind: some[: min(limit or PROMPTS, PROMPTS)]
        for kind, some in prompts(tokenizer, texts).items()
    }
    config: Mapping[str, Any] = args.speculative_config or DEFAULT_CONFIG
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    found, done = [], 0
    total = sum(map(len, kinds.values()))
    with opened(args, LENGTH, speculative_config=config) as llm:
        for kind, some in kinds.items():
            outputs = batches(
                llm,
                some,
                params,
                lambda count, before=done: tell("drafts", before + count, total),  # type: ignore[misc]
            )
            counts = counts_of(outputs)
            done += len(some)
            found.append(
                Acceptance(
                    kind,
                    counts.drafts,
                    counts.acceptance_length,
                    tuple(counts.acceptance_by_position),
                )
            )
    return found


def counts_of(outputs: Iterable[RequestOutput]) -> DraftCounts:
    """Of all answers together."""
    counts = DraftCounts()
    for output in outputs:
        if (drafts := output.outputs[0].drafts) is not None:
            counts.merge(drafts)
    return counts


def prompts(tokenizer: Tokenizer, texts: Mapping[str, str]) -> dict[str, list[list[int]]]:
    """Token ids by kind of text: beginnings of chats, and of ``texts`` by their names."""

    def chat(text: str) -> list[int]:
        return tokenizer.encode_chat([{"role": "user", "content": text}])

    cases = tool_calls.load_cases()["tools"]
    ids = {name: tokenizer.encode(text) for name, text in texts.items()}
    steps = {name: max(1, (len(all) - OPENING) // PROMPTS) for name, all in ids.items()}
    return {
        "stories": [chat(text) for text in STORIES],
        "short answers": [chat(text) for text in SUMS],
        "tool calls": [tool_calls.encode(tokenizer, c["messages"], c["tools"]) for c in cases],
        **{
            name: [[all[0], *all[i * steps[name] + 1 :][:OPENING]] for i in range(PROMPTS)]
            for name, all in ids.items()
        },
    }
