"""`ml4 generate` around an engine that is stood in for: prompts, output, and every way to fail."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ml4core.api import Fault, FaultError, Refusal, Refused
from ml4core.engine.errors import RequestError
from ml4core.models.errors import CheckpointError
from ml4core.serving.grammars import LLGrammars
from ml4core.serving.tokenizer import Tokenizer, find_tokenizer


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(find_tokenizer(checkpoint))


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what stands on stdin, and whether it is a terminal."""

    def put(raw: bytes, terminal: bool = False) -> None:
        buffer = io.BytesIO(raw)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=buffer, isatty=lambda: terminal))

    return put


def test_an_answer_is_all_that_stdout_gets(
    ml4: Any, engine: Any, checkpoint: Path, tokenizer: Tokenizer
) -> None:
    done = ml4("generate", str(checkpoint), "--prompt", "One two three.", "--raw")
    ids = tokenizer.encode("One two three.")
    assert engine.prompts == [ids]
    assert done == (0, tokenizer.decode(reversed(ids)) + "\n", "")
    assert engine.closed


def test_a_prompt_is_a_user_message_by_default(
    ml4: Any, engine: Any, checkpoint: Path, tokenizer: Tokenizer
) -> None:
    assert ml4("generate", str(checkpoint), "--prompt", "Hi").code == 0
    assert engine.prompts == [tokenizer.encode_chat([{"role": "user", "content": "Hi"}])]


def test_the_engine_is_told_what_is_asked(
    ml4: Any, engine: Any, checkpoint: Path, tokenizer: Tokenizer
) -> None:
    words = ["--prompt", "a", "--prompt", "a b c d", "--raw", "--max-tokens", "7", "--seed", "3"]
    done = ml4(
        "generate", str(checkpoint), *words, "--temperature", "0.5", "--stop-token-ids", "70,71",
        "--stop-token-ids", "72", "--block-size", "16",
    )  # fmt: skip
    assert done.code == 0
    longest = len(tokenizer.encode("a b c d"))
    assert isinstance(engine.sizes.pop("grammars"), LLGrammars)
    assert callable(engine.sizes.pop("starting"))
    assert engine.sizes == {
        "choice": engine.choice,
        "sequences": 2,
        "tokens_each": longest + 7,
        "eos_ids": frozenset({tokenizer.eos_id}),
    }
    assert (engine.args.seed, engine.args.block_size, engine.args.revision) == (3, 16, None)
    params = engine.params
    assert (params.max_tokens, params.temperature, params.ignore_eos) == (7, 0.5, False)
    assert params.stop_token_ids == (70, 71, 72)


def test_the_end_of_an_answer_may_be_ignored(ml4: Any, engine: Any, checkpoint: Path) -> None:
    assert ml4("generate", str(checkpoint), "--prompt", "a", "--ignore-eos").code == 0
    assert engine.params.ignore_eos


def test_several_answers_have_a_head_line_each(ml4: Any, engine: Any, checkpoint: Path) -> None:
    done = ml4("generate", str(checkpoint), "--prompt", "a", "--prompt", "b", "--raw")
    assert done[:2] == (0, "==> prompt 0 <==\na\n==> prompt 1 <==\nb\n")
    assert re.fullmatch(
        r"2 prompts in [0-9.]+ s: [0-9.]+ prompt tokens/s, [0-9.]+ output tokens/s\n", done.err
    )


@pytest.mark.parametrize("streaming", ["--stream", "--no-stream"])
def test_a_character_cut_over_tokens_comes_out_whole(
    ml4: Any, engine: Any, checkpoint: Path, tokenizer: Tokenizer, streaming: str
) -> None:
    """B090."""
    text = "šálek \U0001fae0 鿜 שלום"
    engine.answer = tokenizer.encode(text)
    done = ml4("generate", str(checkpoint), "--prompt", "a", streaming)
    assert done == (0, text + "\n", "")
    engine.answer = engine.answer + tokenizer.encode("\U0001fae0")[1:-1]
    done = ml4("generate", str(checkpoint), "--prompt", "a", streaming)
    assert done.out == tokenizer.decode(engine.answer) + "\n"
    assert done.out.count("\ufffd") == 1


