"""What a backend declares means something, word by word and number by number."""

from __future__ import annotations

from typing import Any

import pytest

from ml4core.api import Capabilities


def test_defaults_and_limits_are_kept() -> None:
    defaults = {
        "dtype": "bfloat16",
        "kv": "fp8_ds_mla",
        "fp8": "x-my-dist/rows",
        "index": "planar_f32",
        "block_size": "64",
        "max_num_seqs": "256",
        "max_num_batched_tokens": "8192",
    }
    limits = {"max_topk": 2048, "max_heads": 128, "max_verify_rows": 8}
    made = Capabilities(frozenset(), defaults | {"block_size": 64}, limits)  # type: ignore[arg-type]
    assert (made.defaults, made.limits) == (defaults, limits)


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"kvs": "bf16"}, "unknown default 'kvs'; known are kv, fp8, index, dtype"),
        ({"kv": "bfloat16"}, "default 'kv' is 'bfloat16', and there is no word kv:bfloat16"),
        ({"fp8": "x-mine"}, "there is no word kv:x-mine; works: fp8_ds_mla, e4m3"),
        ({"index": ""}, "there is no word index:; works: planar_f32"),
        ({"dtype": "float16"}, "default 'dtype' is 'float16'; works: float32 or bfloat16"),
        ({"block_size": "0"}, "default 'block_size' is '0'; works: a whole number from 1"),
        ({"max_num_seqs": "many"}, "default 'max_num_seqs' is 'many'; works: a whole number"),
    ],
)
def test_defaults_that_mean_nothing_are_an_error(defaults: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Capabilities(frozenset(), defaults)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"topk": 64}, "unknown limit 'topk'; known are max_topk, max_heads, max_verify_rows"),
        ({"max_topk": 0}, "limit 'max_topk' is 0; works: a whole number from 1"),
        ({"max_topk": "64"}, "limit 'max_topk' is '64'"),
        ({"max_topk": True}, "limit 'max_topk' is True"),
    ],
)
def test_limits_that_mean_nothing_are_an_error(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Capabilities(frozenset(), {}, limits)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"'kv' is 'a'.*'dtype' is 'b'.*limit 'c'"):
        Capabilities(frozenset(), {"kv": "a", "dtype": "b"}, {"c": 1})
