"""What drafts are worth in time: the same prompts with and without them, in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ml4core.bench.timing import Span, Spread, in_turns, ratio, spread, timed
from ml4core.engine.args import EngineArgs
from ml4core.engine.sampling_params import SamplingParams
from ml4core.evaluation import drafting
from ml4core.evaluation.opened import Tell, opened
from ml4core.serving.llm import LLM
from ml4core.serving.outputs import RequestOutput
from ml4core.serving.tokenizer import Tokenizer

LENGTH = 512
TURNS = 3
"""Over each prompt; a first one of every kind warms up."""


@dataclass(frozen=True)
class SpeedUp:
    """Of one kind of text, one request at a time, at temperature 0.

    Attributes:
        tokens: made in a turn, over all prompts; as many with drafts as without.
        alike: whether every token was the same with drafts and without.
        length: tokens that a window gave on average.
        plain, drafted: tokens a second by the clock on the wall.
        ratio, cpu_ratio: drafted over plain, turn by turn, by that clock and by the time of the
            process's own threads.
    """

    kind: str
    tokens: int
    alike: bool
    length: float
    plain: Spread
    drafted: Spread
    ratio: Spread
    cpu_ratio: Spread


def measure(
    args: EngineArgs,
    tokenizer: Tokenizer,
    texts: Mapping[str, str],
    limit: int | None,
    tell: Tell,
) -> list[SpeedUp]:
    """At most ``limit`` prompts of each kind. Raises as ``drafting.measure`` does."""
    kinds = {kind: prompts[:limit] for kind, prompts in drafting.prompts(tokenizer, texts).items()}
    config: Mapping[str, Any] = args.speculative_config or drafting.DEFAULT_CONFIG
    found = []
    with (
        opened(args, LENGTH, max_num_seqs=1, speculative_config=config) as drafted,
        opened(args, LENGTH, max_num_seqs=1, speculative_config={}) as plain,
    ):
        for done, (kind, prompts) in enumerate(kinds.items()):
            tell("speed of drafts", done, len(kinds))
            found.append(_speed_up(kind, prompts, plain, drafted))
        tell("speed of drafts", len(kinds), len(kinds))
    return found


def _speed_up(kind: str, prompts: Sequence[Sequence[int]], plain: LLM, drafted: LLM) -> SpeedUp:
    outputs: dict[str, list[RequestOutput]] = {}

    def run(name: str, llm: LLM) -> Span:
        def all_alone() -> None:
            outputs[name] = [_answer(llm, prompt) for prompt in prompts]

        return timed(all_alone)

    for llm in (plain, drafted):
        _answer(llm, prompts[0])
    without, with_ = in_turns([lambda: run("plain", plain), lambda: run("drafted", drafted)], TURNS)
    made = {
        name: [output.outputs[0].token_ids for output in some] for name, some in outputs.items()
    }
    tokens = sum(map(len, made["plain"]))
    return SpeedUp(
        kind,
        tokens,
        made["plain"] == made["drafted"],
        drafting.counts_of(outputs["drafted"]).acceptance_length,
        spread([tokens / span.wall for span in without]),
        spread([tokens / span.wall for span in with_]),
        ratio(without, with_, "wall"),
        ratio(without, with_, "cpu"),
    )


def _answer(llm: LLM, prompt: Sequence[int]) -> RequestOutput:
    params = SamplingParams(max_tokens=drafting.TOKENS, temperature=0.0)
    (output,) = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
    return output
