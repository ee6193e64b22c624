"""Whole sessions on kernels in Triton's interpreter: with AITER at work, which is a stand-in that
computes with the oracle; what inputs of experts become; and what a session leaves behind.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ml4core.api import Deployment, Device, Session, Weight
from ml4core.engine.sampling_params import SamplingParams
from ml4core.formats import mxfp4
from ml4core.models.seeded import seed_checkpoint
from ml4core_conformance import tiny
from ml4core_conformance.rigs.engines import engine
from ml4core_conformance.subject import Subject
from ml4core_rocm import session as sessions
from ml4core_rocm.backend import RocmBackend
from ml4core_rocm.session import RocmSession
from ml4core_rocm.switches import MOE_BOUND, VARIABLES

from .control.conftest import deployment
from .fake_aiter import Fake
from .test_aiter_ops import small

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="kernels are compiled in this process, not interpreted"
    ),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

AITER, SPARSE, SIZE = VARIABLES.values()
INTERPRETED = Device("interpreted", "Triton's interpreter on the host", "gfx950", "cpu")


class Unrefused(RocmBackend):
    """Opens what a device that is no GPU is refused for: AITER."""

    def __init__(self) -> None:
        self.opened: list[RocmSession] = []

    def open(self, deployment: Deployment) -> Session:
        self.opened.append(RocmSession(deployment))
        return self.opened[-1]


# A dense layer with rope, and one of experts without; each chooses its keys. Every key and every
# expert is chosen, so that rounding moves no choice. Experts are as wide as one of AITER's tiles.
SHAPE: Mapping[str, Any] = {
    "layers": 2,
    "nope_every": 2,
    "hidden": 256,
    "heads": 4,
    "topk": 2048,
    "index_heads": 2,
    "dense_width": 128,
    "experts": 2,
    "experts_per_token": 2,
    "expert_width": 256,
    "vocab": 256,
}
PROMPT = [5, 9, 200, 44]
LAYERS, STEPS = 2, 2
CALLS = {
    "rmsnorm2d_fwd_with_add": STEPS * 2 * LAYERS,
    "rmsnorm2d_fwd": STEPS * (LAYERS + 1),
    "fused_moe": STEPS,
    "silu_and_mul": STEPS * 2,  # of the dense layer, and of the shared expert
    "deepgemm_fp8_paged_mqa_logits": LAYERS,  # of the decode
    "top_k_per_row_decode": LAYERS,
}
PLANNED = ("get_mla_metadata_info_v1", "get_mla_metadata_v1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose experts are in FP8, as the announcement's."""
    params = replace(tiny.CONFIG, **SHAPE).params()
    return seed_checkpoint(tmp_path_factory.mktemp("seeded") / "model", params, format="fp8_block")


def answer(folder: Path, act: str) -> tuple[tuple[int, ...], RocmSession]:
    """The tokens of an engine, and its session, closed. ``act``: of experts in MXFP4, or with
    experts as they are ``fp8_block`` of all products.
    """
    backend = Unrefused()
    config = {"device": "interpreted"}
    if act == "fp8_block":
        config["activations"] = act
    else:
        config |= {"fp8_moe_requant": "mxfp4", "fp8_moe_requant_act": act}
    given = {"additional_config": config, "max_num_seqs": 1, "max_model_len": 64}
    subject = Subject(backend, INTERPRETED, options={"device": "interpreted"})
    with engine(subject, folder, sequences=1, **given) as opened:
        greedy = SamplingParams(temperature=0, max_tokens=STEPS)
        (made,) = opened.generate([PROMPT], greedy)
    (own,) = backend.opened
    return tuple(made.token_ids), own


