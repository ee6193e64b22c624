"""Which number format a matrix has, told from its tensors: dtype, and the scales beside it.

              values                      scales                             whole matrix
fp8_block     weight F8_E4M3 [N, K]       weight_scale(_inv) [N/128, K/128]
fp8_tensor    weight F8_E4M3 [N, K]                                          qscale_weight, or
                                                                             weight_scale(_inv) []
nvfp4         weight_packed or weight     weight_scale F8_E4M3 [N, K/16]     weight_global_scale, a
              U8 [N, K/2]                                                    divisor; or
                                                                             weight_scale_2
mxfp4         weight_packed or weight     weight_scale U8 or F8_E8M0
              U8 [N, K/2]                 [N, K/32]

Beside any of them there may be one fixed scale of the activation: input_scale, activation_scale or
qscale_act, or input_global_scale, a divisor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ml4core.formats import fp8_block, mxfp4, nvfp4
from ml4core.models.safetensors_file import TensorInfo

PLAIN_DTYPES: Mapping[str, str] = MappingProxyType({"BF16": "bf16", "F32": "fp32", "F16": "fp32"})
"""Dtype -> the format it is loaded in. fp16 has no format of its own; fp32 holds it exactly."""
SCALE_DTYPES = ("F32", "BF16", "F16")
UNSUPPORTED = (
    "not supported by this loader; supported are bf16, fp16, fp32, FP8 (e4m3fn) in 128 x 128 "
    "blocks or with one scale a matrix, NVFP4 and MXFP4"
)
_INPUT_SCALES = ("input_scale", "activation_scale", "qscale_act", "input_global_scale")


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a format lies in arrays: rows and columns that a block scale serves (1: there are no
    block scales, or one serves whole rows of the matrix), and values in a byte.
    """

    rows: int = 1
    columns: int = 1
    packed: int = 1


