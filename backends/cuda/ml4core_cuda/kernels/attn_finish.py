"""What follows the projections of attention, in one launch: rope, SSMax, the absorbed query, the
latent's norm and its row, the index query and key, and the key's row.

A program takes one token and one job: a part of a head's absorbed query, the latent, the index key,
some heads of the index query, or the index weights. Everything is fp32 until it is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ml4core_triton.kernels.angles import cos_sin
from ml4core_triton.kernels.chaining import let_next_begin, wait_for_previous
from ml4core_triton.kernels.keys import write_key
from ml4core_triton.kernels.kv_write import write_row
from ml4core_triton.kernels.latents import row_offsets
from ml4core_triton.kernels.layer_norm import layer_normed
from ml4core_triton.kernels.numeric import narrow, widen
from ml4core_triton.kernels.rms_norm import normed
from ml4core_triton.kernels.ssmax import ssmax_factor


@triton.jit
def _whole(made, part, at, fits, PARTS: tl.constexpr):
    """Sums over parts, in their order."""
    total = tl.load(made + at, mask=fits, other=0.0)
    for one in tl.static_range(1, PARTS):
        total += tl.load(made + one * part + at, mask=fits, other=0.0)
    return total


@triton.jit
def _turn(dim, position, inv_freq, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Of dims of a rotated vector: each one's partner, the cosine, and the sine with the sign that
    the partner has it with.
    """
    if INTERLEAVED:
        pair, first, partner = dim // 2, dim % 2 == 0, dim ^ 1
    else:
        pair, first = dim % HALF, dim < HALF
        partner = tl.where(first, dim + HALF, dim - HALF)
    frequency = tl.load(inv_freq + pair, mask=dim < 2 * HALF, other=0.0)
    cos, sin = cos_sin(position, frequency)
    return partner, cos, tl.where(first, -sin, sin)


