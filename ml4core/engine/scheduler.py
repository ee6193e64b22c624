"""Which rows of which requests the next step computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ml4core.engine.kv_manager import KVManager
from ml4core.engine.request import Request, Status
from ml4core.engine.request_queue import FcfsQueue, PriorityRequestQueue, RequestQueue, rank


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step, and policies.

    Attributes:
        max_num_batched_tokens: rows of a step at most.
        long_prefill_token_threshold: rows of one request at most; 0 for no such limit.
        reserve_full: admit a request only if all of its tokens would fit now, not its first chunk
            alone: else requests admitted together preempt each other half way.
        drafts: drafts of a request and step at most; 0 without a drafter.
        max_report_rows: rows of a step at most for prompts whose logprobs are wanted. Each takes
            logits of the whole vocabulary, and a long chunk's would not fit a device's memory.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    reserve_full: bool = True
    drafts: int = 0
    max_report_rows: int = 512

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {self.max_num_seqs}; it must be 1 or more")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; each of "
                f"{self.max_num_seqs} sequences needs a row a step"
            )
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy is {self.policy!r}; known: fcfs, priority")


class Work(NamedTuple):
    """A request's rows of one step: tokens ``start`` to ``end``.

    Attributes:
        draws: the last row's logits give its next token; of a verify window, each row's may.
        epoch: that of the request when this was scheduled.
        window: rows of the plan that a verify window takes, 0 for other work. Its first row is the
            newest token's and those behind it are drafts'; what is left of it is padding.
    """

    request: Request
    start: int
    end: int
    draws: bool
    epoch: int
    window: int = 0

    @property
    def rows(self) -> int:
        return self.end - self.start

    @property
    def held(self) -> int:
        """Rows of the plan."""
        return self.window or self.end - self.start

    @property
    def stale(self) -> bool:
        """Whether the request has ended or been preempted since."""
        return self.request.epoch != self.epoch


@dataclass
class Schedule:
    """One step, and what changed to make it possible.

    Attributes:
        preempted: lost their pages; they wait again.
        admitted: began or resumed.
        grown: running before, and their page tables changed.
        report_rows: what is left of ``max_report_rows``.
    """

    work: list[Work] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    grown: list[Request] = field(default_factory=list)
    report_rows: int = 0


class Scheduler:
    """There are no phases: each step gives each request some rows toward the tokens that it has.

    A request of which all tokens but the last are computed is a decode; one that has more to
    compute is a prefill, whether it is new, cut into chunks, or resumed after a preemption with its
    output beside its prompt. A decode with drafts is a verify window.

    While the step that judges a window is in flight, all its drafts count as accepted; ``confirm``
    takes back what was not.
    """

    def __init__(self, config: SchedulerConfig, kv: KVManager) -> None:
        self.config = config
        self.kv = kv
        self.running: list[Request] = []
        self.waiting: RequestQueue = (
            PriorityRequestQueue() if config.policy == "priority" else FcfsQueue()
        )
        self.preemptions = 0

    @property
    def has_requests(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def add(self, request: Request) -> None:
        request.status = Status.WAITING
        self.waiting.add(request)

    def schedule(self) -> Schedule:
        """The next step. Its ``work`` is empty if no request can take a row."""
        step = Schedule(report_rows=self.config.max_report_rows)
        budget = self._schedule_running(step, self.config.max_num_batched_tokens)
        if not step.preempted:  # what was preempted would be admitted again at once
            self._admit(step, budget)
        for work in step.work:
            request = work.request
            request.num_computed = work.end
            if work.draws:
                request.num_placeholders += work.rows if work.window else 1
        return step

    def confirm(self, work: Work, emitted: int = 1) -> bool:
        """Takes note that a step has run, and of the tokens that it ``emitted`` for a window; False
        if its result is void. Blocks that a window has filled are cached by the caller, who knows
        their tokens.
        """
        request = work.request
        if request.epoch != work.epoch:
            return False
        rows = work.rows
        if work.window:
            request.num_placeholders -= rows
            request.num_computed -= rows - emitted
            request.num_confirmed += emitted
        else:
            request.num_placeholders -= work.draws
            request.num_confirmed += rows
            if self.kv.caching:
                self.kv.cache(request)
        return True

    def finish(self, requests: Iterable[Request], status: Status) -> None:
        """Ends requests, waiting or running, and gives their pages back. Results of theirs that
        are in flight become void. A step in flight may still write to these pages: steps run in
        order, so whoever takes them next writes later.
        """
        left = False
        for request in requests:
            if request.status is Status.RUNNING:
                left = True
            elif not request.status.finished:
                self.waiting.remove(request)
            else:
                continue
            self._release(request, status)
        if left:
            self.running = [r for r in self.running if r.status is Status.RUNNING]

    def _schedule_running(self, step: Schedule, budget: int) -> int:
        most = self.config.long_prefill_token_threshold or budget
        work = step.work
        behind = len(self.running)
        for request in tuple(self.running):
            behind -= 1
            if budget < 1:
                break
            start = request.num_computed
            total = request.num_tokens + request.num_placeholders
            rows = self._rows(step, request, min(total - start, most, budget))
            if rows < 1 or total >= request.limit:  # the token that ends it is in flight
                continue
            if request.status is not Status.RUNNING:  # preempted for one before it
                continue
            window = 0
            if self.config.drafts and total - start == 1:
                if request.num_placeholders > 1 and request.limit - total <= self.config.drafts:
                    continue  # how many drafts there is room for, the step in flight will tell
                # Drafts leave a row for each request behind, which would else wait for this one.
                window, rows = self._window(request, total, budget - behind)
            if start + rows > request.capacity:
                gone = len(step.preempted)
                if not self._make_room(step, request, rows):
                    continue
                if len(step.preempted) > gone:  # one that had its rows may be among them
                    budget = self.config.max_num_batched_tokens - sum(w.held for w in work)
                step.grown.append(request)
            end = start + rows
            work.append(Work(request, start, end, end >= total, request.epoch, window))
            step.report_rows -= rows if request.reports else 0
            budget -= window or rows
        return budget

    def _rows(self, step: Schedule, request: Request, rows: int) -> int:
        """What of ``rows`` rows the step has logits for, where a prompt is reported on."""
        if request.reports:
            rows = min(rows, step.report_rows)
        return rows

    def _window(self, request: Request, total: int, budget: int) -> tuple[int, int]:
        """Rows of the plan and of the request for a decode: a window, or (0, 1) where there are no
        drafts or no room. A draft that could not be emitted is left out.
        """
        held = 1 + self.config.drafts
        drafts = self.config.drafts if request.num_placeholders else len(request.drafts)
        if not drafts or held > budget:
            return 0, 1
        return held, 1 + min(drafts, request.limit - total - 1)

    def _make_room(self, step: Schedule, request: Request, rows: int) -> bool:
        """Preempts others until the request's rows fit; False if it had to go itself."""
        while not self.kv.allocate(request, rows):
            victim = (
                max(self.running, key=rank)
                if self.config.policy == "priority"
                else self.running[-1]
            )
            self._preempt(step, victim)
            if victim is request:
                return False
        return True

    def _preempt(self, step: Schedule, victim: Request) -> None:
        """Takes a request's pages; it waits, and will compute prompt and output again."""
        self.running.remove(victim)
        step.work[:] = [work for work in step.work if work.request is not victim]
        step.grown[:] = [request for request in step.grown if request is not victim]
        self._release(victim, Status.PREEMPTED)
        self.waiting.put_back(victim)
        self.preemptions += 1
        step.preempted.append(victim)

    def _admit(self, step: Schedule, budget: int) -> None:
        config = self.config
        most = config.long_prefill_token_threshold or budget
        owed = [r for r in self.running if r.capacity < r.num_tokens]
        while len(self.waiting) and budget > 0 and len(self.running) < config.max_num_seqs:
            request = self.waiting.first()
            hit = self.kv.find_hit(request)
            rows = self._rows(step, request, min(request.num_tokens - hit.tokens, most, budget))
            if rows < 1:
                return
            if config.reserve_full:
                # And one token more, or it could be preempted before it has drawn another.
                tokens = min(request.num_tokens + 1, request.limit - 1)
                if not self.kv.fits(request, tokens, hit, owed):
                    return
            if not self.kv.allocate(request, rows, hit):
                return
            self.waiting.remove(request)
            self.running.append(request)
            self.kv.count(request, hit)
            request.status = Status.RUNNING
            request.num_confirmed = request.num_computed = hit.tokens
            if request.num_cached_tokens is None:
                request.num_cached_tokens = hit.tokens
            step.admitted.append(request)
            if request.capacity < request.num_tokens:
                owed.append(request)
            end = hit.tokens + rows
            draws = end == request.num_tokens
            step.work.append(Work(request, hit.tokens, end, draws, request.epoch))
            step.report_rows -= rows if request.reports else 0
            budget -= rows

    def _release(self, request: Request, status: Status) -> None:
        self.kv.free(request)
        request.drafts.clear()
        request.status = status
        request.epoch += 1
        request.num_computed = request.num_confirmed = request.num_placeholders = 0
