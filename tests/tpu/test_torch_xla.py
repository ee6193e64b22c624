"""The ops, steps and a mesh on torch-xla, on the host, in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ml4core_tpu.layouts import TILES
from tools.torch_xla import environment

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("ML4_TORCH_XLA_ENV") or ROOT / ".venv" / "torch-xla")
KERNELS = 7
"""Of a layer: latent and key written, scores, top-k, sparse MLA, and two products of experts."""
GRAPHS = {"plain": 3, "plain, op by op": 3, "tiles": 3, "drafts": 5, "tiles and drafts": 5}
"""What is laid out; then a chunk and a decode, or a chunk, a window, and a block behind each."""
COMPILER = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Of the host: half the time to compile, for steps that run thrice as long, of which there are few.
"""

# Each may be the first one, which waits for the environment.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="session")
def python() -> Path:
    """Made once, in minutes, and kept. Where it can't be made: skipped, but not in CI."""
    try:
        return environment.ensure(FOLDER)
    except environment.NotMade as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no environment of torch-xla: {reason}")


def said(python: Path, script: str, *words: str, limit_s: float = 600) -> list[dict[str, Any]]:
    """What a child prints as JSON, in the side environment."""
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name(script)), *words],
        env=environment.settings() | {"XLA_FLAGS": COMPILER},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_ops_of_lazy_tensors(python: Path) -> None:
    """The same JAX programs within torch-xla's graphs, by value beside the CPU kernels."""
    told, *found = said(python, "xla_child.py")
    assert {one["op"].partition(",")[0] for one in found} == set(told["registered"])
    for one in found:
        assert one["same_shape"], one
        assert one["error"] < 1e-5, one


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("case", "margin"),
    [
        ("tiles and drafts", 3e-3),
        pytest.param("plain", 1e-4, marks=pytest.mark.slow),
        pytest.param("plain, op by op", 1e-4, marks=pytest.mark.slow),
        pytest.param("tiles", 3e-3, marks=pytest.mark.slow),
        pytest.param("drafts", 1e-4, marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_are_the_cpus(python: Path, case: str, margin: float) -> None:
    """The engine with the shipped model, each step a graph of torch-xla: tokens are those of the
    cpu backend, with a drafter too, and log probabilities within a margin. Caches in fp32 differ by
    the order of sums; in FP8 a value near the middle of two codes falls to either. Each layer is a
    call of its program, but with --enforce-eager.
    """
    (told,) = said(python, "xla_greedy_child.py", case, limit_s=1200)
    found, wanted = told["found"], told["wanted"]
    assert found["switches"]["runtime"] == "torch_xla"
    assert found["layout"] == (TILES if "tiles" in case else "fp32")
    assert found["layers"] == ["parts" if "op by op" in case else "ml4core-tpu"]
    assert len(found["ids"]) >= 16
    assert found["ids"] == wanted["ids"]
    assert told["error"] < margin
    assert found["judged"] == wanted["judged"]
    assert bool(found["judged"][0]) == ("drafts" in case)
    assert told["graphs"] <= GRAPHS[case], "steps of one shape are one graph"


def test_a_layer_over_eight_devices(python: Path, tmp_path: Path) -> None:
    """Data 2, tensor 4, experts over all, in torch-xla's SPMD: by value the layer on one device.
    Then its graph, with kernels of Pallas within, is compiled for a host of tpu7x.

    The sum is JAX's: torch-xla's own, in its manual region, gives back what it was given.
    """
    graph = tmp_path / "graph.pb"
    layer, sums, written = said(python, "xla_mesh_child.py", str(graph))
    assert layer["layer"] < 1e-4
    assert layer["selected_or_stored_otherwise"] == 0
    assert sums["psum"] == [28.0] * 8
    assert sums["all_reduce"] != sums["psum"], "torch-xla reduces there now: say so in docs/tpu.md"
    assert written["graph"] == graph.stat().st_size
    (compiled,) = said(python, "xla_compile_child.py", str(graph))
    assert compiled["kernels"] >= KERNELS
    assert compiled["all_reduces"] >= 2
