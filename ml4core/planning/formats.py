"""Bytes of a matrix in each number format, its scales included."""

from __future__ import annotations

from ml4core.formats import fp8_block, mxfp4, nvfp4

PLAIN = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a value."""

_GLOBAL = 4  # fp32


def held_bytes(format: str, rows: int, columns: int) -> int:
    """Bytes of a matrix [rows, columns] as a backend receives it, or of a vector [1, columns].

    Of 4-bit formats, two values are a byte; NVFP4 has a global scale for each row there. Raises
    ``ValueError`` for a format of which that is not known.
    """
    values = rows * columns
    if format in PLAIN:
        return values * PLAIN[format]
    if format == "fp8_block":
        down, across = fp8_block.scale_shape(rows, columns)
        return values + down * across * _GLOBAL
    if format == "fp8_tensor":
        return values + _GLOBAL
    if format == "nvfp4":
        return rows * (-(-columns // 2) + -(-columns // nvfp4.GROUP) + _GLOBAL)
    if format == "mxfp4":
        return rows * (-(-columns // 2) + -(-columns // mxfp4.GROUP))
    known = ", ".join([*PLAIN, "fp8_block", "fp8_tensor", "nvfp4", "mxfp4"])
    raise ValueError(f"format {format!r}: its bytes are not known; known are {known}")


def stored_bytes(format: str, rows: int, columns: int) -> int:
    """Bytes of a matrix in a checkpoint: as held, but NVFP4 has one global scale for all rows."""
    size = held_bytes(format, rows, columns)
    return size - (rows - 1) * _GLOBAL if format == "nvfp4" else size
