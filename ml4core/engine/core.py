"""The engine's loop: schedule, run, collect. No text, no threads, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from ml4core.api import Fault, FaultError, StepBuckets, VisionSpec
from ml4core.engine.batch import BatchState, in_row_order
from ml4core.engine.emission import ENDS, sequence_output, take
from ml4core.engine.errors import RequestError
from ml4core.engine.fault_codes import fault_of
from ml4core.engine.grammars import GrammarCompiler
from ml4core.engine.image_inputs import PlacedImage
from ml4core.engine.intake import Intake
from ml4core.engine.kv_manager import KVManager
from ml4core.engine.layout import EXACT
from ml4core.engine.outputs import DraftCounts, EngineStats, SequenceOutput
from ml4core.engine.request import Request, Status
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.scheduler import Scheduler, SchedulerConfig, Work
from ml4core.engine.step_input import Places, assemble
from ml4core.engine.steps import StepHandle, StepRunner

if TYPE_CHECKING:
    from ml4core.engine.replicas.together import Together


@dataclass(frozen=True)
class _Flight:
    """A step that was launched.

    Attributes:
        draws: which draw of the result is whose.
        prompts: the work whose prompt the result reports on.
    """

    handle: StepHandle
    work: list[Work]
    draws: Places
    prompts: list[Work]


class EngineCore:
    """Continuous batching over a step runner.

    With ``overlap`` one step stays in flight: the next one is scheduled and launched before the
    tokens of the last are looked at. Without, each call of ``step`` runs one step to its end.
    Not thread-safe.

    Attributes:
        fault: why the engine has stopped; None while it serves.
        cause: the exception behind the fault, if there was one.
    """

    def __init__(
        self,
        runner: StepRunner,
        kv: KVManager,
        config: SchedulerConfig,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        device: torch.device | str = "cpu",
        overlap: bool = False,
        buckets: StepBuckets | None = None,
        grammars: GrammarCompiler | None = None,
        mend_drafts: bool = False,
        max_images: int = 0,
        vision: VisionSpec | None = None,
        together: Together | None = None,
    ) -> None:
        """
        Args:
            buckets: sizes to which steps are padded; None for their own.
            grammars: compiles the forms of answers; None refuses those.
            mend_drafts: whether drafts may be replaced by tokens that a grammar leaves no choice
                about: not where they are judged by the law that they were drawn from. Nor are they
                with a step in flight, which has them from the device.
            max_images: in a prompt.
            vision: the encoder that they must fit; None leaves that to whoever runs the steps.
            together: the replicas that this engine steps with, with work or without. Whoever runs
                it calls ``step`` as soon as it ``has_work``, which others may give it.
        """
        self.kv = kv
        self.scheduler = Scheduler(config, kv)
        self.overlap = overlap
        self.fault: Fault | None = None
        self.cause: BaseException | None = None
        self._mend_drafts = mend_drafts
        self._runner = runner
        self._intake = Intake(
            kv,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            eos_ids=eos_ids,
            seed=seed,
            grammars=grammars,
            max_images=max_images,
            vision=vision,
        )
        self._batch = BatchState(
            config.max_num_seqs,
            [group.name for group in kv.groups],
            kv.block_size,
            device,
            buckets=buckets or EXACT,
            ahead={group.name: group.ahead for group in kv.groups},
        )
        self._together = together
        self._drafts = DraftCounts() if config.drafts else None
        self._open: dict[str, list[Request]] = {}
        self._flight: _Flight | None = None
        self._ended: list[SequenceOutput] = []
        self._steps = self._prompt_tokens = self._output_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do or to tell."""
        if self._ended or self._flight or self.scheduler.has_requests:
            return True
        return self._together is not None and self.fault is None and self._together.pending

    def check(self, name: str, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises ``RequestError`` for what can't be served even alone. Messages call the prompt
        ``name``.
        """
        self._intake.check(name, prompt_ids, params)

    def add_request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        arrival: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> None:
        """Queues a request: ``params.n`` sequences of one prompt.

        Args:
            arrival: seconds of a monotonic clock; None is now.
            priority: lower is sooner, where the policy looks at it.
            cache_salt: only requests with the same salt share cached prefixes.
            images: in the order of their places in the prompt.

        Raises ``RequestError`` for what can't be served, and then takes nothing; ``FaultError``
        once the engine has stopped.
        """
        if self.fault is not None:
            raise FaultError(self.fault)
        if request_id in self._open:
            raise RequestError("request id", request_id, "an id that no open request has")
        self._intake.check("prompt", prompt_ids, params)
        self._intake.check_images(prompt_ids, images)
        self._open[request_id] = sequences = self._intake.sequences(
            request_id,
            prompt_ids,
            params,
            arrival=arrival,
            priority=priority,
            cache_salt=cache_salt,
            images=tuple(images),
        )
        for sequence in sequences:
            if self._drafts is not None:
                sequence.draft_counts = DraftCounts()
            self.scheduler.add(sequence)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one of its sequences. The next ``step`` tells so. Does nothing for
        what isn't open.
        """
        chosen = [r for r in self._open.get(request_id, ()) if index in (None, r.index)]
        self._finish(chosen, Status.FINISHED_ABORT)
        self._ended += [sequence_output(request, (), "abort") for request in chosen]

    def step(self) -> list[SequenceOutput]:
        """Runs a step, or starts one and finishes the one before; returns what became known.

        Once a step fails nothing of it leaves: every open request ends with ``error`` and
        ``fault`` says why. Later calls raise ``FaultError``.
        """
        if self.fault is not None:
            raise FaultError(self.fault)
        try:
            due, self._flight = self._flight, self._launch()
            if not self.overlap:
                due, self._flight = self._flight, None
            outputs = self._collect(due) if due is not None else []
        except FaultError as error:
            outputs = self._stop(error.fault, error.__cause__)
        except (Exception, SystemExit) as error:  # what the device has done is unknown
            fault = fault_of(error, self._steps)
            outputs = self._stop(fault, error)
        ended, self._ended = self._ended, []
        return ended + outputs

    def stop(self, fault: Fault) -> None:
        """Stops for a reason that no step has met. Open requests end with ``error``, which nobody
        is told by ``step`` any more.
        """
        if self.fault is None:
            self._stop(fault, None)

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, and nothing done, while requests hold pages."""
        return self.kv.reset_prefix_cache()

    def stats(self) -> EngineStats:
        counts = self.kv.counts
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            steps=self._steps,
            preemptions=self.scheduler.preemptions,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            usage=self.kv.usage(),
            cache_queries={name: one.queries for name, one in counts.items()},
            cache_hits={name: one.hits for name, one in counts.items()},
            drafts=None if self._drafts is None else self._drafts.copy(),
        )

    def _launch(self) -> _Flight | None:
        """Schedules and starts a step; None if no request can take a row, here or in another
        replica.
        """
        schedule = self.scheduler.schedule()
        batch, before = self._batch, self._flight
        for request in schedule.preempted:
            batch.unbind(request)
        for request in schedule.admitted:
            batch.bind(request)
        for request in schedule.grown:
            batch.sync(request)
        if not schedule.work:
            return self._go_along()
        self._steps += 1
        work = in_row_order(schedule.work)
        agree = None if self._together is None else partial(self._together.agree, self._steps)
        made = assemble(batch, work, (before.handle, before.draws) if before else None, agree)
        self._prompt_tokens += made.prompt_tokens
        return _Flight(self._runner.launch(made.step), work, made.draws, made.prompts)

    def _go_along(self) -> _Flight | None:
        step = None if self._together is None else self._together.idle(self._steps + 1)
        if step is None:
            return None
        self._steps += 1
        return _Flight(self._runner.launch(step), [], {}, [])

    def _collect(self, flight: _Flight) -> list[SequenceOutput]:
        """Waits for a step and takes its tokens; those of requests that ended since are dropped."""
        result = flight.handle.result()
        for item, entries in zip(flight.prompts, result.prompts, strict=True):
            if not item.stale:
                item.request.prompt_logprobs += entries
        tokens = iter(zip_longest(result.tokens, result.drafts))
        outputs: list[SequenceOutput] = []
        ends: dict[Status, list[Request]] = {}
        alive: list[Request] = []
        for item in flight.work:
            made, drafts = next(tokens) if item.draws else ((), None)
            if not self.scheduler.confirm(item, len(made)) or not made:
                continue
            request = item.request
            new, reason = take(request, made)
            if item.window:
                self._count(item, len(new) - 1)  # what the request takes, no more
                if self.kv.caching:
                    self.kv.cache(request)
            if reason is not None:
                ends.setdefault(ENDS[reason], []).append(request)
            elif drafts is None:
                alive.append(request)
            else:
                request.drafts[:] = self._mended(request, drafts)
                self._batch.extend(request, len(new))
            outputs.append(sequence_output(request, new, reason))
            self._output_tokens += len(new)
        self._batch.append(alive)
        for status, requests in ends.items():
            self._finish(requests, status)
        return outputs

    def _mended(self, request: Request, drafts: Sequence[int]) -> Sequence[int]:
        if request.grammar is None or self.overlap or not self._mend_drafts:
            return drafts
        return request.grammar.mended(request.output_ids, drafts)

    def _count(self, item: Work, accepted: int) -> None:
        judged = item.rows - 1
        for counts in (self._drafts, item.request.draft_counts):
            assert counts is not None, "only a drafter makes windows"
            counts.add(judged, accepted)

    def _finish(self, requests: Sequence[Request], status: Status) -> None:
        """Ends open sequences and gives back what they hold."""
        if not requests:
            return
        self.scheduler.finish(requests, status)
        for request in requests:
            self._batch.unbind(request)
            rest = [other for other in self._open[request.id] if other is not request]
            if rest:
                self._open[request.id] = rest
            else:
                del self._open[request.id]

    def _stop(self, fault: Fault, cause: BaseException | None) -> list[SequenceOutput]:
        if self._together is not None:
            fault = self._together.stopped(fault)
        self.fault, self.cause = fault, cause
        self._flight = None
        requests = [request for sequences in self._open.values() for request in sequences]
        self._finish(requests, Status.FINISHED_ERROR)
        return [sequence_output(request, (), "error") for request in requests]
