"""Checkpoint folders: which files belong together, what is in them, reads by tensor name.

Names are those in the files; what each tensor means is not known here.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ml4core.models import safetensors_file
from ml4core.models.checkpoint_files import INDEX_SUFFIX, Shards, find_shards
from ml4core.models.checkpoint_writer import CheckpointWriter
from ml4core.models.errors import CheckpointError, listed, os_reason, shown
from ml4core.models.safetensors_file import TensorInfo
from ml4core.models.strict_json import read_object

__all__ = ["Checkpoint", "CheckpointWriter"]

PARAMS_FILE = "params.json"
HF_CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 4 << 20


class Checkpoint:
    """An opened checkpoint: every header read and checked, no tensor data read yet.

    `params` is the content of params.json, `hf_config` that of config.json, None where the file
    is absent. `notes` holds what an operator should know and need not change. Reads may come
    from several threads.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, TensorInfo],
        *,
        params: dict[str, Any] | None = None,
        hf_config: dict[str, Any] | None = None,
        notes: Iterable[str] = (),
    ) -> None:
        self.path = path
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(tensors))
        self.params = params
        self.hf_config = hf_config
        self.notes = list(notes)
        self._bytes_read = 0
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path | str, *, require_tensors: bool = True) -> Checkpoint:
        """Open a folder that holds params.json or config.json, and safetensors files.

        `consolidated*.safetensors` is preferred to `model*.safetensors`. An index, where there
        is one, must agree with the files; without one all files of the kind are read. With
        `require_tensors=False` the tensor files may all be absent, and `path` may name a
        params.json or config.json itself.

        Raises CheckpointError for anything missing, contradictory or unreadable.
        """
        path = Path(path)
        names = _names_in(path)
        if names is None:
            return cls._open_config(path, require_tensors)
        params = read_object(path / PARAMS_FILE, MAX_CONFIG_BYTES) if PARAMS_FILE in names else None
        hf = (
            read_object(path / HF_CONFIG_FILE, MAX_CONFIG_BYTES)
            if HF_CONFIG_FILE in names
            else None
        )
        if params is None and hf is None:
            raise CheckpointError(
                f"{path}: no {PARAMS_FILE}; a checkpoint folder holds {PARAMS_FILE} (Mistral "
                f"format) or {HF_CONFIG_FILE} (Hugging Face format) beside its safetensors files"
            )
        shards = find_shards(path, names, require_tensors)
        return cls(path, _tensors(shards), params=params, hf_config=hf, notes=shards.notes)

    @classmethod
    def _open_config(cls, path: Path, require_tensors: bool) -> Checkpoint:
        if require_tensors or path.suffix != ".json":
            raise CheckpointError(f"{path}: a file, not a folder; give the checkpoint's folder")
        content = read_object(path, MAX_CONFIG_BYTES)
        notes = [f"{path.name} alone was read; no tensor was looked for"]
        if path.name == HF_CONFIG_FILE:
            return cls(path, {}, hf_config=content, notes=notes)
        return cls(path, {}, params=content, notes=notes)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data that were read so far."""
        return self._bytes_read

    def read(self, tensor: str | TensorInfo) -> torch.Tensor:
        """A tensor, whole, on the CPU: by its name, or a view of one. Raises CheckpointError."""
        return self._counted(safetensors_file.read_tensor(self._info(tensor)))

    def read_rows(self, tensor: str | TensorInfo, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of dimension 0; no other row is read."""
        return self._counted(safetensors_file.read_rows(self._info(tensor), start, stop))

    def read_box(
        self, tensor: str | TensorInfo, rows: tuple[int, int], columns: tuple[int, int]
    ) -> torch.Tensor:
        """Rows [a, b) and columns [c, d) of a matrix; nothing else is read."""
        return self._counted(safetensors_file.read_box(self._info(tensor), rows, columns))

    def _info(self, name: str | TensorInfo) -> TensorInfo:
        if isinstance(name, TensorInfo):
            return name
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(
                f"{self.path}: no tensor {shown(name)} among the {len(self.tensors)} of this "
                "checkpoint"
            ) from None

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._lock:
            self._bytes_read += tensor.nbytes
        return tensor


def _names_in(path: Path) -> list[str] | None:
    """The names in a folder, sorted; None for a file."""
    try:
        return sorted(os.listdir(path))
    except NotADirectoryError:
        return None
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such folder") from error
    except PermissionError as error:
        raise CheckpointError(
            f"{path}: permission denied; the user running this must be able to list the folder"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: can't be listed: {os_reason(error)}") from error


def _tensors(shards: Shards) -> dict[str, TensorInfo]:
    """Read every shard's header; hold the tensors against each other and against the index."""
    found: dict[str, TensorInfo] = {}
    for file in shards.files:
        for name, info in safetensors_file.read_header(file).items():
            if name in found:
                raise CheckpointError(
                    f"{shards.folder}: tensor {shown(name)} is in both {found[name].file.name} "
                    f"and {file.name}; which one is meant can't be known. Remove one of the files"
                )
            found[name] = info
    if shards.index is not None:
        _compare(shards, shards.index, found)
    return found


def _compare(shards: Shards, index: Mapping[str, str], found: Mapping[str, TensorInfo]) -> None:
    where = f"{shards.folder / (shards.kind + INDEX_SUFFIX)}"
    missing: dict[str, list[str]] = defaultdict(list)
    for name, file in index.items():
        if name not in found:
            missing[file].append(name)
        elif found[name].file.name != file:
            raise CheckpointError(
                f"{where}: places tensor {shown(name)} in {file}, but it is in "
                f"{found[name].file.name}"
            )
    if missing:
        raise CheckpointError(
            f"{where}: names tensors that their files do not hold: "
            + "; ".join(f"{file} lacks {listed(names)}" for file, names in missing.items())
        )
    extra = [name for name in found if name not in index]
    if extra:
        raise CheckpointError(
            f"{where}: does not name {len(extra)} of the tensors in its files: {listed(extra)}. "
            "Index and files are not of one checkpoint"
        )
