"""What a plugin does wrong from `open` on is told with its name, and hides no other error."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest
import torch

from ml4core.api import (
    Accepted,
    Capabilities,
    Deployment,
    Device,
    Fault,
    KVCache,
    LayerSpec,
    Refusal,
    Refused,
    Rejected,
    Segment,
    StepShape,
)
from ml4core.api.known_layouts import latent_layout
from ml4core.models.layer_table import build_model_spec
from ml4core.models.seeded_config import PRESETS
from ml4core.registry import LoadedPlugin, PluginRecord, open_session

SPEC = build_model_spec(PRESETS["micro"].params())
DEVICE = Device("real", "a chip", "arch1", "cpu")
RECORD = PluginRecord("mine", "my-dist", "1.0", "my_module")
NONE = Segment(0, 0, 0)
SHAPE = StepShape(Segment(1, 1, 1), NONE, NONE, (("latent", 1),), 1)
WHY = Refusal("mine", "rows", "few")
LAYOUT = latent_layout("bf16", 512, 64)


def raising(error: BaseException) -> Any:
    def call(*_: object) -> Any:
        raise error

    return call


def offering(candidates: Any, stage: str = "ffn") -> Any:
    """The ``providers`` of a session that serves one stage."""
    return lambda asked, *_: candidates if asked == stage else ()


def cache(blocks: int, block_size: int, dtype: torch.dtype = torch.bfloat16) -> KVCache:
    parts = tuple(torch.zeros(p.shape(blocks, block_size), dtype=dtype) for p in LAYOUT.parts)
    return KVCache(LAYOUT, block_size, parts)


@dataclass
class Session:
    """Honest but for what a test sets."""

    device: Device = DEVICE
    ops: Any = field(default_factory=dict)
    layouts: Any = field(default_factory=dict)
    executor: Any = field(
        default_factory=lambda: SimpleNamespace(compile=lambda step, _: step, eager_break=None)
    )
    collectives: Any = None
    providers: Any = lambda *_: ()
    prepare_weights: Any = lambda weights, layer, part: weights
    alloc_kv: Any = lambda layout, blocks, block_size: cache(blocks, block_size)
    fault: Any = lambda: None
    close: Any = lambda: None

    def __post_init__(self) -> None:
        if self.executor.eager_break is None:
            self.executor.eager_break = lambda function: function


def opened(session: Any = None, device: Device = DEVICE, **changes: Any) -> Any:
    made = Session(**changes) if session is None else session
    backend: Any = SimpleNamespace(
        name="mine",
        open=made if callable(made) else lambda _: made,
        capabilities=lambda _: Capabilities(frozenset({"stage:ffn"})),
    )
    plugin = LoadedPlugin(RECORD, backend, pluggy.PluginManager("ml4core"))
    return open_session(plugin, Deployment(SPEC, device))


def told(error: pytest.ExceptionInfo[Refused]) -> str:
    (refusal,) = error.value.refusals
    assert refusal.source == "mine"
    assert "my-dist 1.0" in refusal.reason
    return f"{refusal.subject}: {refusal.reason}"


def test_an_honest_session_is_what_the_plugin_gave() -> None:
    offer = [Accepted("fast", len), Rejected("slow", (Refusal("mine", "rows", "few"),))]
    made = Session(ops={"topk": len}, providers=offering(offer), fault=lambda: Fault("ecc", "", 1))
    session = opened(made)
    assert session.ops == {"topk": len}
    assert session.providers("ffn", SPEC.layers[0], SHAPE) == offer
    assert session.executor.compile(len, SHAPE) is len
    assert session.executor.eager_break(len) is len
    assert session.alloc_kv(LAYOUT, 3, 16).blocks == 3
    weights = {"wo": torch.zeros(1)}
    assert session.prepare_weights(weights, None) is weights
    assert session.fault() == Fault("ecc", "", 1)
    session.close()


@pytest.mark.parametrize("error", [RuntimeError("dead"), SystemExit(3), ImportError("no lib")])
def test_what_open_raises_is_a_refusal(error: BaseException) -> None:
    with pytest.raises(Refused) as refused:
        opened(raising(error))
    assert f"open(): my-dist 1.0 raised {type(error).__name__}: {error}" in told(refused)


def test_reasons_of_the_plugin_stay_as_they_are() -> None:
    own = Refused([Refusal("mine", "library", "too old", "2.0")])
    with pytest.raises(Refused) as refused:
        opened(raising(own))
    assert refused.value is own


@pytest.mark.parametrize("made", [None, object(), 3])
def test_what_is_no_session_is_refused(made: object) -> None:
    with pytest.raises(Refused, match=f"returned a {type(made).__name__} that is no Session"):
        opened(lambda _: made)


def test_a_session_that_lacks_members_is_closed() -> None:
    closed: list[bool] = []
    with pytest.raises(Refused, match="it lacks device, ops, layouts"):
        opened(lambda _: SimpleNamespace(close=lambda: closed.append(True)))
    assert closed == [True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ops": None}, "ops: my-dist 1.0 has None there, not a mapping"),
        ({"ops": {"topk": 3}}, "ops: my-dist 1.0 has 3 as 'topk', no callable"),
        ({"layouts": {"x-a/b": 3}}, "layouts: my-dist 1.0 has 3 as 'x-a/b', no KVLayout"),
        ({"executor": SimpleNamespace(compile=3, eager_break=len)}, "lacks the calls of one"),
    ],
)
def test_malformed_members_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused) as refused:
        opened(**changes)
    assert message in told(refused)


def test_a_device_that_torch_does_not_know_is_refused() -> None:
    device = Device("real", "a chip", "arch1", "chip:0")
    with pytest.raises(Refused, match="'a chip' as torch device 'chip:0', which torch does not"):
        opened(device=device)


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        (None, "returned None, no sequence of candidates"),
        ([3], "returned 3 among the candidates"),
        ([Accepted("fast", None)], "accepted by 'fast' with None, no callable"),  # type: ignore[arg-type]
        ([Rejected("fast", ())], "rejected by 'fast' with ()"),
        ([Rejected("fast", ("few rows",))], "rejected by 'fast' with ('few rows',)"),  # type: ignore[arg-type]
    ],
)
def test_malformed_candidates_are_refused(candidates: Any, message: str) -> None:
    session = opened(providers=offering(candidates))
    with pytest.raises(Refused) as refused:
        session.providers("ffn", SPEC.layers[0], SHAPE)
    assert f"providers of stage ffn: my-dist 1.0 {message}" in told(refused)


@pytest.mark.parametrize(
    "serves",
    [lambda layer, shape: layer.dense_width is not None, lambda layer, shape: shape.rows > 1],
)
def test_a_stage_that_is_offered_but_not_declared_is_refused_at_open(serves: Any) -> None:
    closed: list[bool] = []

    def providers(stage: str, layer: LayerSpec, shape: StepShape) -> Any:
        offer = Accepted("fast", len) if serves(layer, shape) else Rejected("fast", (WHY,))
        return (offer,) if stage in ("ffn", "attention") else ()

    with pytest.raises(Refused) as refused:
        opened(providers=providers, close=lambda: closed.append(True))
    assert "stage:attention: my-dist 1.0 offers it by 'fast' and does not declare it" in (
        told(refused)
    )
    assert refused.value.refusals[0].remedy == "declare it as a capability"
    assert closed == [True]


def test_a_stage_that_is_not_declared_is_refused_whenever_it_is_offered() -> None:
    """Layers and shapes may come that were not asked about at open; so may the whole model's."""
    late = Session()
    session = opened(late)
    late.providers = offering([Accepted("fast", len)], "vision_encoder")
    with pytest.raises(Refused, match=r"stage:vision_encoder: my-dist 1\.0 offers it by 'fast'"):
        session.providers("vision_encoder", None, SHAPE)
    late.providers = offering([Rejected("fast", (WHY,))], "select")  # a reason is no offer
    assert session.providers("select", SPEC.layers[0], SHAPE) == [Rejected("fast", (WHY,))]


