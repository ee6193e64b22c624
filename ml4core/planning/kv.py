"""Cache pools: groups of layers, pages, and how many of them a memory holds.

The engine sizes its pools by these functions, so that a plan and an allocation can't differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ml4core.api import DraftSpec, KVLayout, ModelSpec
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core.api.speculation import DRAFT_GROUP
from ml4core.engine.kv_groups import KVGroup as PageGroup
from ml4core.engine.kv_groups import size_groups

NULL_PAGES = 1
"""Page 0 of every pool is the null page: never written, never handed out."""

NONE: Mapping[str, KVLayout] = MappingProxyType({})
"""No private layouts."""

DRAFT_LAYOUT = "bf16"
"""Layout of the drafter's rows, whatever the target's is."""


@dataclass(frozen=True)
class KVGroup:
    """Layers whose rows share a block table, with a pool of their own.

    Attributes:
        owners: layers that own storage; those that read another layer's rows are not among them.
        sharded: whether decode context parallel ranks share out the tokens; else each has all.
        window: rows that a request keeps at most, for a group of a sliding window.
        ahead: rows behind the last of a step that it holds, too: a drafter's block.
    """

    name: str
    owners: tuple[int, ...]
    layout: KVLayout
    sharded: bool = True
    window: int | None = None
    ahead: int = 0

    @property
    def bytes_per_token(self) -> int:
        return len(self.owners) * self.layout.bytes_per_token

    def page_bytes(self, block_size: int) -> int:
        return block_size * self.bytes_per_token

    def over(self, ranks: int) -> int:
        """Of ``ranks`` decode context parallel ranks, those that share out its tokens."""
        return ranks if self.sharded else 1

    def pages(self, tokens: int, block_size: int, ranks: int = 1, step_rows: int = 0) -> int:
        """Pages of one rank that a request of ``tokens`` tokens takes at most.

        ``step_rows``: rows beside the window that a request has at one time; a group with
        ``ahead`` knows them itself.
        """
        return self.paged(block_size).pages_for(tokens, block_size * self.over(ranks), step_rows)

    def paged(self, block_size: int) -> PageGroup:
        """What the engine's page tables know of it."""
        return PageGroup(
            self.name,
            self.window,
            required=not self.ahead,
            page_bytes=self.page_bytes(block_size),
            ahead=self.ahead,
        )


@dataclass(frozen=True)
class Pools:
    """Pages of each group on one rank, the null page included.

    Attributes:
        ranks: decode context parallel ranks. A page of a sharded group stands for
            ``block_size * ranks`` tokens.
        step_rows: rows of a request that a windowed group has beside its window.
    """

    groups: tuple[KVGroup, ...]
    blocks: Mapping[str, int]
    block_size: int
    ranks: int = 1
    step_rows: int = 0

    def bytes_of(self, group: KVGroup) -> int:
        return self.blocks[group.name] * group.page_bytes(self.block_size)

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_of(group) for group in self.groups)

    @property
    def layouts(self) -> dict[str, KVLayout]:
        """By group."""
        return {group.name: group.layout for group in self.groups}

    @property
    def owners(self) -> dict[str, tuple[int, ...]]:
        """Layers that own storage, by group."""
        return {group.name: group.owners for group in self.groups}

    @property
    def bytes_per_token(self) -> int:
        """Of the groups that keep every token."""
        return sum(group.bytes_per_token for group in self.groups if group.window is None)

    @property
    def tokens(self) -> int:
        """Tokens that the whole-context groups of all ranks hold together."""
        return min(
            (self.blocks[group.name] - NULL_PAGES) * self.block_size * group.over(self.ranks)
            for group in self.groups
            if group.window is None
        )

    def requests(self, context: int) -> int:
        """Requests of ``context`` tokens that fit at once."""
        return min(
            (self.blocks[group.name] - NULL_PAGES)
            // group.pages(context, self.block_size, self.ranks, self.step_rows)
            for group in self.groups
        )


