"""The process group of all ranks: those of one machine, or of all replicas, on several."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

# Its functions' defaults hold the group that is joined when it is imported, which torch does when
# it first compiles: the group would outlive leave(), and its threads abort an ending process.
import torch.distributed.nn
from torch import Tensor

from ml4core.api import Collectives
from ml4core.engine.collectives import SingleRank, TorchCollectives
from ml4core.engine.ranks.interfaces import interface_to

HOST = "127.0.0.1"
START = timedelta(seconds=120)
"""How long ranks may take to meet, and to open their sessions, once all have come so far."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
_EVER = timedelta(days=365)
"""Later no wait is limited here: how long a step may take is for the engine to say."""


class Place(NamedTuple):
    """Where a rank stands, and where all meet.

    Attributes:
        rank, size: within its replica.
        host, port: of the store.
    """

    rank: int
    size: int
    port: int
    host: str = HOST
    replica: int = 0
    replicas: int = 1


_tensor: dist.ProcessGroup | None = None
"""The ranks of this process's replica; None: the default group, or none but this one."""
_replicas: dist.ProcessGroup | None = None
"""The ranks that have this one's part in each replica; None without others."""


def open_store(host: str = HOST) -> dist.TCPStore:
    """Where ranks meet, on a port that was free. It lives in rank 0 of replica 0."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=START)


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


def join(place: Place, device: torch.device, store: dist.TCPStore | None = None) -> None:
    """Meets the other ranks; ``store``: that of the process in which it lives. ``RuntimeError`` if
    they don't come.
    """
    global _tensor, _replicas
    if store is None:
        store = dist.TCPStore(place.host, place.port, is_master=False, timeout=START)
    words = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{library(device)}"
    own = device if device.type != "cpu" and device.index is not None else None
    if own is not None:
        torch.accelerator.set_device_index(own.index)
    dist.init_process_group(
        words,
        store=store,
        rank=place.replica * place.size + place.rank,
        world_size=place.replicas * place.size,
        timeout=START,
        device_id=own,
    )
    if place.replicas == 1:
        return
    # All processes make all groups, in this order.
    rows = [[r * place.size + rank for rank in range(place.size)] for r in range(place.replicas)]
    if place.size > 1:
        _tensor = [dist.new_group(row, timeout=START) for row in rows][place.replica]
    columns = [list(ranks) for ranks in zip(*rows, strict=True)]
    _replicas = [dist.new_group(column, timeout=START) for column in columns][place.rank]


def collectives(place: Place) -> tuple[Collectives, Collectives]:
    """Of the replica's ranks, and of those that have this rank's part in each replica."""
    own = TorchCollectives(_tensor) if place.size > 1 else SingleRank()
    return own, SingleRank() if _replicas is None else TorchCollectives(_replicas)


def wait_for_ever() -> None:
    """From now on ranks may wait as long as they like for each other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of groups that know no such limit
        for one in {None, _tensor, _replicas}:
            dist.distributed_c10d._set_pg_timeout(_EVER, one)


def send(buffer: Tensor) -> None:
    """From rank 0 to all of its replica, on the buffer's device, in the order of its stream."""
    dist.broadcast(buffer, group=_tensor, group_src=0)


receive = send


def sums() -> str:
    """What joins partial results where no session does, for the start-up report."""
    return f"torch.distributed ({dist.get_backend()})"


def leave() -> None:
    """May be called twice."""
    global _tensor, _replicas
    _tensor = _replicas = None
    if dist.is_initialized():
        dist.destroy_process_group()


def abort() -> None:
    """Ends waits of a device for a rank that is gone; those of a host end by themselves."""
    with suppress(Exception):  # there is nothing else to do about it
        dist.distributed_c10d._abort_process_group()


@contextmanager
def environment(device: torch.device, host: str = HOST) -> Iterator[None]:
    """What the libraries read while a group is joined: ranks talk over the interface by which this
    machine reaches ``host``, the loopback where it is this one, unless the environment names
    another; and a lost rank ends no process but by this package.
    """
    own = {}
    interface = interface_to(host)
    if interface and (host == HOST or _INTERFACE not in os.environ):
        own[_INTERFACE] = interface
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
