"""A model argument: a path, a hub repository, or a clear no. The hub is replaced throughout."""

from __future__ import annotations

import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from ml4core.models.errors import CheckpointError
from ml4core.models.hub import resolve_model

REPOSITORY = "mistralai/Mistral-Large-4"


class Hub:
    """What the hub answers, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[str] | Exception = ["params.json", "consolidated.safetensors"]
        self.error: Exception | None = None
        self.asked: list[dict] = []

    def snapshot_download(self, repo_id: str, **asked: object) -> str:
        self.asked.append({"repo_id": repo_id, **asked})
        if self.error is not None:
            raise self.error
        return str(self.folder)

    def list_repo_files(self, repo_id: str, *, revision: str | None = None) -> list[str]:
        if isinstance(self.files, Exception):
            raise self.files
        return self.files


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    fake = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.chdir(tmp_path)
    return fake


def http_error(kind: type[Exception], text: str) -> Exception:
    """An error of the hub's client, made without the HTTP library that it is bound to."""
    error = kind.__new__(kind)
    error.args = (text,)
    return error


def test_folder(tmp_path: Path, hub: Hub) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    assert hub.asked == []


def test_file(tmp_path: Path, hub: Hub) -> None:
    path = tmp_path / "params.json"
    path.write_text("{}")
    assert resolve_model(str(path)) == path
    assert resolve_model("params.json") == Path("params.json")
    assert resolve_model(".") == Path(".")


def test_folder_that_looks_like_an_id(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_model("org/name") == Path("org/name")
    assert hub.asked == []


def test_download_folder(tmp_path: Path, hub: Hub) -> None:
    resolve_model(REPOSITORY, download_dir="elsewhere")
    assert hub.asked[0]["cache_dir"] == "elsewhere"
    resolve_model(REPOSITORY)
    assert hub.asked[1]["cache_dir"] is None


def test_home(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve_model("~/model") == tmp_path / "model"


def test_revision_of_a_folder(tmp_path: Path, hub: Hub) -> None:
    with pytest.raises(CheckpointError, match="no revision 'v2'; leave the revision out"):
        resolve_model(str(tmp_path), "v2")


@pytest.mark.parametrize(
    "model", ["/no/where", "/nowhere", "./a/b", "../b", "~/nowhere", "a/b/c", "org/name/"]
)
def test_path_that_is_not_there(
    model: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(CheckpointError, match=r"no such folder$"):
        resolve_model(model)
    assert hub.asked == []


@pytest.mark.parametrize("model", ["mistral", "org/", "a b/c", "org/na\nme", "org\\name"])
def test_neither_path_nor_id(model: str, hub: Hub) -> None:
    with pytest.raises(CheckpointError, match=r"no such folder, and not a hub id.*org/name") as e:
        resolve_model(model)
    assert str(e.value).isprintable()
    assert hub.asked == []


@pytest.mark.parametrize("model", ["", "  "])
def test_empty(model: str, hub: Hub) -> None:
    with pytest.raises(CheckpointError, match="empty string; give a folder or a hub id"):
        resolve_model(model)


def test_repository(hub: Hub, tmp_path: Path) -> None:
    assert resolve_model(REPOSITORY, "v2") == tmp_path
    assert hub.asked == [
        {
            "repo_id": REPOSITORY,
            "revision": "v2",
            "cache_dir": None,
            "allow_patterns": ["*.safetensors", "*.json", "tekken*"],
            "ignore_patterns": ["*/*", "model*.safetensors"],
        }
    ]


def test_repository_of_model_files(hub: Hub) -> None:
    hub.files = ["config.json", "model-00001-of-00001.safetensors", "x/consolidated.txt"]
    resolve_model(REPOSITORY)
    assert hub.asked[0]["ignore_patterns"] == ["*/*"]


def test_offline_with_a_copy(hub: Hub, tmp_path: Path) -> None:
    hub.files = errors.OfflineModeIsEnabled("offline")
    assert resolve_model(REPOSITORY) == tmp_path
    assert hub.asked[0]["ignore_patterns"] == ["*/*"]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (http_error(errors.GatedRepoError, "403 Client Error"), "is gated.*terms.*HF_TOKEN"),
        (http_error(errors.RepositoryNotFoundError, "401"), "no such repository.*HF_TOKEN"),
        (http_error(errors.RevisionNotFoundError, "404"), "no revision 'v2'.*revision that exists"),
        (errors.OfflineModeIsEnabled("offline"), "gave no answer.*unset HF_HUB_OFFLINE"),
        (errors.LocalEntryNotFoundError("no copy"), "gave no answer.*unset HF_HUB_OFFLINE"),
        (http_error(errors.HfHubHTTPError, "503 down"), "failed.*503 down.*HF_HUB_OFFLINE=1"),
        (
            ConnectionError("reset by peer\nsecond line"),
            r"failed \(ConnectionError: reset by peer\)",
        ),
        (RuntimeError(""), r"failed \(RuntimeError: \)"),
    ],
)
def test_hub_says_no(error: Exception, says: str, hub: Hub) -> None:
    hub.files = hub.error = error
    with pytest.raises(CheckpointError, match=says) as caught:
        resolve_model(REPOSITORY, "v2")
    message = str(caught.value)
    assert message.startswith(f"{REPOSITORY}: no such local folder, and ")
    assert "Give a local folder" in message
    assert "second line" not in message
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("name", ["consolidated.safetensors", "config.json"])
def test_offline_with_a_part_of_a_copy(name: str, hub: Hub, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.mkdir()
    (part / name).write_bytes(b"")
    hub.error = errors.LocalEntryNotFoundError("some files are missing")
    hub.error.snapshot_path = str(part)  # type: ignore[attr-defined]
    if name.endswith(".safetensors"):
        assert resolve_model(REPOSITORY) == part
    else:
        with pytest.raises(CheckpointError, match="some files are missing"):
            resolve_model(REPOSITORY)


def test_without_the_hub_library(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="pip install huggingface-hub"):
        resolve_model(REPOSITORY)
