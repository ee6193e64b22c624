"""Writes a checkpoint folder: shards, an index, and final names only once all is there."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ml4core.models.checkpoint_files import (
    DEFAULT_SHARD_BYTES,
    INDEX_SUFFIX,
    KINDS,
    SUFFIX,
    index_content,
    shard_name,
)
from ml4core.models.errors import CheckpointError, listed, os_reason, shown
from ml4core.models.folder_lock import FolderLock, is_locked, remove_if_empty, sync_folder
from ml4core.models.safetensors_file import MAX_HEADER_BYTES
from ml4core.models.safetensors_writer import (
    ShardWriter,
    check_metadata,
    check_tensor,
    entry_bytes,
)

KIND = KINDS[0]

STAGING = ".writing"
"""The folder, in the one that is written, where files are until all are there."""
_REPLACED = ".replaced-"


class CheckpointWriter:
    """Writes tensors into `consolidated*.safetensors`, with an index if there are several files.

    Use it as a context manager, or call `close`. Until then all files are in a folder `.writing`
    in the folder. If anything fails, no file keeps a final name and replaced files come back. What
    a process leaves that is killed is removed by the next writer with `overwrite`. Memory: one
    tensor.
    """

    def __init__(
        self,
        folder: Path | str,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Make `folder` if needed. It must be empty unless `overwrite`, which replaces files of
        the same names, and an older set of `consolidated` files whole. No other process may be
        writing into it.

        `max_shard_bytes` bounds the data of one file; a larger tensor gets a file of its own.
        """
        if max_shard_bytes < 1:
            raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}; it must be 1 or more")
        self.folder = Path(folder)
        self._max_shard_bytes = max_shard_bytes
        self._metadata = {"format": "pt", **(metadata or {})}
        check_metadata(self._metadata)
        self._mark = uuid.uuid4().hex
        self._names: set[str] = set()
        self._files: dict[str, Path] = {}  # final name -> temporary path
        self._shards: list[ShardWriter] = []  # all but the last are finished
        self._staging = self.folder / STAGING
        self._open = True
        self._made_folder = not self.folder.exists()
        self._lock: FolderLock | None = None
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._check_content(overwrite)
            self._lock = FolderLock(self._staging, self.folder)
            _clear(self._staging)
            self._check_content(overwrite)  # another may have finished just before

    def add(self, name: str, tensor: torch.Tensor, dtype: str | None = None) -> None:
        """Write one tensor, of any strides and device. It is not kept.

        `dtype` names the format's type where the torch dtype does not: "F8_E8M0" for uint8.
        Raises CheckpointError; a refused tensor leaves the writer usable, a failed write ends it.
        """
        self._check_open()
        if name in self._names:
            raise CheckpointError(f"{self.folder}: tensor {shown(name)} added twice")
        stored = check_tensor(name, tensor, dtype)
        with self._writing():
            shard = self._shard_for(tensor.nbytes, entry_bytes(name, stored, tensor.shape))
            shard.add(name, tensor, stored)
        self._names.add(name)

    def add_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write `content` to a file beside the tensors, such as params.json."""
        self._check_name(name)
        try:
            text = json.dumps(content, indent=2, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{name}: can't be written as JSON: {error}") from error
        self.add_file(name, text.encode())

    def add_file(self, name: str, content: bytes) -> None:
        """Write a JSON file that is there already, such as a tokenizer, as it is."""
        self._check_name(name)
        with self._writing():
            self._write_file(name, content)

    def close(self) -> None:
        """Finish the last file, write the index, give all files their final names."""
        if not self._open:
            return
        with self._writing():
            if not self._shards:
                raise CheckpointError(f"{self.folder}: no tensor was added")
            self._shards[-1].finish()
            count = len(self._shards)
            weight_map: dict[str, str] = {}
            for number, shard in enumerate(self._shards, 1):
                file = shard_name(number, count)
                self._files[file] = shard.path
                weight_map |= dict.fromkeys(shard.names, file)
            if count > 1:
                total = sum(shard.nbytes for shard in self._shards)
                index = json.dumps(index_content(total, weight_map), indent=1)
                self._write_file(KIND + INDEX_SUFFIX, index.encode())
            self._publish()
        self._open = False
        self._unstage()

    def abort(self) -> None:
        """Drop everything written so far; the folder is as it was."""
        if not self._open:
            return
        self._open = False
        for shard in self._shards:
            shard.drop()
        self._unstage()
        if self._made_folder:
            remove_if_empty(self.folder)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    def _check_name(self, name: str) -> None:
        self._check_open()
        if Path(name).name != name or not name.endswith(".json"):
            raise CheckpointError(f"file name {shown(name)}: must be a plain name in .json")
        if name in self._files or name.startswith(KIND):
            raise CheckpointError(f"{self.folder}: {name} is taken")

    def _check_content(self, overwrite: bool) -> None:
        mine = () if self._lock is None else (STAGING,)
        if not overwrite and (content := content_of(self.folder, mine)):
            raise CheckpointError(f"{content}. Give an empty folder or overwrite=True")

    def _check_open(self) -> None:
        if not self._open:
            raise CheckpointError(f"{self.folder}: the writer is closed; make a new one")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Whatever goes wrong inside ends the writer."""
        try:
            yield
        except BaseException as error:
            self.abort()
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"{self.folder}: can't be written: {os_reason(error)}"
                ) from error
            raise

    def _unstage(self) -> None:
        if self._lock is not None:  # else the folder is another writer's
            shutil.rmtree(self._staging, ignore_errors=True)
            self._lock.release()

    def _shard_for(self, nbytes: int, header_bytes: int) -> ShardWriter:
        """The file that takes a tensor: the current one, or a new one once that is full."""
        shard = self._shards[-1] if self._shards else None
        if shard is None or (
            shard.names
            and (
                shard.nbytes + nbytes > self._max_shard_bytes
                or shard.header_bytes + header_bytes > MAX_HEADER_BYTES
            )
        ):
            if shard is not None:
                shard.finish()
            shard = ShardWriter(self._staging / str(len(self._shards) + 1), self._metadata)
            self._shards.append(shard)
        return shard

    def _write_file(self, name: str, content: bytes) -> None:
        path = self._files[name] = self._staging / name
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def _publish(self) -> None:
        """Give all files their final names, or none; the index, as the last, says it is whole."""
        replaced: list[tuple[Path, Path]] = []  # (where it is now, its name before)
        done: list[Path] = []
        try:
            for path in sorted(self.folder.iterdir()):
                if path.name in self._files or (
                    path.name.startswith(KIND) and path.name.endswith((SUFFIX, INDEX_SUFFIX))
                ):
                    if path.is_dir():
                        raise CheckpointError(f"{path}: a folder, which can't be replaced")
                    # Not where abort removes it: if it can't be put back it must survive.
                    aside = self.folder / f"{_REPLACED}{self._mark}-{path.name}"
                    path.rename(aside)
                    replaced.append((aside, path))
            for name, path in self._files.items():
                path.rename(self.folder / name)
                done.append(self.folder / name)
            sync_folder(self.folder)
        except BaseException:
            for path in done:
                path.unlink(missing_ok=True)
            for aside, path in replaced:
                with suppress(OSError):  # the others shall come back; the first error is raised
                    aside.rename(path)
            raise
        for aside in self.folder.glob(f"{_REPLACED}*"):  # those of a killed process too
            with suppress(OSError):
                aside.unlink()


def content_of(folder: Path, without: Sequence[str] = ()) -> str:
    """What a folder holds, in words; empty if it holds nothing. Raises OSError."""
    content = sorted(set(os.listdir(folder)) - set(without))
    left = [name for name in content if name == STAGING or name.startswith(_REPLACED)]
    if STAGING in left and is_locked(folder / STAGING):
        return f"{folder}: another process is writing it"
    text = f"{folder}: not empty: {listed(content)}" if content else ""
    return f"{text}; a process that was killed left {listed(left)}" if left else text


def _clear(folder: Path) -> None:
    """Removes what is in it. Raises OSError."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
