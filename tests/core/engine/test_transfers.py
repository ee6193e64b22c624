"""Arrays on their way to a device, laid behind one another in one piece of memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ml4core.engine import transfers

ARRAYS = {
    "plain": np.arange(7, dtype=np.int32),
    "one": np.array([5], dtype=np.int64),
    "one, repeated": np.broadcast_to(np.int64(9), (1,)),
    "repeated": np.broadcast_to(np.int64(9), (4,)),
    "turned": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "every other": np.arange(10, dtype=np.int16)[::2],
    "backwards": np.arange(5, dtype=np.int64)[::-1],
    "empty": np.empty((0, 3), dtype=np.int32),
    "truths": np.array([True, False, True]),
}


@pytest.mark.parametrize("names", [[name] for name in ARRAYS] + [list(ARRAYS)], ids=str)
def test_arrays_of_any_strides_come_out_as_they_went_in(names):
    arrays = [ARRAYS[name] for name in names]
    starts = transfers.starts_of(arrays)
    staged = torch.full((starts[-1],), 0xA5, dtype=torch.uint8)
    transfers.lay(arrays, starts, staged)
    for array, tensor in zip(arrays, transfers.cut(staged, arrays, starts), strict=True):
        assert tensor.shape == array.shape
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
