"""A folder that appears under its final name only once it is whole, and can be gone on with."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path
from types import TracebackType
from typing import Any

from ml4core.models.errors import CheckpointError, listed, os_reason, shown
from ml4core.models.folder_lock import FolderLock, remove_if_empty, sync_folder
from ml4core.models.strict_json import read_object

STAGING_SUFFIX = ".partial"
RECORD = ".progress.json"
UNFINISHED_SUFFIX = ".writing"
MAX_RECORD_BYTES = 64 << 20


class NoRoom(CheckpointError):
    """A disk or quota that is full, or will be."""


class StagedFolder:
    """The folder `target` in the making, as `target` + ".partial" beside it.

    A file keeps the suffix ".writing" until it is whole. A record says what the work is, so that
    only the same work goes on; it goes once `publish` has renamed the folder. Use it as a context
    manager: leaving keeps what is there for the next attempt.
    """

    def __init__(self, target: Path, work: Mapping[str, Any]) -> None:
        """Begin, or go on with, the `work`: JSON-able and flat but for one level of groups.

        Raises CheckpointError if `target` is taken, another process is at it, or what is there was
        begun as other work; the message names each difference.
        """
        self.target = target
        self.path = staging_of(target)
        self._work: dict[str, Any] = json.loads(json.dumps(work))
        check_target(target)
        with self.writing():
            self._lock = FolderLock(self.path, target)
        try:
            with self.writing():
                self._begin()
        except BaseException:
            remove_if_empty(self.path)
            self._lock.release()
            raise

    def __enter__(self) -> StagedFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()

    @contextmanager
    def file(self, name: str) -> Iterator[BufferedWriter]:
        """A file to write; it has its name once the block ends well, and is removed otherwise."""
        unfinished = self.path / (name + UNFINISHED_SUFFIX)
        try:
            with open(unfinished, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self.path / name)
            sync_folder(self.path)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

    def write_text(self, name: str, text: str) -> None:
        with self.file(name) as file:
            file.write(text.encode())

    def publish(self) -> None:
        """Give the folder its name, in one step."""
        with self.writing():
            os.rename(self.path, self.target)
            sync_folder(self.target.parent)
            (self.target / RECORD).unlink()

    @contextmanager
    def kept_if_useful(self) -> Iterator[None]:
        """If the block fails, what is written goes, unless the same work can be gone on with.

        That is so once a file is whole, and if the content of other files isn't the reason.
        """
        try:
            yield
        except BaseException as error:
            hopeless = isinstance(error, CheckpointError) and _not_of_system(error)
            if hopeless or not set(os.listdir(self.path)) - {RECORD}:
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Tells of the system's refusals as CheckpointError."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.path}: can't be written: {os_reason(error)}") from error

    def _begin(self) -> None:
        content = sorted(set(os.listdir(self.path)) - {RECORD + UNFINISHED_SUFFIX})
        if RECORD not in content:
            if content:
                raise CheckpointError(
                    f"{self.path}: holds {listed(content)} but no {RECORD}, so it was not begun by "
                    "this command; move it away or give another target"
                )
            self.write_text(RECORD, json.dumps(self._work, indent=1))
            return
        begun = read_object(self.path / RECORD, MAX_RECORD_BYTES)
        if differences := _differences(begun, self._work):
            lines = "".join(f"\n  - {line}" for line in differences[:16])
            raise CheckpointError(
                f"{self.path}: begun as other work, so it can't be gone on with:{lines}\n"
                f"Give what it was begun with, or remove {self.path} to begin anew"
            )
        for name in content:
            if name.endswith(UNFINISHED_SUFFIX):
                (self.path / name).unlink()


def _not_of_system(error: BaseException) -> bool:
    return not isinstance(error.__cause__, OSError) and not isinstance(error, NoRoom)


def staging_of(target: Path) -> Path:
    return target.with_name(target.name + STAGING_SUFFIX)


def check_target(target: Path) -> None:
    """Raises CheckpointError for a target that a folder can't be renamed to.

    A record in a whole target is what a process left that was stopped right after the rename.
    """
    if os.path.ismount(target):
        raise CheckpointError(
            f"{target}: a mount point, which can't be replaced; give a folder in it"
        )
    try:
        content = sorted(os.listdir(target))
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{target}: can't be written to: {os_reason(error)}") from error
    if content:
        raise CheckpointError(f"{target}: not empty: {listed(content)}. Give a new or empty folder")


def finish_published(target: Path, work: Mapping[str, Any]) -> bool:
    """Whether `target` is whole and of this work but for its record, which is then removed."""
    record = target / RECORD
    if not record.is_file() or _differences(read_object(record, MAX_RECORD_BYTES), work):
        return False
    with suppress(OSError):
        record.unlink()
    return True


def _differences(begun: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    lines: list[str] = []
    for key in sorted(begun.keys() | now.keys()):
        old, new = begun.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += _differences(old, new, f"{prefix}{key} ")
        elif old != new:
            lines.append(f"{prefix}{key}: was {shown(old)}, is {shown(new)}")
    return lines
