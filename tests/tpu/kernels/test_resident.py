"""The session of TPUs on the host's devices: caches are written in place, rows stay where they are,
and what a program compiled for tpu7x aliases is what it does here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import torch

from ml4core.api import Device, LayerKV, Session
from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import open_engine
from ml4core.models.seeded import make_seeded
from ml4core.registry import select
from ml4core_conformance import tiny
from ml4core_conformance.case import OpCase
from ml4core_conformance.cases import all_cases
from ml4core_conformance.subject import Subject
from ml4core_tpu.aot import devices_of
from ml4core_tpu.aot_cases import LATENT, ROPE, TENSOR
from ml4core_tpu.backend import TpuBackend
from ml4core_tpu.buckets import Buckets
from ml4core_tpu.compilation import without_cache
from ml4core_tpu.device_memory import told_when_full
from ml4core_tpu.kernels.layer.aot_cases import (
    KINDS,
    PAGE,
    PAGES,
    ROWS,
    layer_case,
    published_layer,
)
from ml4core_tpu.kernels.layer.form import Caches, Stored, form_of
from ml4core_tpu.kernels.layer.mesh import cut_caches, local_layer, mesh_of
from ml4core_tpu.kernels.resident.devices import Devices
from ml4core_tpu.kernels.resident.stage import TRIAL_PAGES, ResidentLayers
from ml4core_tpu.kernels.resident.tensor import DeviceTensor
from ml4core_tpu.kernels.rows import Rows
from ml4core_tpu.layouts import lane33_layout, tiles_layout
from ml4core_tpu.programs import Programs
from support.answers import Answers
from support.tpu_plans import PAGE as TOKENS
from support.tpu_plans import chunk

TESTS = Path(__file__).parents[2]
CHILD = TESTS / "tpu" / "resident_child.py"
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS / 'tpu'}",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
}
Conforms = Callable[[OpCase, bool], None]


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    options = {"device": "interpreted", "tpu": {"resident": True}}
    device = Device("interpreted", "XLA on the host", "tpu7x", "cpu")
    found = Subject(TpuBackend(), device, options=options)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("op", "variant", "name"),
    [
        ("sparse_mla", "e4m3+bf16", "hostile"),
        ("window_mla", "e4m3+bf16", "window-edge"),
        ("indexer_logits", "planar_ue8m0x4+bf16", "ragged"),
        ("topk", "scores", "ties"),
    ],
)
def test_ops_on_resident_caches(conforms: Conforms, op: str, variant: str, name: str) -> None:
    """Held against the suite's oracle; rows come in by ``copy_``."""
    (case,) = [one for one in all_cases() if (one.op, one.variant, one.name) == (op, variant, name)]
    conforms(case, op != "topk")


LAYER = tiny.model().layers[1]


def filled(session: Session) -> LayerKV:
    """Caches whose every page has something in it, the same for each session."""
    draw = torch.Generator().manual_seed(0)
    latent = session.alloc_kv(tiles_layout(), 3, TOKENS)
    keys = session.alloc_kv(lane33_layout(), 3, TOKENS)
    for cache, width in ((latent, 576), (keys, 128)):
        rows = torch.randn(3, TOKENS, width, generator=draw)
        for part, content in zip(cache.parts, cache.layout.pack(rows, cache.scale), strict=True):
            part.copy_(content)
    return LayerKV(latent, keys)


def stepped(session: Session) -> tuple[LayerKV, tuple[Any, ...]]:
    """The caches and results of a layer of 40 rows."""
    weights = session.prepare_weights(tiny.weights(tiny.model(), 0).layers[1], LAYER)
    kv, given = filled(session), chunk(40)
    (found,) = session.providers("decoder_layer", LAYER, given.shape)
    x = torch.randn(40, LAYER.hidden_size, generator=torch.Generator().manual_seed(1))
    norm = torch.ones(LAYER.hidden_size)
    call = found.call  # type: ignore[union-attr]
    return kv, call(weights, given, kv, x, None, None, norm)