@pytest.mark.parametrize("act", ["a8w4", "a4w4"])
def test_an_engine_with_aiter_at_work(
    aiter: Fake, folder: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """A prompt, whose index scores are ours, and a decode; attention by AITER's assembly, and by
    our kernel in its place. Answers are those without AITER.
    """
    for name in (AITER, SPARSE, SIZE, MOE_BOUND):
        monkeypatch.delenv(name, raising=False)
    ours, plain = answer(folder, act)
    assert aiter.calls == []
    assert "op moe_experts" not in plain.switches
    monkeypatch.setenv(AITER, "1")
    for sparse in ("0", "1"):
        monkeypatch.setenv(SPARSE, sparse)
        aiter.calls.clear()
        found, session = answer(folder, act)
        assert found == ours
        assert len(found) == STEPS
        attended = {"mla_decode_fwd": STEPS * LAYERS, **dict.fromkeys(PLANNED, STEPS)}
        assert Counter(aiter.names()) == CALLS | (attended if sparse == "0" else {})
        assert session.switches["op moe_experts"] == "AITER fused experts 0.1.21"
        gates = {one.given["gate_mode"] for one in aiter.calls if one.name == "fused_moe"}
        assert gates == {"interleave" if act == "a8w4" else "separated"}
        assert {SIZE, MOE_BOUND}.isdisjoint(os.environ)


def test_an_engine_with_experts_in_fp8_by_blocks(
    aiter: Fake, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its experts and its products of the checkpoint as it is; answers are those without AITER."""
    for name in (AITER, SPARSE, SIZE, MOE_BOUND):
        monkeypatch.delenv(name, raising=False)
    ours, _ = answer(folder, "fp8_block")
    monkeypatch.setenv(AITER, "1")
    found, session = answer(folder, "fp8_block")
    assert found == ours
    assert session.switches["op moe_experts"] == "AITER fused experts 0.1.21"
    kinds = {one.given["quant_type"].name for one in aiter.calls if one.name == "fused_moe"}
    assert kinds == {"per_128x128"}
    assert aiter.names().count("fused_moe") == STEPS
    assert "gemm_a8w8_blockscale" in aiter.names()
    assert MOE_BOUND not in os.environ


def experts(count: int, rows: int, columns: int, seed: int) -> Weight:
    random = torch.Generator().manual_seed(seed)
    data, scale = mxfp4.quantize(torch.randn(count, rows, columns, generator=random))
    return Weight("mxfp4", (count, rows, columns), {"data": data, "scale": scale})


REQUANT = {"fp8_moe_requant": "mxfp4"}


@pytest.mark.parametrize(
    ("arch", "config", "act"),
    [
        ("gfx950", REQUANT | {"fp8_moe_requant_act": "a8w4"}, "mxfp8"),
        ("gfx950", REQUANT | {"fp8_moe_requant_act": "a4w4"}, "mxfp4"),
        ("gfx950", REQUANT, "mxfp8"),
        ("gfx942", REQUANT | {"fp8_moe_requant_act": "a8w4"}, "fp8_block"),
        ("gfx950", {}, None),
    ],
)
def test_announced_activations_reach_our_experts(
    monkeypatch: pytest.MonkeyPatch, arch: str, config: dict[str, Any], act: str | None
) -> None:
    """In both products of an expert, and in no other product."""
    from ml4core_rocm.kernels import activations, gemm, moe_experts

    monkeypatch.delenv(AITER, raising=False)
    given: list[str | None] = []

    def recorded(x: torch.Tensor, weight: Any, act: str | None) -> activations.Activation:
        given.append(act)
        return activations.activation(x, weight, act)

    monkeypatch.setattr(moe_experts, "activation", recorded)
    monkeypatch.setattr(gemm, "activation", recorded)
    asks = deployment(device=replace(INTERPRETED, arch=arch), additional_config=config)
    session = RocmSession(asks)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    w13, w2 = experts(2, 64, 64, 2), experts(2, 64, 32, 3)
    chosen = (torch.full((2, 2), 0.5), torch.tensor([[0, 1], [1, 0]]))
    found: Any = session.ops["moe_experts"](x, w13, w2, *chosen)
    assert given == [act, act]
    assert torch.equal(found, moe_experts.moe_experts(x, w13, w2, *chosen, act=act))
    plain = moe_experts.moe_experts(x, w13, w2, *chosen)
    assert torch.equal(found, plain) is (act is None)
    given.clear()
    session.ops["gemm"](x, Weight("mxfp4", (64, 64), {k: v[0] for k, v in w13.parts.items()}))
    assert given == [None]
    session.close()


A8W4 = REQUANT | {"fp8_moe_requant_act": "a8w4"}
OWN = {"use_aiter": True, "custom_ar_max_size": 8192}


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """Four ranks of which this process is one, with experts that AITER serves."""
    for name in (AITER, SPARSE, SIZE, MOE_BOUND):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sessions, "joined", lambda *given: (None, {}))
    whole = small(deployment(additional_config=A8W4 | {"rocm": OWN}, device=INTERPRETED))
    return replace(whole, tensor_parallel_size=4, enable_expert_parallel=True)


@pytest.mark.parametrize("before", [{}, {SIZE: "8192", MOE_BOUND: "0"}, {MOE_BOUND: ""}])
def test_a_session_gives_the_environment_back(
    aiter: Fake, asks: Deployment, monkeypatch: pytest.MonkeyPatch, before: Mapping[str, str]
) -> None:
    """The next one reads what its user stated, and no more."""
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    found = dict(os.environ)
    session = RocmSession(asks)
    assert (os.environ[SIZE], os.environ[MOE_BOUND]) == ("8192", "0")
    session.close()
    assert dict(os.environ) == found
    monkeypatch.setenv(SIZE, "4096")  # of the user, once the session is closed
    session.close()
    assert os.environ[SIZE] == "4096"
    other = replace(asks, additional_config=A8W4 | {"rocm": {"use_aiter": True}})
    second = RocmSession(other)
    assert second.switches["custom_ar_max_size"] == f"4096 ({SIZE})"
    second.close()


def test_it_does_so_where_opening_fails_half_way(
    aiter: Fake, asks: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def fails(*given: Any) -> Any:
        seen.extend(os.environ[name] for name in (SIZE, MOE_BOUND))
        raise RuntimeError("no group")

    monkeypatch.setattr(sessions, "joined", fails)
    found = dict(os.environ)
    with pytest.raises(RuntimeError, match="no group"):
        RocmSession(asks)
    assert seen == ["8192", "0"]
    assert dict(os.environ) == found


def test_it_does_so_where_closing_fails(
    aiter: Fake, asks: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Group:
        def close(self) -> None:
            raise RuntimeError("a peer is gone")

    monkeypatch.setattr(sessions, "joined", lambda *given: (Group(), {}))
    found = dict(os.environ)
    session = RocmSession(asks)
    with pytest.raises(RuntimeError, match="a peer is gone"):
        session.close()
    assert dict(os.environ) == found


def test_a_session_states_nothing_that_it_does_not_need(aiter: Fake, asks: Deployment) -> None:
    """No size for one rank, no bound where experts are not AITER's or not a8w4."""
    a4w4 = REQUANT | {"fp8_moe_requant_act": "a4w4", "rocm": {"use_aiter": True}}
    found = dict(os.environ)
    one = replace(asks, tensor_parallel_size=1, additional_config=a4w4)
    for quiet in (one, replace(asks, additional_config=A8W4)):
        session = RocmSession(quiet)
        assert dict(os.environ) == found
        session.close()
