"""Fetches what a client names, from hosts that the operator has allowed, and from no other.

The address is looked up once and judged; the connection goes to that very address, so that a name
can't point elsewhere a moment later. Redirects are not followed.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

from ml4core.engine.errors import RequestError

SECONDS = 10.0
"""For all of a fetch."""

Lookup = Callable[[str, int], list[str]]
"""Addresses of a host."""


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_UNICAST = ipaddress.IPv6Network("2000::/3")
"""What of IPv6 is assigned to the open internet; NAT64 leads to the IPv4 address in it."""


def public(address: str) -> bool:
    """Whether an address is of the open internet: no private, local or special range."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is None:
            return found in _UNICAST and found.is_global
        found = inner
    return found.is_global and not found.is_multicast


class Fetcher:
    """``fetch(url, field)`` gives bytes. Raises ``RequestError``. May be called in any thread."""

    def __init__(
        self,
        max_bytes: int,
        seconds: float = SECONDS,
        *,
        lookup: Lookup | None = None,
        allowed: Callable[[str], bool] = public,
    ) -> None:
        """``allowed``: judges the address of a host."""
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._lookup = lookup or _addresses
        self._allowed = allowed

    def __call__(self, url: str, field: str) -> bytes:
        split = urlsplit(url)
        try:
            port = split.port or (443 if split.scheme == "https" else 80)
        except ValueError as error:
            raise RequestError(field, url[:200], "an address with a port of 1 to 65535") from error
        host = split.hostname or ""
        address = self._address(host, port, field)
        target = split.path or "/"
        if split.query:
            target += f"?{split.query}"
        connection = _Pinned(host, port, address, self._seconds, secure=split.scheme == "https")
        # A socket's own limit is of each byte; a host that drips must end, too.
        timer = threading.Timer(self._seconds, connection.cut)
        timer.daemon = True
        timer.start()
        try:
            connection.request("GET", target, headers={"Accept": "image/*"})
            answer = connection.getresponse()
            if answer.status != 200:
                works = "an address that answers 200; redirects are not followed"
                raise RequestError(field, f"{host} answered {answer.status}", works)
            found = self._read(answer, field)
            if connection.was_cut:
                raise RequestError(
                    field, f"{host} is slow", f"all of it within {self._seconds:g} s"
                )
            return found
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, RequestError):
                raise
            text = "slow" if connection.was_cut else str(error) or type(error).__name__
            raise RequestError(
                field, f"{host} can't be read: {text[:120]}", "a whole image"
            ) from error
        finally:
            timer.cancel()
            connection.close()

    def _address(self, host: str, port: int, field: str) -> str:
        try:
            found = self._lookup(host, port)
        except (OSError, UnicodeError) as error:
            raise RequestError(field, f"{host}: {error}", "a host that has an address") from error
        bad = [one for one in found if not self._allowed(one)]
        if bad or not found:
            works = "a host of the open internet; no private, local or special address"
            raise RequestError(field, f"{host} is at {', '.join(bad) or 'no address'}", works)
        return found[0]

    def _read(self, answer: http.client.HTTPResponse, field: str) -> bytes:
        works = f"at most {self._max_bytes:,} bytes"
        if answer.length is not None and answer.length > self._max_bytes:
            raise RequestError(field, f"{answer.length:,} bytes", works)
        parts, size = [], 0
        while part := answer.read1(65536):
            parts.append(part)
            size += len(part)
            if size > self._max_bytes:
                raise RequestError(field, f"more than {self._max_bytes:,} bytes", works)
        return b"".join(parts)


class _Pinned(http.client.HTTPConnection):
    """A connection to an address that was looked up before; the host's name is for the server.

    Attributes:
        was_cut: whether it was taking too long.
    """

    def __init__(self, host: str, port: int, address: str, seconds: float, *, secure: bool) -> None:
        super().__init__(host, port, timeout=seconds)
        self.was_cut = False
        self._address = address
        self._secure = secure

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._secure:
            context = ssl.create_default_context()
            wrapped = context.wrap_socket(
                self.sock, server_hostname=self.host, do_handshake_on_connect=False
            )
            self.sock = wrapped  # where ``cut`` finds it
            wrapped.do_handshake()
        if self.was_cut:  # before there was anything to cut
            raise TimeoutError

    def cut(self) -> None:
        """Ends whatever waits for it. May be called in any thread."""
        self.was_cut = True
        sock: socket.socket | None = self.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
