"""Names of full blocks by content: the tokens, all that came before them, and what else counts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

ROOT = b""
"""The parent of a first block."""

_BYTES = 16


def hash_block(parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[bytes] = ()) -> bytes:
    """The name of a block after its parent. Blocks with different ``extra_keys`` (a salt, the hash
    of an image in it) never share a name, and neither do their successors.
    """
    tokens = array("q", token_ids).tobytes()
    digest = blake2b(parent, digest_size=_BYTES)
    digest.update(len(tokens).to_bytes(8, "little"))
    digest.update(tokens)
    for key in extra_keys:
        digest.update(len(key).to_bytes(8, "little"))
        digest.update(key)
    return digest.digest()