@pytest.mark.timeout(600)
def test_a_layer_writes_into_the_memory_that_it_was_given(subject: Subject) -> None:
    """And what was handed over is gone: nothing was copied. Every byte is as on caches of the
    host, and so are rows.
    """
    session = subject.open(subject.deployment(tiny.model(), dtype="float32"))
    programs: Programs = session.executor._programs  # type: ignore[attr-defined]
    kv = filled(session)
    arrays = [part.array for cache in kv for part in cache.parts]  # type: ignore[union-attr]
    assert not any(array.is_deleted() for array in arrays)
    kv, (residual, hidden, chosen) = stepped(session)
    ((_, program),) = programs._programs.values()
    nbytes = kv.latent.nbytes + kv.index_keys.nbytes  # type: ignore[union-attr]
    assert program.memory_analysis().alias_size_in_bytes == nbytes
    assert len(aliases(program.as_text())) == 3
    parts = [part for cache in kv for part in cache.parts]  # type: ignore[union-attr]
    held = [part.untyped_storage().data_ptr() for part in parts]
    before = [part.array for part in parts]
    (found,) = session.providers("decoder_layer", LAYER, chunk(40).shape)
    weights = session.prepare_weights(tiny.weights(tiny.model(), 0).layers[1], LAYER)
    x = torch.zeros(40, LAYER.hidden_size)
    call = found.call  # type: ignore[union-attr]
    call(weights, chunk(40), kv, x, x, None, torch.ones(LAYER.hidden_size))
    assert [part.untyped_storage().data_ptr() for part in parts] == held
    assert all(array.is_deleted() for array in before)
    assert len(programs.made) == 2  # with and without a state that is normed already

    kv, (residual, hidden, chosen) = stepped(session)
    host = Subject(TpuBackend(), subject.device, options={"device": "interpreted"})
    other = host.open(host.deployment(tiny.model(), dtype="float32"))
    kept, (want_residual, want_hidden, want_chosen) = stepped(other)
    for mine, theirs in zip(kv, kept, strict=True):
        for part, want in zip(mine.parts, theirs.parts, strict=True):  # type: ignore[union-attr]
            assert isinstance(part, DeviceTensor)
            assert torch.equal(part.host(), want)
    torch.testing.assert_close(residual.host(), want_residual)
    torch.testing.assert_close(hidden.host(), want_hidden)
    for one, want in zip(chosen, want_chosen, strict=True):
        assert torch.equal(one.host(), want.to(one.dtype))
    host.close()


def aliases(text: str) -> list[str]:
    """Outputs of a compiled program that are written over an input, each with it."""
    (header,) = re.findall(r"input_output_alias={(.*?)}, entry_computation_layout", text)
    return re.findall(r"{\d*}: \(\d+, {}, \w+-alias\)", header)


def test_what_a_layer_only_reads_is_not_donated() -> None:
    """Else the owner's cache were gone after the first layer that shares it."""
    latents, scale, keys = ("latents",), "scale", "keys"
    caches: Any = Caches(latents, scale, keys)  # type: ignore[arg-type]
    layers = tiny.model().layers
    owner = next(layer for layer in layers if layer.owns_kv and layer.owns_index)
    assert cut_caches(owner, caches) == (Stored(latents, keys), Caches((), scale, None))  # type: ignore[arg-type]
    consumer = replace(layers[1], kv_source=0, topk_source=0, indexer=None)
    alone = caches._replace(keys=None)
    assert cut_caches(consumer, alone) == (Stored((), None), alone)


BUCKETS = Buckets(tokens=(ROWS[0], 64), requests=(8,), most_requests=8, pages=2)


@pytest.mark.skipif(find_spec("libtpu") is None, reason="there is no libtpu")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.name)
def test_what_a_session_compiles_for_a_tpu_writes_in_place(kind: Any) -> None:
    """The session's own lowering, for the eight devices of a host, without one."""
    mesh = mesh_of(devices_of("tpu7x:2x2x1"), 1, TENSOR)
    layers = ResidentLayers(Devices(mesh, "tpu"), False, Programs(), BUCKETS, "fp8_tensor")
    case = layer_case(mesh, kind, ROWS[0])
    weights, step, written, read, *others = case.arguments
    caches = Caches(written.latents or read.latents, read.scale, written.keys)
    layer = local_layer(published_layer(kind), TENSOR)
    rows = Rows("tiles", LATENT, ROPE if kind.rope else 0)
    form = form_of(layer, rows, act="fp8_tensor", target="tpu")
    with without_cache():
        program = layers._lowered(form, (weights, step, caches, *others)).compile()
    token = (512 + 128 * kind.rope) * kind.owns_latent + 132 * kind.owns_index
    assert 0 <= program.memory_analysis().alias_size_in_bytes - PAGES * PAGE * token < 4096
    text = program.as_text()
    assert len(aliases(text)) == 2 * kind.owns_latent + kind.owns_index
    assert "tpu_custom_call" in text  # kernels are Mosaic's, and not interpreted


def ask(model: str, own: dict[str, Any], limit: int, **flags: Any) -> dict[str, Any]:
    asked = {
        "flags": {"model": model, "dtype": "float32", **flags},
        "own": own,
        "prompts": PROMPTS,
        "tokens": 5,
        "limit": limit,
    }
    ended = subprocess.run(
        [sys.executable, str(CHILD), json.dumps(asked)],
        env=os.environ | SETTINGS,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "was compiled after the warm-up" not in ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


PROMPTS = [list(range(300, 330)), list(range(7, 16)), [11] * 15]
LIMITS: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 3, "max_num_batched_tokens": 64}


def alone(model: str, **flags: Any) -> list[dict[str, list[Any]]]:
    """What the cpu backend makes of the prompts."""
    args = EngineArgs(model, backend="cpu", dtype="float32", **flags)
    engine = open_engine(args, choice=select("cpu"), sequences=3, tokens_each=64)
    try:
        return Answers(engine, PROMPTS, 5).all()
    finally:
        engine.close()


