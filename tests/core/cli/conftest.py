"""What the tests of the command line share: runs in this process, and stand-ins for parts."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import typer

from ml4core.api import Capabilities
from ml4core.cli import main
from ml4core.cli.engine_options import EngineCommand, with_engine_flags
from ml4core.engine.args import EngineArgs
from ml4core.engine.outputs import FinishReason, SequenceOutput
from ml4core.engine.sampler_io import Logprob
from ml4core.models.seeded import make_seeded

SMALL = {"layers": 4, "hidden": 128, "heads": 2, "experts": 4, "dense_width": 128}


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Done]


@pytest.fixture
def ml4(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs one command line in this process."""

    def run(*argv: str) -> Done:
        capsys.readouterr()
        code = main(argv)
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small complete checkpoint with seeded weights and the tiny tokenizer. Not to be changed."""
    return make_seeded(tmp_path_factory.mktemp("checkpoints") / "small", **SMALL)


def parse(*argv: str) -> EngineArgs:
    """The flags of a command line, by the same parser that the commands use."""
    found: list[EngineArgs] = []
    app = typer.Typer(add_completion=False)
    app.command(cls=EngineCommand)(with_engine_flags(lambda args: found.append(args)))
    typer.main.get_command(app).main(args=list(argv), standalone_mode=False)
    return found[0]


@pytest.fixture(name="parse")
def parse_fixture() -> Callable[..., EngineArgs]:
    return parse


@dataclass
class StubEngine:
    """Answers each prompt with its own tokens backwards, a token a step, and keeps what it was
    asked. It stands for the engine and for its core. The last prompt is the first to be answered.
    """

    error: BaseException | None = None
    args: EngineArgs | None = None
    sizes: dict[str, Any] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)
    params: Any = None
    answer: list[int] | None = None
    closed: bool = False
    choice: Any = field(
        default_factory=lambda: SimpleNamespace(capabilities=Capabilities(frozenset()))
    )
    fault: Any = None
    rest: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    logprob: float = -0.5

    @property
    def core(self) -> StubEngine:
        return self

    def open(self, args: EngineArgs, *, progress: Any = None, **sizes: Any) -> StubEngine:
        self.args, self.sizes, self.prompts = args, sizes, []
        if progress is not None:
            progress(1, 2)
        return self

    def check(self, name: str, ids: Sequence[int], params: Any) -> None:
        assert not self.prompts, "prompts are checked before the first is taken"

    def add_request(self, name: str, ids: list[int], params: Any, **_: Any) -> None:
        self.prompts.append(ids)
        self.params = params
        for index in range(params.n):
            self.rest[name, index] = list(self.answer or reversed(ids))

    def abort(self, name: str, index: int | None = None) -> None:
        for key in [k for k in self.rest if k[0] == name and index in (None, k[1])]:
            del self.rest[key]

    @property
    def has_work(self) -> bool:
        return bool(self.rest)

    def step(self) -> list[SequenceOutput]:
        outputs = []
        for (name, index), tokens in reversed(list(self.rest.items())):
            if len(tokens) == 1 and self.error is not None:
                raise self.error
            token = tokens.pop(0)
            reason: FinishReason | None = None if tokens else "length"
            logprobs = None
            if self.params.logprobs is not None:
                logprobs = [{token: Logprob(self.logprob, 1), token - 1: Logprob(-math.inf, 9)}]
            outputs.append(SequenceOutput(name, index, [token], reason, 1, 0, 1, logprobs))
            if not tokens:
                del self.rest[name, index]
        return outputs

    def tell_fault(self) -> None:
        raise AssertionError("there is none")

    def report(self) -> dict[str, Any]:
        return {"backend": {"name": "stub"}, "parts": []}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StubEngine:
    """What `ml4 generate` opens in place of a real engine."""
    import ml4core.engine.llm

    stub = StubEngine()
    command = importlib.import_module("ml4core.cli.generate")
    monkeypatch.setattr(command, "choose_backend", lambda args: stub.choice)
    monkeypatch.setattr(ml4core.engine.llm, "open_engine", stub.open)
    return stub


class Site:
    """A folder on the path in which each distribution brings sub-commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def command(self, name: str, source: str, distribution: str = "extra", value: str = "") -> None:
        # A name of its own in each test: modules of a process stay imported.
        module = re.sub(r"\W", "_", f"cmd_{self.folder.name}_{distribution}_{name}")
        (self.folder / f"{module}.py").write_text(source, "utf-8")
        info = self.folder / f"{distribution.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n", "utf-8"
        )
        entry = f"[ml4core.commands]\n{name} = {value or f'{module}:app'}\n"
        info.joinpath("entry_points.txt").write_text(entry, "utf-8")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.syspath_prepend(str(tmp_path))
    return Site(tmp_path)