def test_text_streams_as_it_is_made(
    ml4: Any, engine: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ml4core.cli import output

    parts: list[str] = []
    monkeypatch.setattr(output, "write", parts.append)
    assert ml4("generate", str(checkpoint), "--prompt", "one two three four", "--raw").code == 0
    assert len([part for part in parts if part.strip()]) > 2
    parts.clear()
    words = ["--prompt", "one two three four", "--raw", "--no-stream"]
    assert ml4("generate", str(checkpoint), *words).code == 0
    assert len([part for part in parts if part.strip()]) == 1


def test_json(ml4: Any, engine: Any, checkpoint: Path, tokenizer: Tokenizer) -> None:
    done = ml4("generate", str(checkpoint), "--prompt", "č", "--raw", "--json", "--report")
    assert (done.code, done.err) == (0, "")
    assert done.out.isascii()
    ids = tokenizer.encode("č")
    assert done.json == {
        "model": str(checkpoint),
        "completions": [
            {
                "index": 0,
                "prompt_tokens": len(ids),
                "token_ids": ids[::-1],
                "text": tokenizer.decode(ids[::-1]),
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "report": engine.report(),
    }
    assert "report" not in ml4("generate", str(checkpoint), "--prompt", "a", "--json").json


def test_the_report_goes_to_stderr(ml4: Any, engine: Any, checkpoint: Path) -> None:
    done = ml4("generate", str(checkpoint), "--prompt", "a", "--raw", "--report")
    assert (done.code, done.out) == (0, "a\n")
    assert "backend: name stub" in done.err


def test_prompts_come_from_files_and_stdin(
    ml4: Any, engine: Any, checkpoint: Path, tokenizer: Tokenizer, tmp_path: Path, stdin: Any
) -> None:
    file = tmp_path / "p"
    file.write_bytes(b"of a file\n\n")
    stdin(b"of stdin\r\n")
    words = ["--prompt-file", str(file), "--prompt-file", "-", "--prompt", "of the line"]
    assert ml4("generate", str(checkpoint), "--raw", *words).code == 0
    texts = ["of the line", "of a file\n", "of stdin"]
    assert engine.prompts == [tokenizer.encode(text) for text in texts]


def test_stdin_is_read_if_nothing_else_is_given(
    ml4: Any, engine: Any, checkpoint: Path, tokenizer: Tokenizer, stdin: Any
) -> None:
    stdin(b"of stdin")
    assert ml4("generate", str(checkpoint), "--raw").code == 0
    assert engine.prompts == [tokenizer.encode("of stdin")]
    stdin(b"of stdin", terminal=True)
    done = ml4("generate", str(checkpoint), "--raw")
    assert (done.code, done.out) == (2, "")
    assert "--prompt" in done.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--prompt", ""], "--prompt: empty (works: some text)"),
        (["--prompt", "a\udcff"], "--prompt: no UTF-8 text: character 1 is '\\udcff'"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens: 0 (works: 1 or above)"),
        (["--prompt", "a", "--max-tokens", "-1"], "max_tokens: -1 (works: 1 or above)"),
        (["--prompt", "a", "--temperature", "-0.1"], "temperature: -0.1 (works: "),
        (["--prompt", "a", "--temperature", "nan"], "temperature: nan (works: 0 to"),
        (["--prompt", "a", "--temperature", "inf"], "temperature: inf (works: 0 to"),
        (["--prompt", "a", "--top-p", "0"], "top_p: 0.0 (works: above 0, at most 1)"),
        (["--prompt", "a", "--top-k", "-2"], "top_k: -2 (works: 1 or above"),
        (["--prompt", "a", "--min-p", "1.5"], "min_p: 1.5 (works: 0 to 1)"),
        (["--prompt", "a", "--presence-penalty", "3"], "presence_penalty: 3.0 (works: -2 to 2)"),
        (["--prompt", "a", "--repetition-penalty", "0"], "repetition_penalty: 0.0 (works: "),
        (["--prompt", "a", "--n", "2"], "n: 2 (works: 1 at temperature 0"),
        (["--prompt", "a", "--logprobs", "-1", "--json"], "logprobs: -1 (works: None, or 0"),
        (["--prompt", "a", "--logprobs", "8193", "--json"], "logprobs: 8193 (works: "),
        (
            ["--prompt", "a", "--n", "5", "--temperature", "1", "--max-num-seqs", "4"],
            "n: 5 (works: at most 4: --max-num-seqs)",
        ),
        (["--prompt", "a", "--max-tokens", "5", "--min-tokens", "6"], "min_tokens: 6 (works: "),
        (["--prompt", "a", "--min-tokens", "129"], "min_tokens: 129 (works: at most max_tokens"),
        (["--prompt", "a", "--stop", ""], 'stop: ""'),
        (["--prompts", "/no/such/file"], "--prompts: /no/such/file: No such file"),
        (["--prompt", "a", "--stop-token-ids", "8192"], "8192 (works: ids from 0 to 8191)"),
        (["--prompt", "a", "--stop-token-ids", "-3"], "--stop-token-ids: -3 (works: token ids"),
        (["--prompt", "a", "--stop-token-ids", "x"], "--stop-token-ids: x (works: token ids"),
        (["--prompt", "a", "--stop-token-ids", ""], "--stop-token-ids:  (works: token ids"),
        (["--prompt-file", "/no/such/file"], "--prompt-file: /no/such/file: No such file"),
        (["--prompt-file", "/"], "--prompt-file: /: Is a directory"),
    ],
)
def test_bad_requests_name_field_value_and_what_works(
    ml4: Any, engine: Any, checkpoint: Path, words: list[str], told: str
) -> None:
    """B106."""
    done = ml4("generate", str(checkpoint), *words)
    assert (done.code, done.out) == (1, "")
    assert told in done.err
    assert engine.args is None, "opened an engine for a request that can't run"


def test_a_prompt_that_no_context_holds_is_told_before_the_weights_are_read(
    ml4: Any, engine: Any, checkpoint: Path, tokenizer: Tokenizer
) -> None:
    words = ["generate", str(checkpoint), "--raw", "--prompt", "a", "--prompt", "a b c d"]
    longest = len(tokenizer.encode("a b c d"))
    done = ml4(*words, "--max-model-len", str(longest))
    assert (done.code, done.out, engine.args) == (1, "", None)
    assert f"{longest} tokens (works: at most {longest - 1}" in done.err
    assert ml4(*words, "--max-model-len", str(longest + 1)).code == 0
    done = ml4("generate", str(checkpoint), "--prompt", "word " * 9000)
    assert "at most 8191: the context is 8192 tokens" in done.err


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"", "empty"),
        (b"\n", "empty"),
        (b"ab\xff", "byte 0xff at 2 is no UTF-8"),
        (b"ab\xe2\x82", "byte 0xe2 at 2 is no UTF-8"),
        (b"\xed\xa0\x80", "byte 0xed at 0 is no UTF-8"),
    ],
)
def test_bad_files(
    ml4: Any, engine: Any, checkpoint: Path, tmp_path: Path, stdin: Any, raw: bytes, told: str
) -> None:
    file = tmp_path / "p"
    file.write_bytes(raw)
    stdin(raw)
    for words in (["--prompt-file", str(file)], []):
        done = ml4("generate", str(checkpoint), *words)
        assert (done.code, done.out) == (1, "")
        assert told in done.err