@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_an_engine_sizes_its_caches_by_what_the_devices_tell(tmp_path: Path) -> None:
    """Steps are tried on two pages, then all programs are compiled for what is left, and none after
    that. Every cache stays in its memory, and each array that it had before is gone.
    """
    model = make_seeded(
        tmp_path / "seeded",
        format="bf16",
        layers=3,
        hidden=128,
        heads=4,
        nope_dim=64,
        v_dim=128,
        nope_every=None,
        topk=16,
        index_heads=2,
        dense_width=512,
        experts=8,
        experts_per_token=2,
        expert_width=512,
        vocab=512,
        yarn_original=64,
    )
    flags = {"kv_cache_dtype": "float32", **LIMITS}
    found = ask(str(model), {"warm_up": True}, 64 << 20, **flags)
    for got, want in zip(found["made"], alone(str(model), **flags), strict=True):
        assert got["tokens"] == want["tokens"]
        assert got["logprobs"] == pytest.approx(want["logprobs"], abs=2e-4)
    assert found["waits_each_step"] == 1  # for the fault, once the logits are there
    assert found["in_place"]
    assert all(found["donated"])
    assert min(found["blocks"]) > TRIAL_PAGES
    assert found["switches"]["devices"] == "1 of cpu, kernels for host"
    assert found["switches"]["compiled_after_warm_up"] == "0"
    # Three for trials, and as many for the caches that came of them.
    assert found["switches"]["programs"].startswith("6 of layers")
    assert found["memory"]["agrees"]
    share, taken = found["memory"]["share"], found["memory"]["in_all"]["taken"]
    assert 0.9 * share < taken <= share


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_a_drafter_on_resident_caches_compiles_nothing_late() -> None:
    """The shipped model with its drafter, whose rows are in caches of bfloat16."""
    drafts = {"speculative_config": {"method": "dspark"}}
    flags = {**LIMITS, "kv_cache_dtype": "float32", **drafts}
    found = ask("ml4-tiny", {"warm_up": True}, 0, **flags)
    want = alone("ml4-tiny", **flags)
    assert [one["tokens"] for one in found["made"]] == [one["tokens"] for one in want]
    assert found["in_place"]
    assert all(found["donated"])
    assert found["switches"]["compiled_after_warm_up"] == "0"


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_eager_steps_write_resident_caches_op_by_op() -> None:
    flags = {**LIMITS, "kv_cache_dtype": "float32", "enforce_eager": True}
    found = ask("ml4-tiny", {}, 0, **flags)
    assert [one["tokens"] for one in found["made"]] == [
        one["tokens"] for one in alone("ml4-tiny", **flags)
    ]
    assert found["in_place"]
    assert all(found["donated"])


def test_memory_that_runs_out_is_told_as_such() -> None:
    """JAX has no type for it, and core would take it for any other fault."""
    with (
        pytest.raises(MemoryError, match="a step: RESOURCE_EXHAUSTED: 5 GiB"),
        told_when_full("a step"),
    ):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 5 GiB")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), told_when_full("a step"):
        raise jax.errors.JaxRuntimeError("INTERNAL: else")


def test_caches_that_do_not_fit_are_told_with_their_size(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that failed in another way is no device that is full."""
    session = subject.session
    size = 2**22 * 128 * 640
    with pytest.raises(MemoryError, match=f"4194304 pages of 128 tokens takes {size} bytes"):
        session.alloc_kv(tiles_layout(), 2**22, 128)

    def broken(*given: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: lost")

    monkeypatch.setattr(Devices, "pages", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: lost"):
        session.alloc_kv(tiles_layout(), 2, 128)


def test_steps_on_trial_pages_have_one_size() -> None:
    mesh = mesh_of(jax.local_devices()[:1], 1, 1)
    layers = ResidentLayers(Devices(mesh, "host"), False, Programs(), BUCKETS)

    def bucket(rows: int, blocks: int) -> int:
        kv: Any = SimpleNamespace(latent=SimpleNamespace(blocks=blocks))
        return layers._bucket(rows, kv)

    assert [bucket(3, TRIAL_PAGES), bucket(64, TRIAL_PAGES), bucket(3, TRIAL_PAGES + 1)] == [
        BUCKETS.tokens[-1], BUCKETS.tokens[-1], BUCKETS.tokens[0]
    ]  # fmt: skip


def test_devices_are_those_of_the_mesh() -> None:
    devices = Devices(mesh_of(jax.local_devices()[:1], 1, 1), "host")
    assert (devices.data, devices.tensor, devices.target) == (1, 1, "host")
    pages = devices.pages((3, 8), "uint8")
    assert pages.sharding.device_set == set(devices.own)
    content = torch.arange(24, dtype=torch.uint8).view(3, 8)
    copy = devices.copied(content, pages)
    content.zero_()
    assert int(copy[2, 7]) == 23
