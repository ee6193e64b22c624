"""A plan: one deployment's memory, rank by rank, and the tokens that it leaves room for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ml4core.api import Capabilities, KVLayout, ModelSpec
from ml4core.engine import graph_capture, resolve, switches
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import ArgumentsError
from ml4core.engine.image_limits import image_limit
from ml4core.planning import kv, parallel, reserve
from ml4core.planning.model import PlannedModel
from ml4core.planning.ranks import Ranks
from ml4core.planning.weights import (
    Held,
    PartBytes,
    WeightTable,
    decoded,
    kept,
    requantised,
)

LAYOUTS = ("fp8_ds_mla", "e4m3", "bf16")
"""Latent layouts whose bytes a token every plan shows."""

CAPTURES = "feature:graph_capture"
"""The word of a backend whose steps are captured as graphs, for which memory is kept."""

_FORMATS = {"bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class PlanOptions:
    """What a plan is told beside the engine's flags.

    Attributes:
        memory: bytes of one device; None: weights and bytes a token alone are planned.
        reserve: bytes beside weights and caches; None: the formula's.
        decoded: whether the backend brings every matrix to the activations' dtype.
        fp8: latent layout of ``--kv-cache-dtype`` ``fp8``, ``fp8_e4m3`` and ``auto``.
        backend: what it declares, whose defaults hold where a flag is left out; None: one with
            bfloat16 activations and the caches of ``fp8`` that captures graphs.
        layouts: private ones by id, at the model's widths.
    """

    memory: int | None = None
    reserve: int | None = None
    decoded: bool = False
    fp8: str = "fp8_ds_mla"
    backend: Capabilities | None = None
    layouts: Mapping[str, KVLayout] = field(default_factory=dict)

    @property
    def words(self) -> Capabilities:
        """The backend, or what stands for one."""
        if self.backend is not None:
            return self.backend
        defaults = {"dtype": "bfloat16", "kv": self.fp8, "fp8": self.fp8}
        return Capabilities(frozenset(("index:fp32", CAPTURES)), defaults)


@dataclass(frozen=True)
class Plan:
    """All sizes in bytes; those of weights, reserve and pools are of one rank.

    Attributes:
        weights: by part; ``not_loaded`` the parts that these flags leave out, with their bytes in
            the checkpoint.
        row_bytes: bytes a token by latent layout, over all layers, index keys included.
        groups: draft group last.
        budget: left for pools; None without a memory. It may be negative.
        pools: None if there is no memory, or no page fits.
    """

    model: PlannedModel
    args: EngineArgs
    options: PlanOptions
    ranks: Ranks
    dtype: str
    weights: Mapping[str, PartBytes]
    not_loaded: Mapping[str, int]
    row_bytes: Mapping[str, int]
    layout: str
    groups: tuple[kv.KVGroup, ...]
    block_size: int
    max_model_len: int
    max_num_seqs: int
    rows: int
    step_rows: int
    reserve: reserve.Reserve
    budget: int | None
    pools: kv.Pools | None

    @cached_property
    def weight_bytes(self) -> int:
        return sum(part.rank for part in self.weights.values())

    @cached_property
    def needed(self) -> kv.Pools:
        """Pools of one request of ``max_model_len``; windowed ones of ``max_num_seqs`` requests."""
        return kv.least_pools(
            self.groups,
            self.block_size,
            self.max_model_len,
            self.max_num_seqs,
            self.ranks.dcp,
            self.step_rows,
        )

    @property
    def usable(self) -> int | None:
        """Bytes of the device that may be used."""
        if self.options.memory is None:
            return None
        return int(self.options.memory * self.args.gpu_memory_utilization)

    @property
    def required(self) -> int:
        """Bytes of a rank for weights, reserve and ``needed``."""
        stated = self.args.kv_cache_memory_bytes
        return self.weight_bytes + self.reserve.nbytes + (stated or self.needed.nbytes)

    @property
    def shortfall(self) -> str:
        """Why it doesn't fit, in words; empty if it does, or if no memory is known: neither the
        device's nor that of the caches.
        """
        if self.budget is None:
            return ""
        if self.usable is not None:
            room = self.usable - self.weight_bytes - self.reserve.nbytes
            if room <= 0:
                return (
                    f"weights of {gib(self.weight_bytes)} and a reserve of "
                    f"{gib(self.reserve.nbytes)} leave nothing of {gib(self.usable)} for caches"
                )
            if self.budget > room:
                return (
                    f"--kv-cache-memory-bytes {self.budget} is more than the {room} bytes that are "
                    "left"
                )
        if self.needed.nbytes > self.budget:
            return (
                f"one request of {self.max_model_len:,} tokens"
                + (
                    f", and draft windows of {self.max_num_seqs} requests,"
                    if self._windowed
                    else ""
                )
                + f" need caches of {gib(self.needed.nbytes)}, and there are {gib(self.budget)}"
            )
        return ""

    @property
    def held(self) -> Held:
        return _held(self.options, _FORMATS[self.dtype], self.args)

    @property
    def _windowed(self) -> bool:
        return any(group.window is not None for group in self.groups)

    @property
    def fits(self) -> bool:
        return not self.shortfall

    @property
    def longest_context(self) -> int:
        """Tokens that one request may have: what the pools hold, at most the model's context."""
        if self.pools is None:
            return 0
        return min(self.pools.tokens, self.model.spec.max_position)

    def tokens_at(self, layout: str) -> int | None:
        """Tokens in the pools, were the latent rows of this layout."""
        if self.pools is None or self.budget is None:
            return None
        private = self.options.layouts
        groups = _groups(self.model.spec, layout, self._index_id, self.drafts, private)
        pools = self._within(groups)
        return pools.tokens if pools is not None else 0

    def _within(self, groups: tuple[kv.KVGroup, ...]) -> kv.Pools | None:
        assert self.budget is not None
        return kv.pools_within(
            groups,
            self.block_size,
            self.budget,
            self.max_num_seqs,
            self.max_model_len,
            self.ranks.dcp,
            self.step_rows,
        )

    @property
    def drafts(self) -> bool:
        return "drafter" in self.weights

    @property
    def _index_id(self) -> str:
        index = next((group for group in self.groups if group.name == "index"), None)
        return index.layout.id if index is not None else "planar_f32"


