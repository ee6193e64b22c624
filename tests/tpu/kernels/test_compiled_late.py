"""What JAX itself says that it compiled within a step, after the warm-up."""

from __future__ import annotations

import threading
import warnings
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from ml4core_tpu.executor import BucketExecutor
from ml4core_tpu.programs import Programs, RecompilationWarning


def op() -> Any:
    """One that nothing has compiled before."""
    return jax.jit(lambda x: x * 2 + 1)


def warm() -> Programs:
    programs = Programs()
    programs.warm_up([], lambda *done: None)
    return programs


def test_an_op_is_counted_once_and_warned_of() -> None:
    programs, double, x = warm(), op(), jnp.ones(3)
    with programs.step(), pytest.warns(RecompilationWarning, match=r"was compiled after the warm"):
        double(x)
    with programs.step():
        double(x)
    assert programs.recompiled == 1
    assert programs.made == ()


def test_before_the_warm_up_and_outside_of_steps_nothing_is_late() -> None:
    """Nor what another session's step compiles, or another thread."""
    programs, other, x = warm(), Programs(), jnp.ones(3)
    op()(x)
    with programs.step():
        with other.step():
            op()(x)
        thread = threading.Thread(target=lambda: op()(x))
        thread.start()
        thread.join()
    assert (programs.recompiled, other.recompiled) == (0, 0)


def test_a_program_within_a_step_counts_once() -> None:
    programs = warm()
    with programs.step(), pytest.warns(RecompilationWarning, match="layer, 16 rows") as found:
        programs.get("a", "layer, 16 rows", lambda: op().lower(jnp.ones(3)))
    assert (programs.recompiled, len(found)) == (1, 1)


def test_steps_of_an_executor_are_listened_to() -> None:
    programs, x = warm(), jnp.ones(3)
    nothing: Any = SimpleNamespace()
    executor = BucketExecutor(
        nothing, torch.float32, nothing, programs, nothing, op(), warm_up=False
    )
    run = executor.compile(lambda weights, plan, kv: op()(x), nothing)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        run(nothing, nothing, nothing)
    assert programs.recompiled == 1
