"""The process group of the ranks of one machine."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

# Its functions' defaults hold the group that is joined when it is imported, which torch does when
# it first compiles: the group would outlive leave(), and its threads abort an ending process.
import torch.distributed.nn
from torch import Tensor

HOST = "127.0.0.1"
START = timedelta(seconds=120)
"""How long ranks may take to meet, and to open their sessions, once all have come so far."""
_EVER = timedelta(days=365)
"""Later no wait is limited here: how long a step may take is for the engine to say."""


def open_store() -> dist.TCPStore:
    """Where ranks meet, on a port that was free. It lives in rank 0."""
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=START)


def check_free() -> None:
    """``RuntimeError`` if this process is in a group already."""
    if dist.is_initialized():
        raise RuntimeError(
            "this process is in a group of ranks already, and torch knows one at a time; works: "
            "close the engine that has ranks first"
        )


def library(device: torch.device) -> str:
    """What torch.distributed uses there."""
    found: str = dist.Backend.default_device_backend_map.get(device.type, "gloo")
    return found


def join(rank: int, size: int, device: torch.device, store: dist.TCPStore | int) -> None:
    """Meets the other ranks; ``store``: rank 0's, or its port. ``RuntimeError`` if they don't
    come.
    """
    if isinstance(store, int):
        store = dist.TCPStore(HOST, store, is_master=False, timeout=START)
    words = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{library(device)}"
    own = device if device.type != "cpu" and device.index is not None else None
    if own is not None:
        torch.accelerator.set_device_index(own.index)
    dist.init_process_group(
        words,
        store=store,
        rank=rank,
        world_size=size,
        timeout=START,
        device_id=own,
    )


def wait_for_ever() -> None:
    """From now on ranks may wait as long as they like for each other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of groups that know no such limit
        dist.distributed_c10d._set_pg_timeout(_EVER)


def send(buffer: Tensor) -> None:
    """From rank 0 to all, on the buffer's device, in the order of its stream."""
    dist.broadcast(buffer, 0)


receive = send


def sums() -> str:
    """What joins partial results where no session does, for the start-up report."""
    return f"torch.distributed ({dist.get_backend()})"


def leave() -> None:
    """May be called twice."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abort() -> None:
    """Ends waits of a device for a rank that is gone; those of a host end by themselves."""
    with suppress(Exception):  # there is nothing else to do about it
        dist.distributed_c10d._abort_process_group()


@contextmanager
def environment(device: torch.device) -> Iterator[None]:
    """What the libraries read while a group is joined: ranks of one machine talk over its loopback,
    and a lost rank ends no process but by this package.
    """
    own = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    own[f"TORCH_{library(device).upper()}_ASYNC_ERROR_HANDLING"] = "0"
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
