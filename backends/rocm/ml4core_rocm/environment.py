"""Names of the environment that look like switches: which are taken, which AITER reads by itself,
and which nobody knows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ml4core_rocm.switches import MOE_BOUND, VARIABLES

_logger = logging.getLogger(__name__)

PREFIXES = ("VLLM_ROCM_", "VLLM_FP8_", "AITER_")
CORE = ("VLLM_FP8_MOE_REQUANT", "VLLM_FP8_MOE_REQUANT_ACT")
"""Taken by core, for every backend that can."""
KNOWN = (*VARIABLES.values(), *CORE)
LIBRARYS = (
    MOE_BOUND,
    "AITER_CUSTOM_AR_MIN_SIZE",
    "AITER_ENABLE_EXPERIMENTAL",
    "AITER_JIT_DIR",
    "AITER_MLA_DECODE_PERSISTENT_MAX_BATCH",
    "AITER_MLA_REDUCE_FLYDSL",
    "AITER_MLA_USE_OPUS",
    "AITER_TRITON_ONLY",
)
"""AITER's own that are known to steer what is called of it."""

TAKEN, READ, IDLE, UNKNOWN = (
    "environment, taken",
    "environment, read by AITER itself",
    "environment, without effect as AITER is not used",
    "environment, unknown",
)
"""Words of the start-up report."""


def told(environment: Mapping[str, str], use_aiter: bool) -> dict[str, str]:
    """For the start-up report, names that are set, by what becomes of them; their values are told
    with the switches.
    """
    names = sorted(
        name for name, value in environment.items() if value and name.startswith(PREFIXES)
    )
    library = READ if use_aiter else IDLE
    found: dict[str, list[str]] = {}
    for name in names:
        word = TAKEN if name in KNOWN else library if name in LIBRARYS else UNKNOWN
        found.setdefault(word, []).append(name)
    lines = {word: ", ".join(found[word]) for word in (TAKEN, READ, IDLE) if word in found}
    if UNKNOWN in found:
        lines[UNKNOWN] = unknown(found[UNKNOWN])
    return lines


def unknown(names: list[str]) -> str:
    """That nothing here reads these, and what it does read."""
    text = f"{', '.join(names)}: nothing here reads it; known: {', '.join(KNOWN)}"
    if any(name.startswith("AITER_") for name in names):
        text += f"; AITER reads names of its own, of which these are known: {', '.join(LIBRARYS)}"
    return text


def warn(told: Mapping[str, str]) -> None:
    """Logs what nobody knows, on the first of several ranks."""
    import torch.distributed as dist

    if UNKNOWN not in told or (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        return
    _logger.warning("%s: %s", UNKNOWN, told[UNKNOWN])
