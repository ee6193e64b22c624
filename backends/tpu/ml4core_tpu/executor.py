"""How steps run: core's loop over layers, each layer one program of its token bucket."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ml4core.api import LayerKV, ModelSpec, Selection, StepOutput, StepPlan, StepShape
from ml4core_tpu.buckets import Buckets
from ml4core_tpu.programs import Programs
from ml4core_tpu.progress import progress

if TYPE_CHECKING:
    from ml4core_tpu.kernels.layer.stage import LayerPrograms, Request

F = TypeVar("F", bound=Callable[..., object])
Step = Callable[..., StepOutput]


class EagerExecutor:
    """A step is itself: each op is a program of its own, compiled when it is first called."""

    def compile(self, step: Step, shape: StepShape) -> Step:
        return step

    def eager_break(self, function: F) -> F:
        return function


class BucketExecutor:
    """Before the first step all programs of layers and logits are compiled, if that is asked for;
    then one that is compiled later is counted and warned of.
    """

    def __init__(
        self,
        model: ModelSpec,
        dtype: torch.dtype,
        layers: LayerPrograms,
        programs: Programs,
        buckets: Buckets,
        product: Callable[..., object],
        warm_up: bool,
    ) -> None:
        """``product``: the op ``gemm``, which makes logits."""
        self._model = model
        self._dtype = dtype
        self._layers = layers
        self._programs = programs
        self._buckets = buckets
        self._product = product
        self._cold = warm_up

    def compile(self, step: Step, shape: StepShape) -> Step:
        def run(weights: Any, plan: StepPlan, kv: Any) -> StepOutput:
            if self._cold:
                self._warm_up(weights, plan, kv)
                self._cold = False
            with self._programs.step():
                return step(weights, plan, kv)

        return run

    def eager_break(self, function: F) -> F:
        return function

    def _warm_up(self, weights: Any, plan: StepPlan, kv: Any) -> None:
        start = perf_counter()
        kinds = self._kinds(weights, kv)
        wanted = [one for index in kinds for one in self._of(index, weights, plan, kv)]
        with progress("Compiling programs of layers") as told:
            self._programs.warm_up(wanted, told)
        self._warm_between(weights)
        made = [one for one in self._programs.made if not one.of_images]
        print(
            f"ml4core-tpu: {len(made)} programs of layers for steps of {self._buckets.told} rows "
            f"in {perf_counter() - start:.1f} s: {sum(one.lowering for one in made):.1f} s of "
            f"lowering, {sum(one.compiling for one in made):.1f} s of compiling",
            file=sys.stderr,
        )

    def _warm_between(self, weights: Any) -> None:
        """What a step asks for beside its layers: logits."""
        for rows in self._buckets.requests:
            state = torch.zeros(rows, self._model.hidden_size, dtype=self._dtype)
            self._product(state, weights.top["output"], torch.float32)

    def _kinds(self, weights: Any, kv: Any) -> list[int]:
        """Layers that may need programs of their own. Others only repeat these."""
        found: dict[object, int] = {}
        for layer in self._model.layers:
            last = layer.index + 1 == len(self._model.layers)
            form = self._layers.form(layer, kv.latent[layer.kv_source])
            key = (form, not layer.index, last, _signature(weights.layers[layer.index]))
            found.setdefault(key, layer.index)
        return list(found.values())

    def _of(self, index: int, weights: Any, plan: StepPlan, kv: Any) -> list[Request]:
        layers = self._model.layers
        layer = layers[index]
        residual = torch.zeros(1, layer.hidden_size, dtype=self._dtype)
        selection = None
        if layer.topk_source is not None and not layer.owns_index:
            owner = layers[layer.topk_source].indexer
            assert owner is not None, "an owner of a selection has an indexer"
            one = torch.zeros(1, dtype=torch.int32)
            none = one.expand(1, owner.topk).contiguous()
            selection = Selection(none, one, none, one.bool())
        following = weights.layers[index + 1] if index + 1 < len(layers) else {}
        return self._layers.wanted(
            layer,
            weights.layers[index],
            plan,
            LayerKV(kv.latent[layer.kv_source], kv.index_keys.get(index)),
            residual,
            residual if index else None,
            selection,
            following.get("attention_norm", weights.top["final_norm"]),
        )


def _signature(weights: Mapping[str, Any]) -> tuple[object, ...]:
    """What of a layer's weights a program depends on."""
    return tuple(
        (name, getattr(one, "format", getattr(one, "dtype", None)), tuple(one.shape))
        for name, one in sorted(weights.items())
    )
