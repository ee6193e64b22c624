"""Switches of ``--additional-config`` that core knows, and the environment's words for them.

An environment variable means what its key means; one that says something else than the key is a
contradiction, and none of the two is taken.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ml4core import registry
from ml4core.api import Capabilities, Refusal, Session
from ml4core.engine.errors import ArgumentsError
from ml4core.engine.flag_spec import Check, one_of
from ml4core.models.errors import shown

if TYPE_CHECKING:
    from ml4core.engine.args import EngineArgs
    from ml4core.models.requant import Requant

FLAG = "--additional-config"
REQUANT, ACT, RULE = "fp8_moe_requant", "fp8_moe_requant_act", "fp8_moe_requant_rule"
DECODE = "decode_backend"
ACTIVATIONS = "activations"
LATENCY = "latency_specialized"

VARIABLES: Mapping[str, str] = MappingProxyType(
    {REQUANT: "VLLM_FP8_MOE_REQUANT", ACT: "VLLM_FP8_MOE_REQUANT_ACT"}
)
"""Key -> the environment variable of the same meaning."""

KEYS: Mapping[str, Check] = MappingProxyType(
    {
        "device": one_of("real", "interpreted", "fake", "source"),
        DECODE: one_of("stock", LATENCY),
        ACTIVATIONS: one_of("fp8_block", "fp8_tensor", "mxfp4", "nvfp4"),
        REQUANT: one_of("mxfp4"),
        ACT: one_of("a8w4", "a4w4"),
        RULE: one_of("even", "floor", "roundup", "ceil"),
    }
)
"""Each key with the check of its value."""

ACTS: Mapping[str, str] = MappingProxyType({"a8w4": "act:fp8_block", "a4w4": "act:mxfp4"})
"""Activations of requantised experts -> the word of a backend that can quantise them so."""

HELP = (
    'keys: device, "real", "interpreted", "fake" or "source"; decode_backend, "stock" or '
    '"latency_specialized"; activations, "fp8_block", "fp8_tensor", "mxfp4" or "nvfp4": what '
    "inputs of products with quantised weights are brought to; fp8_moe_requant, "
    '"mxfp4": routed experts in FP8 become that while they '
    'are loaded; fp8_moe_requant_act, "a8w4" or "a4w4": their activations; fp8_moe_requant_rule, '
    '"even", "floor", "roundup" or "ceil": the rule of their scales; an installed backend\'s name: '
    "an object with that backend's own switches"
)


def backend_switches(key: str) -> Check | None:
    """The check of a key that names an installed backend; None for another key."""
    if all(record.name != key for record in registry.discover()):
        return None
    return lambda value: "" if isinstance(value, Mapping) else "a JSON object"


def with_environment(args: EngineArgs, environment: Mapping[str, str] = os.environ) -> EngineArgs:
    """``args`` with the variables' values in ``additional_config``.

    Raises ``ArgumentsError`` that names each variable and key at fault: an unknown value, a
    contradiction, or one that would do nothing.
    """
    config: dict[str, Any] = dict(args.additional_config)
    problems = []
    for key, variable in VARIABLES.items():
        text = environment.get(variable, "")
        if not text:
            continue
        if works := KEYS[key](text):
            problems.append(f"{variable}: {shown(text)}; works: {works}")
        elif config.setdefault(key, text) != text:
            problems.append(
                f"{variable}: {shown(text)}, and {FLAG} {key} is {shown(config[key])}; works: one "
                "of the two, or both alike"
            )
    problems += _idle(config, args.additional_config)
    if problems:
        raise ArgumentsError(problems)
    return replace(args, additional_config=config) if config != args.additional_config else args


def _idle(config: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """What does nothing by itself."""
    if REQUANT in config:
        return
    for key in (ACT, RULE):
        if key in config:
            name = f"{FLAG} {key}" if key in given else VARIABLES[key]
            yield f"{name}: does nothing without {VARIABLES[REQUANT]}=mxfp4, or {FLAG} {REQUANT}"


def needs(config: Mapping[str, Any]) -> frozenset[str]:
    """Capability words that the switches need."""
    words = set()
    if REQUANT in config:
        words |= {"feature:load_time_mxfp4", "weights:mxfp4"}
    if config.get(DECODE) == LATENCY:
        words.add("feature:latency_decode")
    if ACTIVATIONS in config:  # beside act:bf16, of what they are made
        words.add(f"act:{config[ACTIVATIONS]}")
    return frozenset(words)


def requant(config: Mapping[str, Any], device: str = "cpu") -> Requant | None:
    """How experts are converted while they are loaded; None if they stay as they are."""
    if REQUANT not in config:
        return None
    from ml4core.models.requant import Requant

    return Requant(rule=str(config.get(RULE, "even")), device=device)


def refusals(
    config: Mapping[str, Any], experts: Collection[str], capabilities: Capabilities
) -> list[Refusal]:
    """What the checkpoint or the backend can't do. ``experts``: formats of routed experts."""
    if REQUANT not in config:
        return []
    found = []
    act = config.get(ACT)
    if act is not None and ACTS[act] not in capabilities:
        reason = f"the backend doesn't declare {ACTS[act]}, the activations of {act}"
        found.append(Refusal("core", f"{VARIABLES[ACT]} {act}", reason, "leave it out"))
    from ml4core.models.requant import SOURCES, TARGET

    if not experts or set(experts) - SOURCES - {TARGET}:
        here = ", ".join(sorted(experts)) or "none"
        reason = f"only experts in FP8 are converted; formats of this checkpoint's experts: {here}"
        remedy = "leave it out; or convert the checkpoint with ml4 quantize --to mxfp4"
        found.append(Refusal("core", f"{VARIABLES[REQUANT]} {config[REQUANT]}", reason, remedy))
    return found


def told(config: Mapping[str, Any], session: Session) -> dict[str, str]:
    """For the start-up report: core's switches, and those of which the session tells."""
    found = {key: str(config[key]) for key in KEYS if key in config}
    if REQUANT in found:
        found.setdefault(RULE, "even")
    return found | dict(getattr(session, "switches", {}))
