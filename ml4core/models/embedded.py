"""The checkpoint that is shipped with the package: `ml4-tiny`, found by its name."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path

from ml4core.models.errors import CheckpointError, os_reason, shown

EMBEDDED = "ml4-tiny"
"""Where a model is named, this is the shipped one; a folder of that name is `./ml4-tiny`."""

SUMS_FILE = "SHA256SUMS"
"""A line for each file, as `sha256sum` writes and checks them."""

_REMEDY = (
    "Install ml4core again (pip install --force-reinstall --no-deps ml4core), or in a checkout: "
    f"git checkout -- ml4core/assets/{EMBEDDED}"
)


def embedded_folder() -> Path:
    """Its folder. Nothing in it has been looked at."""
    return Path(str(resources.files("ml4core"))) / "assets" / EMBEDDED


def verified_folder() -> Path:
    """Its folder, each file's SHA-256 held against the list. Raises CheckpointError."""
    folder = embedded_folder()
    check_sums(folder)
    return folder


def local_checkpoint(path: Path) -> Path:
    """The shipped checkpoint's folder if that is its name, else `path` with `~` expanded."""
    return verified_folder() if str(path) == EMBEDDED else path.expanduser()


def check_sums(folder: Path) -> None:
    """Hold all files that a folder's SHA256SUMS lists against it. Raises CheckpointError."""
    sums = folder / SUMS_FILE
    for line in _read(sums).decode("utf-8", "replace").splitlines():
        wanted, _, name = line.partition("  ")
        # A plain name only: the list must not reach out of its folder.
        if len(wanted) != 64 or Path(name).name != name:
            raise CheckpointError(f"{sums}: a line is {shown(line)}. {_REMEDY}")
        found = hashlib.sha256(_read(folder / name)).hexdigest()
        if found != wanted:
            raise CheckpointError(
                f"{folder / name}: damaged: its SHA-256 is {found}, {SUMS_FILE} says {wanted}. "
                f"{_REMEDY}"
            )


def sums_text(folder: Path, names: list[str]) -> str:
    """The content of a SHA256SUMS file."""
    return "".join(
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {os_reason(error)}. {_REMEDY}") from error
