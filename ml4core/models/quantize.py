"""Checkpoints converted between number formats: BF16, FP8 in blocks, NVFP4 and MXFP4.

What is quantised is decoded to bf16 first and then quantised anew. Memory: a block of rows. Same
source and options, same bytes. A run that was stopped is gone on with by the same call.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml4core import __version__
from ml4core.models.checkpoint import HF_CONFIG_FILE, PARAMS_FILE, Checkpoint
from ml4core.models.checkpoint_files import INDEX_SUFFIX, KINDS, SUFFIX, index_content
from ml4core.models.embedded import SUMS_FILE
from ml4core.models.errors import CheckpointError, os_reason
from ml4core.models.quantize_options import QuantizeOptions
from ml4core.models.quantize_params import stated_rule, updated
from ml4core.models.quantize_plan import Plan, make_plan
from ml4core.models.quantize_work import Converter
from ml4core.models.staged_folder import NoRoom, StagedFolder, finish_published

__all__ = ["QuantizeOptions", "QuantizeReport", "quantize"]

Progress = Callable[[int, int], None]
"""Called with (bytes of the source done, bytes to do)."""

MAX_SMALL_BYTES = 256 << 20
_WEIGHT_SUFFIXES = (SUFFIX, ".bin", ".gguf", ".pt", ".pth")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class QuantizeReport:
    """What was done.

    Attributes:
        target: the folder.
        matrices: (format before, format after) -> matrices.
        nbytes: of the tensors' files.
        files: how many files of tensors there are.
        resumed: how many of them an earlier run had finished.
        notes: what an operator should know.
    """

    target: Path
    matrices: Mapping[tuple[str, str], int]
    nbytes: int
    files: int
    resumed: int
    notes: tuple[str, ...]


def quantize(
    source: Path | str,
    target: Path | str,
    options: QuantizeOptions,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Write the checkpoint `source`, converted, to the new folder `target`.

    Until all is there, it is `target` + ".partial". Whatever stops the run (an error, a signal, a
    full disk), the same call goes on behind the last whole file; another call is refused.

    Raises CheckpointError: for matrices that can't be converted, before anything is written; for
    values or scales that aren't finite; for a target that is taken; for want of room.
    """
    source, target = Path(source).resolve(), Path(target).expanduser().resolve()
    checkpoint = Checkpoint.open(source)
    config = checkpoint.params or checkpoint.hf_config or {}
    kind = next(iter(checkpoint.tensors.values())).file.name if checkpoint.tensors else KINDS[0]
    kind = next(known for known in KINDS if kind.startswith(known))
    plan = make_plan(checkpoint, options, stated_rule(config), kind)
    small, notes = _small_files(source)
    work = {
        "ml4core": __version__,
        "options": options.facts(),
        "source": _fingerprint(checkpoint, small),
    }
    if finish_published(target, work):
        return _report(target, plan, len(plan.shards), notes)
    with StagedFolder(target, work) as staged:
        run = _Run(checkpoint, plan, options, staged, progress)
        with staged.kept_if_useful():
            resumed = run.write_shards(sum(path.stat().st_size for path in small))
            run.write_rest(small, kind)
        staged.publish()
    return _report(target, plan, resumed, notes)


