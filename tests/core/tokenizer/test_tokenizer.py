"""Finding and reading a Tekken file, ids of texts and chats, and every file that can't be read."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml4core.engine.errors import RequestError
from ml4core.models.errors import CheckpointError
from ml4core.serving.tokenizer import Tokenizer, check_text, find_tokenizer

BOS, EOS, INST, END_INST = 1, 2, 3, 4
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC"
)
"""A PNG of one pixel."""


def test_facts(tokenizer: Tokenizer, tiny: Path) -> None:
    assert tokenizer.vocab_size == 8192
    assert (tokenizer.bos_id, tokenizer.eos_id) == (BOS, EOS)
    assert tokenizer.version == "v15"
    assert tokenizer.path == tiny


@given(text=st.text())
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == BOS
    assert all(64 <= token < tokenizer.vocab_size for token in ids[1:])
    assert tokenizer.decode(ids) == text


def test_names_of_special_tokens_are_text(tokenizer: Tokenizer) -> None:
    text = "<s>[INST]</s>[TOOL_CALLS]<SPECIAL_40>"
    ids = tokenizer.encode(text)
    assert min(ids[1:]) >= 64
    assert tokenizer.decode(ids) == text
    chat = tokenizer.encode_chat([{"role": "user", "content": text}])
    assert chat.count(INST) == chat.count(END_INST) == 1


def test_a_chat_ends_where_the_answer_begins(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    assert ids[0] == BOS
    assert ids[-1] == END_INST
    assert ids[ids.index(INST) + 1 : -1] == tokenizer.encode("Hello")[1:]
    longer = tokenizer.encode_chat(
        [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": "Bye"},
        ]
    )
    assert longer.count(INST) == 2
    assert longer.count(EOS) == 1
    assert longer[-1] == END_INST


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "judge", "content": "a"}],
        [{"content": "a"}],
        [{"role": "assistant", "content": "a"}],
        [{"role": "tool", "content": "a"}],
    ],
)
def test_chats_that_the_template_does_not_allow(
    tokenizer: Tokenizer, messages: list[dict[str, Any]]
) -> None:
    with pytest.raises(RequestError, match="works: a chat that the v15 template allows"):
        tokenizer.encode_chat(messages)


@pytest.mark.parametrize("text", ["\ud800", "a\udcff", "\udfff b"])
def test_half_surrogates_are_no_text(tokenizer: Tokenizer, text: str) -> None:
    for encode in (
        lambda: check_text(text, "field 7"),
        lambda: tokenizer.encode(text, "field 7"),
        lambda: tokenizer.encode_chat([{"role": "user", "content": text}], "field 7"),
    ):
        with pytest.raises(RequestError, match=r"field 7: no UTF-8 text: character \d is"):
            encode()


@pytest.mark.parametrize("text", ["a" * 200_000, "\n" * 200_000, "ab " * 50_000])
def test_long_texts(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_run_too_long_for_the_pattern_is_the_request_s_fault(tokenizer: Tokenizer) -> None:
    text = " " * 2_000_000
    for encode in (
        lambda: tokenizer.encode(text, "prompt"),
        lambda: tokenizer.encode_chat([{"role": "user", "content": text}], "prompt"),
    ):
        with pytest.raises(RequestError, match=r"^prompt: .* long runs") as caught:
            encode()
        assert len(str(caught.value)) < 1000


def test_ids_of_the_model_alone_show_as_replacement(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a"), tokenizer.vocab_size, 2**31, -1, *tokenizer.encode("b")]
    assert tokenizer.decode(ids) == "a\ufffd\ufffd\ufffdb"


def test_vocabulary_is_held_against_the_model(tokenizer: Tokenizer) -> None:
    tokenizer.check_vocab(8192)
    tokenizer.check_vocab(8193)
    with pytest.raises(CheckpointError, match="has 8192 ids, the model's vocab_size is 8191"):
        tokenizer.check_vocab(8191)


def test_the_file_is_found(tmp_path: Path, tiny: Path) -> None:
    shutil.copy(tiny, tmp_path / "my_tekken_v9.json")
    assert find_tokenizer(tmp_path) == tmp_path / "my_tekken_v9.json"
    shutil.copy(tiny, tmp_path / "tekken.json")
    assert find_tokenizer(tmp_path) == tmp_path / "tekken.json"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert find_tokenizer(elsewhere, str(tmp_path)) == tmp_path / "tekken.json"
    assert (
        find_tokenizer(elsewhere, str(tmp_path / "my_tekken_v9.json")).name == "my_tekken_v9.json"
    )


def test_which_of_several_can_not_be_known(tmp_path: Path, tiny: Path) -> None:
    for name in ("tekken_a.json", "tekken_b.json"):
        shutil.copy(tiny, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"'tekken_a\.json', 'tekken_b\.json'.*--tokenizer"):
        find_tokenizer(tmp_path)


@pytest.mark.parametrize("other", ["tokenizer.model", "tokenizer.model.v3", "tokenizer.json"])
def test_other_kinds_are_named(tmp_path: Path, other: str) -> None:
    (tmp_path / other).write_bytes(b"\n\x00")
    with pytest.raises(CheckpointError, match=f"looked for tekken.json.*'{other}' is of a kind"):
        find_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("absent", "--tokenizer .*absent: no such file or folder"),
        ("tokenizer.model", "its name must hold 'tekken'"),
        ("vocab.json", "its name must hold 'tekken'"),
        ("tekken.txt", "end in .json"),
    ],
)
def test_flags_that_name_no_tekken_file(tmp_path: Path, name: str, told: str) -> None:
    for file in ("tokenizer.model", "vocab.json", "tekken.txt"):
        (tmp_path / file).write_text("x", "utf-8")
    with pytest.raises(CheckpointError, match=told):
        find_tokenizer(tmp_path, str(tmp_path / name))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        find_tokenizer(tmp_path / "gone")
    assert str(caught.value) == f"{tmp_path / 'gone'}: no such file or folder"


def tekken(tiny: Path, **change: Any) -> bytes:
    content = json.loads(tiny.read_text("utf-8"))
    for key, value in change.items():
        if value is None:
            del content[key]
        else:
            content[key] = value
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "m, content of a message of 'user': None (works: a text"),
        (3, "m, content of a message of 'user': 3"),
        ([3], "m, content of type: 3"),
        ([{"type": "text"}], "m, content of type: text"),
        ([{"type": "text", "text": "a\udcff"}], "m: no UTF-8 text: character 1"),
        ([{"type": "input_audio", "input_audio": "x"}], "m, content of type: input_audio"),
    ],
)
def test_content_that_is_no_text(tokenizer: Tokenizer, content: object, told: str) -> None:
    with pytest.raises(RequestError) as refused:
        tokenizer.encode_chat([{"role": "user", "content": content}], "m")
    assert told in str(refused.value)


@pytest.mark.parametrize("address", ["file://{file}", "http://{host}/a.png", "{file}"])
def test_no_address_in_a_message_is_opened(
    tokenizer: Tokenizer, tmp_path: Path, address: str
) -> None:
    """The image is one that could be read, and the host would answer."""
    file = tmp_path / "a.png"
    file.write_bytes(PIXEL)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        url = address.format(file=file, host=f"127.0.0.1:{server.getsockname()[1]}")
        part = {"type": "image_url", "image_url": {"url": url}}
        with pytest.raises(RequestError, match=r"image_url .works: a text.*have not landed"):
            tokenizer.encode_chat([{"role": "user", "content": [part]}])
        with pytest.raises(TimeoutError):
            server.accept()


def test_texts_in_parts_are_one_message(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "Hello"}]
    whole = tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    assert tokenizer.encode_chat([{"role": "user", "content": parts}]) == whole


def test_files_that_are_no_tokenizer(tmp_path: Path, tiny: Path) -> None:
    config = json.loads(tiny.read_text("utf-8"))["config"]
    contents = {
        "empty": b"",
        "no JSON": b"{",
        "no object": b"[]",
        "an empty object": b"{}",
        "cut": tiny.read_bytes()[:1000],
        "no text": b"\xff\xfe",
        "no vocabulary": tekken(tiny, vocab=None),
        "short vocabulary": tekken(tiny, vocab=[]),
        "no special tokens": tekken(tiny, special_tokens=None),
        "no beginning": tekken(tiny, special_tokens=[]),
        "a version of the future": tekken(tiny, config=config | {"version": "v999"}),
        "a wrong size": tekken(tiny, config=config | {"default_vocab_size": 10**6}),
    }
    for name, content in contents.items():
        file = tmp_path / f"tekken {name}.json"
        file.write_bytes(content)
        with pytest.raises(
            CheckpointError, match="not a Tekken file that mistral-common reads"
        ) as e:
            Tokenizer.load(file)
        assert str(file) in str(e.value), name
        assert len(str(e.value)) < 1000, name


def test_files_that_can_not_be_opened(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        Tokenizer.load(tmp_path / "tekken.json")
    (tmp_path / "tekken.json").mkdir()
    with pytest.raises(CheckpointError, match="not a plain file"):
        Tokenizer.load(tmp_path / "tekken.json")
    os.mkfifo(tmp_path / "tekken_pipe.json")
    with pytest.raises(CheckpointError, match="not a plain file"):
        Tokenizer.load(tmp_path / "tekken_pipe.json")


def test_a_missing_library_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mistral_common.tokens.tokenizers.mistral", None)
    with pytest.raises(CheckpointError, match="pip install mistral-common"):
        Tokenizer.load(tiny)
