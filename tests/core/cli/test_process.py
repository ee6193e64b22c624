"""The real process: exit codes, streams that close, signals, imports, and a whole answer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("probed_once")  # of commands in this process

PUBLISHED = Path(str(resources.files("ml4core") / "assets" / "published" / "params.json"))
ML4 = [sys.executable, "-m", "ml4core"]


def run(
    *argv: str | bytes, stdin: bytes | None = None, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*ML4, *argv],
        input=b"" if stdin is None else stdin,
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def shell(line: str, *argv: str) -> subprocess.CompletedProcess[bytes]:
    """Runs a line of sh in which "$@" is the command."""
    return subprocess.run(
        ["sh", "-c", line, "sh", *ML4, *argv], capture_output=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--version"], 0),
        (["nonsense"], 2),
        (["generate", "m", "--prompt", "a", "-pp", "8", "--backend", "cpu"], 3),
        (["inspect", "/no/such/folder"], 1),
    ],
)
def test_exit_codes(words: list[str], code: int) -> None:
    done = run(*words)
    assert done.returncode == code
    assert bool(done.stdout) == (code == 0)
    assert bool(done.stderr) == (code != 0)
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["generate", "m", "--prompt", "a", "--tensor-paralel-size", "8"], 2),
        (["generate", "m", "--prompt", "a", "-tp", "0"], 2),
        (["generate", "m", "--prompt", "a", "-pp", "8"], 3),
        (["generate", "/no/such/folder", "--prompt", "a"], 1),
        (["serve", "--port", "65536"], 2),
        (["serve", "m", "-pp", "8"], 3),
        (["bench", "step", "--part", "nothing"], 2),
    ],
)
def test_exit_codes_of_each_command(ml4: Any, words: list[str], code: int) -> None:
    """What the process ends with, as the test above shows."""
    done = ml4(*words)
    assert (done.code, done.out) == (code, "")
    assert done.err
    assert "Traceback" not in done.err


def test_light_commands_import_no_torch() -> None:
    code = (
        "import sys\nfrom ml4core.cli import main\n"
        "for words in (['--version'], ['generate', '--help'], ['generate', 'm', '-tp', '8']):\n"
        "    main(words)\n"
        "heavy = {'torch', 'mistral_common', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_a_reader_that_leaves_ends_the_run_quietly() -> None:
    words = [*ML4, "inspect", str(PUBLISHED), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()  # before a word is written
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(60) == 141
    assert said == b""


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full"])
@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        ["--help"],
        pytest.param(["inspect", str(PUBLISHED)], marks=pytest.mark.slow),  # written as a version
    ],
)
def test_results_that_can_not_be_written_are_an_error(words: list[str], redirection: str) -> None:
    done = shell(f'"$@" {redirection}', *words)
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: ")
    assert done.stderr.count(b"\n") == 1


def test_closed_streams_harm_no_file(ml4: Any, tmp_path: Path) -> None:
    """The first files that are opened would get their numbers, and what is printed."""
    done = shell('"$@" <&- >&- 2>&-', "checkpoint", "make", str(tmp_path / "made"))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert ml4("inspect", str(tmp_path / "made")).code == 0
    assert b"stdin: empty" in shell('"$@" <&-', "generate", str(tmp_path / "made")).stderr
    refused = shell('"$@" 2>&-', "nonsense")
    assert (refused.returncode, refused.stdout) == (2, b""), "an error message on stdout"


def test_what_a_path_holds_can_not_steer_the_terminal(ml4: Any) -> None:
    for words in (["inspect", "/no/\x1b[31m"], ["generate", "/\x1b[31m", "--prompt", "a"]):
        done = ml4(*words)
        assert (done.code, done.out) == (1, "")
        assert "\x1b" not in done.err
        assert "\\x1b[31m: no such folder" in done.err


def test_what_a_plugin_prints_is_no_result(checkpoint: Path, tmp_path: Path) -> None:
    """Not by print, not by the file's number, and not by a process that it starts."""
    (tmp_path / "noisy.py").write_text(
        "import os, subprocess\nfrom ml4core.cpu.backend import CpuBackend\n"
        "from ml4core.api import hookimpl\n"
        "print('by print')\nos.write(1, b'by number\\n')\nsubprocess.run(['echo', 'by child'])\n"
        "class Noisy(CpuBackend):\n    name = 'noisy'\n"
        "@hookimpl\ndef ml4core_backends():\n    return [Noisy()]\n",
        "utf-8",
    )
    info = tmp_path / "noisy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: noisy\nVersion: 1.0\nKeywords: ml4core-api:1-1\n", "utf-8"
    )
    (info / "entry_points.txt").write_text("[ml4core.backends]\nnoisy = noisy\n", "utf-8")
    words = ["generate", str(checkpoint), "--prompt", "a", "--max-tokens", "2", "--json"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = run(*words, "--backend", "noisy", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["completions"][0]["token_ids"]) == 2
    assert {b"by print", b"by number", b"by child"} == set(done.stderr.splitlines())


def test_bytes_that_are_no_text(ml4: Any) -> None:
    done = run("generate", "m", "--prompt", b"a\xff")
    assert done.returncode == 1
    assert b"--prompt: no UTF-8 text" in done.stderr
    told = ml4("inspect", os.fsdecode(b"/no/\xff"))  # as the interpreter hands it on
    assert told.code == 1
    assert "no such folder" in told.err


def test_a_whole_answer(ml4: Any, checkpoint: Path) -> None:
    words = ["generate", str(checkpoint), "--backend", "cpu", "--max-tokens", "5", "--ignore-eos"]
    done = ml4(*words, "--prompt", "Tell me a story.", "--json", "--report")
    assert (done.code, done.err) == (0, "")
    answer = done.json
    (completion,) = answer["completions"]
    assert len(completion["token_ids"]) == 5
    assert completion["finish_reason"] == "length"
    assert answer["report"]["backend"]["name"] == "cpu"
    streamed = run(*words, "--prompt-file", "-", "--report", stdin=b"Tell me a story.\n")
    assert streamed.returncode == 0
    assert streamed.stdout.decode() == completion["text"] + "\n"
    report = streamed.stderr.decode()
    assert "backend: name cpu, distribution ml4core" in report
    assert [line.split()[:4] for line in report.splitlines() if line.startswith("decoder_layer")]


def test_output_without_a_unicode_encoding_is_escaped(ml4: Any, tmp_path: Path) -> None:
    folder = tmp_path / "čaj"
    folder.mkdir()
    shutil.copy(PUBLISHED, folder)
    done = run("inspect", str(folder), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    whole = ml4("inspect", str(folder)).out
    assert b"\\u010daj" in done.stdout
    assert done.stdout == whole.encode("ascii", errors="backslashreplace")


def test_prompts_that_do_not_fit_are_told_with_the_limit(ml4: Any, checkpoint: Path) -> None:
    """B106: the context's end, and one over."""
    words = ["generate", str(checkpoint), "--backend", "cpu", "--raw", "--max-tokens", "9"]
    words += ["--prompt", " the"]  # two ids, with that of the beginning
    done = ml4(*words, "--max-model-len", "3", "--ignore-eos", "--json")
    assert (done.code, done.err) == (0, "")
    assert len(done.json["completions"][0]["token_ids"]) == 1
    done = ml4(*words, "--max-model-len", "2")
    assert (done.code, done.out) == (1, "")
    assert "prompt: 2 tokens" in done.err


def test_a_backend_that_is_not_there_is_refused_by_name(ml4: Any, checkpoint: Path) -> None:
    """B122: no other takes its place."""
    done = ml4("generate", str(checkpoint), "--backend", "absent", "--prompt", "a", "-pp", "2")
    assert (done.code, done.out) == (3, "")
    assert "absent" in done.err
    assert "--pipeline-parallel-size" in done.err


def test_an_interrupt_ends_with_130(checkpoint: Path) -> None:
    words = ["--prompt", "a", "--max-tokens", "8000", "--ignore-eos", "--backend", "cpu"]
    command = [*ML4, "generate", str(checkpoint), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)  # it generates
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert b"Traceback" not in process.stderr.read()
