"""Mutants of layers: what a stage computes, selects or writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ml4core.api import (
    Accepted,
    KVCache,
    Selection,
    Weight,
)
from ml4core_conformance.mutant import Mutant
from ml4core_conformance.mutants.altered import AlteredSession, Changed
from ml4core_conformance.rigs.scenes import composed


def mutants() -> list[Mutant]:
    rows: Sequence[tuple[str, str, Callable[[AlteredSession], None], tuple[str, ...]]] = (
        (
            "rope-skipped",
            "One layer's queries and keys are not rotated.",
            rope_skipped,
            ("model.logits", "stages.attn_inputs", "stages.decoder_layer"),
        ),
        (
            "nope-rotated",
            "Layers without a rotary embedding rotate their queries nevertheless.",
            nope_rotated,
            ("model.logits", "stages.attn_inputs"),
        ),
        (
            "pairs-swapped",
            "Rotation pairs neighbours where it should pair halves, and the other way about.",
            pairs_swapped,
            ("stages.vision_encoder", "stages.attn_inputs"),
        ),
        (
            "ssmax-skipped",
            "Queries are not scaled by their position.",
            ssmax_skipped,
            ("model.logits", "model.engine"),
        ),
        (
            "consumer-writes",
            "A layer that reads another's latents writes its own over them.",
            consumer_writes,
            ("model.kv_bytes", "stages.attention"),
        ),
        (
            "other-owner",
            "A layer without an indexer uses the first owner's selection, not the nearest one's.",
            other_owner,
            ("model.index_share", "stages.attention"),
        ),
        (
            "no-shared-expert",
            "The shared expert is left out.",
            no_shared_expert,
            ("model.logits", "stages.ffn"),
        ),
        (
            "chunk-only",
            "Index scores see the keys of the current chunk alone.",
            chunk_only,
            ("model.chunks", "stages.select"),
        ),
        (
            "head-zeroed",
            "One head's attention is zero.",
            head_zeroed,
            ("stages.sparse_mla",),
        ),
        (
            "norm-forgotten",
            "The norm before the feed-forward has no weight.",
            norm_forgotten,
            ("stages.attn_output",),
        ),
        (
            "window-forgotten",
            "The drafter's rows see every key.",
            window_forgotten,
            ("stages.draft_block",),
        ),
        (
            "junk-in-padding",
            "Padded rows are written to the cache as if they were real.",
            junk_in_padding,
            ("model.batch", "stages.attn_inputs"),
        ),
        (
            "stale-page",
            "The last key of a page is read from the page before it in memory.",
            stale_page,
            ("model.pages",),
        ),
        (
            "nan-hidden",
            "Top-k doesn't tell of NaN.",
            nan_hidden,
            ("stages.nan",),
        ),
        (
            "scale-off",
            "Quantised weights are decoded two per cent too large.",
            scale_off,
            ("model.weights",),
        ),
    )
    return [Mutant(name, doc, Changed(change), dies) for name, doc, change, dies in rows]


def _edited(session: AlteredSession, edit: Callable[[dict[str, Any], Any], None]) -> None:
    """Edits a copy of what the session is given to lay out; decoder layers only."""
    prepare = session.inner.prepare_weights

    def edited(weights: Any, layer: Any, part: str = "decoder") -> Any:
        weights = dict(weights)
        if part == "decoder" and layer is not None:
            edit(weights, layer)
        return prepare(weights, layer, part)  # type: ignore[arg-type]

    session.prepare_weights = edited  # type: ignore[attr-defined]


def _zeros(weight: Weight) -> Weight:
    data = torch.zeros_like(weight.data)
    return replace(weight, parts={**weight.parts, "data": data})


def rope_skipped(session: AlteredSession) -> None:
    def edit(weights: dict[str, Any], layer: Any) -> None:
        if layer.index == 1:
            weights["inv_freq"] = torch.zeros_like(weights["inv_freq"])

    _edited(session, edit)


def nope_rotated(session: AlteredSession) -> None:
    rope = session.honest["rope"]

    def extra(stage: str, layer: Any, shape: Any) -> Sequence[Any]:
        if stage != "attn_inputs" or layer is None or layer.rope is not None:
            return ()
        honest = composed(session.inner, session.honest, stage, layer, shape)

        def call(w: Any, plan: Any, *more: Any) -> Any:
            made = honest(w, plan, *more)
            turns = torch.full((16,), 0.1, device=made.q.device)
            head = rope(made.q[..., :32].contiguous(), plan.positions, turns, True, 1.0)
            return made._replace(q=torch.cat((head, made.q[..., 32:]), -1))

        return (Accepted("mutant", call),)

    session.extra = extra


def pairs_swapped(session: AlteredSession) -> None:
    rope = session.honest["rope"]
    session.ops["rope"] = lambda x, positions, freq, pairs, m: rope(
        x, positions, freq, not pairs, m
    )


def ssmax_skipped(session: AlteredSession) -> None:
    session.ops["ssmax"] = lambda x, *more: x.clone()


def no_shared_expert(session: AlteredSession) -> None:
    def edit(weights: dict[str, Any], layer: Any) -> None:
        if "shared_w2" in weights:
            weights["shared_w2"] = _zeros(weights["shared_w2"])

    _edited(session, edit)


def norm_forgotten(session: AlteredSession) -> None:
    def edit(weights: dict[str, Any], layer: Any) -> None:
        weights["ffn_norm"] = torch.ones_like(weights["ffn_norm"])

    _edited(session, edit)


def _attention(
    session: AlteredSession, call: Callable[..., Any], chosen: Callable[..., bool]
) -> None:
    """Offers an attention stage of its own for chosen layers."""

    def extra(stage: str, layer: Any, shape: Any) -> Sequence[Any]:
        if stage != "attention" or layer is None or not chosen(layer):
            return ()
        honest = composed(session.inner, session.honest, "attention", layer, shape)
        return (Accepted("mutant", lambda *args: call(honest, layer, *args)),)

    session.extra = extra


def consumer_writes(session: AlteredSession) -> None:
    write = session.honest["kv_write"]

    def call(honest: Any, layer: Any, w: Any, plan: Any, kv: Any, residual: Any, *more: Any) -> Any:
        found = honest(w, plan, kv, residual, *more)
        rows = found[0][:, :1].expand(-1, layer.kv_lora_rank).contiguous()
        write(kv.latent, plan.slots["latent"], rows, None)
        return found

    _attention(session, call, lambda layer: not layer.owns_kv)


def other_owner(session: AlteredSession) -> None:
    first: dict[int, Selection] = {}

    def call(
        honest: Any, layer: Any, w: Any, plan: Any, kv: Any, residual: Any, hidden: Any, given: Any
    ) -> Any:
        if not layer.owns_index and given is not None:
            held = first.get(len(plan.positions))
            fits = held is not None and held.positions.shape == given.positions.shape
            return (
                *honest(w, plan, kv, residual, hidden, held if fits else _least(given))[:2],
                given,
            )
        found = honest(w, plan, kv, residual, hidden, given)
        if layer.index == 0:
            first[len(plan.positions)] = found[2]
        return found

    _attention(session, call, lambda layer: layer.topk_source is not None)


def _least(selection: Selection) -> Selection:
    """The first key alone."""
    keep = torch.arange(selection.positions.shape[1], device=selection.lens.device) == 0
    return Selection(
        torch.where(keep, selection.positions, -1),
        selection.lens.clamp(max=1),
        torch.where(keep, selection.slots, -1),
        selection.has_nan,
    )


def chunk_only(session: AlteredSession) -> None:
    scores = session.honest["indexer_logits"]

    def call(q: Any, weights: Any, scale: Any, cache: Any, table: Any, start: Any, visible: Any,
             rows: Any) -> Tensor:  # fmt: skip
        found = scores(q, weights, scale, cache, table, start, visible, rows)
        column = torch.arange(found.shape[1], device=found.device)
        old = column < (visible - 4).unsqueeze(-1)
        return torch.where(old, -torch.inf, found)

    session.ops["indexer_logits"] = call


def head_zeroed(session: AlteredSession) -> None:
    for name in ("sparse_mla", "window_mla"):
        session.ops[name] = _without_head(session.honest[name])


def _without_head(attend: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        out, lse = attend(*args)
        out = out.clone()
        out[:, 0] = 0
        return out, lse

    return call


def window_forgotten(session: AlteredSession) -> None:
    attend = session.honest["window_mla"]
    session.ops["window_mla"] = lambda *args: attend(*args[:7], None)


def nan_hidden(session: AlteredSession) -> None:
    choose = session.honest["topk"]

    def call(scores: Tensor, visible: Tensor, k: int) -> Any:
        positions, lens, has_nan = choose(scores, visible, k)
        return positions, lens, torch.zeros_like(has_nan)

    session.ops["topk"] = call


def junk_in_padding(session: AlteredSession) -> None:
    write = session.honest["kv_write"]

    def call(cache: KVCache, slots: Tensor, latent: Tensor, rope: Tensor | None = None) -> None:
        write(cache, slots, latent, rope)
        last = slots.amax()
        padded = (slots < 0).nonzero().flatten()[:1]
        if len(padded):  # one padded row, over the row that was written last
            row = None if rope is None else rope[padded]
            write(cache, last.reshape(1), latent[padded], row)

    session.ops["kv_write"] = call


def stale_page(session: AlteredSession) -> None:
    convert, attend = session.honest["to_slots"], session.honest["window_mla"]

    def call(positions: Tensor, table: Tensor, owner: Tensor, size: int) -> Tensor:
        slots = convert(positions, table, owner, size)
        last = (positions >= 0) & (positions % size == size - 1)
        return torch.where(last & (slots >= size), slots - size, slots)

    session.ops["to_slots"] = call
    session.ops["window_mla"] = attend


def scale_off(session: AlteredSession) -> None:
    def edit(weights: dict[str, Any], layer: Any) -> None:
        for name, weight in weights.items():
            if isinstance(weight, Weight) and weight.format in ("fp8_block", "fp8_tensor"):
                parts = {**weight.parts, "scale": weight.parts["scale"] * 1.02}
                weights[name] = replace(weight, parts=parts)

    _edited(session, edit)
