"""Runs a list of prompts to their ends."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Literal

from ml4core.api import FaultError
from ml4core.engine.core import EngineCore
from ml4core.engine.sampling_params import SamplingParams

OnToken = Callable[[int, int], None]
"""Told (index of the completion, token id) as each token is made."""


@dataclass(frozen=True)
class Completion:
    """One answer. ``stop``: a stop id was made (it is the last id); ``length``: a limit was
    reached; ``error``: its grammar could not tell any more what may come.
    """

    token_ids: list[int]
    finish_reason: Literal["stop", "length", "error"]


def generate(
    core: EngineCore,
    prompts: Seq[Seq[int]],
    params: SamplingParams,
    seed: int,
    on_token: OnToken | None = None,
) -> list[Completion]:
    """``params.n`` completions a prompt, in order. All prompts are checked before the first step.

    Prompt ``i`` draws with the seed of ``params``, or else ``seed``, plus i. Raises
    ``RequestError`` for bad input, ``FaultError`` once the engine has stopped.
    """
    for index, ids in enumerate(prompts):
        core.check(f"prompt {index}" if index else "prompt", ids, params)
    base = seed if params.seed is None else params.seed
    made: list[list[int]] = [[] for _ in range(len(prompts) * params.n)]
    ends: dict[int, Literal["stop", "length", "error"]] = {}
    names = [f"prompt {index}" for index in range(len(prompts))]
    place_of = {name: index * params.n for index, name in enumerate(names)}
    try:
        for index, ids in enumerate(prompts):
            own = (base + index + 2**63) % 2**64 - 2**63  # wraps as 64-bit integers do
            core.add_request(names[index], ids, replace(params, seed=own))
        while len(ends) < len(made):
            for output in core.step():
                place = place_of.get(output.request_id)
                if place is None:  # of a call that was broken off
                    continue
                place += output.index
                for token in output.token_ids:
                    made[place].append(token)
                    if on_token is not None:
                        on_token(place, token)
                if output.finish_reason in ("stop", "length", "error"):
                    ends[place] = output.finish_reason
            if core.fault is not None:
                raise FaultError(core.fault) from core.cause
    except BaseException:
        for name in names:
            core.abort(name)
        raise
    return [Completion(ids, ends[place]) for place, ids in enumerate(made)]
