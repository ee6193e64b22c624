"""Cases of ``ml4core_cuda.check``: inputs, plain references, targets and peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core_cuda.kernels import flash_mla
from ml4core_cuda.kernels.check_judges import (
    BLOCK,
    Inputs,
    attention_error,
    empty,
    index_cache,
    latents,
    logits_error,
    nbytes,
    topk_error,
    window_error,
    write_error,
)
from ml4core_cuda.kernels.indexer_logits import indexer_logits
from ml4core_cuda.kernels.indexer_write import indexer_write
from ml4core_cuda.kernels.kv_write import kv_write
from ml4core_cuda.kernels.sparse_mla import sparse_mla
from ml4core_cuda.kernels.timing import Timer
from ml4core_cuda.kernels.topk import choose
from ml4core_cuda.kernels.window_mla import window_mla

_SCALE = 576**-0.5


@dataclass(frozen=True)
class Case:
    """One kernel at one shape.

    Attributes:
        make: inputs of a seed, on the device.
        call: the kernel on them.
        error: how wrong the result is, for what is allowed: right up to 1.
        nbytes: the fewest bytes that the work must move; 0 if not told.
        target_us: what is aimed at.
        peers: by name, the same work by others, as far as they are installed.
    """

    name: str
    make: Callable[[int], Inputs]
    call: Callable[..., Any]
    error: Callable[[Inputs, Any], float]
    nbytes: int = 0
    target_us: float = 0.0
    peers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def run(self, timer: Timer | None) -> dict[str, Any]:
        """The verdict, and the times if there is a timer."""
        found: dict[str, Any] = {"name": self.name, "nbytes": self.nbytes, "told": ""}
        if self.target_us:
            found["target_us"] = self.target_us
        try:
            inputs = self.make(0)
            found["error"] = self.error(inputs, self.call(*inputs))
        except (RuntimeError, ValueError) as error:
            found |= {"error": float("nan"), "told": str(error)[:500]}
        found["right"] = found["error"] <= 1.0
        if timer is not None and found["right"]:
            found["times"] = self._times(timer, inputs, found)
        return found

    def _times(self, timer: Timer, inputs: Inputs, found: dict[str, Any]) -> dict[str, Any]:
        size = sum(nbytes(value) for value in inputs)
        sets = [
            inputs,
            *(self.make(seed) for seed in range(1, timer.copies(self.nbytes or size, size))),
        ]
        times = {}
        for who, call in {"ours": self.call, **self.peers}.items():
            try:
                if who != "ours":
                    found.setdefault("peer_errors", {})[who] = self.error(inputs, call(*inputs))
                queue = [lambda each=each, call=call: call(*each) for each in sets]
                times[who] = timer.time(queue).to_json()
            except (RuntimeError, ValueError, TypeError, ImportError) as error:
                found.setdefault("peer_told", {})[who] = str(error)[:500]
        return times


def cases(device: str, *, small: bool) -> Iterator[Case]:
    """Every case; ``small`` ones for the interpreter."""
    where = torch.device(device)
    yield from _sparse(where, small)
    yield from _window(where, small)
    yield from _logits(where, small)
    yield from _topk(where, small)
    yield from _writes(where)


def _sparse(device: torch.device, small: bool) -> Iterator[Case]:
    targets = {(64, 1): 17.4 / 2, (64, 8): 19.9 / 1.6, (64, 64): 75.0, (64, 128): 113 / 0.9}
    keys, blocks = (100, 4) if small else (2048, 4096)
    shapes = [(h, r) for h in (8, 16, 32, 64, 128) for r in ((2,) if small else (1, 8, 64, 128))]
    if not small:
        shapes += [(8, 4096), (64, 4096)]
    for layout in ("fp8_ds_mla", "bf16"):
        # One for all: it is larger than what the device caches, and slots differ from set to set.
        whole = latents(layout, blocks, torch.Generator(device).manual_seed(0))
        for heads, rows in shapes:

            def make(
                seed: int, cache: KVCache = whole, heads: int = heads, rows: int = rows
            ) -> Inputs:
                draw = torch.Generator(device).manual_seed(seed)
                slots = torch.stack(
                    [
                        torch.randperm(blocks * BLOCK, generator=draw, device=device)[:keys]
                        for _ in range(min(rows, 64))
                    ]
                )
                slots = slots.repeat(-(-rows // len(slots)), 1)[:rows].to(torch.int32)
                q = torch.randn(rows, heads, 576, generator=draw, device=device).bfloat16()
                lens = torch.full((rows,), keys, dtype=torch.int32, device=device)
                return q, cache, slots, lens, _SCALE

            peers: dict[str, Callable[..., Any]] = {}
            if layout == "fp8_ds_mla" and find_spec("flash_mla") is not None:
                peers["FlashMLA"] = flash_mla.sparse_mla
            width = latent_layout(layout).bytes_per_token
            yield Case(
                f"sparse_mla {layout} {heads} heads {rows} rows",
                make,
                sparse_mla,
                attention_error,
                rows * (keys * width + heads * (576 + 512) * 2),
                targets.get((heads, rows), 0.0) if layout == "fp8_ds_mla" else 0.0,
                peers,
            )


def _window(device: torch.device, small: bool) -> Iterator[Case]:
    for requests, each, heads, window in ((8, 7, 8, 512), (1, 1, 64, None), (4, 1, 8, None)):
        pages = 3 if small else 64
        seen = pages * BLOCK - 5
        if small and heads == 64:
            continue

        def make(
            seed: int,
            requests: int = requests,
            each: int = each,
            heads: int = heads,
            window: int | None = window,
            pages: int = pages,
            seen: int = seen,
        ) -> Inputs:
            draw = torch.Generator(device).manual_seed(seed)
            cache = latents("fp8_ds_mla", requests * pages + 1, draw)
            table = 1 + torch.randperm(requests * pages, generator=draw, device=device)
            q = torch.randn(requests * each, heads, 576, generator=draw, device=device).bfloat16()
            start = torch.arange(requests + 1, dtype=torch.int32, device=device) * each
            visible = torch.full((requests * each,), seen, dtype=torch.int32, device=device)
            table = table.view(requests, pages).to(torch.int32)
            return q, cache, table, start, visible, each, _SCALE, window

        yield Case(
            f"window_mla {requests}x{each} rows {heads} heads window {window}",
            make,
            window_mla,
            window_error,
        )


def _logits(device: torch.device, small: bool) -> Iterator[Case]:
    context = 200 if small else 65536
    targets = {8: 16.3 / 0.75, 64: 130 / 0.75}
    pages = -(-context // BLOCK)
    for heads in (32, 64):
        for rows in (2,) if small else (1, 8, 64):

            def make(seed: int, heads: int = heads, rows: int = rows) -> Inputs:
                draw = torch.Generator(device).manual_seed(seed)
                cache = index_cache(rows * pages + 1, draw)
                table = 1 + torch.randperm(rows * pages, generator=draw, device=device)
                q = torch.randn(rows, heads, 128, generator=draw, device=device)
                weights = torch.randn(rows, heads, generator=draw, device=device)
                start = torch.arange(rows + 1, dtype=torch.int32, device=device)
                visible = torch.full((rows,), context, dtype=torch.int32, device=device)
                table = table.view(rows, pages).to(torch.int32)
                return q, weights, 0.01, cache, table, start, visible, 1

            yield Case(
                f"indexer_logits {heads} heads {rows} rows of {context}",
                make,
                indexer_logits,
                logits_error,
                rows * context * (132 + 4),
                0.0 if small else targets.get(rows, 0.0),
            )


def _topk(device: torch.device, small: bool) -> Iterator[Case]:
    targets = {(65536, 1): 12.0, (65536, 64): 24.0}
    for columns in (3000,) if small else (4096, 65536, 1 << 20):
        for rows in (2,) if small else (1, 64):
            k = 100 if small else 2048

            def make(seed: int, columns: int = columns, rows: int = rows, k: int = k) -> Inputs:
                draw = torch.Generator(device).manual_seed(seed)
                scores = torch.randn(rows, columns, generator=draw, device=device)
                scores = (scores * 512).round() / 512  # ties at the border
                visible = torch.full((rows,), columns, dtype=torch.int32, device=device)
                pages = -(-columns // BLOCK)
                table = torch.arange(rows * pages, dtype=torch.int32, device=device)
                request = torch.arange(rows, device=device)
                return scores, visible, k, table.view(rows, pages), request, BLOCK

            peers: dict[str, Callable[..., Any]] = {"torch": lambda s, v, k, *_: s.topk(k)[1]}
            if find_spec("flashinfer") is not None:
                peers["FlashInfer"] = _flashinfer_topk
            yield Case(
                f"topk of {columns} {rows} rows",
                make,
                choose,
                topk_error,
                rows * (columns * 4 + k * 8),
                targets.get((columns, rows), 0.0),
                peers,
            )


def _flashinfer_topk(scores: Tensor, visible: Tensor, k: int, *_: object) -> Tensor:
    import flashinfer

    found: Tensor = flashinfer.top_k(scores, k)[1]
    return found


def _writes(device: torch.device) -> Iterator[Case]:
    def rows(seed: int, width: int) -> Tensor:
        draw = torch.Generator(device).manual_seed(seed)
        x = torch.randn(64, width, generator=draw, device=device)
        return x * torch.logspace(-12, 4, 64, device=device).unsqueeze(1)

    slots = torch.arange(64, device=device) * 3
    for layout in ("fp8_ds_mla", "bf16", "e4m3"):

        def make_latents(seed: int, layout: str = layout) -> Inputs:
            x = rows(seed, 576).bfloat16()
            return empty(latent_layout(layout), 4, device), slots, x[:, :512], x[:, 512:]

        yield Case(f"kv_write {layout}", make_latents, _written(kv_write), write_error)

    def make_keys(seed: int) -> Inputs:
        return empty(index_layout("planar_f32"), 4, device), slots, rows(seed, 128)

    yield Case("indexer_write planar_f32", make_keys, _written(indexer_write), write_error)


def _written(op: Callable[..., None]) -> Callable[..., Tensor]:
    def call(cache: KVCache, *rest: Tensor) -> Tensor:
        op(cache, *rest)
        return cache.parts[0]

    return call
