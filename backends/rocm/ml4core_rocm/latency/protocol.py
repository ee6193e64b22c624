"""What the kernel does at its edges, as host code over memory that the host sees: it publishes
partial sums, waits for its peers' with a bound, and when a wait is given up stops all ranks.

Order is what counts, and it is the kernel's:

1. A value and its tag are one aligned store of 8 bytes. A reader takes a value for whose tag it
   waited, and no other.
2. A wait ends when all its tags are there; when the fault word is set; or at the deadline. The last
   is a fault: a record of it, then the fault words of every peer, then the own one. Nothing that is
   stored later overtakes them.
3. The fault word is never cleared. Once it is set, waits end at once, and a step runs to its end on
   what happens to lie there: ranks stop together, and none hangs.
4. At a step's end ranks trade whether they failed, with the same bound: behind it each one's word
   tells of a fault anywhere. What the step computed is looked at after that only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ml4core_rocm.latency.mailbox import FAULT_WORDS, PAIR, Mailbox, Region
from ml4core_rocm.latency.tags import Tags

DEADLINE_S = 10.0
"""Longest wait inside a kernel: 10**9 ticks of the GPU's constant clock of 100 MHz."""

_VALUE = 0xFFFFFFFF


class Peers:
    """One rank's end of the protocol.

    Attributes:
        failed: whether the own fault word is set.
    """

    def __init__(
        self,
        rank: int,
        memory: Sequence[Tensor],
        mailbox: Mailbox,
        tags: Tags,
        deadline_s: float = DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
        relax: Callable[[], object] = lambda: time.sleep(0.0005),
    ) -> None:
        """``memory``: each rank's, int64 [mailbox.nbytes / 8], in rank order; ``relax`` is called
        between two looks.
        """
        self.rank = rank
        self.mailbox = mailbox
        self.tags = tags
        self._memory = memory
        self._words = [one.view(torch.int32) for one in memory]
        self._deadline_s = deadline_s
        self._clock = clock
        self._relax = relax
        self._fault = mailbox.region("fault").offset // 4

    @property
    def failed(self) -> bool:
        return int(self._words[self.rank][self._fault]) != 0

    @property
    def word(self) -> Tensor:
        """int32 [4], the fault words of this rank, where peers write them."""
        return self._words[self.rank][self._fault : self._fault + FAULT_WORDS]

    def all_reduce(self, epoch: int, site: int, partial: Tensor) -> Tensor:
        """The sum over ranks of bfloat16 ``partial`` [rows, hidden], fp32, added in rank order on
        each of them, so that all have the same bits. After a fault it is what lies there.
        ``ValueError`` for the last site, which is the step's end and has no sum.
        """
        if site == self.tags.sites - 1:
            raise ValueError(f"exchange {site} is the end of a step")
        tag, box = self.tags.tag(epoch, site), self.mailbox
        rows, hidden = partial.shape
        values = partial.contiguous().view(torch.int32).to(torch.int64) & _VALUE
        pairs = (values | _tagged(0, tag)).flatten()
        start = box.partial_sum(tag, self.rank) // PAIR
        for memory in self._memory:
            memory[start : start + len(pairs)] = pairs
        mine = self._memory[self.rank]
        total = torch.zeros(rows, hidden)
        for source in range(box.ranks):
            start = box.partial_sum(tag, source) // PAIR
            there = mine[start : start + len(pairs)]
            self._wait(there, tag, box.region(f"sum.{tag % 2}"), (epoch, site))
            total += (there & _VALUE).to(torch.int32).view(torch.bfloat16).view(rows, hidden)
        return total

    def end_step(self, epoch: int) -> None:
        """Trades failures, in the epoch's last exchange; behind it every rank's word tells of a
        fault on any of them.
        """
        box, region = self.mailbox, self.mailbox.region("end")
        tag = self.tags.tag(epoch, self.tags.sites - 1)
        place = box.end_mark(self.rank) // PAIR
        for memory in self._memory:
            memory[place] = _tagged(int(self.failed), tag)
        start = region.offset // PAIR
        marks = self._memory[self.rank][start : start + box.ranks]
        self._wait(marks, tag, region, (epoch, self.tags.sites - 1))
        if not self.failed and bool(((marks & _VALUE) != 0).any()):
            first = int((marks & _VALUE).nonzero()[0])
            self.word.copy_(torch.tensor([1, first, epoch, self.tags.sites - 1]))

    def abort(self, epoch: int, site: int = 0) -> None:
        """The host can't go on behind a launch: every rank is told before it raises."""
        self._fail(epoch, site)

    def _wait(self, pairs: Tensor, tag: int, region: Region, where: tuple[int, int]) -> None:
        until = self._clock() + self._deadline_s
        while not bool(((pairs >> 32) & _VALUE == tag).all()):
            if self.failed:
                return
            if self._clock() > until:
                self._record(pairs, tag, region)
                self._fail(*where)
                return
            self._relax()

    def _record(self, pairs: Tensor, tag: int, region: Region) -> None:
        """What was waited for; the first record stays."""
        start = self.mailbox.region("record").offset // 4
        words = self._words[self.rank]
        if int(words[start]):
            return
        late = int(((pairs >> 32) & _VALUE != tag).nonzero()[0])
        seen = int((pairs[late] >> 32) & _VALUE)
        ticks = int(self._clock() * 1e8) & 0x7FFFFFFF
        record = [1, region.id, late, *(_signed(one) for one in (tag, seen)), 0, ticks, 0]
        words[start : start + len(record)] = torch.tensor(record, dtype=torch.int32)

    def _fail(self, epoch: int, site: int) -> None:
        """The peers' words, then the own."""
        told = torch.tensor([1, self.rank, _signed(epoch & _VALUE), site], dtype=torch.int32)
        others = [words for rank, words in enumerate(self._words) if rank != self.rank]
        for words in (*others, self._words[self.rank]):
            place = words[self._fault : self._fault + FAULT_WORDS]
            if not int(place[0]):  # who failed first is kept
                place[1:] = told[1:]
                place[0] = 1


def reset(memory: Tensor, mailbox: Mailbox) -> None:
    """Zeroes a rank's own pairs, so that tags may begin anew. All ranks do it, between two
    barriers of theirs. Fault words and record stay.
    """
    for region in mailbox.regions:
        if region.pairs:
            memory[region.offset // PAIR : region.end // PAIR] = 0


def assert_alive(word: Tensor) -> None:
    """Queued behind a step's launches and before anything that looks at its results: on a GPU it
    traps if ``word[0]`` is set, so that nothing behind it runs; on a host it raises
    ``RuntimeError``.
    """
    torch._assert_async(
        word[0] == 0, "a rank gave up waiting for its peers; this step's results are void"
    )


def _tagged(value: int, tag: int) -> int:
    """A pair as int64 holds it: tags from 2**31 on make it negative."""
    return value | (_signed(tag) << 32)


def _signed(word: int) -> int:
    """32 bits as int32 holds them."""
    return word - (1 << 32) if word >= 1 << 31 else word