def model_layouts(
    spec: ModelSpec, latent: str, index: str, private: Mapping[str, KVLayout] = NONE
) -> dict[str, KVLayout]:
    """The layouts of these ids at the model's widths: open ones, and those of ``private``.

    Rows of layers without rope have the rope slot too. Raises ``ValueError`` for ids that are
    unknown or can't hold these widths.
    """
    rope = max(layer.rope_dim for layer in spec.layers)
    width = spec.layers[0].kv_lora_rank
    layouts = {"latent": private.get(latent) or latent_layout(latent, width, rope)}
    dims = {layer.indexer.head_dim for layer in spec.layers if layer.indexer is not None}
    if dims:
        layouts["index"] = private.get(index) or index_layout(index, dims.pop())
    return layouts


def target_groups(spec: ModelSpec, layouts: Mapping[str, KVLayout]) -> tuple[KVGroup, ...]:
    """The decoder's groups: ``latent``, and ``index`` if a layer has an indexer."""
    owners = {"latent": spec.kv_owners, "index": spec.index_owners}
    return tuple(KVGroup(name, owners[name], layouts[name]) for name in owners if owners[name])


def draft_group(draft: DraftSpec) -> KVGroup:
    """The drafter's group: rows in bfloat16, replicated on every rank."""
    first = draft.layers[0]
    return KVGroup(
        DRAFT_GROUP,
        tuple(layer.index for layer in draft.layers),
        latent_layout(DRAFT_LAYOUT, first.kv_lora_rank, first.rope_dim),
        sharded=False,
        window=draft.window,
        ahead=draft.depth,
    )


def draft_step_rows(depth: int) -> int:
    """Rows of a request beside the window: the block that is drafted, and two that are verified,
    whose fate is open. Of a prompt's chunk no more than the window is written.
    """
    return depth + PageGroup(DRAFT_GROUP, ahead=depth).slack


def pools_for(
    groups: Sequence[KVGroup],
    block_size: int,
    tokens: int,
    sequences: int,
    ranks: int = 1,
    step_rows: int = 0,
) -> Pools:
    """Pools that hold ``sequences`` sequences of ``tokens`` tokens at once.

    Raises ``ValueError`` for a block size that a layout can't have.
    """
    _check(groups, block_size)
    blocks = {
        group.name: group.pages(tokens, block_size, ranks, step_rows) * sequences + NULL_PAGES
        for group in groups
    }
    return Pools(tuple(groups), blocks, block_size, ranks, step_rows)


def least_pools(
    groups: Sequence[KVGroup],
    block_size: int,
    tokens: int,
    sequences: int,
    ranks: int = 1,
    step_rows: int = 0,
) -> Pools:
    """The smallest pools that ``pools_within`` finds room in for one sequence of ``tokens`` tokens:
    windowed groups are for ``sequences`` of them.
    """
    one = pools_for(groups, block_size, tokens, 1, ranks, step_rows)
    windowed = {
        group.name: sequences * (one.blocks[group.name] - NULL_PAGES) + NULL_PAGES
        for group in groups
        if group.window is not None
    }
    return Pools(tuple(groups), {**one.blocks, **windowed}, block_size, ranks, step_rows)


def pools_within(
    groups: Sequence[KVGroup],
    block_size: int,
    budget: int,
    sequences: int,
    longest: int,
    ranks: int = 1,
    step_rows: int = 0,
) -> Pools | None:
    """Pools that take at most ``budget`` bytes of a rank; None if they'd have no page to hand out.

    Windowed groups are bounded by ``sequences`` of up to ``longest`` tokens, so they come first.
    The others have equally many pages each: what is left, divided by the bytes of a page of all.
    """
    _check(groups, block_size)
    try:
        blocks = size_groups(
            [group.paged(block_size) for group in groups],
            budget,
            block_size,
            max_num_seqs=sequences,
            max_model_len=longest,
            step_rows=step_rows,
        )
    except ValueError:
        return None
    return Pools(tuple(groups), blocks, block_size, ranks, step_rows)


def _check(groups: Sequence[KVGroup], block_size: int) -> None:
    for group in groups:
        group.layout.check_block_size(block_size)
