"""FP8 experts of very few rows, of matrices so small that a launch's beginning and end count: the
ranks of a cut model. In Gluon, by ``row_turns``.

A program knows all that it will read as soon as it knows its experts. The second launch may come up
as the first one's programs end: its experts are known by then, so its codes are on their way before
its activation is there.

Eight rows of w1 and the same of w3 a program, or sixteen of w2 of every choice, in turns of 256
columns. A rank of eight (768 wide): 480 programs of the first, four a multiprocessor, so that all
run at once, and 384 of the second.
"""

# Tuples grow by turns, as the kernel is compiled; its language has no way to unpack one.
# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ml4core.api import MoESpec
from ml4core_cuda.kernels.row_turns import (
    AHEAD,
    COLUMNS,
    EACH,
    LINE,
    LINES,
    REGISTERS,
    WORDS,
    let_next_begin,
    product,
    stage,
    turn_of,
    wait_for_previous,
)
from ml4core_cuda.kernels.short_shapes import ROWS, TURN
from ml4core_triton.kernels import silu_mul
from ml4core_triton.kernels.chaining import dependent
from ml4core_triton.kernels.numeric import next_power
from ml4core_triton.kernels.weights import WeightArgs

_silu = gluon.jit(silu_mul.silu.fn)


@gluon.jit
def _chosen(
    logits, E, routed_scale, TOPK: gl.constexpr, RENORMALIZE: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """Experts and weights of a row's choices by its logits, a tuple each; the last is expert E, the
    shared one, with weight 1. A row that can't be judged has weights NaN. Every warp chooses for
    itself. Logits come past the first cache, which may hold those of a launch before.
    """
    expert = gl.arange(0, BLOCK, layout=gl.BlockedLayout([BLOCK // 32], [32], [4], [0]))
    real = expert < E
    found = gl.load(logits + expert, mask=real, other=0.0, cache_modifier=".cg")
    # NaN passes no comparison either.
    broken = gl.sum((real & ~(gl.abs(found) < float("inf"))).to(gl.int32), 0) > 0
    found = gl.where(broken, 0.0, found)
    bits = (found + 0.0).to(gl.int32, bitcast=True)
    left = gl.where(real, bits ^ ((bits >> 31) & 0x7FFFFFFF), -(2**31))
    experts, weights = (), ()
    top = 0.0
    total = 0.0
    for one in gl.static_range(TOPK):
        best = gl.max(left, 0)
        at = gl.min(gl.where(left == best, expert, BLOCK), 0)
        left = gl.where(expert == at, -(2**31), left)
        logit = (best ^ ((best >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)
        if one == 0:
            top = logit
        weight = gl.exp(logit - top)
        total += weight
        experts = experts + (at,)
        weights = weights + (weight,)
    if not RENORMALIZE:
        total = gl.sum(gl.where(real, gl.exp(found - top), 0.0), 0)
    shares = ()
    for one in gl.static_range(TOPK):
        share = gl.div_rn(weights[one], total) * routed_scale
        shares = shares + (gl.where(broken, float("nan"), share),)
    return experts + (E,), shares + (gl.where(broken, float("nan"), 1.0),)


@gluon.jit
def _given(weights, ids, first_expert, E, SHARED: gl.constexpr, COUNT: gl.constexpr):
    """The same as they were chosen before; what is another rank's has weight 0."""
    experts, shares = (), ()
    for one in gl.static_range(COUNT):
        expert = gl.load(ids + one, cache_modifier=".cg").to(gl.int32) - first_expert
        weight = gl.load(weights + one, cache_modifier=".cg")
        mine = (expert >= 0) & (expert < E + SHARED)
        experts = experts + (gl.where(mine, expert, 0),)
        shares = shares + (gl.where(mine, weight, 0.0),)
    return experts, shares


@gluon.jit
def _choices(
    given, ids, token, first_expert, E, routed_scale, BY_LOGITS: gl.constexpr,
    SHARED: gl.constexpr, COUNT: gl.constexpr, RENORMALIZE: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    if BY_LOGITS:
        experts, shares = _chosen(given + token * E, E, routed_scale, COUNT - 1, RENORMALIZE, BLOCK)
    else:
        experts, shares = _given(
            given + token * COUNT, ids + token * COUNT, first_expert, E, SHARED, COUNT
        )
    return experts, shares


@gluon.jit
def _matrix(data, scale, shared, shared_scale, expert, E, size, scale_size, SHARED: gl.constexpr):
    """Where an expert's codes, as words, and scales begin; expert E is the shared one."""
    own = data.to(gl.pointer_type(gl.int32)) + expert.to(gl.int64) * size
    own_scale = scale + expert.to(gl.int64) * scale_size
    if SHARED:
        own = gl.where(expert == E, shared.to(gl.pointer_type(gl.int32)), own)
        own_scale = gl.where(expert == E, shared_scale, own_scale)
    return own, own_scale


@gluon.jit
def gated_kernel(
    x, given, ids, data, scale, shared, shared_scale, out, W, size, scale_size, first_expert, E,
    routed_scale,
    K: gl.constexpr, COUNT: gl.constexpr, PLACES: gl.constexpr, MOST_AHEAD: gl.constexpr,
    BY_LOGITS: gl.constexpr, SHARED: gl.constexpr, RENORMALIZE: gl.constexpr, BLOCK: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """silu(w1 x) * (w3 x) of each choice, out [T, COUNT, W]: grid (tiles of W, COUNT, T)."""
    TURNS: gl.constexpr = K // 256
    ASKED: gl.constexpr = min(MOST_AHEAD, TURNS)
    # The shared expert first: it is known before the router has spoken.
    choice, token = COUNT - 1 - gl.program_id(1), gl.program_id(2).to(gl.int64)
    E = gl.to_tensor(E)  # of a single expert it is known as this is compiled
    expert, share = E, 1.0
    if not (SHARED and choice == COUNT - 1):
        wait_for_previous(DEPENDENT)
        experts, shares = _choices(
            given, ids, token, first_expert, E, routed_scale, BY_LOGITS, SHARED, COUNT, RENORMALIZE,
            BLOCK,
        )  # fmt: skip
        for one in gl.static_range(COUNT):
            expert = gl.where(choice == one, experts[one], expert)
            share = gl.where(choice == one, shares[one], share)
    used = share != 0  # NaN too
    codes, scales = _matrix(data, scale, shared, shared_scale, expert, E, size, scale_size, SHARED)
    # Rows of w1, then those of w3: a thread has one of each.
    first = gl.program_id(0) * 8
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, WORDS))
    row = first + row % 8 + row // 8 * W
    lines = codes + gl.expand_dims(row.to(gl.int64) * (K // 4), 1)
    row = gl.arange(0, 16, layout=LINE)
    row = first + row % 8 + row // 8 * W
    blocks = scales + gl.expand_dims(row // 128 * (K // 128), 1)
    ring = ()
    for turn in gl.static_range(ASKED):
        ring = ring + (turn_of(lines, blocks, used, turn),)
    wait_for_previous(DEPENDENT)
    held = gl.allocate_shared_memory(gl.bfloat16, [PLACES, 256], LINES)
    stage(x + token * K, held, TURNS, PLACES)
    acc = gl.zeros((16, 16), gl.float32, EACH)
    for turn in gl.static_range(TURNS):
        acc += product(ring[0][0], ring[0][1], held.index(turn).load(COLUMNS))
        ring = ring[1:]
        if turn + ASKED < TURNS:
            ring = ring + (turn_of(lines, blocks, used, turn + ASKED),)
    # Late: what comes up would take from the bytes that this launch's own programs wait for.
    let_next_begin(DEPENDENT)
    gate, up = gl.split(gl.permute(gl.reshape(gl.sum(acc, 1), (2, 8)), (1, 0)))
    inner = (_silu(gate) * up).to(out.dtype.element_ty)
    at = first + gl.arange(0, 8, layout=inner.type.layout)
    gl.store(out + (token * COUNT + choice) * W + at, inner)


@gluon.jit
def outer_kernel(
    x, given, ids, data, scale, shared, shared_scale, out, H, size, scale_size, first_expert, E,
    routed_scale,
    K: gl.constexpr, COUNT: gl.constexpr, PLACES: gl.constexpr, MOST_AHEAD: gl.constexpr,
    BY_LOGITS: gl.constexpr, SHARED: gl.constexpr, RENORMALIZE: gl.constexpr, BLOCK: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The weighted sum of w2 times x [T, COUNT, K], out [T, H]: grid (tiles of H, T).

    It begins when every program of the launch before has waited for the one before that: what was
    chosen is there, if not yet what this one multiplies.
    """
    PART: gl.constexpr = K // 256
    TURNS: gl.constexpr = PART * COUNT
    ASKED: gl.constexpr = min(MOST_AHEAD, TURNS)
    E = gl.to_tensor(E)
    token = gl.program_id(1).to(gl.int64)
    experts, shares = _choices(
        given, ids, token, first_expert, E, routed_scale, BY_LOGITS, SHARED, COUNT, RENORMALIZE,
        BLOCK,
    )  # fmt: skip
    first = gl.program_id(0) * 16
    row = first + gl.arange(0, 16, layout=gl.SliceLayout(1, WORDS))
    words = gl.expand_dims(row.to(gl.int64) * (K // 4), 1)
    row = first + gl.arange(0, 16, layout=LINE)
    sizes = gl.expand_dims(row // 128 * (K // 128), 1)
    matrices = ()
    for one in gl.static_range(COUNT):
        codes, scales = _matrix(
            data, scale, shared, shared_scale, experts[one], E, size, scale_size, SHARED
        )
        matrices = matrices + ((codes + words, scales + sizes, shares[one] != 0),)
    ring = ()
    for turn in gl.static_range(ASKED):
        ring = ring + (turn_of(*matrices[turn // PART], turn % PART),)
    let_next_begin(DEPENDENT)
    wait_for_previous(DEPENDENT)
    held = gl.allocate_shared_memory(gl.bfloat16, [PLACES, 256], LINES)
    stage(x + token * COUNT * K, held, TURNS, PLACES)
    acc = gl.zeros((16, 16), gl.float32, EACH)
    for turn in gl.static_range(TURNS):
        found = product(ring[0][0], ring[0][1], held.index(turn).load(COLUMNS))
        # What has no weight was never written.
        acc += gl.where(matrices[turn // PART][2], found * shares[turn // PART], 0.0)
        ring = ring[1:]
        if turn + ASKED < TURNS:
            ring = ring + (turn_of(*matrices[(turn + ASKED) // PART], (turn + ASKED) % PART),)
    gl.store(out + token * H + row, gl.sum(acc, 1).to(out.dtype.element_ty))


def launch(
    x: Tensor,
    w13: WeightArgs,
    w2: WeightArgs,
    shared: tuple[WeightArgs, WeightArgs] | None,
    given: Tensor,
    ids: Tensor | None,
    out: Tensor,
    *,
    count: int,
    first_expert: int = 0,
    moe: MoESpec | None = None,
    ahead: bool,
) -> None:
    """Fills ``out`` [T, H] with the weighted sum of ``count`` choices of each row of ``x`` [T, H],
    of experts as ``experts_fit`` has them.

    Weights fp32 [T, count] are ``given``, and experts int64 ``ids``; without these, what is given
    are router logits fp32 [T, E], and ``moe`` says how they choose. With ``shared`` (its w13 and
    w2), id E is that expert, and the last choice.
    """
    rows = len(x)
    other13, other2 = shared or (w13, w2)
    inner = torch.empty(rows, count, w2.columns, dtype=x.dtype, device=x.device)
    named: dict[str, Any] = {
        "COUNT": count, "BY_LOGITS": ids is None, "SHARED": int(shared is not None),
        "RENORMALIZE": moe is not None and moe.renormalize,
        "BLOCK": max(32, next_power(w13.matrices)), "DEPENDENT": ahead, "num_warps": 4,
        "MOST_AHEAD": AHEAD, "maxnreg": REGISTERS, **dependent(ahead),
    }  # fmt: skip
    which = given if ids is None else ids
    factor = 1.0 if moe is None else float(moe.routed_scale)
    for source, found, one, other, kernel, turns in (
        (x, inner, w13, other13, gated_kernel, w13.columns // TURN),
        (inner, out, w2, other2, outer_kernel, count * w2.columns // TURN),
    ):
        gated = kernel is gated_kernel
        tiles = found.shape[-1] // (ROWS // 2 if gated else ROWS)
        kernel[(tiles, count, rows) if gated else (tiles, rows)](
            source, given, which, one.data, one.scale, other.data, other.scale, found,
            found.shape[-1], one.rows * one.columns // 4, one.scale_size, first_expert,
            one.matrices, factor,
            K=one.columns, PLACES=next_power(turns), **named,
        )  # fmt: skip
