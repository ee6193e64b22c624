"""Binding: the largest accepted stage wins, each choice is on record, nothing falls back in
silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from ml4core.api import (
    OPS,
    Accepted,
    Capabilities,
    Refusal,
    Refused,
    Rejected,
    Segment,
    StepShape,
)
from ml4core.compose.bind import bind_model, bind_ops
from ml4core.compose.context import StageContext
from ml4core.compose.contract import CheckedOp
from ml4core.compose.ops import COMPOSED
from ml4core.engine.collectives import SingleRank
from ml4core.models.layer_table import build_model_spec
from ml4core.models.seeded_config import PRESETS

NONE = Segment(0, 0, 0)
DECODE = StepShape(Segment(2, 2, 1), NONE, NONE, (("latent", 4), ("index", 4)), 2)
PREFILL = StepShape(NONE, NONE, Segment(1, 32, 32), (("latent", 4), ("index", 4)), 1)
SPEC = build_model_spec(PRESETS["tiny"].params())


def context(**changes: Any) -> StageContext:
    made = StageContext(SPEC, None, COMPOSED, SingleRank(), torch.float32, "absorbed")
    return replace(made, **changes)


@dataclass
class Stub:
    """A session whose providers are given as stage -> function of (layer, shape)."""

    ops: dict[str, Callable[..., Any]] = field(default_factory=dict)
    offers: dict[str, Callable[..., list[Any]]] = field(default_factory=dict)
    asked: list[tuple[str, int]] = field(default_factory=list)

    def providers(self, stage, layer, shape):
        self.asked.append((stage, layer.index))
        return self.offers.get(stage, lambda layer, shape: [])(layer, shape)


def fused(*args: Any) -> Any:
    raise AssertionError("never called here")


def test_a_session_without_providers_is_composed_of_its_parts():
    session = Stub()
    bound = bind_model(session, context(), DECODE)
    assert len(bound.layers) == len(SPEC.layers)
    kinds = {layer.kind for layer in SPEC.layers}
    assert {choice.layer_kind for choice in bound.choices} == kinds
    by_part = {(c.part, c.layer_kind): c for c in bound.choices}
    for kind in kinds:
        assert by_part["decoder_layer", kind].provider == "parts"
        assert by_part["sparse_mla", kind].provider == "compose"
        assert by_part["sparse_mla", kind].chosen_by == "core"
        # Sharers don't select.
        assert (("select", kind) in by_part) == ("index_owner" in kind)
    listed = sorted(i for c in bound.choices if c.part == "ffn" for i in c.layers)
    assert listed == [layer.index for layer in SPEC.layers]


def test_the_largest_accepted_stage_is_bound_and_its_parts_are_not_asked_for():
    offer = {"decoder_layer": lambda layer, shape: [Accepted("one-kernel", fused, "2.0")]}
    session = Stub(offers=offer)
    bound = bind_model(session, context(), DECODE)
    assert all(call is fused for call in bound.layers)
    assert {stage for stage, _ in session.asked} == {"decoder_layer"}
    assert {(c.part, c.provider, c.chosen_by, c.version) for c in bound.choices} == {
        ("decoder_layer", "one-kernel", "backend", "2.0")
    }


def test_acceptance_depends_on_layer_and_shape_and_rejections_keep_their_reasons():
    no_nope = Refusal("lib", "rope dim 0", "the kernel needs a rope part", "a rope layer")

    def attention(layer, shape):
        if shape.kind != "decode":
            return [Rejected("fast", (Refusal("lib", "rows", f"{shape.rows} rows", "1 row"),))]
        return [Rejected("fast", (no_nope,))] if layer.rope_dim == 0 else [Accepted("fast", fused)]

    session = Stub(offers={"attention": attention})
    decode = {(c.part, c.layer_kind): c for c in bind_model(session, context(), DECODE).choices}
    prefill = {(c.part, c.layer_kind): c for c in bind_model(session, context(), PREFILL).choices}
    for layer in SPEC.layers:
        choice = decode["attention", layer.kind]
        assert layer.index in choice.layers
        if layer.rope_dim:
            assert (choice.provider, choice.rejected) == ("fast", ())
            assert ("sparse_mla", layer.kind) not in decode
        else:
            assert choice.provider == "parts"
            assert choice.rejected == (Rejected("fast", (no_nope,)),)
        assert prefill["attention", layer.kind].rejected[0].refusals[0].reason == "32 rows"
        assert prefill["attention", layer.kind].step_kind == "prefill"


def test_the_first_accepted_candidate_is_taken_and_those_before_it_are_on_record():
    why = (Refusal("lib", "version", "too old", "1.2"),)
    offers = {
        "ffn": lambda layer, shape: [Rejected("a", why), Accepted("b", fused), Accepted("c", fused)]
    }
    bound = bind_model(Stub(offers=offers), context(), DECODE)
    ffn = [c for c in bound.choices if c.part == "ffn"]
    assert {c.provider for c in ffn} == {"b"}
    assert {c.rejected for c in ffn} == {(Rejected("a", why),)}


def test_a_form_asked_for_by_flag_is_not_overruled():
    offers = {"attention": lambda layer, shape: [Accepted("fast", fused)]}
    session = Stub(offers=offers)
    bound = bind_model(session, context(mla_form="unabsorbed"), PREFILL)
    attention = [c for c in bound.choices if c.part == "attention"]
    assert {(c.provider, c.chosen_by) for c in attention} == {("compose:unabsorbed", "flag")}


def test_attention_follows_the_rows_where_nobody_else_has_a_part_in_it():
    bound = bind_model(Stub(), context(mla_form="auto"), PREFILL)
    attention = {c.layer_kind: c for c in bound.choices if c.part == "attention"}
    assert {(c.provider, c.chosen_by) for c in attention.values()} == {("compose:auto", "core")}
    assert not [c for c in bound.choices if c.part in ("attn_inputs", "sparse_mla")]
    # A provider of one of its parts, or an op of the backend's own, is used.
    offers = {"sparse_mla": lambda layer, shape: [Accepted("fast", fused)]}
    bound = bind_model(Stub(offers=offers), context(mla_form="auto"), PREFILL)
    assert {c.provider for c in bound.choices if c.part == "sparse_mla"} == {"fast"}
    assert {c.provider for c in bound.choices if c.part == "attention"} == {"parts"}
    own = context(mla_form="auto", ops={**COMPOSED, "sparse_mla": fused})
    bound = bind_model(Stub(), own, PREFILL)
    assert {c.provider for c in bound.choices if c.part == "attention"} == {"parts"}
    # So is the reason of one that was passed over.
    why = (Refusal("lib", "rows", "32 rows", "1 row"),)
    offers = {"attn_output": lambda layer, shape: [Rejected("a", why)]}
    bound = bind_model(Stub(offers=offers), context(mla_form="auto"), PREFILL)
    assert {c.rejected for c in bound.choices if c.part == "attn_output"} == {(Rejected("a", why),)}


def test_layers_of_one_kind_that_are_served_apart_stay_apart_in_the_report():
    """A provider may serve layer 5 and not layer 9 of the same kind: the report shows both."""
    offers = {"ffn": lambda layer, shape: [Accepted("x", fused)] if layer.index == 5 else []}
    bound = bind_model(Stub(offers=offers), context(), DECODE)
    five = next(layer for layer in SPEC.layers if layer.index == 5)
    found = {
        c.provider: c.layers for c in bound.choices if c.part == "ffn" and c.layer_kind == five.kind
    }
    assert found["x"] == (5,)
    assert 5 not in found["compose"]
    assert len(found["compose"]) >= 1


def test_own_ops_come_before_compositions():
    own = Stub(ops={"topk": fused})
    ops, choices = bind_ops(own, Capabilities(frozenset({"feature:compose", "op:topk"})), "mine")
    assert isinstance(ops["topk"], CheckedOp)
    assert ops["topk"].call is fused
    assert ops["rope"] is COMPOSED["rope"]
    assert set(ops) == set(OPS)
    assert {c.part for c in choices if c.provider == "mine"} == {"topk"}


def test_without_compose_every_missing_op_is_named_at_once():
    own = Stub(ops={name: fused for name in OPS if name not in ("rope", "topk")})
    with pytest.raises(Refused) as refused:
        bind_ops(own, Capabilities(frozenset(f"op:{name}" for name in own.ops)), "mine")
    assert {r.subject for r in refused.value.refusals} == {"op:rope", "op:topk"}
    assert "feature:compose" in str(refused.value)


def test_an_op_that_is_not_in_the_table_is_refused():
    own = Stub(ops={"sparse_mlp": fused})
    with pytest.raises(Refused, match="op:sparse_mlp: is not in the op table"):
        bind_ops(own, Capabilities(frozenset({"feature:compose"})), "mine")


def test_an_op_that_is_offered_but_not_declared_is_refused():
    own = Stub(ops={"topk": fused})
    with pytest.raises(Refused, match="op:topk: is offered but not declared"):
        bind_ops(own, Capabilities(frozenset({"feature:compose"})), "mine")
