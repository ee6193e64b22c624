"""The programs that a warm-up compiles are those that steps of any size ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ml4core.api import LayerKV
from ml4core_conformance import tiny
from ml4core_conformance.subject import Subject
from ml4core_tpu.buckets import Buckets
from ml4core_tpu.kernels.layer.form import form_of
from ml4core_tpu.kernels.layer.stage import LayerPrograms
from ml4core_tpu.kernels.rows import Rows
from ml4core_tpu.layouts import lane33_layout, tiles_layout
from ml4core_tpu.programs import Programs
from support.tpu_plans import PAGE, chunk

BUCKETS = Buckets(tokens=(32, 64, 100), requests=(8,), most_requests=8, pages=2)


@pytest.mark.parametrize("rows", [1, 32, 40, 100])
def test_whatever_the_first_step_is(subject: Subject, rows: int) -> None:
    layer, given = tiny.model().layers[1], tiny.weights(tiny.model(), 0).layers[1]
    session, _ = subject.session_for(frozenset())
    kv = LayerKV(
        session.alloc_kv(tiles_layout(), 3, PAGE), session.alloc_kv(lane33_layout(), 3, PAGE)
    )
    layers = LayerPrograms(Programs(), BUCKETS)

    def state(rows: int) -> tuple[Any, ...]:
        residual = torch.zeros(rows, layer.hidden_size)
        return residual, residual, None, given["attention_norm"]

    def asked(size: int, bucket: int) -> Any:
        pages = layers._pages(layer, chunk(size), kv, None)
        arguments = layers._arguments(layer, given, chunk(size), kv, *state(size), bucket, pages)
        return layers._wanted(layer, kv, arguments)[0]

    wanted = [key for key, _, _ in layers.wanted(layer, given, chunk(rows), kv, *state(1))]
    assert wanted == [asked(3, 32), asked(33, 64), asked(99, 100)]


def test_pools_of_other_sizes_share_programs(subject: Subject) -> None:
    """A program gets the pages that a step sees, in a pool whose size follows from requests."""
    layer, given = tiny.model().layers[1], tiny.weights(tiny.model(), 0).layers[1]
    session, _ = subject.session_for(frozenset())
    layers = LayerPrograms(Programs(), BUCKETS)
    state = torch.zeros(3, layer.hidden_size)
    keys = []
    for blocks in (3, 17, 90):
        kv = LayerKV(
            session.alloc_kv(tiles_layout(), blocks, PAGE),
            session.alloc_kv(lane33_layout(), blocks, PAGE),
        )
        rest = (state, state, None, given["attention_norm"])
        keys.append([key for key, _, _ in layers.wanted(layer, given, chunk(3), kv, *rest)])
    assert keys[0] == keys[1] == keys[2]


def test_hosts_with_other_experts_run_one_program() -> None:
    """A warm-up goes by the whole model's table, and steps by what a host has of it."""
    layer = tiny.model().layers[1]
    assert layer.moe is not None
    other = replace(layer, index=5, kv_source=5, topk_source=5,
                    moe=replace(layer.moe, first_expert=4))  # fmt: skip
    rows = Rows("tiles", 512, 64)
    assert form_of(other, rows) == form_of(layer, rows)