def test_capabilities_that_are_none_are_refused() -> None:
    backend: Any = SimpleNamespace(name="mine", open=None, capabilities=lambda _: ["op:topk"])
    plugin = LoadedPlugin(RECORD, backend, pluggy.PluginManager("ml4core"))
    with pytest.raises(Refused, match=r"capabilities\(\): my-dist 1.0 returned \['op:topk'\], no"):
        open_session(plugin, Deployment(SPEC, DEVICE))


def test_each_call_that_raises_names_itself() -> None:
    dead = raising(RuntimeError("dead"))
    executor = SimpleNamespace(compile=dead, eager_break=len)
    made = Session(prepare_weights=dead, alloc_kv=dead, executor=executor)
    session = opened(made)
    made.providers = dead
    for call, subject in (
        (lambda: session.providers("ffn", None, SHAPE), "providers of stage ffn"),
        (lambda: session.prepare_weights({}, SPEC.layers[1]), "prepare_weights of layer 1"),
        (lambda: session.alloc_kv(LAYOUT, 2, 16), "alloc_kv of a latent cache"),
        (lambda: session.executor.compile(len, SHAPE), "executor.compile()"),
    ):
        with pytest.raises(Refused) as refused:
            call()
        assert f"{subject}: my-dist 1.0 raised RuntimeError: dead" in told(refused)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "returned None, not a KVCache"),
        (cache(2, 16), r"returned parts \[\(\(2, 16, 576\)"),
        (cache(3, 8), "pages of 8 tokens; asked for 'bf16' with 16"),
        (cache(3, 16, torch.float32), "'float32'"),
        (KVCache(LAYOUT, 16, (None,)), r"returned parts \[\(None, 'NoneType'\)\]"),  # type: ignore[arg-type]
    ],
)
def test_a_cache_of_another_form_is_refused(answer: Any, message: str) -> None:
    session = opened(alloc_kv=lambda *_: answer)
    with pytest.raises(Refused, match=message):
        session.alloc_kv(LAYOUT, 3, 16)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("9 GiB"),
        torch.OutOfMemoryError("9 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 GiB"),
        RuntimeError("CUDA error: out of memory: 9 GiB"),
        RuntimeError("Triton Error [CUDA]: out of memory: 9 GiB"),
    ],
)
def test_lack_of_memory_keeps_its_type_and_gets_a_name(error: Exception) -> None:
    session = opened(alloc_kv=raising(error))
    with pytest.raises(MemoryError, match=r"backend mine \(from my-dist 1.0\): alloc_kv.* 9 GiB"):
        session.alloc_kv(LAYOUT, 3, 16)


