"""A model argument turned into a local path: the shipped model, a folder, a file, or a repository
of the hub.
"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

from ml4core.models.embedded import EMBEDDED, verified_folder
from ml4core.models.errors import CheckpointError, shown

FILE_PATTERNS = ("*.safetensors", "*.json", "tekken*")
NESTED = "*/*"  # only the top folder of a repository is a checkpoint

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def is_local(model: str) -> bool:
    """Whether `model` needs no download: the shipped one, or an existing path."""
    return model == EMBEDDED or (bool(model.strip()) and Path(model).expanduser().exists())


def resolve_model(model: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The local path of a model: an existing path itself, or a hub repository, downloaded.

    `model` is a path, or an id `org/name` of the Hugging Face hub; `revision` a branch, tag or
    commit there; `download_dir` takes the place of the hub client's cache folder. `ml4-tiny` is
    the shipped checkpoint, its checksums verified. Raises CheckpointError that says what was tried
    and what would work.
    """
    if not model.strip():
        raise CheckpointError("the model is an empty string; give a folder or a hub id org/name")
    path = Path(model).expanduser()
    if is_local(model):
        if revision is not None:
            raise CheckpointError(
                f"{path}: a local path has no revision {shown(revision)}; leave the revision out"
            )
        return verified_folder() if model == EMBEDDED else path
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise CheckpointError(f"{path}: no such folder")
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"{shown(model)}: no such folder, and not a hub id, which has the form org/name; "
            f"{EMBEDDED} is the shipped model"
        )
    return _download(model, revision, download_dir)


def _download(model: str, revision: str | None, download_dir: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{model}: no such local folder, and the hub can't be asked: {error}. Give a local "
            "folder, or pip install huggingface-hub"
        ) from error
    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=list(FILE_PATTERNS),
                ignore_patterns=[NESTED, *_unneeded(model, revision)],
            )
        )
    except Exception as error:  # the hub's client lets errors of several HTTP libraries through
        # Offline, a copy that lacks files counts as a failure there. Which files are needed is
        # checked when the folder is opened, so one that holds tensors is taken.
        partial = getattr(error, "snapshot_path", None)
        if partial is not None and any(Path(partial).glob("*.safetensors")):
            return Path(partial)
        raise _failure(model, revision, error) from error


def _unneeded(model: str, revision: str | None) -> list[str]:
    """Patterns of a second copy of the weights, so that of a repository with both one is loaded."""
    from huggingface_hub import HfApi

    try:
        files = HfApi().list_repo_files(model, revision=revision)
    except Exception:  # whatever failed, snapshot_download meets it too: it has the cache to try
        return []
    both = any(fnmatch(name, "consolidated*.safetensors") for name in files)
    return ["model*.safetensors"] if both else []


def _failure(model: str, revision: str | None, error: Exception) -> CheckpointError:
    from huggingface_hub import errors

    ways = "Give a local folder"
    if isinstance(error, errors.GatedRepoError):
        what = "the hub says that this repository is gated"
        ways += ", or accept its terms on its page and set HF_TOKEN to a token of that account"
    elif isinstance(error, errors.RevisionNotFoundError):
        what = f"the hub knows no revision {shown(revision)} of it"
        ways += ", or a revision that exists"
    elif isinstance(error, errors.RepositoryNotFoundError):
        what = "the hub knows no such repository, or it is private"
        ways += ", check the id, or set HF_TOKEN if it is private"
    elif isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        what = "the hub gave no answer (offline?) and its cache here holds no copy"
        ways += ", or unset HF_HUB_OFFLINE and check the network; once downloaded it works offline"
    else:
        what = "the download from the hub failed"
        ways += "; HF_TOKEN sets a token, HF_HUB_OFFLINE=1 uses only what is downloaded already"
    answer = (str(error).strip().splitlines() or [""])[0][:300]
    return CheckpointError(
        f"{model}: no such local folder, and {what} ({type(error).__name__}: {answer}). {ways}"
    )
