"""How much memory tensors hold."""

from __future__ import annotations

import gc

import torch


def live_bytes() -> int:
    """Bytes of the storages of all tensors that the collector knows: those that were made since
    ``gc.freeze``; those without memory, on the device ``meta``, too.
    """
    storages = {}
    for thing in gc.get_objects():
        # Not isinstance: some objects answer it with a warning.
        if issubclass(type(thing), torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
