"""One error with every reason; and the news of a fault, which may fail without harm."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import pluggy
import pytest

from ml4core.api import (
    PROJECT,
    Capabilities,
    Deployment,
    Device,
    Fault,
    ModelSpec,
    Refusal,
    Refused,
    hookimpl,
    hookspecs,
)
from ml4core.registry import check, notify_fault

FAULT = Fault("nan", "a visible score is NaN", 7)


class Answers:
    """A plugin that gives these answers, or raises this."""

    def __init__(self, answers: object) -> None:
        self.answers = answers
        self.told: list[Fault] = []

    @hookimpl
    def ml4core_refusals(self, deployment: Deployment) -> Sequence[Refusal]:
        if isinstance(self.answers, BaseException):
            raise self.answers
        return cast(Sequence[Refusal], self.answers)

    @hookimpl
    def ml4core_fault(self, fault: Fault) -> None:
        self.told.append(fault)
        if isinstance(self.answers, BaseException):
            raise self.answers


def manager(**plugins: object) -> pluggy.PluginManager:
    made = pluggy.PluginManager(PROJECT)
    made.add_hookspecs(hookspecs)
    for name, plugin in plugins.items():
        made.register(plugin, name=name)
    return made


def deployment(*needs: str) -> Deployment:
    device = Device("fake", "a chip", "arch1", "cpu")
    return Deployment(cast(ModelSpec, None), device, needs=frozenset(needs))


def reasons(refused: pytest.ExceptionInfo[Refused]) -> list[str]:
    return [str(refusal) for refusal in refused.value.refusals]


def test_nothing_against_it() -> None:
    capabilities = Capabilities(frozenset({"op:topk", "kv:bf16"}))
    check(deployment("op:topk", "kv:bf16"), capabilities, manager(silent=Answers(())))
    check(deployment(), Capabilities(frozenset()), manager(nothing=Answers(None)))


def test_every_reason_is_in_one_error() -> None:
    capabilities = Capabilities(frozenset({"kv:bf16", "kv:fp32", "op:topk"}))
    plugins = manager(
        b=Answers([Refusal("b", "x", "second"), Refusal("b", "w", "first")]),
        a=Answers((Refusal("a", "y", "third", "this"),)),
    )
    with pytest.raises(Refused) as refused:
        check(deployment("spec:dspark", "kv:fp8_ds_mla", "op:topk"), capabilities, plugins)
    assert reasons(refused) == [
        "[a] y: third (works: this)",
        "[b] w: first",
        "[b] x: second",
        "[core] kv:fp8_ds_mla: needed, and not declared; declared with kv: are kv:bf16, kv:fp32",
        "[core] spec:dspark: needed, and not declared; declared with spec: are none",
    ]


def test_composition_counts_as_declared() -> None:
    composes = Capabilities(frozenset({"feature:compose"}))
    check(deployment("op:topk", "stage:ffn"), composes, manager())
    with pytest.raises(Refused) as refused:
        check(deployment("op:topk", "kv:bf16"), composes, manager())
    assert len(refused.value.refusals) == 1


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (ValueError("no such arch"), "it can't say whether it serves this deployment: ValueError"),
        (SystemExit(2), "SystemExit: 2"),
        (7, "TypeError: 'int' object is not iterable"),
        (["too big"], "it answered 'too big', which is no Refusal"),
    ],
)
def test_failing_hook_is_a_reason_and_hides_no_other(answers: object, expected: str) -> None:
    plugins = manager(first=Answers([Refusal("first", "x", "no")]), wrong=Answers(answers))
    with pytest.raises(Refused) as refused:
        check(deployment("spec:dspark"), Capabilities(frozenset()), plugins)
    told = reasons(refused)
    assert len(told) == 3
    assert "[first] x: no" in told
    assert told[2].startswith("[wrong] ml4core_refusals: ")
    assert expected in told[2]


def test_reasons_are_equal_on_every_rank() -> None:
    def told(order: int) -> list[str]:
        plugins = {"a": Answers(ValueError(object())), "b": Answers([Refusal("b", "x", "no")])}
        names = sorted(plugins, reverse=bool(order))
        with pytest.raises(Refused) as refused:
            check(
                deployment("op:topk", "op:rope"),
                Capabilities(frozenset()),
                manager(**{name: plugins[name] for name in names}),
            )
        return reasons(refused)

    first, second = told(0), told(1)
    assert first == second
    assert len(first) == 4
    assert "0x…" in first[0]


def test_fault_reaches_every_plugin(caplog: pytest.LogCaptureFixture) -> None:
    plugins = {"a": Answers(OSError("no network")), "b": Answers(SystemExit(1)), "c": Answers(())}
    with caplog.at_level(logging.ERROR):
        notify_fault(FAULT, manager(**plugins))
    assert [plugin.told for plugin in plugins.values()] == [[FAULT]] * 3
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0].startswith("plugin a failed in ml4core_fault: OSError: no network")
    assert messages[1].startswith("plugin b failed in ml4core_fault: SystemExit: 1")