def make_plan(model: PlannedModel, args: EngineArgs, options: PlanOptions) -> Plan:
    """The plan of these flags, whether it fits or not (see ``Plan.shortfall``).

    Raises ``ArgumentsError`` with every flag by which the model can't be shared out or laid out.
    """
    spec, ranks = model.spec, Ranks.of(args)
    words = options.words
    dtype = words.defaults.get("dtype", "bfloat16") if args.dtype == "auto" else args.dtype
    problems = [f"--dtype: {dtype} has no plan; works: {', '.join(_FORMATS)}"] * (
        dtype not in _FORMATS
    )
    held = _held(options, _FORMATS.get(dtype, "bf16"), args)
    table = _loaded(model, args)
    drafts = "drafter" in table.parts
    problems += parallel.problems(args, spec, table, held)
    longest = args.max_model_len or spec.max_position
    if longest > spec.max_position:
        problems.append(
            f"--max-model-len: {longest} is above the model's longest context; works: up to "
            f"{spec.max_position}"
        )
    if args.speculative_config and "drafter" not in model.table.parts:
        problems.append("--speculative-config: this model has no drafter; works: leave it out")
    layout = resolve.kv_layout_id(args, words)
    index = resolve.index_layout_id(args, words, layout)
    block = args.block_size or int(words.defaults.get("block_size", resolve.BLOCK_SIZE))
    groups: tuple[kv.KVGroup, ...] = ()
    try:
        groups = _groups(spec, layout, index, drafts, options.layouts)
        for group in groups:
            group.layout.check_block_size(block)
    except ValueError as error:
        problems.append(f"--kv-cache-dtype {args.kv_cache_dtype}, --block-size {block}: {error}")
    if problems:
        raise ArgumentsError(problems)
    depth = _depth(spec, args) if drafts else 0
    sequences, rows = resolve.step_limits(args, words, 1 + depth)
    step_rows = kv.draft_step_rows(depth) if drafts else 0
    weights = table.by_part(ranks, held)
    beside = (
        reserve.stated(options.reserve)
        if options.reserve is not None
        else reserve.estimate(
            spec,
            ranks,
            value_bytes=2 if dtype == "bfloat16" else 4,
            rows=rows,
            sequences=sequences,
            longest=longest,
            drafts=depth,
            drawn=args.speculative_config.get("draft_sample_method") == "probabilistic",
            images="vision" in table.parts,
            graphs=CAPTURES in words
            and not graph_capture.is_eager(args.enforce_eager, args.compilation_config),
        )
    )
    budget = args.kv_cache_memory_bytes
    if budget is None and options.memory is not None:
        usable = int(options.memory * args.gpu_memory_utilization)
        budget = usable - sum(part.rank for part in weights.values()) - beside.nbytes
    pools = None
    if budget is not None:
        pools = kv.pools_within(groups, block, budget, sequences, longest, ranks.dcp, step_rows)
    whole = model.table.by_part(ranks, held)
    return Plan(
        model=model,
        args=args,
        options=options,
        ranks=ranks,
        dtype=dtype,
        weights=weights,
        not_loaded={p: b.stored for p, b in whole.items() if p not in weights},
        row_bytes=row_bytes(spec, index, options.layouts),
        layout=layout,
        groups=groups,
        block_size=block,
        max_model_len=longest,
        max_num_seqs=sequences,
        rows=rows,
        step_rows=step_rows,
        reserve=beside,
        budget=budget,
        pools=pools,
    )


def row_bytes(
    spec: ModelSpec, index: str = "planar_f32", private: Mapping[str, KVLayout] = kv.NONE
) -> dict[str, int]:
    """Bytes a token over all layers, index keys included, for each of ``LAYOUTS`` that can hold the
    model's rows.
    """
    found = {}
    for layout in LAYOUTS:
        try:
            groups = kv.target_groups(spec, kv.model_layouts(spec, layout, index, private))
        except ValueError:  # fp8_ds_mla can't hold every width
            continue
        found[layout] = sum(group.bytes_per_token for group in groups)
    return found


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.2f} GiB"


def _held(options: PlanOptions, format: str, args: EngineArgs) -> Held:
    if options.decoded:
        return decoded(format)
    converted = switches.REQUANT in args.additional_config
    return requantised(kept(format)) if converted else kept(format)


def _loaded(model: PlannedModel, args: EngineArgs) -> WeightTable:
    """The weights without the parts that the flags leave out."""
    out = [] if args.speculative_config else ["drafter"]
    if not image_limit(args.limit_mm_per_prompt):
        out.append("vision")
    return model.table.without(*out)


def _depth(spec: ModelSpec, args: EngineArgs) -> int:
    asked = args.speculative_config.get("num_speculative_tokens")
    if isinstance(asked, int) and asked > 0:
        return asked
    return spec.draft.depth if spec.draft is not None else 0


def _groups(
    spec: ModelSpec, layout: str, index: str, drafts: bool, private: Mapping[str, KVLayout]
) -> tuple[kv.KVGroup, ...]:
    groups = kv.target_groups(spec, kv.model_layouts(spec, layout, index, private))
    return (*groups, kv.draft_group(spec.draft)) if drafts and spec.draft is not None else groups
