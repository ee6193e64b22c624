"""A layer over ranks: data 2, tensor 4, experts over all 8, beside the layer on one device."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ml4core_conformance import tiny
from ml4core_tpu.kernels.layer.form import Caches, Matrix, Step
from ml4core_tpu.kernels.layer.mesh import argument_specs, local_layer, mesh_of, ranked_rows

CHILD = Path(__file__).parents[1] / "mesh_child.py"


def run(processes: int) -> list[list[dict[str, Any]]]:
    """What each process says, of 8 devices in all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [
        subprocess.Popen(
            [sys.executable, str(CHILD), *map(str, (rank, processes, port, 8 // processes))],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        ended = [child.communicate(timeout=540) for child in children]
    finally:
        for child in children:
            with child:  # waits, and closes its pipes
                child.kill()
    for child, (_, errors) in zip(children, ended, strict=True):
        assert child.returncode == 0, errors[-3000:]
    return [[json.loads(line) for line in out.splitlines() if line[:1] == "{"] for out, _ in ended]


def check(said: list[dict[str, Any]]) -> None:
    *steps, programs = said
    assert [one["step"] for one in steps] == ["both", "one idle"]
    for one in steps:
        assert one["error"] < 1e-5, one
        assert one["finite"], one
        assert one["selected_or_stored_otherwise"] == 0, one
    assert programs == {"programs": 1}  # an idle rank steps along in the same one


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_devices_of_one_process() -> None:
    check(run(1)[0])


@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_two_processes_of_four_devices_over_gloo() -> None:
    for said in run(2):
        check(said)


def test_gate_and_up_of_a_rank_stay_together() -> None:
    rows = np.arange(8)[:, None] * np.ones((1, 3), int)
    assert ranked_rows(rows, 2)[:, 0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_the_one_latent_is_whole_on_each_tensor_rank() -> None:
    """Heads are cut, and what there is one of is not: pages are those of their data rank (B130)."""
    row, matrix = np.zeros(4, np.int32), Matrix({"data": np.zeros((8, 8))}, "fp32")
    weights = {name: matrix for name in ("wq", "wo", "wkv_a", "w_uk", "experts_w2")}
    step = Step(*[row] * len(Step._fields))
    caches = Caches((np.zeros((4, 16, 576)),), np.ones(1), np.zeros((4, 16, 128)))
    placed = argument_specs((weights, step, caches, row, row, None, row))
    assert {name: one.data for name, one in placed[0].items()} == {
        "wq": P("tensor"),
        "wo": P(None, "tensor"),
        "wkv_a": P(),
        "w_uk": P("tensor"),
        "experts_w2": P(("data", "tensor")),
    }
    assert set(placed[1]) == {P("data")}
    assert placed[2] == Caches((P("data"),), P(), P("data"))
    assert placed[3:] == (P("data"), P("data"), None, P())
    for tensor in (1, 2, 4, 8):
        assert local_layer(tiny.model().layers[1], tensor).heads == 8 // tensor


def test_a_mesh_of_other_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="are 8 devices; there are 2"):
        mesh_of([object()] * 2, 2, 4)
    with pytest.raises(ValueError, match="8 heads don't divide into 3"):
        local_layer(tiny.model().layers[1], 3)
