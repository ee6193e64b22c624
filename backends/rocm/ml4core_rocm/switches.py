"""The backend's switches: the variables of ROCm deployments, and keys of ours that mean the same.

    VLLM_ROCM_USE_AITER                     use_aiter
    VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA   aiter_triton_sparse_mla
    AITER_CUSTOM_AR_MAX_SIZE                custom_ar_max_size
    (none)                                  sparse_mla_precision

Keys stand in the object under the backend's name: ``--additional-config '{"rocm": {"use_aiter":
true}}'``. What a variable and its key say must be the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ml4core.api import Capabilities, Deployment, Refusal
from ml4core_rocm.devices import FLAVOUR

AITER, SPARSE_MLA, AR_SIZE = "use_aiter", "aiter_triton_sparse_mla", "custom_ar_max_size"
PRECISION = "sparse_mla_precision"
PRECISIONS = ("bf16", "fp8")
"""In what queries meet keys of an FP8 cache in our sparse attention; the first is the default."""

VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        AITER: "VLLM_ROCM_USE_AITER",
        SPARSE_MLA: "VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA",
        AR_SIZE: "AITER_CUSTOM_AR_MAX_SIZE",
    }
)
"""Key -> variable."""
KEYS = (*VARIABLES, PRECISION)

MOE_BOUND = "AITER_BF16_FP8_MOE_BOUND"
"""AITER's own: rows from which its a8w4 experts make FP8 of their inputs. It reads it on each call;
a session sets it to 0, which is always.
"""

AR_WORLDS = (2, 4, 6, 8)
"""Ranks that AITER's all-reduce is made for."""
AR_DEFAULT = 64 << 20
AR_POOL = 1 << 30
"""Bytes of the pool that the custom all-reduce registers: no message can be larger."""

EXPERT_ACTS: Mapping[str, str] = MappingProxyType({"a8w4": "fp8_block", "a4w4": "mxfp4"})
"""Activations of experts in MXFP4 -> the format of ``act:`` words."""
_DEFAULT_ACT = "a8w4"
_KERNEL_ACTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "a8w4": {"gfx950": "mxfp8", "gfx942": "fp8_block"},
        "a4w4": {"gfx950": "mxfp4"},
    }
)
"""What our kernels make of an input: on gfx950 what its scaled matrix instructions take, groups of
32 with a power of two each.
"""

Value = bool | int | str

_BOOLS = {"1": True, "true": True, "0": False, "false": False}


@dataclass(frozen=True)
class Switches:
    """What is in force.

    Attributes:
        custom_ar_max_size: bytes of the largest message that the custom all-reduce takes; 0: none.
        expert_act: ``a8w4`` or ``a4w4`` of experts in MXFP4; empty where inputs stay as they are.
        told: words by word, with where each comes from.
        sparse_mla_precision: of ``PRECISIONS``.
        kernel_act: the format to which our kernels bring inputs of such experts; None: as they are.
    """

    use_aiter: bool = False
    aiter_triton_sparse_mla: bool = False
    custom_ar_max_size: int = AR_DEFAULT
    expert_act: str = ""
    kernel_act: str | None = None
    sparse_mla_precision: str = PRECISIONS[0]
    told: Mapping[str, str] = field(default_factory=dict, hash=False)


