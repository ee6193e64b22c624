"""The sizes that steps are padded to, so that few programs serve them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ml4core.api import Deployment, VisionSpec

LEAST_TOKENS = 16
LEAST_TOKENS_HOST = 64
"""On the host a program costs more than rows that are empty."""
LEAST_REQUESTS = 8
LEAST_PAGES = 32
"""Of the pool that a program of the host gets, so that few sizes serve most steps."""
LEAST_CELLS = 16
"""Of an image."""


@dataclass(frozen=True)
class Buckets:
    """Attributes:
    tokens: rows of a layer's program, ascending; the last is what a step may have at most.
    requests: rows whose logits are wanted.
    most_requests: of a step; tables have as many.
    pages: of a request, at most.
    """

    tokens: tuple[int, ...]
    requests: tuple[int, ...]
    most_requests: int
    pages: int

    @property
    def told(self) -> str:
        return ", ".join(map(str, self.tokens))

    def rows(self, count: int) -> int:
        """What this many rows are padded to; to a power of two beyond the last bucket."""
        return bucket_of(self.tokens, count)

    def columns(self, blocks: int) -> int:
        """Pages of a request, in a pool of ``blocks``."""
        return min(self.pages, self._pool(blocks))

    def pool(self, requests: int, columns: int, blocks: int) -> int:
        """Pages of the pool that a program gets: what a step's requests, of ``columns`` pages each,
        can see of ``blocks``. It never depends on what they do see, which differs between hosts.
        """
        return self._pool(min(self.tables(requests) * max(self.pages, columns), blocks))

    @staticmethod
    def _pool(pages: int) -> int:
        return max(LEAST_PAGES, 1 << (pages - 1).bit_length())

    def tables(self, requests: int) -> int:
        """Requests that a step's tables have: as many in each, but in one of too many."""
        most = self.most_requests
        return most if requests <= most else 1 << (requests - 1).bit_length()


def buckets_of(deployment: Deployment) -> Buckets:
    """Tokens 16 (64 on the host), twice that, ... and as many as a step may have; requests 8, 16,
    ... likewise. A step of several hosts may have one's chunk of a prompt beside another's decodes.
    """
    least = LEAST_TOKENS if deployment.device.kind == "real" else LEAST_TOKENS_HOST
    pages = max(1, -(-deployment.max_model_len // deployment.block_size))
    tokens = doubling(least, deployment.max_num_batched_tokens)
    if deployment.data_parallel_size > 1:
        draft = deployment.model.draft
        running = deployment.max_num_seqs * (1 if draft is None else draft.depth + 1)
        tokens = (*tokens, tokens[-1] + running)
    return Buckets(
        tokens,
        doubling(LEAST_REQUESTS, deployment.max_num_seqs),
        max(LEAST_REQUESTS, deployment.max_num_seqs),
        pages,
    )


def bucket_of(sizes: Sequence[int], count: int) -> int:
    """The first size, of ascending ones, that holds ``count``; beyond the last a power of two."""
    found = next((size for size in sizes if size >= count), None)
    return found or 1 << (count - 1).bit_length()


def image_buckets(spec: VisionSpec) -> tuple[int, ...]:
    """Patches of an image: those of 16 cells, twice that, ... and of the largest image."""
    side = -(-spec.image_size // spec.cell_size)
    return tuple(cells * spec.cell_patches for cells in doubling(LEAST_CELLS, side * side))


def doubling(least: int, most: int) -> tuple[int, ...]:
    """``least``, twice that and so on below ``most``, then ``most``; ``least`` where that is
    less.
    """
    found = []
    size = least
    while size < most:
        found.append(size)
        size *= 2
    return (*found, max(least, most))