class _Run:
    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        options: QuantizeOptions,
        staged: StagedFolder,
        progress: Progress | None,
    ) -> None:
        self.checkpoint = checkpoint
        self.plan = plan
        self.options = options
        self.staged = staged
        self.progress = progress
        self.skipped = 0  # bytes of the source behind finished files
        self.left = 0  # bytes to write

    def write_shards(self, small_bytes: int) -> int:
        """Write the files of tensors that aren't there yet; returns how many were."""
        done = {
            name
            for name, (layout, _) in self.plan.shards.items()
            if layout.is_written(self.staged.path / name)
        }
        self.left = small_bytes + sum(
            layout.size for name, (layout, _) in self.plan.shards.items() if name not in done
        )
        free = shutil.disk_usage(self.staged.path).free
        if self.left > free:
            raise self._no_room(f"{self.left} bytes are needed, {free} are free")
        converter = Converter(self.checkpoint, self.options, self._tell)
        for name, (layout, units) in self.plan.shards.items():
            if name in done:
                self.skipped += sum(unit.cost for unit in units)
                continue
            with self._file(name) as file:
                layout.begin(file)
                for unit in units:
                    converter.run(unit, lambda *part, f=file, w=layout.write: w(f, *part))
            self.left -= layout.size
        return len(done)

    def write_rest(self, small: list[Path], kind: str) -> None:
        """Everything else; params.json, which makes a folder a checkpoint, comes last."""
        for path in small:
            with open(path, "rb") as source, self._file(path.name) as file:
                shutil.copyfileobj(source, file)
        if len(self.plan.shards) > 1:
            files = {shard: layout.tensors for shard, (layout, _) in self.plan.shards.items()}
            weight_map = {name: shard for shard, tensors in files.items() for name in tensors}
            nbytes = sum(info.nbytes for tensors in files.values() for info in tensors.values())
            self._text(kind + INDEX_SUFFIX, json.dumps(index_content(nbytes, weight_map), indent=1))
        configs = (
            (HF_CONFIG_FILE, self.checkpoint.hf_config, "quantization_config"),
            (PARAMS_FILE, self.checkpoint.params, "quantization"),
        )
        for name, content, key in configs:
            if content is None:
                continue
            changed = updated(content, self.plan, self.options, key)
            if changed is None:
                self._text(name, (self.checkpoint.path / name).read_text("utf-8"))
            else:
                self._text(name, json.dumps(changed, indent=2))

    @contextmanager
    def _file(self, name: str) -> Iterator[Any]:
        try:
            with self.staged.file(name) as file:
                yield file
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise NoRoom(
                    f"{self.staged.path / name}: {os_reason(error)}: a limit on the size of one "
                    "file (ulimit -f, or the file system's own). Raise it, and the same command "
                    "goes on; or begin anew with fewer bytes to a file"
                ) from error
            if error.errno in _NO_ROOM:
                free = shutil.disk_usage(self.staged.path).free
                hint = f"{os_reason(error)}: {self.left} bytes are needed, {free} are free"
                raise self._no_room(hint, name) from error
            raise CheckpointError(
                f"{self.staged.path / name}: can't be written: {os_reason(error)}"
            ) from error

    def _text(self, name: str, text: str) -> None:
        with self._file(name) as file:
            file.write(text.encode())

    def _no_room(self, text: str, name: str = "") -> CheckpointError:
        where = self.staged.path / name
        return NoRoom(f"{where}: {text}. Make room; the same command then goes on")

    def _tell(self) -> None:
        if self.progress is not None:
            total = self.plan.cost
            self.progress(min(self.skipped + self.checkpoint.bytes_read, total), total)


def _small_files(source: Path) -> tuple[list[Path], tuple[str, ...]]:
    """Files beside the tensors that are copied, and notes on those that are not."""
    copied: list[Path] = []
    left: list[str] = []
    written = {PARAMS_FILE, HF_CONFIG_FILE, *(kind + INDEX_SUFFIX for kind in KINDS)}
    for path in sorted(source.iterdir()):
        if not path.is_file() or path.name.startswith(".") or path.name in written:
            continue
        if path.name.startswith(KINDS) and path.name.endswith(SUFFIX):
            continue
        large = path.stat().st_size > MAX_SMALL_BYTES
        if path.suffix in _WEIGHT_SUFFIXES or path.name == SUMS_FILE or large:
            left.append(path.name)
        else:
            copied.append(path)
    return copied, (f"not copied: {', '.join(left)}",) if left else ()


def _fingerprint(checkpoint: Checkpoint, small: list[Path]) -> dict[str, str]:
    """File name -> what shows that it is the one that work was begun with."""
    files = {info.file for info in checkpoint.tensors.values()} | set(small)
    configs = (checkpoint.path / name for name in (PARAMS_FILE, HF_CONFIG_FILE))
    files |= {path for path in configs if path.exists()}
    facts = {path.name: path.stat() for path in sorted(files)}
    return {name: f"{fact.st_size} bytes of {fact.st_mtime_ns} ns" for name, fact in facts.items()}


def _report(target: Path, plan: Plan, resumed: int, notes: tuple[str, ...]) -> QuantizeReport:
    matrices: Counter[tuple[str, str]] = Counter()
    for unit in plan.units:
        before = getattr(unit.group.matrix, "format", None)
        if before is not None and unit.format is not None:
            named = unit.action == "reform"
            after = f"{unit.format} in the other form" if named else unit.format
            matrices[before, after] += 1
    layouts = [layout for layout, _ in plan.shards.values()]
    size = sum(layout.size for layout in layouts)
    return QuantizeReport(target, matrices, size, len(layouts), resumed, notes)