def read(
    deployment: Deployment, capabilities: Capabilities, environment: Mapping[str, str]
) -> tuple[Switches, tuple[Refusal, ...]]:
    """The switches, and each that can't be: an unknown value, a contradiction, or one that this
    deployment can't have.
    """
    own = deployment.additional_config.get("rocm", {})
    config = own if isinstance(own, Mapping) else {}
    values: dict[str, Value] = {AITER: False, SPARSE_MLA: False, AR_SIZE: AR_DEFAULT}
    values[PRECISION] = PRECISIONS[0]
    told, faults = {}, []
    sources: dict[str, str] = {}
    for key in KEYS:
        source, variable = "default", VARIABLES.get(key, _flag(key))
        stated: dict[str, Value] = {}
        for name, raw in ((variable, environment.get(variable, "")), (_flag(key), config.get(key))):
            if raw is None or raw == "":
                continue
            value, works = _value(key, raw)
            if value is None:
                faults.append(Refusal("rocm", name, f"{raw!r} is no value of it", works))
            else:
                stated[name] = value
        if len(set(stated.values())) > 1:
            both = " and ".join(f"{name} says {value}" for name, value in stated.items())
            faults.append(Refusal("rocm", variable, both, "one of the two, or both alike"))
        for name, value in stated.items():
            values[key], source = value, name
            sources.setdefault(key, name)
        told[key] = f"{_shown(values[key])} ({source})"
    act = _expert_act(deployment, capabilities)
    if act:
        told["experts in MXFP4"] = act
    kernel_act = _KERNEL_ACTS.get(act, {}).get(deployment.device.arch)
    switches = Switches(
        bool(values[AITER]),
        bool(values[SPARSE_MLA]),
        int(values[AR_SIZE]),
        act,
        kernel_act,
        str(values[PRECISION]),
        told,
    )
    against = (
        *_against(switches, deployment),
        *_against_size(switches, deployment, sources.get(AR_SIZE)),
        *_against_bound(switches, environment),
    )
    return switches, (*faults, *against)


def _flag(key: str) -> str:
    return f"--additional-config rocm.{key}"


def _value(key: str, raw: object) -> tuple[Value | None, str]:
    """The value, None where it is none, and what would work."""
    if key == PRECISION:
        return (str(raw) if raw in PRECISIONS else None), " or ".join(PRECISIONS)
    if key != AR_SIZE:
        value = raw if isinstance(raw, bool) else _BOOLS.get(str(raw).lower())
        return value, "1 or 0, true or false"
    number = raw if isinstance(raw, int) and not isinstance(raw, bool) else None
    if isinstance(raw, str) and raw.isascii() and raw.isdigit():
        number = int(raw)
    fits = number is not None and 0 <= number <= AR_POOL
    return (number if fits else None), f"bytes, 0 (no custom all-reduce) to {AR_POOL}, its pool"


def _shown(value: Value) -> str:
    return value if isinstance(value, str) else str(int(value))


def _expert_act(deployment: Deployment, capabilities: Capabilities) -> str:
    """Stated, or the default where the device quantises activations so."""
    if "fp8_moe_requant" not in deployment.additional_config:
        return ""
    stated = deployment.additional_config.get("fp8_moe_requant_act")
    if stated is not None:
        return str(stated)
    return _DEFAULT_ACT if f"act:{EXPERT_ACTS[_DEFAULT_ACT]}" in capabilities else ""


def _against(switches: Switches, deployment: Deployment) -> Iterator[Refusal]:
    """Reasons that lie in the deployment."""
    device = deployment.device
    if switches.use_aiter and device.kind != "real":
        reason = f"AITER's kernels run on a GPU, and the device is of kind {device.kind}"
        yield Refusal("rocm", VARIABLES[AITER], reason, "leave it out")
    yield from _against_precision(switches, deployment)
    if switches.aiter_triton_sparse_mla:
        yield from _against_sparse_mla(switches, deployment)


