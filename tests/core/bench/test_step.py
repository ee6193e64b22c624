"""The parts of ``ml4 bench step`` on a small checkpoint, and what it says to bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ml4core.bench import compare, environment, load, model, relative
from ml4core.bench.parts import SEEDED
from ml4core.cli import main
from ml4core.engine.args import EngineArgs
from ml4core.engine.backend_choice import choose_backend
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.seeded import make_seeded

pytestmark = pytest.mark.usefixtures("probed_once")


class Done(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: str) -> Done:
        capsys.readouterr()
        code = main(["bench", "step", *argv])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dims: dict[str, Any] = {"hidden": 64, "heads": 2, "experts": 4, "expert_width": 64}
    return make_seeded(tmp_path_factory.mktemp("bench") / "m", layers=4, dense_width=64, **dims)


SMALL = ("--backend", "cpu", "--repeats", "2", "--output-len", "2", "--input-len", "9")


def test_a_model_is_measured(bench: Run, folder: Path) -> None:
    threads = torch.get_num_threads()
    done = bench(
        str(folder), *SMALL, "--part", "model", "--context", "8", "--context", "70",
        "--batch-size", "3", "--json", "-",
    )  # fmt: skip
    assert done.code == 0
    assert torch.get_num_threads() == threads
    facts = json.loads(done.out)
    assert {*facts} == {"environment", "model"}
    assert [one["context"] for one in facts["model"]["contexts"]] == [8, 70]
    for one in facts["model"]["contexts"]:
        assert one["prefill"]["repeats"] == one["decode"]["repeats"] == 2
        assert 0 < one["decode"]["low"] <= one["decode"]["median"] <= one["decode"]["high"]
    (batch,) = facts["model"]["batches"]
    assert (batch["requests"], batch["context"]) == (3, 9)
    where = facts["environment"]
    assert where["backend"] == "cpu"
    assert where["threads"] == 1
    assert {"ml4core", "torch", "python"} <= {*where["versions"]}
    assert where["date"].startswith("20")
    assert where["processor"] == environment.processor()


def test_the_flags_of_the_engine_count(bench: Run, folder: Path) -> None:
    flags = ("--dtype", "bfloat16", "--kv-cache-dtype", "fp8", "--context", "8")
    done = bench(str(folder), *SMALL, "--part", "model", *flags, "--json", "-")
    assert done.code == 0
    facts = json.loads(done.out)["model"]
    assert (facts["dtype"], facts["kv_layout"]) == ("bfloat16", "fp8_ds_mla")


def test_figures_go_to_a_file_and_a_table_to_stdout(
    bench: Run, folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / "figures.json"
    done = bench(
        str(folder), *SMALL, "--part", "host", "--part", "load", "--requests", "2",
        "--json", str(target),
    )  # fmt: skip
    assert done.code == 0
    facts = json.loads(target.read_text("utf-8"))
    assert {*facts} == {"environment", "host", "load"}
    for words in ("HOST: RUNNING REQUESTS", "beside the model", "load", "versions"):
        assert words in done.out
    assert "measuring: host cost of a step" in done.err


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--part", "hots"], 2, "--part hots: no such part; works: host, model, load, compare"),
        (["--repeats", "-1"], 2, "'--repeats'"),
        (["--requests", "0"], 2, "'--requests'"),
        (["--threads", "none"], 2, "'--threads'"),
        (["--compare", "pip"], 2, "'--compare'"),
        (["--context", "8190"], 1, "--context: 8190 (works: at most 8170"),
        (["--max-model-len", "40", "--context", "30"], 1, "--context: 30 (works: at most 18"),
        (["--input-len", "9000"], 1, "--input-len: 9000"),
        (["--max-num-seqs", "2", "--batch-size", "3"], 1, "--batch-size: 3 (works: at most 2"),
        (["--json", "/no/such/folder/x"], 2, "its folder does not exist"),
        (["-pp", "2"], 3, "pipeline parallelism has not landed"),
        (["--backend", "none"], 3, "--backend none"),
    ],
)
def test_bad_input_is_told_before_anything_is_measured(
    bench: Run, folder: Path, words: list[str], code: int, told: str
) -> None:
    done = bench(str(folder), *words)
    assert (done.code, done.out) == (code, "")
    assert told in done.err
    assert "measuring" not in done.err


def test_a_missing_checkpoint_is_told(bench: Run, tmp_path: Path) -> None:
    done = bench(str(tmp_path / "none"), "--part", "load")
    assert (done.code, done.out) == (1, "")
    assert "no such folder" in done.err


def test_without_transformers_the_line_that_brings_it_is_told(
    bench: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relative, "NAME", "not_installed_anywhere")
    done = bench("--compare", "transformers")
    assert (done.code, done.out) == (3, "")
    assert "not_installed_anywhere: is not installed" in done.err
    assert "pip install 'ml4core[test]'" in done.err


def test_an_interruption_ends_it(bench: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(load, "measure", stop)
    threads = torch.get_num_threads()
    done = bench(str(folder), "--part", "load")
    assert (done.code, done.out) == (130, "")
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("limit", "tokens", "wanted"),
    [(4116, 20, [128, 256, 512, 1024, 2048, 4096]), (4115, 20, [128, 256, 512, 1024, 2048]),
     (300, 20, [128, 256]), (100, 20, [80])],
)  # fmt: skip
def test_contexts_double_as_long_as_they_fit(limit: int, tokens: int, wanted: list[int]) -> None:
    assert model.contexts_up_to(limit, tokens) == wanted


def test_loading_is_measured_against_the_model(folder: Path) -> None:
    found = load.measure(EngineArgs(str(folder), backend="cpu"))
    tensors = Checkpoint.open(folder).tensors.values()
    assert found.file == sum(info.nbytes for info in tensors)
    # bf16 on disk, fp32 in memory
    assert found.file < found.model <= 2.1 * found.file
    assert 0 < found.layer < found.model
    assert found.peak - found.before > 0.8 * found.model
    assert found.target == found.layer + max(info.nbytes for info in tensors)


def test_a_child_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match=r"CheckpointError: .*no such folder"):
        load.measure(EngineArgs(str(tmp_path / "none"), backend="cpu"))


@pytest.mark.slow  # some ten seconds
def test_both_sides_of_a_comparison_make_the_same_tokens() -> None:
    pytest.importorskip("transformers")
    args = EngineArgs(SEEDED, backend="cpu")
    work = compare.Workload(prompt=40, each=20, output=4)
    found = compare.measure(args, choose_backend(args), 1, work)
    assert found.alike == 1.0
    assert [one.target for one in found.comparisons] == [1.0, 1.0, 3.0, 1.2]
    for one in found.comparisons:
        assert one.ours.median > 0
        assert one.ratio.median == pytest.approx(one.ours.median / one.theirs.median)
