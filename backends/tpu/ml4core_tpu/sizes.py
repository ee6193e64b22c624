"""What each device of a launch gets: sizes of programs and bytes of caches, without a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ml4core_tpu.backend import TpuBackend
from ml4core_tpu.buckets import LEAST_REQUESTS, LEAST_TOKENS, doubling
from ml4core_tpu.capabilities import capabilities, smallest_page
from ml4core_tpu.layouts import lane33_layout, tiles_layout

PUBLISHED_LENGTH = 1 << 20
"""Tokens of the published model's context."""


def default(name: str) -> int:
    """A default of the backend on a TPU."""
    return int(capabilities(TpuBackend.reference_device).defaults[name])


@dataclass(frozen=True)
class Sizes:
    """Of a replica: its requests and rows stay on its tensor ranks, each of which runs all rows."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int

    def told(self, layers: int, latents: int, keys: int) -> Iterator[str]:
        """Lines on a model of so many layers, of which some own latents, and some index keys."""
        tokens = doubling(LEAST_TOKENS, self.max_num_batched_tokens)
        requests = doubling(LEAST_REQUESTS, self.max_num_seqs)
        pages = -(-self.max_model_len // self.block_size)
        each = latents * tiles_layout().bytes_per_token + keys * lane33_layout().bytes_per_token
        least = smallest_page(self.max_model_len, self.max_num_seqs)
        yield f"token buckets: {', '.join(map(str, tokens))}"
        yield f"request buckets: {', '.join(map(str, requests))}"
        yield f"page tables: {self.max_num_seqs} requests of {pages:,} pages"
        yield f"page: {self.block_size:,} tokens, {self.block_size * each:,} bytes of {layers} layers"
        yield f"caches: {each:,} bytes a token, the same on each tensor rank"
        if self.block_size < least:
            yield f"REFUSED: --block-size {self.block_size}; the least is {least}"