BLOCKS: Mapping[str, Blocks] = MappingProxyType(
    {
        "fp32": Blocks(),
        "bf16": Blocks(),
        "fp8_tensor": Blocks(),
        "fp8_block": Blocks(fp8_block.BLOCK, fp8_block.BLOCK),
        "nvfp4": Blocks(1, nvfp4.GROUP, 2),
        "mxfp4": Blocks(1, mxfp4.GROUP, 2),
    }
)
"""By format of `WEIGHT_FORMATS`. A cut through a matrix falls between blocks."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix as it lies in the checkpoint.

    Attributes:
        format: of `WEIGHT_FORMATS`.
        data: the tensor of the values.
        scale: the tensor of the block scales; of the one scale, for `fp8_tensor`.
        global_scale: for `nvfp4`.
        input_scale: the fixed scale of the activation, where there is one.
        divides: whether `global_scale` is a divisor; else a multiplier.
        input_divides: the same of `input_scale`.
    """

    format: str
    data: TensorInfo
    scale: TensorInfo | None = None
    global_scale: TensorInfo | None = None
    input_scale: TensorInfo | None = None
    divides: bool = False
    input_divides: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, of values."""
        rows, columns = self.data.shape
        return rows, columns * BLOCKS[self.format].packed

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales, without the activation's."""
        infos = (self.data, self.scale, self.global_scale)
        return sum(info.nbytes for info in infos if info is not None)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why tensors make up no matrix to load. `kind`: missing, misshapen or unsupported."""

    kind: str
    text: str


def classify(stem: str, parts: Mapping[str, TensorInfo], quantised: bool = True) -> Matrix | Fault:
    """The matrix of the tensors `parts`, by suffix. `quantised` says whether it may be."""
    both = [parts[suffix] for suffix in ("weight", "weight_packed") if suffix in parts]
    if not both:
        names = ", ".join(parts[suffix].name for suffix in sorted(parts))
        return Fault("missing", f"{stem}.weight, which {names} belongs to")
    if len(both) == 2:
        names = f"{both[0].name} and {both[1].name}"
        return Fault("unsupported", f"{names}: two tensors of values for one matrix; remove one")
    (data,) = both
    if data.dtype in PLAIN_DTYPES and "weight" in parts:
        if len(parts) > 1:
            names = ", ".join(parts[suffix].name for suffix in sorted(parts.keys() - {"weight"}))
            return Fault(
                "unsupported", f"{data.name}: {data.dtype} needs no scale, but there is {names}"
            )
        return Matrix(PLAIN_DTYPES[data.dtype], data)
    if not quantised:
        return Fault(
            "unsupported", f"{data.name}: {data.dtype}; it must be one of {', '.join(PLAIN_DTYPES)}"
        )
    if data.dtype == "F8_E4M3" and "weight" in parts:
        return _fp8(stem, data, parts)
    scales = ("weight_scale", "weight_global_scale", "weight_scale_2")
    if data.dtype == "U8" and ("weight_packed" in parts or any(s in parts for s in scales)):
        return _four_bit(stem, data, parts)
    return Fault("unsupported", f"{data.name}: dtype {data.dtype}, {UNSUPPORTED}")


def _fp8(stem: str, data: TensorInfo, parts: Mapping[str, TensorInfo]) -> Matrix | Fault:
    names = ("weight_scale", "weight_scale_inv", "qscale_weight")
    scale = _only(parts, names)
    if isinstance(scale, Fault):
        return scale
    if scale is None:
        return Fault(
            "missing", f"{stem}.weight_scale or {stem}.weight_scale_inv, the scales of {data.name}"
        )
    whole = scale.shape in ((), (1,))
    format = "fp8_tensor" if whole else "fp8_block"
    if "qscale_weight" in parts and not whole:
        return Fault("misshapen", f"{scale.name}: {list(scale.shape)}, wanted [], one scale")
    if not whole:
        rows, columns = data.shape
        if scale.shape in ((rows,), (rows, 1)) and columns > fp8_block.BLOCK:
            text = f"{data.name}, {scale.name}: FP8 with a scale a row, {UNSUPPORTED}"
            return Fault("unsupported", text)
        wanted = fp8_block.scale_shape(rows, columns)
        if scale.shape != wanted:
            return Fault(
                "misshapen",
                f"{scale.name}: {list(scale.shape)}, wanted {list(wanted)}: one scale for each "
                f"block of 128 x 128 of {list(data.shape)}, ragged blocks included",
            )
    if scale.dtype not in SCALE_DTYPES:
        return _scale_dtype(scale, SCALE_DTYPES)
    return _with_input(Matrix(format, data, scale), parts, {"weight", *names})


def _four_bit(stem: str, data: TensorInfo, parts: Mapping[str, TensorInfo]) -> Matrix | Fault:
    wholes = ("weight_global_scale", "weight_scale_2")
    scale, whole = parts.get("weight_scale"), _only(parts, wholes)
    if isinstance(whole, Fault):
        return whole
    if data.dtype != "U8":
        return Fault("unsupported", f"{data.name}: dtype {data.dtype}; two codes to a byte are U8")
    if scale is None:
        return Fault("missing", f"{stem}.weight_scale, the scales of {data.name}")
    nv = whole is not None or scale.dtype == "F8_E4M3"
    name, format = ("NVFP4", "nvfp4") if nv else ("MXFP4", "mxfp4")
    if nv and whole is None:
        text = f"{stem}.weight_global_scale or {stem}.weight_scale_2, the global scale of NVFP4"
        return Fault("missing", f"{text}, which {data.name} is")
    dtypes = ("F8_E4M3",) if nv else ("U8", "F8_E8M0")
    if scale.dtype not in dtypes:
        return _scale_dtype(scale, dtypes)
    if whole is not None and whole.shape not in ((), (1,)):
        return Fault("misshapen", f"{whole.name}: {list(whole.shape)}, wanted [] or [1]")
    if whole is not None and whole.dtype not in SCALE_DTYPES:
        return _scale_dtype(whole, SCALE_DTYPES)
    matrix = Matrix(format, data, scale, whole, divides="weight_global_scale" in parts)
    (rows, columns), group = matrix.shape, BLOCKS[format].columns
    if columns % group:
        text = f"{data.name}: {columns} values a row, not a multiple of {group}, {name}'s group"
        return Fault("misshapen", text)
    if scale.shape != (rows, columns // group):
        return Fault(
            "misshapen",
            f"{scale.name}: {list(scale.shape)}, wanted {[rows, columns // group]}: one scale for "
            f"each {group} of {rows} x {columns} values of {name}",
        )
    return _with_input(matrix, parts, {"weight", "weight_packed", "weight_scale", *wholes})


def _with_input(
    matrix: Matrix, parts: Mapping[str, TensorInfo], used: Collection[str]
) -> Matrix | Fault:
    """`matrix` with its activation's scale, once nothing is left that belongs to no format."""
    if unknown := sorted(parts.keys() - {*used, *_INPUT_SCALES}):
        text = f"{parts[unknown[0]].name}: no part of {_WORDS[matrix.format]}"
        return Fault("unsupported", f"{text}, {UNSUPPORTED}")
    scale = _only(parts, _INPUT_SCALES)
    if scale is None or isinstance(scale, Fault):
        return matrix if scale is None else scale
    if scale.shape not in ((), (1,)):
        return Fault("misshapen", f"{scale.name}: {list(scale.shape)}, wanted [] or [1]")
    if scale.dtype not in SCALE_DTYPES:
        return _scale_dtype(scale, SCALE_DTYPES)
    divides = "input_global_scale" in parts
    return replace(matrix, input_scale=scale, input_divides=divides)


_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "fp8_block": "FP8 in blocks",
        "fp8_tensor": "FP8 with one scale a matrix",
        "nvfp4": "NVFP4",
        "mxfp4": "MXFP4",
    }
)


def _only(parts: Mapping[str, TensorInfo], names: Collection[str]) -> TensorInfo | Fault | None:
    """The one tensor of `names` that is there."""
    there = [parts[suffix] for suffix in names if suffix in parts]
    if len(there) > 1:
        text = f"{there[0].name} and {there[1].name}: two scales of one matrix; remove one"
        return Fault("unsupported", text)
    return there[0] if there else None


def _scale_dtype(scale: TensorInfo, dtypes: Collection[str]) -> Fault:
    text = f"{scale.name}: dtype {scale.dtype}; scales must be one of {', '.join(dtypes)}"
    return Fault("unsupported", text)
