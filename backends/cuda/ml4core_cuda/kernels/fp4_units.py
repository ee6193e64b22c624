"""What matrix units take of a weight in FP4, in Gluon: a turn's words, decoded in registers, and
their products with eight rows of an activation.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ml4core_triton.kernels.weights import NVFP4

_NVFP4 = gl.constexpr(NVFP4)


@gluon.constexpr_function
def wide(warps: int, words: int) -> gl.BlockedLayout:
    """So many words a thread, [32 warps, words]."""
    return gl.BlockedLayout([1, words], [32, 1], [warps, 1], [1, 0])


@gluon.constexpr_function
def flat(warps: int) -> gl.BlockedLayout:
    """One a thread, [32 warps]."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.constexpr_function
def scale_words(format: int) -> int:
    """Words of 4 scales of a row and 128 columns."""
    return 2 if format == NVFP4 else 1


def _products(twice: bool) -> str:
    """Assembly of the 8 products of a turn [16, 128] with [128, 8].

    Sums $0 to $3; words of rows g $4 and of rows g + 8 $8, their scales $12 and $16, activations
    $20, 24, 28 and 32, each as four registers, one a word; sums before $36. A code n becomes
    n << 12 | n << 6, of which the sign, exponent and fraction of bf16 stay: its value, 2**126 too
    small. ``twice``: that factor follows apart, else it is part of the scales.
    """
    lines = [".reg .b32 a0, a1, a2, a3, w, v, f;", "mov.b32 f, 0x7E807E80;"]
    sums = "36, 37, 38, 39"
    for word in range(4):
        sources = (f"${4 + word}", f"${8 + word}")
        for half in range(2):
            if half:
                lines += [f"shr.u32 w, {sources[0]}, 8;", f"shr.u32 v, {sources[1]}, 8;"]
                sources = ("w", "v")
            for register, (row, mask, factor) in enumerate(
                (row, mask, factor)
                for mask, factor in (("0x000F000F", "0x1040"), ("0x00F000F0", "0x104"))
                for row in range(2)
            ):
                name = f"a{register}"
                lines += [
                    f"and.b32 {name}, {sources[row]}, {mask};",
                    f"mul.lo.u32 {name}, {name}, {factor};",
                    f"and.b32 {name}, {name}, 0x81C081C0;",
                ]
                lines += [f"mul.rn.bf16x2 {name}, {name}, f;"] if twice else []
                lines.append(f"mul.rn.bf16x2 {name}, {name}, ${12 + 4 * row + word};")
            before = "{" + ", ".join(f"${one}" for one in sums.split(", ")) + "}"
            x = f"{{${20 + 8 * half + word}, ${24 + 8 * half + word}}}"
            lines.append(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, "
                f"{{a0, a1, a2, a3}}, {x}, {before};"
            )
            sums = "0, 1, 2, 3"
    return "{" + " ".join(lines) + "}"


_ONCE, _TWICE = gl.constexpr(_products(False)), gl.constexpr(_products(True))
_REGISTERS = gl.constexpr(",".join(["=&f"] * 4 + ["r"] * 32 + ["f"] * 4))


@gluon.jit
def added(words0, words1, factor0, factor1, x0, x1, x2, x3, acc, TWICE: gl.constexpr):
    """``acc`` fp32 [32 warps, 4] and the products of 16 rows: words and factors of rows g and of
    rows g + 8, and those of the activation, all [32 warps, 4].
    """
    return gl.inline_asm_elementwise(
        _TWICE if TWICE else _ONCE, _REGISTERS,
        [words0, words1, factor0, factor1, x0, x1, x2, x3, acc],
        dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _as_pairs(number):
    """fp32 as two bf16 of a word."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [number], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def factors(found, FORMAT: gl.constexpr, TWICE: gl.constexpr, WARPS: gl.constexpr):
    """What the words of a thread are multiplied by, as two bf16 of a word each [32 WARPS, 4]."""
    if FORMAT == _NVFP4:
        # Two E4M3 bytes, times 2**119.
        low, high = gl.inline_asm_elementwise(
            "{ .reg .b32 a; .reg .b16 l, h; cvt.rn.f16x2.e4m3x2 a, $2; mov.b32 {l, h}, a;"
            " cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }",
            "=f,=f,h", [found], dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
        )  # fmt: skip
        low, high = _as_pairs(low * 6.646139978924579e35), _as_pairs(high * 6.646139978924579e35)
        both = gl.permute(gl.join(gl.join(low, low), gl.join(high, high)), (0, 2, 1))
        factor = gl.reshape(both, (32 * WARPS, 4))
        factor = gl.convert_layout(factor, wide(WARPS, 4), assert_trivial=True)
    else:
        exponent = found.to(gl.uint8, bitcast=True).to(gl.int32)
        if TWICE:  # 2**(n - 127)
            bits = gl.where(exponent == 0, 0x40, exponent << 7)
            bits = gl.where(exponent == 255, 0x7FC0, bits)
        else:  # 2**122 times as much; infinite at most
            bits = gl.minimum(exponent, 133) * 128 + 122 * 128
        bits = gl.convert_layout(
            bits | bits << 16, gl.SliceLayout(1, wide(WARPS, 4)), assert_trivial=True
        )
        four = gl.zeros((32 * WARPS, 4), gl.int32, wide(WARPS, 4))
        factor = gl.expand_dims(bits, 1) + four
    return factor
