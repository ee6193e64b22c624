"""Sizes of launches and choices of providers that were measured, as data.

``data/measured.json`` holds what ``python -m ml4core_cuda.check`` found, by the device's name, then
by kernel and shape. A kernel asks for its shape and has the measured sizes, or its own default. An
entry remembers the source of its kernel, so that one measured with another source can be told.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import ml4core_triton

T = TypeVar("T")

DATA = Path(__file__).parent / "data" / "measured.json"
FORMAT = 1
"""Of the file."""

_FOLDERS = (Path(__file__).parent, Path(ml4core_triton.__file__).parent)

SOURCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "sparse_mla": (
            "sparse_mla",
            "tile_mla",
            "tile_step",
            "warp_mla",
            "warp_mla_few",
            "warp_keys",
            "attend_slots",
            "attend",
            "latents",
            "fp8",
        ),
        "merge_lse": ("merge_lse",),
        "window_mla": ("window_mla", "attend", "latents"),
        "indexer_logits": ("indexer_logits", "score_keys", "keys", "page_logits"),
        "topk": ("topk", "sieve_topk", "spread_topk", "topk_steps"),
        "gemm_row": ("gemm", "row_sums", "fp4", "weights"),
        "gemm_tile": ("gemm", "products", "weight_tiles", "weights"),
        "gemm_many": ("gemm", "many_rows"),
        "moe_row": ("moe_row", "latency_experts", "row_sums", "weights"),
        "moe_fp4": ("moe_fp4", "fp4_rows", "fp4"),
        "fp4_experts": ("fp4_experts", "fp4_turns", "fp4_units"),
        "moe_gated": (
            "moe_experts",
            "many_experts",
            "many_rows",
            "products",
            "weight_tiles",
            "fp4",
        ),
        "moe_outer": (
            "moe_experts",
            "many_experts",
            "many_rows",
            "products",
            "weight_tiles",
            "fp4",
        ),
        "router": ("router",),
        "attn_inputs": (
            "attn_inputs",
            "attn_products",
            "row_sums",
            "products",
            "weight_tiles",
        ),
    }
)
"""Kernels whose sizes are measured, and the files that their times depend on most."""

_FORCED: ContextVar[Mapping[tuple[str, str], Mapping[str, int]]] = ContextVar(
    "forced", default=MappingProxyType({})
)


@dataclass(frozen=True)
class Entry:
    """Measured sizes of one kernel at one shape.

    Attributes:
        sizes: fields of the kernel's tiling; those not named keep their defaults.
        us, default_us: microseconds with them, and with the defaults.
        source: digest of the kernel's files when it was measured.
    """

    sizes: Mapping[str, int]
    us: float
    default_us: float
    source: str


@dataclass(frozen=True)
class Table:
    """What was measured on one device.

    Attributes:
        taken: date and versions, in words.
        kernels: entries by kernel, then by shape.
        rules: by stage or op: pairs of the least rows and of the provider's name with its figures.
    """

    taken: str = ""
    kernels: Mapping[str, Mapping[str, Entry]] = field(default_factory=dict)
    rules: Mapping[str, tuple[tuple[int, str, str], ...]] = field(default_factory=dict)


def parse(text: str) -> dict[str, Table]:
    """Tables by device name. ``ValueError`` names what isn't as it should be."""
    facts = json.loads(text)
    if facts.get("format") != FORMAT:
        raise ValueError(f"measured sizes are of format {facts.get('format')!r}, not {FORMAT}")
    return {name: _table(name, one) for name, one in facts["devices"].items()}


