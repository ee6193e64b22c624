"""``ml4 inspect``: what a checkpoint holds, as the engine will read it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ml4core.cli import output

if TYPE_CHECKING:
    from ml4core.api import ModelSpec
    from ml4core.models.describe import RowBytes

LATENT_ROWS = ("fp8_ds_mla", "e4m3", "bf16")
INDEX_ROW = "planar_f32"
_OWN = ("index", "kv_source", "topk_source")
"""Keys in which layers of one kind differ."""


def inspect(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint's folder, or a params.json; ml4-tiny is the shipped model.",
            metavar="CHECKPOINT",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One object, with every layer.")] = False,
) -> None:
    """Show a checkpoint's layers, formats, sizes, cache bytes, and the assumptions in force."""
    from ml4core.models.checkpoint import Checkpoint
    from ml4core.models.describe import describe
    from ml4core.models.embedded import local_checkpoint
    from ml4core.models.tensors import load_model_spec, validate

    opened = Checkpoint.open(local_checkpoint(checkpoint), require_tensors=False)
    spec = load_model_spec(opened)
    report = validate(opened, spec) if opened.tensors else None
    facts = describe(spec, report, cache_rows(spec))
    facts["path"] = str(opened.path)
    facts["notes"] = list(opened.notes)
    if as_json:
        output.write_json(facts)
    else:
        output.write(_text(facts))


def cache_rows(spec: ModelSpec) -> dict[str, RowBytes]:
    """Bytes of a cache row at this model's widths, for each latent layout that can hold it."""
    from ml4core.api.known_layouts import index_layout, latent_layout
    from ml4core.models.describe import RowBytes

    latent = spec.layers[0].kv_lora_rank
    rope = max(layer.rope_dim for layer in spec.layers)
    dims = {layer.indexer.head_dim for layer in spec.layers if layer.indexer is not None}
    index = index_layout(INDEX_ROW, dims.pop()).bytes_per_token if dims else 0
    rows = {}
    for name in LATENT_ROWS:
        try:
            rows[name] = RowBytes(latent_layout(name, latent, rope).bytes_per_token, index)
        except ValueError:  # fp8_ds_mla can't hold every width
            continue
    return rows


def _text(facts: Mapping[str, Any]) -> str:
    kv = facts["kv"]
    top = [
        ("checkpoint", facts["path"]),
        ("parameters", ", ".join(f"{key} {value:,}" for key, value in facts["parameters"].items())),
        ("layers", f"{len(facts['layers'])} of hidden size {facts['hidden_size']:,}"),
        ("vocabulary", f"{facts['vocab_size']:,}{', tied' if facts['tied_embeddings'] else ''}"),
        ("longest context", f"{facts['max_position']:,}"),
        ("rope", _words(facts["rope"])),
        ("taps after layers", ", ".join(map(str, facts["taps"])) or "none"),
        ("other blocks", ", ".join(facts["other_blocks"]) or "none"),
        ("latent owners", str(kv["latent_owners"])),
        ("index owners", str(kv["index_owners"])),
        *(
            (f"cache bytes a token, {name}", f"{size:,}")
            for name, size in kv["bytes_per_token"].items()
        ),
    ]
    parts = [output.table(("", ""), top, sys.stdout), _layers(facts["layers"])]
    found = facts.get("checkpoint")
    notes = list(facts["notes"])
    if found is not None:
        notes += found["notes"]
        sizes = [
            *(
                (f"{name} matrices", f"{f['matrices']:,}", _bytes(f["bytes"]))
                for name, f in found["formats"].items()
            ),
            *(
                (f"unread: {part}", f"{f['tensors']:,}", _bytes(f["bytes"]))
                for part, f in found["unused_parts"].items()
            ),
            ("read in all", "", _bytes(found["bytes"])),
        ]
        parts.append(output.table(("TENSORS", "COUNT", "BYTES"), sizes, sys.stdout))
    if facts["assumptions"]:
        rows = list(facts["assumptions"].items())
        parts.append(
            output.table(("ASSUMED", "VALUE, AND WHAT WOULD SHOW IT WRONG"), rows, sys.stdout)
        )
    parts += [output.printable(f"note: {text}\n") for text in notes]
    return "\n".join(parts)


def _layers(layers: Sequence[Mapping[str, Any]]) -> str:
    """One line for all layers that are alike but for their number and whom they follow."""
    alike: dict[str, list[Mapping[str, Any]]] = {}
    for layer in layers:
        alike.setdefault(repr({k: v for k, v in layer.items() if k not in _OWN}), []).append(layer)
    columns = (
        "LAYERS",
        "COUNT",
        "KIND",
        "HEADS",
        "QK+ROPE",
        "V",
        "FFN",
        "LATENT OF",
        "SELECTION OF",
    )
    rows = []
    for group in alike.values():
        one = group[0]
        rows.append(
            (
                ranges(layer["index"] for layer in group),
                str(len(group)),
                one["kind"],
                str(one["heads"]),
                f"{one['nope_dim']}+{one['rope_dim']}",
                str(one["v_dim"]),
                _ffn(one),
                _followed(group, "kv_source"),
                _followed(group, "topk_source"),
            )
        )
    return output.table(columns, rows, sys.stdout)


def _ffn(layer: Mapping[str, Any]) -> str:
    if layer["experts"] is None:
        return f"dense {layer['dense_width']:,}"
    shared = f" + shared {layer['shared_width']:,}" if layer["shared_width"] else ""
    return f"{layer['experts_per_token']} of {layer['experts']} x {layer['expert_width']:,}{shared}"


def _followed(group: Sequence[Mapping[str, Any]], key: str) -> str:
    sources = {layer[key] for layer in group}
    if sources == {None}:
        return "none"
    if all(layer[key] == layer["index"] for layer in group):
        return "its own"
    return ranges(source for source in sources if source is not None)


def _words(facts: Mapping[str, Any] | None) -> str:
    """``key value, key (key value)``, without what is not there."""
    return ", ".join(
        f"{key} ({_words(value)})" if isinstance(value, Mapping) else f"{key} {value}"
        for key, value in (facts or {"none": ""}).items()
        if value is not None
    ).strip()


def ranges(numbers: Iterable[int]) -> str:
    """``0-2,4,6-7`` for 0, 1, 2, 4, 6, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _bytes(count: int) -> str:
    return f"{count:,}"