@pytest.mark.parametrize(
    "words",
    [
        ["--prompt", "a", "--prompt", "b", "--stream"],
        ["--prompt", "a", "--json", "--stream"],
        ["--prompt-file", "-", "--prompt-file", "-"],
        ["--prompt-file", "-", "--prompts", "-"],
        ["--prompt", "a", "--logprobs", "1"],
        ["--prompt", "a", "--n", "2", "--temperature", "1", "--stream"],
        ["--prompt", "a", "--top-p", "x"],
        ["--prompt", "a", "--max-tokens", "x"],
        ["--prompt", "a", "--temperature", ""],
        ["--prompt", "a", "--block-size", "0"],
    ],
)
def test_usage_errors(ml4: Any, engine: Any, checkpoint: Path, words: list[str]) -> None:
    done = ml4("generate", str(checkpoint), *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")


REFUSED = Refused([Refusal("a", "x", "one"), Refusal("b", "y", "two")])


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (RequestError("prompt", "9 tokens", "at most 8"), 1, "prompt: 9 tokens (works: at most 8)"),
        (CheckpointError("f: torn"), 1, "f: torn"),
        (REFUSED, 3, "refused for 2 reasons"),
        (FaultError(Fault("nan", "a NaN", 3)), 4, "'nan' at step 3"),
        (KeyboardInterrupt(), 130, ""),
        (MemoryError("10 GiB"), 1, "out of memory: 10 GiB"),
        (OSError(28, "No space left on device", "/f"), 1, "/f: No space left on device"),
        (ZeroDivisionError("odd"), 1, "ML4_TRACEBACK=1"),
    ],
)
@pytest.mark.parametrize("when", ["opening", "generating"])
def test_each_error_has_its_exit_code_and_no_traceback(
    ml4: Any,
    engine: Any,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    told: str,
    when: str,
) -> None:
    if when == "generating":
        engine.error = error
    else:

        def fail(*_: Any, **__: Any) -> Any:
            raise error

        monkeypatch.setattr("ml4core.engine.llm.open_engine", fail)
    monkeypatch.delenv("ML4_TRACEBACK", raising=False)
    done = ml4("generate", str(checkpoint), "--prompt", "a", "--json")
    assert (done.code, done.out) == (code, "")
    assert told in done.err
    assert "Traceback" not in done.err
    assert engine.closed == (when == "generating")