@triton.jit
def _turned(
    made, part, at, dim, position, inv_freq, R: tl.constexpr, ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Dims ``dim`` of the vector of R at ``at``, rotated if ``ROPE``."""
    x = _whole(made, part, at + dim, dim < R, PARTS)
    if ROPE:
        partner, cos, sin = _turn(dim, position, inv_freq, R // 2, INTERLEAVED)
        x = x * cos + _whole(made, part, at + partner, dim < R, PARTS) * sin
    return x


@triton.jit
def _factor(
    position, head, scale, bias, beta, origin, limit, whole, KIND: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """SSMax of a head, or of several, at a position."""
    found = ssmax_factor(position, beta, origin, limit, KIND) * whole
    if SCALED:
        found = found * widen(tl.load(scale + head))
    if BIASED:
        found = found + widen(tl.load(bias + head))
    return found


@triton.jit
def _index_dims(
    made, part, at, dim, weight, bias, fits, position, inv_freq, eps,
    D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Vectors [HEADS, BD] of D dims at ``at`` [HEADS, 1]: normed, then their first R rotated."""
    x = _whole(made, part, at + dim, fits, PARTS)
    partner, cos, sin = dim, 0.0, 0.0
    if R:
        partner, cos, sin = _turn(dim, position, inv_freq, R // 2, INTERLEAVED)
        partner = tl.where(dim < R, partner, dim)
        cos, sin = tl.where(dim < R, cos, 1.0), tl.where(dim < R, sin, 0.0)
    if NORM:
        own = layer_normed(
            x, widen(tl.load(weight + dim, mask=fits, other=0.0)),
            widen(tl.load(bias + dim, mask=fits, other=0.0)), fits, D, eps,
        )  # fmt: skip
    else:
        own = x
    if R:
        other = _whole(made, part, at + partner, fits, PARTS)
        if NORM:
            # The partner's norm has the same mean and variance, whatever the order.
            other = layer_normed(
                other, widen(tl.load(weight + partner, mask=fits, other=0.0)),
                widen(tl.load(bias + partner, mask=fits, other=0.0)), fits, D, eps,
            )  # fmt: skip
        own = own * cos + other * sin
    return own


@triton.jit
def _head_job(
    made, part, position, job, q, w_uk, inv_freq, scale, bias, beta, origin, limit, whole,
    P: tl.constexpr, BP: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, L: tl.constexpr,
    HL: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, KIND: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """HL dims of a head's absorbed query, and with the first of them its rope part; ``q`` is the
    token's row.
    """
    TILES: tl.constexpr = L // HL
    head = job // TILES
    factor = _factor(position, head, scale, bias, beta, origin, limit, whole, KIND, SCALED, BIASED)
    dim = tl.arange(0, BP)
    one = _whole(made, part, head * (P + R) + dim, dim < P, PARTS) * factor
    row = (job % TILES) * HL + tl.arange(0, HL)
    place = w_uk + (head * L + row).to(tl.int64)[:, None] * P + dim[None, :]
    matrix = widen(tl.load(place, mask=(dim < P)[None, :], other=0.0))
    start = q + head * (L + R)
    tl.store(start + row, narrow(tl.sum(matrix * one[None, :], 1), q.dtype.element_ty))
    if R:  # noqa: SIM102 - one is known as the kernel is compiled, the other is not
        if job % TILES == 0:
            tail = tl.arange(0, BR)
            pe = _turned(
                made, part, head * (P + R) + P, tail, position, inv_freq, R, ROPE, INTERLEAVED,
                PARTS,
            )  # fmt: skip
            tl.store(start + L + tail, narrow(pe * factor, q.dtype.element_ty), tail < R)


@triton.jit
def _latent_job(
    made, part, position, at, start, norm, eps, inv_freq, cache_scale,
    R: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, LAYOUT: tl.constexpr,
    CL: tl.constexpr, CR: tl.constexpr, BL: tl.constexpr, BCR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The latent, normed, and its rotated part as the row at ``start``."""
    column = tl.arange(0, BL)
    tail = tl.arange(0, BCR)
    x = _whole(made, part, at + column, column < CL, PARTS)
    x = normed(x, widen(tl.load(norm + column, mask=column < CL, other=0.0)), CL, eps)
    pe = tl.zeros((BCR,), tl.float32)
    if R:
        pe = _turned(made, part, at + CL, tail, position, inv_freq, R, ROPE, INTERLEAVED, PARTS)
    write_row(start, x, pe, cache_scale, column, tail, LAYOUT, CL, CR, BL)


@triton.jit
def _key_job(
    made, part, position, at, start, inside, weight, bias, eps, inv_freq,
    D: tl.constexpr, BD: tl.constexpr, RI: tl.constexpr, INTERLEAVED: tl.constexpr,
    LAYOUT: tl.constexpr, BLOCK_SIZE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The index key as token ``inside`` of the page at ``start``."""
    dim = tl.arange(0, BD)[None, :]
    lone = tl.zeros((1, 1), tl.int32) + at
    x = _index_dims(
        made, part, lone, dim, weight, bias, dim < D, position, inv_freq, eps, D, RI, INTERLEAVED,
        True, PARTS,
    )  # fmt: skip
    write_key(start, inside, tl.reshape(x, (BD,)), tl.arange(0, BD), LAYOUT, D, BLOCK_SIZE)


@triton.jit
def _query_job(
    made, part, position, at, group, index_q, weight, bias, eps, inv_freq, scale, shift, beta,
    origin, limit, whole,
    Hi: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, RI: tl.constexpr,
    INTERLEAVED: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr,
    NORM: tl.constexpr, PER_HEAD: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """HEADS heads of the index query; ``index_q`` is the token's."""
    dim = tl.arange(0, BD)[None, :]
    head = group * HEADS + tl.arange(0, HEADS)
    known = tl.minimum(head, Hi - 1)
    fits = (head < Hi)[:, None] & (dim < D)
    learned = known[:, None] * D if PER_HEAD else 0 * known[:, None]
    x = _index_dims(
        made, part, at + known[:, None] * D, dim, weight + learned, bias + learned, fits, position,
        inv_freq, eps, D, RI, INTERLEAVED, NORM, PARTS,
    )  # fmt: skip
    factor = _factor(
        position, known, scale, shift, beta, origin, limit, whole, KIND, SCALED, BIASED
    )
    x = x * factor[:, None] if SCALED or BIASED else x * factor
    tl.store(index_q + known[:, None] * D + dim, x, fits)


@triton.jit
def _weights_job(
    made, part, at, index_weights, Hi: tl.constexpr, BW: tl.constexpr, PARTS: tl.constexpr
):
    """The index weights; ``index_weights`` is the token's row."""
    column = tl.arange(0, BW)
    tl.store(
        index_weights + column, _whole(made, part, at + column, column < Hi, PARTS), column < Hi
    )


@triton.jit
def finish_kernel(
    made, made_part, made_row, positions, inv_freq, q, w_uk, ssmax_scale, ssmax_bias,
    beta, origin, limit, whole, kv_norm, kv_eps,
    rows, cache_scale, slots, all_slots, page_stride, row_stride,
    pages, index_slots, index_all_slots, index_page_stride,
    iq_norm, iq_bias, ik_norm, ik_bias, index_eps, index_scale, index_bias,
    index_beta, index_origin, index_limit, index_whole, index_q, index_weights,
    N: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    L: tl.constexpr, BL: tl.constexpr, HL: tl.constexpr, ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr,
    OWNS: tl.constexpr, LAYOUT: tl.constexpr, CL: tl.constexpr, CR: tl.constexpr,
    BCR: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    Hi: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, RI: tl.constexpr,
    I_INTERLEAVED: tl.constexpr, I_KIND: tl.constexpr, I_SCALED: tl.constexpr,
    I_BIASED: tl.constexpr, I_NORM: tl.constexpr, PER_HEAD: tl.constexpr,
    I_LAYOUT: tl.constexpr, I_BLOCK_SIZE: tl.constexpr, BW: tl.constexpr, HEADS: tl.constexpr,
    PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (jobs, T)."""
    job, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    let_next_begin(DEPENDENT)
    wait_for_previous(DEPENDENT)
    made += token * made_row
    position = tl.load(positions + token)
    TILES: tl.constexpr = L // HL
    if job < N * TILES:
        _head_job(
            made, made_part, position, job, q + token * N * (L + R), w_uk, inv_freq, ssmax_scale,
            ssmax_bias, beta, origin, limit, whole, P, BP, R, BR, L, HL, ROPE, INTERLEAVED, KIND,
            SCALED, BIASED, PARTS,
        )  # fmt: skip
    elif job < N * TILES + OWNS:
        slot = tl.load(slots + token)
        if (slot >= 0) & (slot < all_slots):
            _latent_job(
                made, made_part, position, N * (P + R),
                rows + row_offsets(slot, BLOCK_SIZE, page_stride, row_stride), kv_norm, kv_eps,
                inv_freq, cache_scale, R, ROPE, INTERLEAVED, LAYOUT, CL, CR, BL, BCR, PARTS,
            )  # fmt: skip
    elif Hi > 0:
        own: tl.constexpr = N * (P + R) + (CL + R if OWNS else 0)
        piece = job - (N * TILES + OWNS)
        if piece == 0:
            _weights_job(
                made, made_part, own + (Hi + 1) * D, index_weights + token * Hi, Hi, BW, PARTS
            )
            index_slot = tl.load(index_slots + token)
            if (index_slot >= 0) & (index_slot < index_all_slots):
                _key_job(
                    made, made_part, position, own + Hi * D,
                    pages + (index_slot // I_BLOCK_SIZE).to(tl.int64) * index_page_stride,
                    index_slot % I_BLOCK_SIZE, ik_norm, ik_bias, index_eps, inv_freq, D, BD, RI,
                    I_INTERLEAVED, I_LAYOUT, I_BLOCK_SIZE, PARTS,
                )  # fmt: skip
        else:
            _query_job(
                made, made_part, position, own, piece - 1, index_q + token * Hi * D, iq_norm,
                iq_bias, index_eps, inv_freq, index_scale, index_bias, index_beta, index_origin,
                index_limit, index_whole, Hi, D, BD, RI, I_INTERLEAVED, I_KIND, I_SCALED, I_BIASED,
                I_NORM, PER_HEAD, HEADS, PARTS,
            )  # fmt: skip