def test_a_session_that_cant_tell_its_fault_has_one() -> None:
    failing = opened(fault=raising(RuntimeError("lost"))).fault()
    assert (failing.code, "can't tell: RuntimeError: lost" in failing.message) == ("backend", True)
    junk = opened(fault=lambda: "bad").fault()
    assert (junk.code, "answered 'bad', which is no Fault" in junk.message) == ("backend", True)


@pytest.mark.parametrize("error", [RuntimeError("stuck"), SystemExit(9)])
def test_a_close_that_fails_is_logged(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        opened(close=raising(error)).close()
    assert f"backend mine (from my-dist 1.0) failed in close(): {type(error).__name__}" in (
        caplog.text
    )


def test_control_characters_of_a_plugin_reach_no_terminal() -> None:
    with pytest.raises(Refused) as refused:
        opened(raising(RuntimeError("red \x1b[31m, bell \x07, turned \u202e")))
    assert str(refused.value).replace("\n", "").isprintable()
    assert r"red \x1b[31m, bell \x07, turned \u202e" in str(refused.value)


def test_switches_that_a_session_tells_are_words() -> None:
    made: Any = Session()
    assert opened(made).switches == {}
    made.switches = {"fast math": "off (default)"}
    assert opened(made).switches == {"fast math": "off (default)"}
    for wrong in ({"fast math": False}, ["fast math"], {3: "off"}):
        made.switches = wrong
        with pytest.raises(Refused) as refused:
            opened(made)
        assert "no words by word" in told(refused)


def test_memory_that_a_session_tells_of_has_its_calls() -> None:
    made: Any = Session()
    assert opened(made).memory is None
    made.memory = SimpleNamespace(figures=len, reset_peak=len, release=len)
    assert opened(made).memory is made.memory
    made.memory = SimpleNamespace(figures=len)
    with pytest.raises(Refused) as refused:
        opened(made)
    assert "which lacks reset_peak, release" in told(refused)


def test_captures_of_an_executor_stay_in_sight() -> None:
    plain = opened()
    assert not hasattr(plain.executor, "captures_shape")
    dropped: list[bool] = []
    executor = SimpleNamespace(
        compile=lambda step, _: step,
        eager_break=lambda function: function,
        captures=["one"],
        captures_shape=lambda shape: shape is SHAPE,
        drop=lambda: dropped.append(True),
    )
    session = opened(executor=executor)
    assert session.executor.captures == ["one"]
    assert session.executor.captures_shape(SHAPE) is True
    assert session.executor.captures_shape(None) is False
    session.executor.drop()
    assert dropped == [True]
    executor.captures_shape = raising(ValueError("lost"))
    with pytest.raises(Refused, match=r"executor.captures_shape\(\).*lost"):
        session.executor.captures_shape(SHAPE)
