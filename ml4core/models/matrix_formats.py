"""Which number format a matrix has, told from its tensors: dtype, and the scales beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ml4core.formats import fp8_block
from ml4core.models.safetensors_file import TensorInfo

PLAIN_DTYPES: Mapping[str, str] = MappingProxyType({"BF16": "bf16", "F32": "fp32", "F16": "fp32"})
"""Dtype -> the format it is loaded in. fp16 has no format of its own; fp32 holds it exactly."""
SCALE_DTYPES = ("F32", "BF16", "F16")
UNSUPPORTED = (
    "not supported by this loader yet; supported are bf16, fp16, fp32 and FP8 in 128 x 128 blocks"
)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix as it lies in the checkpoint.

    Attributes:
        format: of `WEIGHT_FORMATS`.
        data: the tensor of the values.
        scale: the tensor of the block scales, for `fp8_block`.
    """

    format: str
    data: TensorInfo
    scale: TensorInfo | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """Why tensors make up no matrix to load. `kind`: missing, misshapen or unsupported."""

    kind: str
    text: str


def classify(stem: str, parts: Mapping[str, TensorInfo], quantised: bool = True) -> Matrix | Fault:
    """The matrix of the tensors `parts`, by suffix. `quantised` says whether it may be."""
    other = sorted(parts.keys() - {"weight"})
    if "weight_packed" in parts:
        kind = "NVFP4" if "weight_global_scale" in parts else "packed 4-bit"
        return Fault("unsupported", f"{parts['weight_packed'].name}: {kind} weights, {UNSUPPORTED}")
    data = parts.get("weight")
    if data is None:
        names = ", ".join(parts[suffix].name for suffix in other)
        return Fault("missing", f"{stem}.weight, which {names} belongs to")
    if data.dtype in PLAIN_DTYPES:
        if other:
            names = ", ".join(parts[suffix].name for suffix in other)
            return Fault(
                "unsupported", f"{data.name}: {data.dtype} needs no scale, but there is {names}"
            )
        return Matrix(PLAIN_DTYPES[data.dtype], data)
    if not quantised:
        return Fault(
            "unsupported", f"{data.name}: {data.dtype}; it must be one of {', '.join(PLAIN_DTYPES)}"
        )
    if data.dtype == "F8_E4M3":
        return _fp8(stem, data, parts)
    if data.dtype == "U8" and (scale := parts.get("weight_scale")) is not None:
        kind = "NVFP4" if scale.dtype == "F8_E4M3" else "MXFP4"
        return Fault("unsupported", f"{data.name}: {kind} weights, {UNSUPPORTED}")
    return Fault("unsupported", f"{data.name}: dtype {data.dtype}, {UNSUPPORTED}")


def _fp8(stem: str, data: TensorInfo, parts: Mapping[str, TensorInfo]) -> Matrix | Fault:
    static = [parts[s].name for s in ("input_scale", "qscale_act") if s in parts]
    scales = [parts[s] for s in ("weight_scale", "weight_scale_inv") if s in parts]
    whole = [parts[s] for s in ("qscale_weight",) if s in parts]
    whole += [scale for scale in scales if scale.shape in ((), (1,))]
    if whole:
        text = f"{data.name}, {whole[0].name}: FP8 with one scale a matrix, {UNSUPPORTED}"
        return Fault("unsupported", text)
    if static:
        return Fault("unsupported", f"{static[0]}: a fixed activation scale, {UNSUPPORTED}")
    if not scales:
        return Fault(
            "missing", f"{stem}.weight_scale or {stem}.weight_scale_inv, the scales of {data.name}"
        )
    if len(scales) == 2:
        names = f"{scales[0].name} and {scales[1].name}"
        return Fault("unsupported", f"{names}: two scales of one matrix; remove one")
    if unknown := sorted(parts.keys() - {"weight", "weight_scale", "weight_scale_inv"}):
        return Fault(
            "unsupported", f"{parts[unknown[0]].name}: no part of FP8 in blocks, {UNSUPPORTED}"
        )
    scale, (rows, columns) = scales[0], data.shape
    if scale.shape in ((rows,), (rows, 1)) and columns > fp8_block.BLOCK:
        text = f"{data.name}, {scale.name}: FP8 with a scale a row, {UNSUPPORTED}"
        return Fault("unsupported", text)
    wanted = fp8_block.scale_shape(rows, columns)
    if scale.shape != wanted:
        return Fault(
            "misshapen",
            f"{scale.name}: {list(scale.shape)}, wanted {list(wanted)}: one scale for each block "
            f"of 128 x 128 of {list(data.shape)}, ragged blocks included",
        )
    if scale.dtype not in SCALE_DTYPES:
        return Fault(
            "unsupported",
            f"{scale.name}: dtype {scale.dtype}; scales must be one of {', '.join(SCALE_DTYPES)}",
        )
    return Matrix("fp8_block", data, scale)
