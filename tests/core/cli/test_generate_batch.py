"""`ml4 generate` with many prompts, several answers, and what is told of tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ml4core.serving.tokenizer import Tokenizer, find_tokenizer


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(find_tokenizer(checkpoint))


def lines(out: str) -> list[Any]:
    return [json.loads(line) for line in out.splitlines()]


def test_a_prompt_a_line(
    ml4: Any, engine: Any, checkpoint: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("one two\r\n\n  \nth\u2028ree\nfour five six".encode())
    done = ml4("generate", str(checkpoint), "--raw", "--prompts", str(file), "--max-tokens", "9")
    texts = ["one two", "th\u2028ree", "four five six"]
    assert engine.prompts == [tokenizer.encode(text) for text in texts]
    assert engine.sizes["sequences"] == 3
    assert engine.sizes["tokens_each"] == max(map(len, engine.prompts)) + 9
    assert done.code == 0
    answers = [tokenizer.decode(ids[::-1]) for ids in engine.prompts]
    heads = [f"==> prompt {place} <==\n{answer}\n" for place, answer in enumerate(answers)]
    assert done.out == "".join(heads)
    assert done.err.startswith("3 prompts in ")


def test_json_lines_in_the_order_of_the_file(
    ml4: Any, engine: Any, checkpoint: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "Hi"}]
    rows: list[Any] = [{"prompt": "a much longer prompt"}, {"messages": chat}, {"prompt": "c"}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
    done = ml4("generate", str(checkpoint), "--raw", "--prompts", str(file), "--json")
    assert done.code == 0
    ids = [tokenizer.encode("a much longer prompt"), tokenizer.encode_chat(chat)]
    ids.append(tokenizer.encode("c"))
    assert engine.prompts == ids
    assert [(row["index"], row["token_ids"]) for row in lines(done.out)] == [
        (place, one[::-1]) for place, one in enumerate(ids)
    ]
    assert all(row["finish_reason"] == "length" for row in lines(done.out))


def test_one_line_in_a_file_gives_a_json_line_too(
    ml4: Any, engine: Any, checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "p"
    file.write_text("alone", "utf-8")
    done = ml4("generate", str(checkpoint), "--prompts", str(file), "--json", "--report")
    assert [row["index"] for row in lines(done.out)] == [0]
    assert "backend: name stub" in done.err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: []"),
        ('{"prompt": 1}', 'works: {"prompt": text}'),
        ('{"messages": "a"}', 'works: {"prompt": text}'),
        ('{"prompt": "a", "max_tokens": 3}', "max_tokens"),
        ('{"prompt": "a", "prompt": "b"}', "appears twice"),
        ('{"prompt": ""}', "line 2: empty"),
        ('{"messages": []}', "line 2: empty"),
        ('{"messages": ["a"]}', "line 2: a (works: messages"),
        ('{"messages": [{"role": "nobody", "content": "a"}]}', "line 2"),
    ],
)
def test_bad_lines_are_named(
    ml4: Any, engine: Any, checkpoint: Path, tmp_path: Path, line: str, told: str
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "good"}\n' + line, "utf-8")
    done = ml4("generate", str(checkpoint), "--prompts", str(file))
    assert (done.code, done.out) == (1, "")
    assert told in done.err
    assert engine.args is None


def test_a_file_without_a_prompt(ml4: Any, engine: Any, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "p"
    file.write_text("\n \n", "utf-8")
    done = ml4("generate", str(checkpoint), "--prompts", str(file))
    assert (done.code, done.out) == (1, "")
    assert "no prompt" in done.err


def test_sampling_options_reach_the_engine(ml4: Any, engine: Any, checkpoint: Path) -> None:
    given = {
        "max_tokens": 40,
        "min_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "n": 3,
        "logprobs": 2,
    }
    words = [w for k, v in given.items() for w in ("--" + k.replace("_", "-"), str(v))]
    words += ["--stop", "a,b", "--stop", "c d", "--json"]
    assert ml4("generate", str(checkpoint), "--prompt", "a", *words).code == 0
    assert {name: getattr(engine.params, name) for name in given} == given
    assert engine.params.stop == ("a,b", "c d")
    assert engine.sizes["sequences"] == 3


def test_a_stop_ends_the_text(ml4: Any, engine: Any, checkpoint: Path, tokenizer: Any) -> None:
    engine.answer = tokenizer.encode("one two three four")[1:]
    words = ["generate", str(checkpoint), "--prompt", "a", "--stop", "o thr"]
    assert ml4(*words) == (0, "one tw\n", "")
    (record,) = ml4(*words, "--json").json["completions"]
    assert (record["text"], record["finish_reason"]) == ("one tw", "stop")
    assert record["stop_reason"] == "o thr"
    assert record["token_ids"] == engine.answer[:-1]
    assert not engine.rest, "the engine was not told"


def test_several_answers(ml4: Any, engine: Any, checkpoint: Path, tokenizer: Any) -> None:
    words = ["generate", str(checkpoint), "--prompt", "a", "--raw", "--n", "2"]
    words += ["--temperature", "1"]
    done = ml4(*words)
    answers = "==> prompt 0, answer 0 <==\na\n==> prompt 0, answer 1 <==\na\n"
    assert done == (0, answers, "")
    found = ml4(*words, "--json").json["completions"]
    assert [(one["index"], one["answer"]) for one in found] == [(0, 0), (0, 1)]


def test_logprobs(ml4: Any, engine: Any, checkpoint: Path, tokenizer: Tokenizer) -> None:
    words = ["--prompt", "a", "--raw", "--logprobs", "1", "--json"]
    (record,) = ml4("generate", str(checkpoint), *words).json["completions"]
    ids = tokenizer.encode("a")[::-1]
    assert record["cumulative_logprob"] == -0.5 * len(ids)
    assert [entry[0]["token_id"] for entry in record["logprobs"]] == ids
    assert record["logprobs"][0] == [
        {"token_id": ids[0], "token": "a", "logprob": -0.5, "rank": 1},
        {
            "token_id": ids[0] - 1,
            "token": tokenizer.decode([ids[0] - 1]),
            "logprob": -9999.0,
            "rank": 9,
        },
    ]


def test_a_bar_on_the_terminal_takes_no_answer_from_stdout(
    ml4: Any, engine: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    done = ml4("generate", str(checkpoint), "--prompt", "a", "--prompt", "b", "--raw")
    assert done.out == "==> prompt 0 <==\na\n==> prompt 1 <==\nb\n"
    assert "2/2" in done.err
