"""Which layers have which trait, as params.json states it."""

from __future__ import annotations

from ml4core.models.params import Indexer, MoE, Params, TopkSchedule

FIRST_SHARER = 16
"""Of the default schedule of indexers: all layers before this one own theirs."""


def nope_layers(params: Params) -> frozenset[int]:
    """The layers without rotary embedding."""
    if params.nope_layers is not None:
        return frozenset(params.nope_layers)
    return every_nth(params.nope_every, params.n_layers)


def every_nth(n: int | None, n_layers: int) -> frozenset[int]:
    """Layers l with l % n == n - 1; none without n."""
    return frozenset(range(n - 1, n_layers, n)) if n is not None else frozenset()


def kv_sources(params: Params) -> dict[int, int]:
    """Consumer layer -> the layer whose latent it reads."""
    return {int(layer): owner for layer, owner in (params.kv_sharing or {}).items()}


def stated_full(indexer: Indexer, n_layers: int) -> dict[str, tuple[bool, ...]]:
    """By key of the file that says it: for each layer, whether it owns an indexer."""
    stated: dict[str, tuple[bool, ...]] = {}
    if indexer.types is not None:
        stated["indexer.types"] = tuple(kind == "full" for kind in indexer.types)
    if isinstance(indexer.topk_pattern, str):
        stated["indexer.topk_pattern"] = tuple(kind == "F" for kind in indexer.topk_pattern)
    elif isinstance(indexer.topk_pattern, TopkSchedule):
        freq, offset = indexer.topk_pattern.freq, indexer.topk_pattern.offset
        stated["indexer.topk_pattern"] = tuple(
            max(layer - offset + 1, 0) % freq == 0 for layer in range(n_layers)
        )
    return stated


def default_full(n_layers: int, nope: frozenset[int]) -> tuple[bool, ...]:
    """The first 16 layers, every fourth of the rest and the NoPE layers own an indexer."""
    return tuple(
        layer < FIRST_SHARER or layer % 4 == 0 or layer in nope for layer in range(n_layers)
    )


def is_moe(moe: MoE | None, layer: int) -> bool:
    return moe is not None and layer >= moe.first_k_dense_replace and layer % moe.route_every_n == 0


def topk_sources(full: tuple[bool, ...]) -> tuple[int, ...]:
    """For each layer, the nearest owner at or before it; -1 where there is none."""
    sources: list[int] = []
    for layer, owns in enumerate(full):
        sources.append(layer if owns else (sources[-1] if sources else -1))
    return tuple(sources)


def pattern_problems(
    full: tuple[bool, ...], n_layers: int, nope: frozenset[int], nope_owners: bool, key: str
) -> list[str]:
    """What is wrong with a schedule of indexer owners; `key` says where it stands."""
    if len(full) != n_layers:
        return [f"{key}: {len(full)} entries; n_layers is {n_layers}, each layer needs one"]
    problems = []
    if early := [layer for layer, source in enumerate(topk_sources(full)) if source < 0]:
        problems.append(
            f"{key}: layer {early[0]} shares a selection, but no layer before it owns an indexer; "
            "layer 0 must be full"
        )
    sharing = sorted(layer for layer in nope if layer < n_layers and not full[layer])
    if nope_owners and sharing:
        problems.append(
            f"{key}: NoPE layers {sharing} share a selection; NoPE layers own their indexers, "
            "unless indexer.nope_owners is false"
        )
    return problems
