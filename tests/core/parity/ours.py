"""Our model on the embedded backend: a checkpoint folder in, logits and selections out."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ml4core.api import (
    Accepted,
    Deployment,
    LayerKV,
    LayerSpec,
    ModelSpec,
    Selection,
    StepPlan,
    StepShape,
)
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core.compose.attention import select, sparse_mla
from ml4core.compose.context import StageContext
from ml4core.cpu import ml4core_backends
from ml4core.engine.collectives import SingleRank
from ml4core.engine.runner import ModelRunner
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.tensors import load_model_spec
from ml4core.models.weights import load_layers
from support.stepping import Sequence, build_plan, plan_pools

Schedule = Callable[[int, int, int], int]
"""(prompt, step, tokens left) -> rows that the prompt computes in this step; 0 skips it."""


def whole(prompt: int, step: int, left: int) -> int:
    return left


def chunks(prompt: int, step: int, left: int) -> int:
    """Uneven chunks, so that prompts end in different steps and no cut is at a page's edge."""
    return min(left, 19 + 4 * prompt)


def one_by_one(prompt: int, step: int, left: int) -> int:
    return min(left, 1)


def mixed(prompt: int, step: int, left: int) -> int:
    """Decodes, windows of 4 rows, chunks and idle prompts, side by side in one step."""
    return min(left, (13, 1, 4, 0, 38, 4, 1)[(step + 2 * prompt) % 7])


MIXED_VERIFY_ROWS = 4


@dataclass
class Seen:
    """What a stage was given or gave: rows [T, k] of positions."""

    layer: int
    plan: StepPlan
    positions: Tensor


