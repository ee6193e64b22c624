"""Which safetensors files of a folder make up a checkpoint."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ml4core.models.errors import CheckpointError, listed, shown
from ml4core.models.strict_json import read_object

KINDS = ("consolidated", "model")  # Mistral's and Hugging Face's names; the first is preferred
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20
DEFAULT_SHARD_BYTES = 5 * 10**9  # data of one file that is written

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{1,9})-of-(?P<total>[0-9]{1,9})\.safetensors")


@dataclass(frozen=True, slots=True)
class Shards:
    """The tensor files of one checkpoint, in the order of their names."""

    folder: Path
    kind: str  # of KINDS
    files: tuple[Path, ...]
    index: Mapping[str, str] | None  # tensor name -> file name
    notes: tuple[str, ...]


def find_shards(folder: Path, names: Sequence[str], required: bool = True) -> Shards:
    """Choose the tensor files among `names`, the folder's content.

    Raises CheckpointError for a file that the index or the numbering says must exist, and, if
    `required`, where there is none at all.
    """
    files = {kind: [name for name in names if _is_shard(name, kind)] for kind in KINDS}
    kind = next((kind for kind in KINDS if files[kind]), None)
    if kind is None:
        return _without_shards(folder, names, required)
    notes = [
        f"{other}*{SUFFIX} ({len(files[other])} files) left unread: {kind}*{SUFFIX} is preferred"
        for other in KINDS
        if other != kind and files[other]
    ]
    notes += [
        f"{other}{INDEX_SUFFIX} left unread: no {other}*{SUFFIX} is here"
        for other in KINDS
        if not files[other] and other + INDEX_SUFFIX in names
    ]
    if kind + INDEX_SUFFIX not in names:
        _check_numbering(folder, files[kind])
        return Shards(folder, kind, _paths(folder, files[kind]), None, tuple(notes))
    index = _read_index(folder / (kind + INDEX_SUFFIX))
    _check_present(folder, kind, index, names)
    used = sorted(set(index.values()))
    notes += [
        f"{name} left unread: {kind}{INDEX_SUFFIX} does not name it"
        for name in files[kind]
        if name not in used
    ]
    return Shards(folder, kind, _paths(folder, used), index, tuple(notes))


def shard_name(number: int, count: int, kind: str = KINDS[0]) -> str:
    """The name of file `number`, from 1, of `count`."""
    return f"{kind}{f'-{number:05d}-of-{count:05d}' if count > 1 else ''}{SUFFIX}"


def index_content(nbytes: int, weight_map: Mapping[str, str]) -> dict[str, Any]:
    """What an index holds: bytes of all tensors, and the file of each."""
    return {"metadata": {"total_size": nbytes}, "weight_map": dict(weight_map)}


def _is_shard(name: str, kind: str) -> bool:
    return name.startswith(kind) and name.endswith(SUFFIX)


def _paths(folder: Path, names: Sequence[str]) -> tuple[Path, ...]:
    return tuple(folder / name for name in names)


def _without_shards(folder: Path, names: Sequence[str], required: bool) -> Shards:
    kind = next((kind for kind in KINDS if kind + INDEX_SUFFIX in names), None)
    if required and kind is not None:
        _check_present(folder, kind, _read_index(folder / (kind + INDEX_SUFFIX)), names)
    if required:
        kinds = " or ".join(f"{kind}*{SUFFIX}" for kind in KINDS)
        raise CheckpointError(f"{folder}: no {kinds}; found {listed(names) or 'nothing'}")
    notes = [f"{kind}{INDEX_SUFFIX} is here, its files are not"] if kind else []
    return Shards(folder, kind or KINDS[0], (), None, (*notes, "no tensor file is here"))


def _read_index(path: Path) -> dict[str, str]:
    index = read_object(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise CheckpointError(
            f"{path}: weight_map is {shown(index)}; it must map tensor names to file names"
        )
    for name, file in index.items():
        # A plain name only: an index must not reach out of its folder.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(SUFFIX):
            raise CheckpointError(
                f"{path}: tensor {shown(name)} is placed in {shown(file)}; it must be the name of "
                f"a {SUFFIX} file of the same folder"
            )
    return index


def _check_present(folder: Path, kind: str, index: Mapping[str, str], names: Sequence[str]) -> None:
    here = set(names)
    missing = {
        file: count for file, count in sorted(Counter(index.values()).items()) if file not in here
    }
    if missing:
        files = [f"{file} ({count} tensors)" for file, count in islice(missing.items(), 8)]
        more = f" and {len(missing) - len(files)} more" if len(missing) > len(files) else ""
        raise CheckpointError(
            f"{folder}: {len(missing)} of the files that {kind}{INDEX_SUFFIX} names are missing: "
            f"{', '.join(files)}{more}. Copy or download them again"
        )


def _check_numbering(folder: Path, files: Sequence[str]) -> None:
    """`x-00002-of-00003` says that there are three files: find the one that is not here."""
    sets: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    width = 0
    for match in filter(None, map(_NUMBERED.fullmatch, files)):
        width = max(width, len(match["number"]))
        sets[match["stem"]][int(match["total"])].add(int(match["number"]))
    for stem, by_total in sets.items():
        if len(by_total) > 1:
            totals = " and ".join(f"of {total}" for total in sorted(by_total))
            raise CheckpointError(
                f"{folder}: {stem}-* files are numbered {totals}: parts of two checkpoints. Keep "
                "one set"
            )
        ((total, numbers),) = by_total.items()
        first = 0 if 0 in numbers else 1
        wanted = range(first, first + total)
        if stray := [number for number in sorted(numbers) if number not in wanted]:
            raise CheckpointError(f"{folder}: {stem}-* has number {stray[0]} of only {total}")
        if len(numbers) < total:
            gaps = islice((number for number in wanted if number not in numbers), 8)
            missing = [f"{stem}-{gap:0{width}d}-of-{total:0{width}d}{SUFFIX}" for gap in gaps]
            more = total - len(numbers) - len(missing)
            raise CheckpointError(
                f"{folder}: {total - len(numbers)} of {total} files are missing: "
                f"{', '.join(missing)}{f' and {more} more' if more else ''}. Copy or download "
                "them again"
            )
