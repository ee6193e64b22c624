"""One writer to a folder, and renames that last."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from ml4core.models.errors import CheckpointError


class FolderLock:
    """Held by the one process that writes into a folder; the system drops it with the process."""

    def __init__(self, folder: Path, target: Path) -> None:
        """Make `folder`, where files are staged that are to be `target`'s, and lock it.

        Raises CheckpointError if another process holds it, OSError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(folder, os.O_RDONLY)
        try:
            self._take(folder, target)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _take(self, folder: Path, target: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise CheckpointError(
                    f"{folder}: another process is writing it; wait for it or stop it"
                ) from error
            # A file system without locks: two runs at once are then the operator's to avoid.
        mine = os.fstat(self._descriptor).st_ino
        if not folder.exists() or mine != folder.stat().st_ino:
            raise CheckpointError(f"{target}: another process has just finished it")


def is_locked(folder: Path) -> bool:
    """Whether a process writes into it, as far as can be told."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EAGAIN, errno.EACCES)
    finally:
        os.close(descriptor)
    return False


def sync_folder(folder: Path) -> None:
    """Make renames last: a folder's entries are data of the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
