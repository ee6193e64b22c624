"""The tiny model on a session of the subject: weights laid out, caches filled, steps run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ml4core.api import (
    KVCache,
    KVLayout,
    LayerKV,
    LayerSpec,
    ModelSpec,
    Session,
    StepOutput,
    StepPlan,
    Weight,
)
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core.api.pages import page_tokens
from ml4core.compose.bind import BoundModel, bind_model, bind_ops
from ml4core.compose.context import StageContext
from ml4core.engine.collectives import SingleRank
from ml4core.models.mistral_large4 import KVState, ModelWeights, forward
from ml4core_conformance.check import CheckFailed, NotRun
from ml4core_conformance.draw import Draw
from ml4core_conformance.oracle.stages import Rounding
from ml4core_conformance.rigs.plans import PageBook
from ml4core_conformance.subject import Subject
from ml4core_conformance.tiny import TinyWeights, Weights


@dataclass(frozen=True)
class Precision:
    """The dtype of activations and the layouts of caches that a check judges with.

    Attributes:
        name: as in the variants of checks.
        dtype, kv, index: as in ``Deployment``; ``default:<key>`` is what the backend declares.
        requires: capability words; those of declared defaults go without saying.
    """

    name: str
    dtype: str
    kv: str
    index: str
    requires: frozenset[str] = frozenset()

    def settled(self, subject: Subject) -> Mapping[str, str]:
        """The fields of a ``Deployment``. ``NotRun`` if the backend declares no such default."""
        defaults = subject.capabilities.defaults
        fields = {"dtype": self.dtype, "kv_layout": self.kv, "index_layout": self.index}
        for field, value in fields.items():
            kind, _, key = value.partition(":")
            if kind != "default":
                continue
            if key not in defaults:
                raise NotRun(
                    f"{subject.backend.name} declares no default {key!r}, and this check is of it"
                )
            fields[field] = defaults[key]
        return fields


REFERENCE = Precision(
    "reference", "float32", "fp32", "fp32", frozenset({"act:fp32", "kv:fp32", "index:fp32"})
)
BF16 = Precision("bf16", "bfloat16", "bf16", "default:index", frozenset({"act:bf16", "kv:bf16"}))
FP8 = Precision("fp8", "bfloat16", "default:fp8", "default:index", frozenset({"act:bf16"}))
MIXED = Precision("mixed", "float32", "bf16", "default:index", frozenset({"act:fp32", "kv:bf16"}))
"""A cache that stores less than activations hold."""
DEFAULT = Precision("default", "default:dtype", "default:kv", "default:index")


class Rig:
    """A model on a session of its own.

    Attributes:
        weights: dense, on the CPU: the oracle's.
        layouts: by KV group.
        rounding: what the twin of the oracle does to results.
    """

    def __init__(
        self,
        subject: Subject,
        spec: ModelSpec,
        weights: TinyWeights,
        precision: Precision,
        *,
        blocks: int = 24,
        given: Sequence[Weights] | None = None,
        **deployment: Any,
    ) -> None:
        """``given`` are the layers' weights as the backend gets them, if not the dense ones."""
        self.subject = subject
        self.spec = spec
        self.weights = weights
        fields = precision.settled(subject)
        needs = {f"kv:{fields['kv_layout']}", f"index:{fields['index_layout']}"}
        needs.add("act:fp32" if fields["dtype"] == "float32" else "act:bf16")
        needs |= deployment.pop("needs", frozenset())
        self.exercised = {
            f"weights:{one.format}"
            for own in (weights.top, *(given or weights.layers))
            for one in own.values()
            if isinstance(one, Weight)
        }
        self.deployment = subject.deployment(spec, **fields, needs=frozenset(needs), **deployment)
        self.block_size = self.deployment.block_size
        self.blocks = blocks
        self.session = subject.open(self.deployment)
        self.ops, _ = bind_ops(self.session, subject.capabilities, subject.backend.name)
        self.dtype: torch.dtype = getattr(torch, self.deployment.dtype)
        self.rounding = Rounding(self.dtype)
        self.context = StageContext(
            model=spec,
            layer=None,
            ops=self.ops,
            collectives=self.session.collectives or SingleRank(),
            dtype=self.dtype,
        )
        prepare = self.session.prepare_weights
        self.prepared = ModelWeights(
            prepare(_copied(weights.top), None),
            tuple(
                prepare(_copied(own), layer)
                for layer, own in zip(spec.layers, given or weights.layers, strict=True)
            ),
        )
        self.layouts: Mapping[str, KVLayout] = {
            "latent": _layout(self.session, self.deployment.kv_layout, latent_layout),
            "index": _layout(self.session, self.deployment.index_layout, index_layout),
        }
        alloc = self.session.alloc_kv
        self.kv = KVState(
            {n: alloc(self.layouts["latent"], blocks, self.block_size) for n in spec.kv_owners},
            {n: alloc(self.layouts["index"], blocks, self.block_size) for n in spec.index_owners},
        )
        self._bound: dict[Any, tuple[BoundModel, Callable[..., StepOutput]]] = {}

    @property
    def device(self) -> torch.device:
        return self.subject.torch_device

    def exercise(self, *words: str) -> None:
        """Notes that a check runs with what this model needs, and with ``words``."""
        composed = {"feature:compose"} & self.subject.capabilities.features
        self.subject.exercise({*self.deployment.needs, *self.exercised, *composed, *words})

    def book(self) -> PageBook:
        return PageBook(self.blocks)

    def to(self, x: Tensor) -> Tensor:
        """Floats in the dtype of activations, on the device."""
        return x.to(device=self.device, dtype=self.dtype if x.is_floating_point() else x.dtype)

    def layer_kv(self, layer: LayerSpec) -> LayerKV:
        return LayerKV(self.kv.latent[layer.kv_source], self.kv.index_keys.get(layer.index))

    def caches(self) -> list[tuple[str, int, KVCache]]:
        """Every cache: its group, owner, and itself."""
        latent = [("latent", owner, cache) for owner, cache in self.kv.latent.items()]
        return latent + [("index", owner, cache) for owner, cache in self.kv.index_keys.items()]

    def fill(self, seed: int) -> None:
        """Rows of nearly normal numbers in each slot of each cache, but for the null page."""
        for group, owner, cache in self.caches():
            layout, draw = self.layouts[group], Draw(seed, f"fill/{group}/{owner}")
            rows = draw.normal(self.blocks, self.block_size, layout.width)
            if group == "latent" and self.spec.layers[owner].rope is None:
                rows[..., self.spec.layers[owner].kv_lora_rank :] = 0
            rows[0] = 0
            scale = None if cache.scale is None else cache.scale.cpu()
            for part, packed in zip(cache.parts, layout.pack(rows, scale), strict=True):
                part.copy_(packed)

    def through(self, group: str, rows: Tensor) -> Tensor:
        """Rows [T, width] after they were stored and read, by the layout's own words."""
        caches = self.kv.latent if group == "latent" else self.kv.index_keys
        return through(next(iter(caches.values())), rows)

    def rows(self, cache: KVCache) -> Tensor:
        """What a cache holds: fp64 [slots, width]."""
        scale = None if cache.scale is None else cache.scale.cpu()
        rows = cache.layout.unpack(_parts(cache), scale)
        return rows.flatten(0, 1).to(torch.float64)

    def tokens(self, cache: KVCache) -> list[Tensor]:
        """The bytes of each part a token: uint8 [slots, bytes]. Of private layouts the rows."""
        if cache.layout.id.startswith("x-"):
            return [self.rows(cache)]
        found = []
        for index, part in enumerate(_parts(cache)):
            token = page_tokens(cache.layout, index, part, cache.block_size)
            found.append(token.contiguous().flatten(0, 1).view(torch.uint8))
        return found

    def snapshot(self) -> dict[tuple[str, int], list[Tensor]]:
        return {(group, owner): self.tokens(cache) for group, owner, cache in self.caches()}

    def untouched(
        self,
        before: Mapping[tuple[str, int], list[Tensor]],
        written: Mapping[tuple[str, int], Tensor],
        what: str,
    ) -> None:
        """Raises ``CheckFailed`` if a slot has other bytes than before and isn't in ``written``."""
        for (group, owner), parts in self.snapshot().items():
            changed = torch.zeros(len(parts[0]), dtype=torch.bool)
            for old, new in zip(before[group, owner], parts, strict=True):
                same = (old == new) | ((old != old) & (new != new))
                changed |= ~same.flatten(1).all(-1)
            allowed = written.get((group, owner), torch.empty(0, dtype=torch.int64))
            changed[allowed[allowed >= 0]] = False
            if changed.any():
                slot = int(changed.nonzero()[0])
                raise CheckFailed(
                    f"{what}: {int(changed.sum())} slots of the {group} cache of layer {owner} "
                    f"changed that it may not write, the first being slot {slot} (page "
                    f"{slot // self.block_size}, token {slot % self.block_size})"
                )

    def bound(self, plan: StepPlan) -> tuple[BoundModel, Callable[..., StepOutput]]:
        """The model as core binds it for a plan's shape, and its compiled step."""
        self.exercise()
        if plan.shape not in self._bound:
            bound = bind_model(self.session, self.context, plan.shape)

            def step(weights: ModelWeights, plan: StepPlan, kv: KVState) -> StepOutput:
                return forward(bound, weights, plan, kv)

            self._bound[plan.shape] = bound, self.session.executor.compile(step, plan.shape)
        return self._bound[plan.shape]

    def step(self, plan: StepPlan) -> StepOutput:
        """Runs a step. Results are copies on the CPU."""
        with torch.inference_mode():
            output = self.bound(plan)[1](self.prepared, plan, self.kv)
        return StepOutput(
            output.logits.cpu().clone(),
            tuple(tap.cpu().clone() for tap in output.taps),
            output.fault.cpu().clone(),
        )


def through(cache: KVCache, rows: Tensor) -> Tensor:
    """Rows [T, width] after a cache like this has stored and given them back."""
    layout, scale = cache.layout, None if cache.scale is None else cache.scale.cpu()
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % layout.block_multiple))
    arrays = layout.pack(padded.float().unsqueeze(0), scale)
    return layout.unpack(arrays, scale)[0, : len(rows)].to(torch.float64)


def _layout(session: Session, id: str, make: Callable[[str], KVLayout]) -> KVLayout:
    """The session's private layout of that id, or the open one at the published widths."""
    return session.layouts[id] if id.startswith("x-") else make(id)


def _parts(cache: KVCache) -> tuple[Tensor, ...]:
    """Copies of a cache's arrays on the CPU."""
    return tuple(part.detach().to("cpu").contiguous().clone() for part in cache.parts)


def _copied(weights: Weights) -> Weights:
    """Another mapping of the same tensors: a session may empty what it is given."""
    return dict(weights)