class Tapped:
    """A session that also serves ``select`` and ``sparse_mla``, by core's composition, and listens.

    With ``answers`` (positions [T, k] of one prompt, by layer) ``select`` gives those instead of
    what it found, so that each layer is judged on the reference's input.
    """

    def __init__(self, session: Any, model: ModelSpec) -> None:
        self._session = session
        self._model = model
        self.selections: list[Seen] = []
        self.attended: list[Seen] = []
        self.answers: dict[int, Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def providers(self, stage: str, layer: LayerSpec | None, shape: StepShape) -> Seq[Any]:
        if layer is None or stage not in ("select", "sparse_mla"):
            return self._session.providers(stage, layer, shape)
        context = StageContext(self._model, layer, self.ops, SingleRank(), torch.float32)
        tap = self._tap_select if stage == "select" else self._tap_attention
        return [Accepted("tap", tap(layer.index, context))]

    def _tap_select(self, layer: int, context: StageContext) -> Callable[..., Any]:
        composed = select(context, {})

        def call(plan: StepPlan, kv: LayerKV, q: Tensor, weights: Tensor) -> Selection:
            found = composed(plan, kv, q, weights)
            self.selections.append(Seen(layer, plan, found.positions))
            if self.answers is None:
                return found
            positions = _front_packed(self.answers[layer][plan.positions], plan.visible)
            slots = self.ops["to_slots"](
                positions, plan.block_tables["latent"], plan.row_request, kv.latent.block_size
            )
            return Selection(positions, (positions >= 0).sum(-1).int(), slots, found.has_nan)

        return call

    def _tap_attention(self, layer: int, context: StageContext) -> Callable[..., Any]:
        composed = sparse_mla(context, {})

        def call(plan: StepPlan, kv: LayerKV, q: Tensor, selection: Selection | None) -> Any:
            if selection is not None:
                self.attended.append(Seen(layer, plan, selection.positions))
            return composed(plan, kv, q, selection)

        return call


class Ours:
    """A checkpoint, opened as the engine opens one."""

    def __init__(self, folder: Path) -> None:
        self._checkpoint = Checkpoint.open(folder)
        self.spec = load_model_spec(self._checkpoint)

    def runner(
        self,
        *,
        tokens: int,
        sequences: int = 1,
        block_size: int = 64,
        mla_form: str = "absorbed",
        index: str = "fp32",
        spec: ModelSpec | None = None,
    ) -> tuple[ModelRunner, Tapped]:
        """A runner in fp32 with room for ``sequences`` of ``tokens``, and the tap on it.

        ``spec`` runs the weights as another model than the file describes. Caches begin full of
        junk.
        """
        spec = spec or self.spec
        (backend,) = ml4core_backends()
        (device,) = backend.probe().devices
        deployment = Deployment(
            model=spec,
            device=device,
            index_layout=index,
            block_size=block_size,
            attention_config={"mla_form": mla_form},
        )
        tapped = Tapped(backend.open(deployment), spec)
        runner = ModelRunner(tapped, backend.name, deployment, backend.capabilities(device))
        first = spec.layers[0]
        dims = [layer.indexer.head_dim for layer in spec.layers if layer.indexer is not None]
        layouts = {
            "latent": latent_layout("fp32", first.kv_lora_rank, first.rope_dim),
            "index": index_layout(index, dims[0] if dims else 128),
        }
        runner.load(load_layers(self._checkpoint, spec, torch.float32))
        runner.allocate_kv(plan_pools(spec, layouts, block_size, tokens, sequences))
        assert runner.kv is not None
        for cache in (*runner.kv.latent.values(), *runner.kv.index_keys.values()):
            for part in cache.parts:
                part.fill_(77)
        return runner, tapped


def _front_packed(positions: Tensor, visible: Tensor) -> Tensor:
    """The visible ones of positions [T, k], ascending, -1 behind."""
    hidden = torch.iinfo(torch.int32).max
    kept = torch.where(positions < visible.unsqueeze(1), positions, hidden).sort(-1).values
    return torch.where(kept == hidden, -1, kept).to(torch.int32)


def by_layer(seen: Seq[Seen], request: int = 0) -> dict[int, Tensor]:
    """Positions [T, k] of one request of every step, in order of position, by layer."""
    rows: dict[int, list[Tensor]] = {}
    for item in seen:
        mine = (item.plan.row_request == request) & (item.plan.visible > 0)
        rows.setdefault(item.layer, []).append(item.positions[mine])
    return {layer: torch.cat(found) for layer, found in rows.items()}


def run(
    runner: ModelRunner,
    prompts: Seq[Seq[int]],
    schedule: Schedule = whole,
    *,
    verify_rows: int = 0,
    **padding: int,
) -> list[Tensor]:
    """Logits [T, vocab] of each prompt, after steps over the paged cache as ``schedule`` says.

    Pages are taken as they are needed, so those of the prompts lie between each other.
    ``padding`` is that of ``build_plan``.
    """
    sequences = [Sequence(list(prompt), len(prompt)) for prompt in prompts]
    rows: list[list[Tensor]] = [[] for _ in prompts]
    step = 0
    while any(s.computed < len(s.token_ids) for s in sequences):
        work: list[tuple[int, int]] = []
        for index, sequence in enumerate(sequences):
            left = len(sequence.token_ids) - sequence.computed
            count = schedule(index, step, left) if left else 0
            if count:
                sequence.grow(runner.pools, sequence.computed + count, runner.block_size)
                work.append((index, count))
        step += 1
        if not work:
            continue
        plan = build_plan(
            [(sequences[index], count) for index, count in work],
            tuple(runner.pools),
            runner.block_size,
            verify_rows=verify_rows,
            all_logits=True,
            **padding,
        )
        logits = runner.step(plan).logits
        for index, part in _split(plan, logits, [(sequences[i], n, i) for i, n in work]):
            rows[index].append(part)
        for index, count in work:
            sequences[index].computed += count
    for sequence in sequences:
        sequence.release(runner.pools)
    return [torch.cat(parts) for parts in rows]


def _split(
    plan: StepPlan, logits: Tensor, work: list[tuple[Sequence, int, int]]
) -> list[tuple[int, Tensor]]:
    """The logits of each prompt. A request is known by its first page, which no two share."""
    first_page = {int(page): i for i, page in enumerate(plan.block_tables["latent"][:, 0]) if page}
    # Those of padding come behind all others.
    total = sum(count for _, count, _ in work)
    logits, requests = logits[:total], plan.row_request[plan.logits_indices[:total]]
    parts = []
    for sequence, count, index in work:
        mine = logits[requests == first_page[sequence.pages["latent"][0]]]
        assert len(mine) == count
        parts.append((index, mine))
    return parts
