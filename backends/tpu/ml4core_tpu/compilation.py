"""What is compiled when, where it is kept, and what the start-up report tells of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ml4core.api import Deployment, Refusal
from ml4core_tpu.buckets import Buckets
from ml4core_tpu.programs import Programs
from ml4core_tpu.runtimes import LAZY, runtime_of

CACHE = "compilation_cache"
WARM_UP = "warm_up"
RESIDENT = "resident"
_HOME_CACHE = ".cache"
MOST_MAPPINGS = 20_000
"""Of a process's memory: a third of what it may have."""
SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        "jax_persistent_cache_min_compile_time_secs": 0.2,
        "jax_persistent_cache_min_entry_size_bytes": 0,
        "jax_compilation_cache_include_metadata_in_key": False,
        # Kernels for TPUs are part of the key as they are, with the lines that they came from.
        "jax_traceback_in_locations_limit": 0,
        "jax_hlo_source_file_canonicalization_regex": ".*",
    }
)
"""Of JAX, where it keeps what it compiles."""


def own_switches(deployment: Deployment) -> Mapping[str, object]:
    """The object ``tpu`` of ``--additional-config``."""
    own = deployment.additional_config.get("tpu", {})
    return own if isinstance(own, Mapping) else {}


def compilation_refusals(deployment: Deployment) -> tuple[Refusal, ...]:
    """Values of switches that nothing can be made of."""
    own, found = own_switches(deployment), []
    for name, kind, remedy in (
        (CACHE, str, 'the path of a folder; "" for none'),
        (WARM_UP, bool, "true, or false"),
        (RESIDENT, bool, "true, or false"),
    ):
        if name in own and not isinstance(own[name], kind):
            subject = f"--additional-config tpu.{name}"
            found.append(Refusal("tpu", subject, f"can't be {own[name]!r}", remedy))
        elif name in own and runtime_of(deployment) == LAZY:
            subject, reason = f"--additional-config tpu.{name}", "torch-xla compiles for itself"
            if name == RESIDENT:
                reason = "torch-xla has weights and caches as its own tensors"
            found.append(Refusal("tpu", subject, reason, f"no {name}, or tpu.runtime=jax"))
    if own.get(RESIDENT) is False and deployment.device.kind == "real":
        subject = f"--additional-config tpu.{RESIDENT}"
        reason = "weights and caches of a TPU's session have no other place"
        found.append(Refusal("tpu", subject, reason, f"no {RESIDENT}"))
    return tuple(found)


def stays_on_devices(deployment: Deployment) -> bool:
    """Whether weights, caches and rows of a session stay on devices: on TPUs, and where it is asked
    for. On the host caches are torch's own, and programs get the pages that they need.
    """
    return bool(own_switches(deployment).get(RESIDENT, deployment.device.kind == "real"))


def warms_up(deployment: Deployment) -> bool:
    """Whether all programs are compiled before the first step: on TPUs, and where it is asked
    for. On the host a step compiles what it needs.
    """
    return bool(own_switches(deployment).get(WARM_UP, deployment.device.kind == "real"))


def compilation_cache(deployment: Deployment) -> None:
    """Has JAX keep what it compiles in a folder, under keys of what is compiled alone: not of the
    lines that it came from, so that ranks, processes and places of a checkout share it.

    A folder that the environment or the program named to JAX stays, as it is kept.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache as cache

    config: Any = jax.config  # its options have no types
    named = own_switches(deployment).get(CACHE)
    if named is None and config.jax_compilation_cache_dir:
        return
    folder = _default_folder() if named is None else str(named)
    if folder != (config.jax_compilation_cache_dir or ""):
        config.update("jax_compilation_cache_dir", folder or None)
        cache.reset_cache()  # else the first folder of a process stays in use
    for name, value in SETTINGS.items() if folder else ():
        config.update(name, value)


def release_programs() -> None:
    """Drops what JAX has compiled in this process, once that is much: a program takes some tens of
    memory mappings, and Linux gives a process 65,530, beyond which compiling fails.
    """
    try:
        with open("/proc/self/maps", "rb") as maps:
            count = sum(1 for _ in maps)
    except OSError:  # another system
        return
    if count > MOST_MAPPINGS:
        import jax

        jax.clear_caches()


@contextmanager
def without_cache() -> Iterator[None]:
    """Programs for a slice that isn't there: JAX stores them, and fails when it reads them back."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache as cache

    config: Any = jax.config
    before = config.jax_enable_compilation_cache
    config.update("jax_enable_compilation_cache", False)
    cache.reset_cache()  # else what was found at a process's first program goes for all
    try:
        yield
    finally:
        config.update("jax_enable_compilation_cache", before)
        cache.reset_cache()


def _default_folder() -> str:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / _HOME_CACHE
    return str(Path(root) / "ml4core" / "tpu")


class Told(Mapping[str, str]):
    """The session's settings, as they are when they are asked for."""

    def __init__(self, fixed: Mapping[str, str], buckets: Buckets, programs: Programs) -> None:
        """``fixed``: those that stay as they are."""
        self._fixed = fixed
        self._buckets = buckets
        self._programs = programs

    def _now(self) -> dict[str, str]:
        made = self._programs.made
        images = sum(one.of_images for one in made)
        counts = f"{len(made) - images} of layers" + (f", {images} of images" if images else "")
        return {
            **self._fixed,
            "token_buckets": self._buckets.told,
            "request_buckets": ", ".join(map(str, self._buckets.requests)),
            "programs": f"{counts}, in {sum(one.seconds for one in made):.1f} s",
            "compiled_after_warm_up": str(self._programs.recompiled),
        }

    def __getitem__(self, key: str) -> str:
        return self._now()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())
