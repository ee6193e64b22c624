"""Number formats in plain torch, bit exact wherever float32 division and casts are IEEE 754's.

Each module is one format. Element formats have `encode` and `decode`; formats with scales have
`quantize` and `dequantize`. Stored bytes are uint8. All functions but `check_scales` can be
traced: they never look at the data.

e4m3           8-bit float, flavours e4m3fn and e4m3fnuz
e8m0           8-bit power of two
e2m1           4-bit float, two in a byte
exponent       exact powers of two of float32
fp8_block      FP8 weights in 128 x 128 blocks, activations in 1 x 128 blocks
fp8_shards     stacking and cutting such weights
fp8_tensor     FP8 with one scale for the tensor
mxfp4          E2M1 with an E8M0 scale for 32, four scale rules
nvfp4          E2M1 with an e4m3fn scale for 16 and a global divisor or multiplier
scale_swizzle  the 128 x 4 order of block scales
kv_rows        rows of the latent cache and index keys
index_pages    byte offsets in pages of index keys
"""

from ml4core.formats import (
    e2m1,
    e4m3,
    e8m0,
    exponent,
    fp8_block,
    fp8_shards,
    fp8_tensor,
    index_pages,
    kv_rows,
    mxfp4,
    nvfp4,
    scale_swizzle,
)
from ml4core.formats.exponent import ceil_pow2
from ml4core.formats.scale_check import check_scales

__all__ = [
    "ceil_pow2",
    "check_scales",
    "e2m1",
    "e4m3",
    "e8m0",
    "exponent",
    "fp8_block",
    "fp8_shards",
    "fp8_tensor",
    "index_pages",
    "kv_rows",
    "mxfp4",
    "nvfp4",
    "scale_swizzle",
]