def _against_sparse_mla(switches: Switches, deployment: Deployment) -> Iterator[Refusal]:
    """Why our kernel can't be asked for in the place of AITER's attention: what the switch is
    published for, and where that attention wouldn't serve.
    """
    subject, arch = VARIABLES[SPARSE_MLA], deployment.device.arch
    anyway = "our Triton kernel attends anyway, so it would change nothing"
    if not switches.use_aiter:
        remedy = f"{VARIABLES[AITER]}=1, or leave it out"
        yield Refusal("rocm", subject, f"without AITER {anyway}", remedy)
    if arch != "gfx950":
        reason = f"it is published for gfx950; this device is {arch}"
        yield Refusal("rocm", subject, reason, "leave it out")
    if deployment.dtype != "bfloat16":
        reason = f"AITER's attention takes bfloat16, not {deployment.dtype}: {anyway}"
        yield Refusal("rocm", subject, reason, "--dtype bfloat16, or leave it out")
    native = "e4m3fnuz" if FLAVOUR.get(arch) == "e4m3fnuz" else "e4m3"
    if deployment.kv_layout not in ("bf16", native):
        rows = f"rows of bf16 or {native}, not of {deployment.kv_layout}"
        reason = f"AITER's attention reads {rows}: {anyway}"
        remedy = "--kv-cache-dtype fp8, or bfloat16, or leave it out"
        yield Refusal("rocm", subject, reason, remedy)
    for flag, size in (
        ("--decode-context-parallel-size", deployment.decode_context_parallel_size),
        ("--prefill-context-parallel-size", deployment.prefill_context_parallel_size),
    ):
        if size > 1:
            reason = f"it is published for no context parallelism, and {flag} is {size}"
            yield Refusal("rocm", subject, reason, f"{flag} 1, or leave it out")


def _against_size(
    switches: Switches, deployment: Deployment, source: str | None
) -> Iterator[Refusal]:
    """Why a size of AITER's all-reduce that ``source`` states would bound nothing; that there is
    none, 0, may be said anywhere.
    """
    if source is None or not switches.custom_ar_max_size:
        return
    world, nodes = deployment.tensor_parallel_size, deployment.nnodes
    if not switches.use_aiter:
        reason = "without AITER torch sums over ranks, whatever the size"
        yield Refusal("rocm", source, reason, f"{VARIABLES[AITER]}=1, or leave it out")
    if world == 1:
        reason = "one rank sums with no other"
        yield Refusal("rocm", source, reason, "--tensor-parallel-size 8, or leave it out")
    elif world not in AR_WORLDS:
        made = ", ".join(map(str, AR_WORLDS))
        reason = f"AITER's all-reduce is made for {made} ranks, not for {world}: torch sums"
        yield Refusal("rocm", source, reason, "leave it out")
    if nodes > 1:
        reason = f"AITER's all-reduce reaches peers of one host, not of {nodes}: torch sums"
        yield Refusal("rocm", source, reason, "leave it out")


def _against_bound(switches: Switches, environment: Mapping[str, str]) -> Iterator[Refusal]:
    """Of the library's own variable: that AITER would make other activations than are asked for."""
    stated = environment.get(MOE_BOUND, "")
    if switches.use_aiter and switches.expert_act == "a8w4" and stated not in ("", "0"):
        reason = f"it says {stated!r}, and a8w4 is FP8 inputs of experts from the first row on"
        yield Refusal("rocm", MOE_BOUND, reason, "0, or leave it out")


def _against_precision(switches: Switches, deployment: Deployment) -> Iterator[Refusal]:
    """Why queries can't be FP8 in our sparse attention, or why it would change nothing."""
    if switches.sparse_mla_precision != "fp8":
        return
    subject, remedy = _flag(PRECISION), "leave it out"
    if deployment.device.kind == "fake":
        yield Refusal("rocm", subject, "a device of kind fake has no kernels", remedy)
    if deployment.dtype != "bfloat16":
        reason = f"queries of {deployment.dtype} meet keys in float32"
        yield Refusal("rocm", subject, reason, "--dtype bfloat16")
    if not deployment.kv_layout.startswith("e4m3"):
        reason = f"a cache of {deployment.kv_layout} has no FP8 for queries in FP8 to meet"
        yield Refusal("rocm", subject, reason, "--kv-cache-dtype fp8")
    if switches.use_aiter and not switches.aiter_triton_sparse_mla:
        reason = "AITER's attention, which is to serve, has queries in FP8 on such a cache already"
        yield Refusal("rocm", subject, reason, f"{remedy}, or {VARIABLES[SPARSE_MLA]}=1")
