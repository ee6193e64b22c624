"""Images of a chat: from the part of a message to upright pixels on white, within limits."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ml4core.engine.errors import RequestError
from ml4core.engine.image_limits import FLAG
from ml4core.serving.chat.fetch import Fetcher

MAX_BYTES = 20 * 2**20
"""Of an image's file."""
MAX_PIXELS = 64_000_000
"""Of an image: a small file may hold a great many."""
MAX_REQUEST_PIXELS = 256_000_000
"""Of all images of a request, which are held together: three bytes each."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")

SCHEMES = "data:image/...;base64,..."
_DOMAINS = "--allowed-media-domains"
_FOLDER = "--allowed-local-media-path"


class ImageReader:
    """Reads the images of one request.

    It is called with each part ``image_url`` in order, and what messages call it; it gives a PIL
    image, RGB. Raises ``RequestError``.
    """

    def __init__(
        self,
        limit: int,
        *,
        domains: tuple[str, ...] = (),
        folder: str | None = None,
        fetch: Fetcher | None = None,
        max_pixels: int = MAX_REQUEST_PIXELS,
    ) -> None:
        """
        Args:
            limit: images of the request at most.
            domains: hosts that images may be fetched from, over http and https.
            folder: whose files may be named.
            max_pixels: of all images of the request.
        """
        self._limit = limit
        self._domains = domains
        self._folder = folder
        self._fetch = fetch or Fetcher(MAX_BYTES)
        self._count = 0
        self._pixels_left = max_pixels
        self._max_pixels = max_pixels

    def __call__(self, part: Mapping[str, Any], name: str) -> Any:
        self._count += 1
        if self._count > self._limit:
            works = f"at most {self._limit} in a request: {FLAG}"
            raise RequestError(name, f"image {self._count}", works)
        given = part.get("image_url")
        field = f"{name}.image_url"
        if isinstance(given, Mapping):
            if given.get("detail") not in (None, "auto", "low", "high"):
                raise RequestError(f"{field}.detail", given["detail"], "auto, low or high")
            given, field = given.get("url"), f"{field}.url"
        if not isinstance(given, str) or not given:
            raise RequestError(field, given, SCHEMES)
        image = decode_image(self._bytes(given, field), field)
        self._pixels_left -= image.width * image.height
        if self._pixels_left < 0:
            found = f"{self._max_pixels - self._pixels_left:,} pixels up to here"
            raise RequestError(field, found, f"at most {self._max_pixels:,} in a request")
        return image

    def _bytes(self, url: str, field: str) -> bytes:
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            return _data(url, field)
        try:
            urlsplit(url)
        except ValueError as error:
            raise RequestError(field, f"{url[:100]}: {error}", SCHEMES) from error
        if scheme in ("http", "https"):
            return self._remote(url, field)
        if scheme == "file":
            return self._local(url, field)
        raise RequestError(field, url[:100], SCHEMES)

    def _remote(self, url: str, field: str) -> bytes:
        host = (urlsplit(url).hostname or "").lower()
        if host not in self._domains:
            allowed = ", ".join(self._domains) or f"none; {_DOMAINS} allows hosts"
            works = f"{SCHEMES}, or an address at one of: {allowed}"
            raise RequestError(field, f"an address at {host or 'no host'}", works)
        return self._fetch(url, field)

    def _local(self, url: str, field: str) -> bytes:
        if self._folder is None:
            works = f"{SCHEMES}; {_FOLDER} allows files"
            raise RequestError(field, "a file", works)
        split, root = urlsplit(url), Path(self._folder).resolve()
        named = unquote(split.path)
        if "\0" in named:
            raise RequestError(field, url[:200], f"a file below {root}")
        path = Path(named).resolve()  # links are followed before they are judged
        if split.netloc not in ("", "localhost") or not path.is_relative_to(root):
            raise RequestError(field, url[:200], f"a file below {root}")
        try:
            if path.stat().st_size > MAX_BYTES or not path.is_file():
                raise RequestError(field, url[:200], f"a file of at most {MAX_BYTES:,} bytes")
            return path.read_bytes()
        except OSError as error:
            raise RequestError(field, f"{url[:200]}: {error.strerror}", "a file") from error


def _data(url: str, field: str) -> bytes:
    header, comma, body = url[5:].partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise RequestError(field, f"data:{header[:40]}", SCHEMES)
    if len(body) > MAX_BYTES * 4 // 3 + 4:
        raise RequestError(field, f"{len(body) * 3 // 4:,} bytes", f"at most {MAX_BYTES:,} bytes")
    try:
        raw = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(field, f"no base64: {error}", SCHEMES) from error
    return raw


def decode_image(raw: bytes, field: str) -> Any:
    """A PIL image, RGB: turned upright as its file says, its first frame, on white where it is
    transparent. Raises ``RequestError``.
    """
    from PIL import Image, ImageOps

    if not raw:
        raise RequestError(field, "0 bytes", f"an image: {', '.join(FORMATS)}")
    try:
        image: Any = Image.open(io.BytesIO(raw), formats=FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS:
            works = f"at most {MAX_PIXELS:,} pixels"
            raise RequestError(field, f"{width} x {height} pixels", works)
        image.load()
        return _on_white(ImageOps.exif_transpose(image))
    except RequestError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        works = f"at most {MAX_PIXELS:,} pixels"
        raise RequestError(field, "far too many pixels", works) from error
    except Exception as error:  # whatever a decoder makes of hostile bytes
        text = (str(error).splitlines() or [""])[0].replace(repr(raw), "")[:120]
        found = "no image that can be read" + (f": {text}" if text and "0x" not in text else "")
        raise RequestError(field, found, f"a whole image: {', '.join(FORMATS)}") from error


def _on_white(image: Any) -> Any:
    from PIL import Image

    if image.mode in ("I;16", "I;16B", "I;16L", "I"):  # 16 bits of grey
        image = image.point(lambda value: value / 256).convert("L")
    if image.mode not in ("RGBA", "LA", "PA", "RGBa", "La") and "transparency" not in image.info:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "WHITE")
    return Image.alpha_composite(white, image).convert("RGB")
