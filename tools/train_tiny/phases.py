"""The phases of training: what each starts from, learns, and is taught by."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tools.train_tiny.attention import weights_of_rows
from tools.train_tiny.data import COOLDOWN, SELECTION, Batches, Corpus, main_windows, mixed_windows
from tools.train_tiny.draft import Drafter, draft_loss
from tools.train_tiny.layers import rows_of
from tools.train_tiny.model import Step, TinyModel, sharers, token_loss
from tools.train_tiny.optim import MATRIX_DECAY, Optimizers, make_optimizers, rate_factor
from tools.train_tiny.own_words import Words, spoken
from tools.train_tiny.ranks import Ranks
from tools.train_tiny.rotary import Places
from tools.train_tiny.rounding import rounded

BALANCE = 0.01
"""Weight of the load-balancing loss."""
FALL = 0.45
"""Share of the main phase over which the rate falls, if no other is asked for."""
COOLDOWN_SHARE = 0.22
"""Share of the main phase, its last, that has YaRN and the cooldown's mix."""
INDEX_ROWS = 256
"""Queries of a sequence whose attention the indexer is compared with, drawn anew each step."""
ELSEWHERE = 1e-3
"""Odds of a query that tells nothing of an answer, against one that does."""
ANCHORS = 96
"""Blocks in each 2,048 tokens that the drafter learns from, drawn anew each step."""
FEWEST = 16
"""Blocks of a sequence, at least."""


@dataclass
class Settings:
    """Of one phase. `steps` of `batch` windows, of all processes together, of `length` tokens."""

    steps: int
    batch: int
    length: int
    seed: int = 0
    warm_up: int = 100
    scale: float = 1.0
    """Factor of all rates."""
    weight_decay: float = MATRIX_DECAY
    dropout: float = 0.0
    """Of the main phase."""
    fall: float = 1.0
    """Share of the steps, the last, over which the rate falls to zero."""