def test_tracebacks_are_shown_if_asked_for(
    ml4: Any, engine: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.error = ZeroDivisionError("odd")
    monkeypatch.setenv("ML4_TRACEBACK", "1")
    done = ml4("generate", str(checkpoint), "--prompt", "a")
    assert done.code == 1
    assert "Traceback" in done.err
    assert "in generate" in done.err


@pytest.mark.usefixtures("probed_once")
def test_refused_flags_are_told_with_the_reasons_of_the_backend(
    ml4: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def refuse(args: Any, **_: Any) -> Any:
        seen.append(args)
        raise Refused([*args.refusals(), Refusal("stub", "device", "is away")])

    monkeypatch.setattr("ml4core.engine.llm.open_engine", refuse)
    done = ml4("generate", str(checkpoint), "-pp", "2")  # no prompt: none is looked for
    assert (done.code, done.out) == (3, "")
    assert "[core] --pipeline-parallel-size: " in done.err
    assert "[stub] device: is away" in done.err
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("/no/such/folder", "/no/such/folder: no such folder"),
        ("", "MODEL: an empty text"),
        (".", "params.json"),
    ],
)
def test_bad_models(
    ml4: Any, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = ml4("generate", model, "--prompt", "a")
    assert done.code == (1 if model else 2)
    assert told in done.err


def test_bad_tokenizers(ml4: Any, engine: Any, checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint, folder)
    file = folder / "tekken.json"
    larger = json.loads(file.read_text("utf-8"))
    size = larger["config"]["default_vocab_size"]
    extra = {"rank": len(larger["vocab"]), "token_bytes": "4piD4piD4piD", "token_str": None}
    larger["vocab"].append(extra)
    larger["config"]["default_vocab_size"] = size + 1
    (tmp_path / "tekken_large.json").write_text(json.dumps(larger), "utf-8")
    words = ["generate", str(folder), "--prompt", "a"]
    done = ml4(*words, "--tokenizer", str(tmp_path / "tekken_large.json"))
    assert (done.code, done.out) == (1, "")
    assert f"{size + 1} ids, the model's vocab_size is {size}" in done.err
    file.unlink()
    done = ml4(*words)
    assert (done.code, done.out) == (1, "")
    assert "looked for tekken.json" in done.err
    assert engine.args is None
