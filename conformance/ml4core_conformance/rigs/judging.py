"""One stage of one layer before the judge: what it is given, and the oracle with its twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ml4core.api import KVCache, LayerSpec, Selection
from ml4core_conformance import tiny
from ml4core_conformance.check import CheckFailed
from ml4core_conformance.oracle.stages import EXACT, Inputs, LayerOracle
from ml4core_conformance.rigs import errors
from ml4core_conformance.rigs.rig import Precision, Rig
from ml4core_conformance.rigs.scenes import Scene, calls
from ml4core_conformance.subject import Subject

ROUTER_MARGIN = {torch.float32: 1e-4, torch.bfloat16: 0.03}
"""Below this distance of logits another expert may be chosen, as the rows that reach the router are
rounded; such rows are not compared.
"""


def rig_of(subject: Subject, precision: Precision, seed: int) -> Rig:
    """The tiny model with one more layer, which has no index, on filled caches."""

    def make() -> Rig:
        spec = tiny.model()
        extra = tiny.without_index(spec.layers[1])
        spec = replace(spec, layers=(*spec.layers, replace(extra, index=8, kv_source=8)))
        dtype = getattr(torch, precision.settled(subject)["dtype"])
        rig = Rig(subject, spec, tiny.weights(spec, seed, dtype), precision, blocks=12)
        rig.fill(seed)
        return rig

    return subject.once(f"stages/{precision.name}/{seed}", make)


class Judge:
    """One stage of one layer on one scene: what it is given, and the oracle with its twin."""

    def __init__(self, subject: Subject, rig: Rig, scene: Scene, spec: LayerSpec) -> None:
        self.subject, self.rig, self.scene, self.spec = subject, rig, scene, spec
        self.where = f"layer {spec.index} ({spec.kind}), {scene.kind}"
        dense = rig.weights.layers[spec.index]
        self.exact = subject.once(
            f"oracle/{id(rig)}/{spec.index}", lambda: LayerOracle(spec, dense, EXACT)
        )
        self.twin = subject.once(
            f"twin/{id(rig)}/{spec.index}", lambda: LayerOracle(spec, dense, rig.rounding)
        )
        self.weights = rig.prepared.layers[spec.index]
        self.kv = rig.layer_kv(spec)
        self.real = scene.real

    def calls(self, stage: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Every provider, each with its name in messages."""
        for provider, call in calls(self.rig, stage, self.spec, self.scene.plan):
            yield f"{self.where}, by {provider}", call

    def compare(
        self,
        what: str,
        got: Tensor | None,
        exact: Tensor | None,
        twin: Tensor | None,
        where: str,
        rows: Tensor | None = None,
        axes: tuple[str, ...] = ("row",),
    ) -> None:
        """Real rows against the oracle; padded ones must be finite. None is due for None."""
        if exact is None or twin is None or got is None:
            if (got is None) != (exact is None):
                verb = "is missing" if got is None else "is given, and not due"
                raise CheckFailed(f"{what}: {verb}; {where}")
            return
        got = got.cpu()
        if got.shape != exact.shape:
            shapes = f"shape {list(got.shape)}, wanted {list(exact.shape)}"
            raise CheckFailed(f"{what}: {shapes}; {where}")
        errors.finite(f"{what} of padded rows", got[~self.real], where)
        rows = self.real if rows is None else rows
        errors.judge(self.subject, what, got[rows], exact[rows], twin[rows], where, axes)

    def floats(self, *shape: int) -> Tensor:
        return self.scene.floats(*shape)

    def hidden(self) -> Tensor | None:
        """A normed state; None on layer 0, which has to norm for itself."""
        return None if self.spec.index == 0 else self.floats(self.spec.hidden_size)

    def to(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else self.rig.to(x)

    def given(self) -> Selection | None:
        """What a sharer is handed, on the CPU; owners are handed what is not theirs to use."""
        source = self.spec.topk_source
        if source is None or self.spec.owns_index:
            return None
        indexer = self.rig.spec.layers[source].indexer
        assert indexer is not None
        return self.scene.selection(indexer.topk)

    def written(self, made: Inputs) -> dict[tuple[str, int], Tensor]:
        """The slots of each cache that this layer writes."""
        slots = {}
        if made.row is not None:
            slots["latent", self.spec.index] = self.scene.cpu.slots["latent"]
        if made.indexed is not None:
            slots["index", self.spec.index] = self.scene.cpu.slots["index"]
        return slots

    def check_rows(self, made: Inputs, twin: Inputs, where: str) -> None:
        """What the caches hold of the rows that this layer wrote: fp64 rows through the layout."""
        keys = [None if one.indexed is None else one.indexed.key for one in (made, twin)]
        self._check_group("latent", self.kv.latent, made.row, twin.row, where)
        self._check_group("index", self.kv.index_keys, keys[0], keys[1], where)

    def _check_group(
        self,
        group: str,
        cache: KVCache | None,
        exact: Tensor | None,
        lossy: Tensor | None,
        where: str,
    ) -> None:
        if exact is not None and lossy is not None and cache is not None:
            slots = self.scene.cpu.slots[group][self.real]
            stored = self.rig.rows(cache)[slots]
            tail = stored[:, exact.shape[-1] :]
            if not bool((tail == 0).all()):
                raise CheckFailed(f"{group} rows: the unused rope part is not zero; {where}")
            pad = (0, stored.shape[-1] - exact.shape[-1])
            exact, lossy = (torch.nn.functional.pad(x[self.real], pad) for x in (exact, lossy))
            through = self.rig.through(group, lossy)
            errors.judge(self.subject, f"{group} rows", stored, exact, through, where)
