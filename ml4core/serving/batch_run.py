"""Runs a list of prompts together, to the ends of their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ml4core.api import FaultError
from ml4core.serving.answers import Answers
from ml4core.serving.inputs import Job
from ml4core.serving.outputs import RequestOutput
from ml4core.serving.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ml4core.engine.llm import Engine

OnText = Callable[[int, int, str], None]
"""Told (place of the job, index of the answer, further text) as text is made."""
OnDone = Callable[[int, RequestOutput], None]
"""Told (place of the job, its output) once all answers to it have ended."""


def run_jobs(
    engine: Engine,
    tokenizer: Tokenizer,
    jobs: Sequence[Job],
    numbers: Iterator[int],
    *,
    on_text: OnText | None = None,
    on_done: OnDone | None = None,
) -> list[RequestOutput]:
    """The outputs, in the order of ``jobs``. All are checked before the first step.

    Args:
        numbers: gives the id of each request; none may come twice in the engine's life.

    Raises ``RequestError`` for what can't be served, ``FaultError`` once the engine has stopped.
    Whatever ends the call, no request of it stays open.
    """
    core = engine.core
    for job in jobs:
        core.check(job.name, job.prompt.token_ids, job.params)
    done: dict[int, RequestOutput] = {}
    waiting: dict[str, tuple[int, Answers]] = {}
    try:
        for place, job in enumerate(jobs):
            name, prompt = str(next(numbers)), job.prompt
            waiting[name] = place, Answers(name, prompt, job.params, tokenizer)
            core.add_request(
                name,
                prompt.token_ids,
                job.params,
                priority=job.priority,
                cache_salt=prompt.cache_salt,
            )
        while waiting:
            outputs = core.step()
            if core.fault is not None:  # no token of the step that failed leaves
                raise FaultError(core.fault) from core.cause
            for output in outputs:
                if output.request_id not in waiting:  # ended by its text, or of a broken-off call
                    continue
                place, answers = waiting[output.request_id]
                text, stopped = answers.take(output)
                if stopped:
                    core.abort(output.request_id, output.index)
                if text and on_text is not None:
                    on_text(place, output.index, text)
                if answers.finished:
                    del waiting[output.request_id]
                    done[place] = answers.output()
                    if on_done is not None:
                        on_done(place, done[place])
        while core.has_work and core.fault is None:  # what a stop string left in flight
            core.step()
        if core.fault is not None:  # every answer is of a step before
            engine.tell_fault()
    except BaseException:
        for name in waiting:
            core.abort(name)
        if core.fault is not None:
            engine.tell_fault()
        raise
    return [done[place] for place in range(len(jobs))]
