"""``--limit-mm-per-prompt``: how many images a prompt may have; and how much is kept of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FLAG = "--limit-mm-per-prompt"
MOST = 999
KEPT_ROWS = 16384
"""Embeddings that are kept on the device: those of some five images of the largest size."""


def _count(value: Any) -> str:
    count = value.get("count") if isinstance(value, Mapping) else value
    good = isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= MOST
    return "" if good else f'a number from 0 to {MOST}, or {{"count": number}}'


def _none(value: Any) -> str:
    return "" if value in (0, {"count": 0}) else "0: no such parts are taken"


KEYS = {"image": _count, "audio": _none, "video": _none}
"""Each with the check of its value."""


def image_limit(limits: Mapping[str, Any]) -> int:
    """Images in a prompt at most, by the flag's value."""
    value = limits.get("image", 0)
    return int(value.get("count", 0) if isinstance(value, Mapping) else value)
