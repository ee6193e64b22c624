"""What programs of a launch are made for: of each device of a replica alike, as every tensor rank
runs all of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from ml4core_tpu.buckets import LEAST_REQUESTS, LEAST_TOKENS, doubling
from ml4core_tpu.capabilities import smallest_page
from ml4core_tpu.layouts import LANES, lane33_layout, tiles_layout


def sizes(rows: int, requests: int, length: int, page: int) -> Iterator[str]:
    """Lines on steps of at most so many rows and requests, of ``length`` tokens at most, in pages
    of ``page`` tokens.
    """
    least = smallest_page(length, requests)
    works = f"--block-size {max(least, LANES)}"
    buckets = doubling(LEAST_TOKENS, rows), doubling(LEAST_REQUESTS, requests)
    yield f"token buckets    {', '.join(map(str, buckets[0]))}"
    yield f"request buckets  {', '.join(map(str, buckets[1]))}"
    yield f"page tables      {requests} x {-(-length // page)} pages of {page} tokens"
    yield (
        f"cache, bytes     {tiles_layout().bytes_per_token} a token and owner of latents, "
        f"{lane33_layout().bytes_per_token} a token and indexer"
    )
    if page % LANES:
        yield f"REFUSED          pages don't fill the {LANES} lanes; {works}"
    if page < least:
        yield f"REFUSED          tables take more than half of scalar memory; {works}"
