"""Which network interface leads to a host."""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress

_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""
_ANY_PORT = 9


def interface_to(host: str) -> str:
    """The name of the interface by which this machine reaches a host; "" where that can't be told,
    and libraries have to find out by themselves.
    """
    with suppress(OSError):
        own = address_to(host)
        if own.startswith("127."):
            return "lo0" if sys.platform == "darwin" else "lo"
        for _, name in socket.if_nameindex():
            if _address_of(name) == own:
                return name
    return ""


def address_to(host: str) -> str:
    """This machine's address, as a host sees it. Nothing is sent. ``OSError`` for one that has no
    address, or no way to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))
        found: str = probe.getsockname()[0]
    return found


def _address_of(interface: str) -> str:
    """ "" for one without."""
    if not sys.platform.startswith("linux"):
        return ""
    import fcntl

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
        return socket.inet_ntoa(answer[20:24])
    return ""
