"""The memory that peers write to: one allocation on each GPU, laid out alike on all of them.

    head     fault words, a record of the first wait that was given up, marks at a step's end
    sum      pairs (value, tag) [parity, source rank, row, hidden / 2]: partial sums, one site
             after the other, two bfloat16 values to a pair

Regions alternate from exchange to exchange: a rank can be one ahead of its slowest peer, never two,
as each exchange waits for all. All of it is uncached on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

PAIR = 8
"""Bytes: the value's 32 bits, then the tag's, in one aligned store."""
LINE = 128
"""Bytes that regions begin at a multiple of: no two share a cache line."""
FAULT_WORDS = 4
"""int32: set, the rank that gave up first, its epoch, and the exchange."""
RECORD_WORDS = 8
"""int32: set, region, pair, tag waited for, tag seen, workgroup, clock (low half), and padding."""


@dataclass(frozen=True)
class Region:
    """Some bytes of the memory.

    Attributes:
        pairs: whether it holds pairs; else words of 4 bytes.
    """

    name: str
    offset: int
    nbytes: int
    pairs: bool

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def id(self) -> int:
        """What a record names it by."""
        return crc32(self.name.encode()) & 0x7FFFFFFF


@dataclass(frozen=True)
class Mailbox:
    """The layout for ``ranks`` peers, steps of at most ``rows`` rows of ``hidden`` values."""

    ranks: int
    rows: int
    hidden: int

    def __post_init__(self) -> None:
        if self.ranks < 2 or self.rows < 1 or self.hidden < 2 or self.hidden % 2:
            raise ValueError(
                f"peers' memory of {self.ranks} ranks, {self.rows} rows, {self.hidden} values; "
                "works: 2 ranks or more, a row or more, an even number of values"
            )

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """In order of their offsets."""
        sums = self.ranks * self.rows * (self.hidden // 2) * PAIR
        sizes = [("fault", 4 * FAULT_WORDS, False), ("record", 4 * RECORD_WORDS, False)]
        sizes += [("end", self.ranks * PAIR, True)]
        sizes += [(f"sum.{parity}", sums, True) for parity in (0, 1)]
        found, offset = [], 0
        for name, nbytes, pairs in sizes:
            found.append(Region(name, offset, nbytes, pairs))
            offset += -(-nbytes // LINE) * LINE
        return tuple(found)

    @property
    def nbytes(self) -> int:
        last = self.regions[-1]
        return last.offset + -(-last.nbytes // LINE) * LINE

    def region(self, name: str) -> Region:
        """Raises ``KeyError`` that lists the names."""
        for one in self.regions:
            if one.name == name:
                return one
        raise KeyError(f"no region {name!r}; there are {', '.join(r.name for r in self.regions)}")

    def partial_sum(self, tag: int, source: int, row: int = 0, pair: int = 0) -> int:
        """The offset where rank ``source`` leaves two values of a row's partial sum, in the
        exchange of this tag; pairs of a row, then rows, follow each other.
        """
        limits = (self.ranks, self.rows, self.hidden // 2)
        if any(not 0 <= at < limit for at, limit in zip((source, row, pair), limits, strict=True)):
            raise ValueError(f"source, row, pair {(source, row, pair)} of {limits}")
        start = self.region(f"sum.{tag % 2}").offset
        return start + ((source * self.rows + row) * (self.hidden // 2) + pair) * PAIR

    def end_mark(self, source: int) -> int:
        """The offset where rank ``source`` says that its step has ended, and whether well."""
        if not 0 <= source < self.ranks:
            raise ValueError(f"source {source} of {self.ranks}")
        return self.region("end").offset + source * PAIR