def _table(device: str, facts: Mapping[str, Any]) -> Table:
    kernels: dict[str, dict[str, Entry]] = {}
    for kernel, shapes in facts.get("kernels", {}).items():
        if kernel not in SOURCES:
            raise ValueError(f"{device}: no kernel {kernel!r}; known: {', '.join(SOURCES)}")
        kernels[kernel] = {
            shape: Entry(one["sizes"], one["us"], one["default_us"], one["source"])
            for shape, one in shapes.items()
        }
    rules = {
        name: tuple((int(rows), str(who), str(why)) for rows, who, why in found)
        for name, found in facts.get("rules", {}).items()
    }
    return Table(str(facts.get("taken", "")), kernels, rules)


def render(tables: Mapping[str, Table]) -> str:
    """The text that ``parse`` reads, in one order."""
    devices = {
        name: {
            "taken": table.taken,
            "kernels": {
                kernel: {
                    shape: {
                        "sizes": dict(one.sizes),
                        "us": round(one.us, 2),
                        "default_us": round(one.default_us, 2),
                        "source": one.source,
                    }
                    for shape, one in sorted(shapes.items())
                }
                for kernel, shapes in sorted(table.kernels.items())
            },
            "rules": {name: [list(r) for r in found] for name, found in table.rules.items()},
        }
        for name, table in sorted(tables.items())
    }
    return json.dumps({"format": FORMAT, "devices": devices}, indent=1) + "\n"


@cache
def measured() -> Mapping[str, Table]:
    """The tables of this package; none if the file is missing."""
    return MappingProxyType(parse(DATA.read_text("utf-8")) if DATA.is_file() else {})


def _files(kernel: str) -> Iterator[Path]:
    """Its files: where the backend's own only hands sizes to the shared one, both."""
    for name in SOURCES[kernel]:
        places = [folder / "kernels" / f"{name}.py" for folder in _FOLDERS]
        found = [place for place in places if place.is_file()]
        if not found:
            raise FileNotFoundError(f"kernel {kernel} has no file {name}.py in {places}")
        yield from found


@cache
def source_of(kernel: str) -> str:
    """Digest of a kernel's files, without comments and layout."""
    digest = sha256()
    for path in _files(kernel):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
                del body[0]  # a docstring; alone it stands for nothing that is compiled
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()[:12]


def sizes_for(kernel: str, device_name: str, shape: str, default: T) -> T:
    """The kernel's sizes at a shape: forced ones, else those measured on that device, else
    ``default``, a dataclass of whole numbers.
    """
    wanted = _FORCED.get().get((kernel, shape))
    if wanted is not None:
        return replace(default, **wanted)  # type: ignore[type-var]
    table = measured().get(device_name)
    found = table and table.kernels.get(kernel, {}).get(shape)
    return replace(default, **found.sizes) if found else default  # type: ignore[type-var]


@contextmanager
def forced(kernel: str, shape: str, sizes: Mapping[str, int]) -> Iterator[None]:
    """While it lasts, launches of a kernel at a shape have these sizes."""
    token = _FORCED.set({**_FORCED.get(), (kernel, shape): sizes})
    try:
        yield
    finally:
        _FORCED.reset(token)


def sizes_of(tiling: object) -> dict[str, int]:
    """The fields of a tiling."""
    return {one.name: getattr(tiling, one.name) for one in fields(tiling)}  # type: ignore[arg-type]


def told(device_name: str, kernels: Iterable[str]) -> tuple[str, ...]:
    """What is to be said of the measured sizes of ``kernels`` on a device; nothing if all are there
    and of this source.
    """
    table, kernels = measured().get(device_name), list(kernels)
    if table is None:
        known = ", ".join(measured()) or "none"
        return (f"no sizes were measured on {device_name}; there are those of: {known}",)
    missing = [name for name in kernels if name not in table.kernels]
    stale = [
        name
        for name in kernels
        if any(e.source != source_of(name) for e in table.kernels.get(name, {}).values())
    ]
    found = []
    if missing:
        found.append(f"no sizes were measured for {', '.join(missing)}: defaults serve")
    if stale:
        names = ", ".join(stale)
        found.append(f"the sizes of {names} were measured with another source of theirs")
    return tuple(found)