class Phase:
    """A loss and what it changes. A subclass fills `modules` and `optimizers`.

    Each process computes the loss of its share of a step's windows.
    """

    name = ""
    mix = COOLDOWN
    modules: dict[str, nn.Module]
    optimizers: Optimizers

    def __init__(
        self, settings: Settings, corpus: Corpus, device: torch.device, ranks: Ranks
    ) -> None:
        if settings.batch % ranks.size:
            raise ValueError(f"batch {settings.batch}: no multiple of {ranks.size} processes")
        self.settings = settings
        self.corpus = corpus
        self.device = device
        self.ranks = ranks
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.batches = Batches(corpus, settings.length, device)
        self.random = torch.Generator(device)

    def factor(self, step: int) -> float:
        s = self.settings
        return rate_factor(step, s.steps, s.warm_up, max(1, round(s.fall * s.steps)))

    def windows(self, step: int) -> np.ndarray[Any, Any]:
        """Beginnings of this process's windows of a step, of `mix`, from a seed of its own."""
        s = self.settings
        seed = s.seed * 1_000_003 + step
        return mixed_windows(self.corpus, self.mix, s.batch, s.length, seed)[self.ranks.own]

    def loss(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        raise NotImplementedError

    def as_shipped(self, step: int) -> AbstractContextManager[None]:
        """Around a step's loss and gradient: the weights as the shipped format holds them, where
        the phase is the last that they learn in.
        """
        return nullcontext()

    def draw(self, step: int) -> None:
        """Seed this step's random choices, so that a resumed run draws as an unbroken one."""
        seed = (self.settings.seed * 7_368_787 + step) * self.ranks.size + self.ranks.rank
        self.random.manual_seed(seed)
        torch.manual_seed(seed)  # dropout draws from torch's own

    def over_all(self, total: Tensor, count: Tensor) -> Tensor:
        """`total` by this process's part of all processes' `count`: the mean of that over the
        processes is the sum of totals by the sum of counts.
        """
        return total / self.ranks.mean(count).clamp(min=1)


class MainPhase(Phase):
    """Next-token loss with full attention; YaRN and the chat mix while the rate falls."""

    name = "main"

    def __init__(
        self, settings: Settings, corpus: Corpus, model: TinyModel, ranks: Ranks | None = None
    ) -> None:
        super().__init__(settings, corpus, model.embedding.device, ranks or Ranks())
        self.model = model
        self.modules = {"model": model}
        model.indexers.requires_grad_(False)
        self.optimizers = make_optimizers(
            model.core_parameters(), settings.scale, settings.weight_decay
        )
        self.token_loss = compiled(token_loss, self.device)
        for layer in model.spec.layers:
            model.block(layer.index).drop = settings.dropout
        s = settings
        self._main = main_windows(corpus, s.steps * s.batch, s.length, s.seed)

    def loss(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        self.draw(step)
        s = self.settings
        last = step >= s.steps - max(1, round(COOLDOWN_SHARE * s.steps))
        if last != self.model.stretched:
            self.model.stretch(last)
        if last:
            starts = self.windows(step)
        else:
            starts = self._main[step * s.batch : (step + 1) * s.batch][self.ranks.own]
        ids, targets, weights = self.batches.window(starts, assistant_only=last)
        out = self.model(ids, self.dtype)
        total, count = self.token_loss(out.hidden, self.model.output, targets, weights)
        nll = self.over_all(total, count)
        return nll + BALANCE * out.balance, {"nll": nll, "balance": out.balance}


class IndexPhase(Phase):
    """The indexers alone learn to score keys as the layers' attention weighs them.

    Their target is a key's largest attention weight in any head of the layers that share a
    selection, so that one head's need isn't lost among those of many. Queries that tell an answer
    come before others.
    """

    name = "indexer"
    mix = SELECTION

    def __init__(
        self, settings: Settings, corpus: Corpus, model: TinyModel, ranks: Ranks | None = None
    ) -> None:
        super().__init__(settings, corpus, model.embedding.device, ranks or Ranks())
        self.model = model
        self.modules = {"model": model}
        model.requires_grad_(False)
        model.indexers.requires_grad_(True)
        model.stretch(True)
        named = ((f"indexers.{n}", p) for n, p in model.indexers.named_parameters())
        self.optimizers = make_optimizers(named, settings.scale, settings.weight_decay)

    def loss(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        self.draw(step)
        ids, _, weights = self.batches.window(self.windows(step), assistant_only=True)
        steps: list[Step] = []
        with torch.no_grad():
            self.model(ids, self.dtype, steps=steps)
        loss = index_loss(self.model, steps, self._rows(weights))
        return loss, {"kl": loss}

    def _rows(self, weights: Tensor) -> Tensor:
        """int64 [B, Q] of the weights [B, T] of what follows each position."""
        odds = weights.clamp(min=ELSEWHERE)
        count = min(INDEX_ROWS, odds.shape[1])
        return torch.multinomial(odds, count, generator=self.random)


class SparsePhase(IndexPhase):
    """All weights, with each query limited to what its indexer chose."""

    name = "sparse"

    def __init__(
        self, settings: Settings, corpus: Corpus, model: TinyModel, ranks: Ranks | None = None
    ) -> None:
        super().__init__(settings, corpus, model, ranks)
        model.requires_grad_(True)
        self.optimizers = make_optimizers(
            model.named_parameters(), settings.scale, settings.weight_decay
        )
        self.token_loss = compiled(token_loss, self.device)

    def as_shipped(self, step: int) -> AbstractContextManager[None]:
        return rounded(self.model)

    def loss(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        self.draw(step)
        ids, targets, weights = self.batches.window(self.windows(step), assistant_only=True)
        steps: list[Step] = []
        out = self.model(ids, self.dtype, sparse=True, steps=steps)
        total, count = self.token_loss(out.hidden, self.model.output, targets, weights)
        nll = self.over_all(total, count)
        kl = index_loss(self.model, steps, self._rows(weights))
        return nll + BALANCE * out.balance + kl, {"nll": nll, "kl": kl, "balance": out.balance}


def index_loss(model: TinyModel, steps: list[Step], rows: Tensor) -> Tensor:
    """Mean KL over indexers, at queries `rows` [B, Q]. Only indexers get a gradient."""
    at = model.places(steps[0].normed.shape[1]).detach()
    here = Places(at.cos[rows], at.sin[rows], at.log_n[rows])
    total = torch.zeros((), device=rows.device)
    owners = model.spec.index_owners
    for owner in owners:
        with torch.no_grad():
            target = torch.zeros((), device=rows.device)
            for layer in sharers(model.spec, owner):
                attention = model.block(layer).attention
                q = attention.query(rows_of(steps[layer].normed, rows), here)
                k = attention.keys(steps[layer].rows)
                weights = weights_of_rows(q, k, rows, attention.scale)
                target = torch.maximum(target, weights)
            target = target / target.sum(-1, keepdim=True)
        indexer = model.indexer(owner)
        total = total + indexer.loss(steps[owner].normed.detach(), at, rows, target)
    return total / len(owners)


class DraftPhase(Phase):
    """The drafter learns to say what the frozen target would.

    Of text, and, every other step, of the target's `own` words.
    """

    name = "draft"

    def __init__(
        self,
        settings: Settings,
        corpus: Corpus,
        model: TinyModel,
        drafter: Drafter,
        ranks: Ranks | None = None,
        own: Words | None = None,
    ) -> None:
        super().__init__(settings, corpus, model.embedding.device, ranks or Ranks())
        self.model, self.drafter, self.own = model, drafter, own
        self.modules = {"drafter": drafter}
        model.requires_grad_(False)
        model.stretch(True)
        self.optimizers = make_optimizers(
            drafter.named_parameters(), settings.scale, settings.weight_decay
        )
        self.draft_loss = compiled(draft_loss, self.device)

    def as_shipped(self, step: int) -> AbstractContextManager[None]:
        half = self.settings.steps // 2
        return rounded(self.drafter) if step >= half else nullcontext()

    def loss(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        self.draw(step)
        if self.own is not None and step % 2:
            ids, targets, weights = self._own(self.own)
        else:
            ids, targets, weights = self.batches.window(self.windows(step), assistant_only=True)
        depth = self.drafter.spec.depth
        with torch.no_grad():
            out = self.model(ids, self.dtype, taps=self.drafter.spec.taps)
            # An anchor is a token after which the text counts; its block needs `depth` more.
            odds = weights + 1e-6
            odds[:, -depth:] = 0
            count = max(FEWEST, ANCHORS * ids.shape[1] // 2048)
            anchors = torch.multinomial(odds, count, True, generator=self.random)
            places = anchors.unsqueeze(-1) + torch.arange(depth, device=ids.device)
            flat = places.flatten(1)
            wanted = self.model.logits(rows_of(out.hidden, flat)).unflatten(1, places.shape[1:])
        previous = ids.gather(1, flat).view_as(places)
        tokens = targets.gather(1, flat).view_as(places)
        counts = weights.gather(1, flat).view_as(places).clamp(max=1)
        # A row matters only if all rows before it counted.
        counts = counts.cumprod(-1)
        blocks = self.drafter.blocks(self.model.embedding, out.taps, ids, anchors)
        first = ids.gather(1, anchors)
        logits = self.drafter.logits(blocks, self.model.output, previous, first)
        loss = self.over_all(*self.draft_loss(logits, wanted, tokens, counts))
        with torch.no_grad():
            right = (logits.argmax(-1) == wanted.argmax(-1)).float().cumprod(-1)
            length = 1 + (right * counts).sum() / counts[..., 0].sum().clamp(min=1)
        return loss, {"draft": loss, "accepted": length}

    def _own(self, own: Words) -> tuple[Tensor, Tensor, Tensor]:
        """ids, targets and weights of as many tokens as a step of text has."""
        length = own.ids.shape[1] - 1
        count = max(1, self.settings.batch // self.ranks.size * self.settings.length // length)
        some = torch.randint(len(own.ids), (count,), generator=self.random, device=self.device)
        words = Words(own.ids[some], own.prompts[some])
        return words.ids[:, :-1].contiguous(), words.ids[:, 1:].contiguous(), spoken(words)


def compiled(function: Any, device: torch.device) -> Any:
    return torch.compile(function, dynamic=False) if device.type == "cuda" else function
