"""A dry run on a plugin from outside says what a start on it would say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.multiprocess

CODE = """
import json, sys
from ml4core import registry
from ml4core.api import Refused
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import RequestError
from ml4core.serving.dry_run import dry_run
from ml4core.serving.opening import open_for_any

choice = registry.select("example")
registry.select = lambda name, **more: choice

def reasons(call, args):
    try:
        call(args)
    except Refused as refused:
        return [str(one) for one in refused.refusals]
    except RequestError as error:
        return [str(error)]
    return []

bad = json.loads(sys.argv[1])
found = {}
for name, flags in bad.items():
    args = EngineArgs("ml4-tiny", backend="example", **{"max_model_len": 512} | flags)
    found[name] = [reasons(open_for_any, args), reasons(dry_run, args)]
print(json.dumps(found))
"""

BAD: dict[str, dict[str, Any]] = {
    "ranks": {"tensor_parallel_size": 2},
    "its own pages": {"kv_cache_dtype": "x-ml4core-example/columns", "block_size": 12},
    "prefixes and drafts": {
        "enable_prefix_caching": True,
        "speculative_config": {"method": "dspark", "draft_sample_method": "probabilistic"},
    },
    "an fp8 cache": {"kv_cache_dtype": "fp8_ds_mla"},
    "a step in flight": {"async_scheduling": True},
    "few bytes": {"kv_cache_memory_bytes": 1000},
}


def test_both_lists_are_one(install: Callable[[str], Any]) -> None:
    example = install("example")
    done = example.run("-c", CODE, json.dumps(BAD))
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    refused = 0
    for name, (real, dry) in found.items():
        assert set(real) <= set(dry), name
        refused += bool(real)
    assert refused >= 4, found
