"""Images of chats: as people see them, within limits, and from allowed places alone."""

from __future__ import annotations

import base64
import io
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ml4core.engine.errors import RequestError
from ml4core.serving.chat import ChatTemplate
from ml4core.serving.chat.fetch import Fetcher, public
from ml4core.serving.chat.images import MAX_PIXELS, ImageReader, decode_image
from ml4core.serving.protocol import ChatRequest
from ml4core.serving.tokenizer import Tokenizer

GRID = np.array(
    [[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[255, 255, 0], [0, 255, 255], [9, 9, 9]]], np.uint8
)


def saved(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def url(raw: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def part(address: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


def pixels(raw: bytes) -> np.ndarray:
    image = decode_image(raw, "image")
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_stand_upright(orientation: int) -> None:
    """B094: all orientations of a file give the picture that people see."""
    turns: dict[int, Callable[[np.ndarray], np.ndarray]] = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(turns[orientation](GRID)))
    assert np.array_equal(pixels(saved(stored, "PNG", exif=exif)), GRID)


def half_clear(mode: str) -> tuple[bytes, np.ndarray]:
    """An image of two pixels, the second of which is transparent; and what is to be seen."""
    white = np.array([[[255, 0, 0], [255, 255, 255]]], np.uint8)
    if mode == "RGBA":
        return saved(Image.fromarray(np.array([[[255, 0, 0, 255], [0, 9, 0, 0]]], np.uint8))), white
    if mode == "LA":
        grey = Image.fromarray(np.array([[[7, 255], [9, 0]]], np.uint8), "LA")
        return saved(grey), np.array([[[7] * 3, [255] * 3]], np.uint8)
    if mode == "P":
        palette = Image.new("P", (2, 1))
        palette.putpalette([255, 0, 0, 0, 9, 0])
        palette.putdata([0, 1])
        return saved(palette, transparency=1), white
    plain = Image.fromarray(np.array([[[255, 0, 0], [0, 9, 0]]], np.uint8))
    return saved(plain, transparency=(0, 9, 0)), white


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_what_is_transparent_is_white(mode: str) -> None:
    raw, seen = half_clear(mode)
    assert np.array_equal(pixels(raw), seen)


def test_other_kinds_of_pixels() -> None:
    deep = Image.fromarray(np.array([[0, 65535, 32768]], np.uint16))
    assert pixels(saved(deep))[0, :, 0].tolist() == [0, 255, 128]
    inked = saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")
    assert pixels(inked)[0, 0, 0] > 200
    frames = [Image.new("RGB", (2, 2), color) for color in ("red", "blue")]
    moving = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert pixels(moving)[0, 0].tolist() == [255, 0, 0], "its first frame"
    assert pixels(saved(Image.new("1", (1, 1), 1)))[0, 0].tolist() == [255] * 3


def bomb() -> bytes:
    """A file of some kilobytes that says it has a hundred million pixels."""
    return saved(Image.new("1", (20_000, 5_000)))


BAD: dict[str, tuple[Any, str]] = {
    "nothing": (url(b""), "0 bytes"),
    "text": (url(b"hello"), "no image"),
    "half a JPEG": (url(saved(Image.effect_noise((64, 64), 50), "JPEG")[:900]), "no image"),
    "half a PNG": (url(saved(Image.effect_noise((64, 64), 50))[:500]), "no image"),
    "a bomb": (url(bomb()), "pixels"),
    "no base64": ("data:image/png;base64,@@@", "no base64"),
    "not base64": ("data:image/png,abc", "data:image/png"),
    "no address": ("", ""),
    "a number": (3, "3"),
    "another scheme": ("ftp://example.com/a.png", "ftp://"),
    "a host that is not allowed": ("http://127.0.0.1/a.png", "127.0.0.1"),
    "a file": ("file:///etc/passwd", "a file"),
    "half a host": ("http://[::1", "http://[::1"),
    "a letter that is a slash": ("https://\u2100.com/", "netloc"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_image_is_refused_by_its_place(name: str) -> None:
    """B096, B098, B100: a fault of the client, with the message and the part."""
    address, found = BAD[name]
    with pytest.raises(RequestError) as caught:
        ImageReader(4)(part(address), "messages[0].content[1]")
    assert caught.value.field == "messages[0].content[1].image_url.url"
    assert found in str(caught.value.value)


def test_the_limit_is_told() -> None:
    reader, good = ImageReader(2), part(url(saved(Image.new("RGB", (1, 1)))))
    for _ in range(2):
        reader(good, "messages[0].content[0]")
    with pytest.raises(
        RequestError, match=r"messages\[1\]\.content\[0\]: image 3 \(works: at most 2"
    ):
        reader(good, "messages[1].content[0]")


def test_small_files_of_many_pixels_in_all() -> None:
    reader, wide = ImageReader(9, max_pixels=250), part(url(saved(Image.new("RGB", (10, 10)))))
    for _ in range(2):
        reader(wide, "m")
    with pytest.raises(RequestError, match=r"300 pixels up to here \(works: at most 250 in a req"):
        reader(wide, "m")


def test_a_small_file_of_many_pixels_is_not_decoded() -> None:
    raw = bomb()
    assert len(raw) < 100_000
    assert MAX_PIXELS < 20_000 * 5_000
    with pytest.raises(RequestError, match="pixels"):
        decode_image(raw, "image")


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [
        *((1, 1, (1, 1)), (1, 500, (18, 1)), (3, 11, (1, 1)), (11, 3, (1, 1))),
        *((1, 10000, (55, 1)), (100, 60, (3, 4)), (60, 100, (4, 3))),
    ],
)
def test_sizes_at_the_edge_have_their_tokens(
    v15: Tokenizer, width: int, height: int, grid: tuple[int, int]
) -> None:
    """B096: one pixel, three rows that are no channels, and sides that differ much."""
    pytest.importorskip("cv2")
    image = url(saved(Image.new("RGB", (width, height), "red")))
    content = [{"type": "text", "text": "What?"}, part(image)]
    request = ChatRequest(messages=[{"role": "user", "content": content}])
    prompt = ChatTemplate(v15).encode(request, ImageReader(1))
    (placed,) = prompt.images
    rows, columns = grid
    assert placed.pixels.shape == (3, 28 * rows, 28 * columns)
    assert len(placed.rows) == rows * columns
    ids = prompt.token_ids
    assert all(ids[row] == v15.special_id("[IMG]") for row in placed.rows)
    assert ids.count(v15.special_id("[IMG_BREAK]") or -1) == rows - 1
    assert ids[placed.end] == v15.special_id("[IMG_END]")


def test_several_images_keep_their_order(v15: Tokenizer) -> None:
    pytest.importorskip("cv2")
    images = [
        part(url(saved(Image.new("RGB", (28 * n, 28), color))))
        for n, color in ((1, "red"), (2, "blue"), (3, "red"))
    ]
    messages = [
        {"role": "user", "content": [*images[:2], {"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [images[2]]},
    ]
    placed = ChatTemplate(v15).encode(ChatRequest(messages=messages), ImageReader(3)).images
    assert [len(one.rows) for one in placed] == [1, 2, 3]
    assert placed[0].end < placed[1].start < placed[2].start
    assert len({one.key for one in placed}) == 3
    red, blue = (one.pixels.reshape(3, -1).mean(1) for one in placed[:2])
    assert red.argmax() == 0
    assert blue.argmax() == 2


def test_files_come_from_the_allowed_folder_alone(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a b.png").write_bytes(saved(Image.new("RGB", (2, 3))))
    (inside / "link.png").symlink_to(outside / "a b.png")
    reader = ImageReader(9, folder=str(inside))
    assert reader(part(f"file://{inside}/a%20b.png"), "m").size == (2, 3)
    for path in (f"{outside}/a%20b.png", f"{inside}/../out/a%20b.png", f"{inside}/link.png"):
        with pytest.raises(RequestError, match="a file below"):
            reader(part(f"file://{path}"), "m")
    with pytest.raises(RequestError, match="No such file"):
        reader(part(f"file://{inside}/none.png"), "m")
    with pytest.raises(RequestError, match="a file below"):
        reader(part(f"file://{inside}/a%00b.png"), "m")


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("::1", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1", "224.0.0.1", "2001:db8::1"),
        # IPv4 addresses within those of IPv6, and what is no longer assigned.
        *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "::7f00:1"),
        *("::ffff:0:7f00:1", "fec0::1", "ff0e::1"),
    ],
)
def test_addresses_that_are_not_of_the_open_internet(address: str) -> None:
    assert not public(address)
    fetch = Fetcher(100, lookup=lambda host, port: ["8.8.8.8", address])
    with pytest.raises(RequestError, match="host of the open internet"):
        fetch("http://example.com/a.png", "url")


@pytest.mark.parametrize("address", ["8.8.8.8", "2001:4860:4860::8888", "64:ff9b::808:808"])
def test_addresses_of_the_open_internet(address: str) -> None:
    assert public(address)


class Listener:
    """A server on this machine that answers each connection with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self.hits = 0
        self.heads: list[bytes] = []
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.hits += 1
            with closing(connection):
                self.heads.append(connection.recv(4096))
                try:
                    connection.sendall(self._answer)
                except OSError:
                    continue

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.fixture
def listen() -> Iterator[Callable[[bytes], Listener]]:
    opened: list[Listener] = []

    def made(answer: bytes) -> Listener:
        opened.append(Listener(answer))
        return opened[-1]

    yield made
    for one in opened:
        one.close()


def http(body: bytes, status: str = "200 OK", extra: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nConnection: close\r\n{extra}\r\n".encode() + body


def local(max_bytes: int = 10_000) -> Fetcher:
    """A fetcher that may go to this machine, where names lead."""
    lookup = lambda host, port: ["127.0.0.1"]  # noqa: E731
    return Fetcher(max_bytes, seconds=20, lookup=lookup, allowed=lambda address: True)


def test_an_allowed_host_is_read(listen: Callable[[bytes], Listener]) -> None:
    raw = saved(Image.new("RGB", (2, 3)))
    witness = listen(http(raw))
    reader = ImageReader(1, domains=("example.com",), fetch=local())
    image = reader(part(f"http://example.com:{witness.port}/a.png?b=c"), "m")
    assert image.size == (2, 3)
    assert witness.heads[0].startswith(b"GET /a.png?b=c HTTP/1.1\r\n")
    assert f"Host: example.com:{witness.port}\r\n".encode() in witness.heads[0]


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (http(b"", "302 Found", "Location: http://127.0.0.1/\r\n"), "answered 302"),
        (http(b"", "404 Not Found"), "answered 404"),
        (http(b"", extra="Content-Length: 99999999\r\n"), "99,999,999 bytes"),
        (http(b"x" * 20_000), "more than 10,000 bytes"),
        (b"no HTTP\r\n\r\n", "can't be read"),
    ],
)
def test_what_a_host_may_not_answer(
    listen: Callable[[bytes], Listener], answer: bytes, found: str
) -> None:
    witness = listen(answer)
    with pytest.raises(RequestError, match=found):
        local()(f"http://example.com:{witness.port}/a.png", "url")
    assert witness.hits == 1


@pytest.mark.parametrize(
    ("scheme", "begin", "drop"),
    [
        ("http", b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
        ("https", b"\x16\x03\x03\x40\x00", b"\x02"),  # the head of a long record
    ],
)
def test_a_host_that_drips_is_cut_off(scheme: str, begin: bytes, drop: bytes) -> None:
    """Each byte comes soon, and the end never; nor that of a handshake."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(begin)
                while not ended.wait(0.05):
                    try:
                        connection.sendall(drop)
                    except OSError:
                        return

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        lookup = lambda host, port: ["127.0.0.1"]  # noqa: E731
        fetch = Fetcher(10_000, seconds=0.5, lookup=lookup, allowed=lambda address: True)
        try:
            with pytest.raises(RequestError, match="slow"):
                fetch(f"{scheme}://example.com:{server.getsockname()[1]}/a.png", "url")
        finally:
            ended.set()
            thread.join()


def test_nobody_is_asked_who_is_not_allowed(listen: Callable[[bytes], Listener]) -> None:
    """B098: with a listener as the witness."""
    witness = listen(http(b""))
    address = f"http://127.0.0.1:{witness.port}/a.png"
    for reader in (ImageReader(1), ImageReader(1, domains=("127.0.0.1",))):
        with pytest.raises(RequestError, match=r"127\.0\.0\.1"):
            reader(part(address), "m")
    assert witness.hits == 0
