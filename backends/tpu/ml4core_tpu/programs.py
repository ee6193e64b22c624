"""Compiled programs of a session: made once for each size, counted, and kept on disk. What else
JAX compiles within a step is counted, too.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Any

Lower = Callable[[], Any]
"""Gives a program lowered, which is then compiled."""
IMAGES = "images"
"""How names of programs for images begin; others are of layers."""


_COMPILED = "/jax/core/compile/backend_compile_duration"
"""What JAX tells of whatever it compiles, or reads from where it is kept."""
_here = threading.local()
"""``step``: the programs of the session whose step this thread is in."""


class RecompilationWarning(RuntimeWarning):
    """A program was compiled after the warm-up, while requests waited."""


@dataclass(frozen=True)
class Made:
    """What a program has cost.

    Attributes:
        lowering: seconds of tracing and lowering.
        compiling: seconds of the compiler, or of reading what it made before.
        late: whether it was made after the warm-up.
    """

    name: str
    lowering: float
    compiling: float
    late: bool

    @property
    def seconds(self) -> float:
        return self.lowering + self.compiling

    @property
    def of_images(self) -> bool:
        return self.name.startswith(IMAGES)


class Programs:
    """Programs by key. A key names all that a program depends on but its arguments' values."""

    def __init__(self) -> None:
        self._programs: dict[Hashable, tuple[str, Any]] = {}
        self._made: list[Made] = []
        self._others = 0
        self._lock = threading.Lock()
        self._warm = False

    @property
    def made(self) -> Sequence[Made]:
        return tuple(self._made)

    @property
    def recompiled(self) -> int:
        """What was compiled after the warm-up: programs, and all else within steps."""
        return self._others + sum(one.late for one in self._made)

    def cool(self) -> None:
        """Ends what a warm-up began: until the next one nothing that is compiled is late. Programs
        of layers are let go: those of caches of another size serve no step, and take memory.
        """
        self._warm = False
        self._programs = {
            key: held for key, held in self._programs.items() if held[0].startswith(IMAGES)
        }

    def get(self, key: Hashable, name: str, lower: Lower) -> Any:
        """The program of a key, compiled if it is new; after the warm-up that is warned of."""
        found = self._programs.get(key)
        return self._make(key, name, lower, late=self._warm) if found is None else found[1]

    def warm_up(
        self,
        wanted: Sequence[tuple[Hashable, str, Lower]],
        told: Callable[[int, int], None],
        threads: int = 2,
    ) -> None:
        """Compiles what is not there yet. From here on whatever else is compiled is late.

        ``told`` hears how many are done, and of how many.
        """
        missing = {key: (name, lower) for key, name, lower in wanted if key not in self._programs}
        told(0, len(missing))
        with ThreadPoolExecutor(threads) as pool:
            jobs = [pool.submit(self._make, key, *one, late=False) for key, one in missing.items()]
            try:
                for done, job in enumerate(jobs, 1):
                    job.result()
                    told(done, len(missing))
            except BaseException:  # of a program, or Ctrl-C: else all others are compiled first
                pool.shutdown(cancel_futures=True)
                raise
        self._warm = True

    @contextmanager
    def step(self) -> Iterator[None]:
        """While a step runs in this thread: what JAX compiles for ops is counted like programs."""
        _listening()
        with _within(self):
            yield

    def other(self, name: str, seconds: float) -> None:
        """Hears of something that is none of the programs, and was compiled within a step."""
        if self._warm:
            self._others += 1
            _warn(name, seconds)

    def _make(self, key: Hashable, name: str, lower: Lower, late: bool) -> Any:
        start = perf_counter()
        with _within(None):
            lowered = lower()
            between = perf_counter()
            program = lowered.compile()
        end = perf_counter()
        with self._lock:
            self._programs[key] = name, program
            self._made.append(Made(name, between - start, end - between, late))
        if late:
            _warn(name, end - start)
        return program


def _warn(name: str, seconds: float) -> None:
    text = f"{name} was compiled after the warm-up, in {seconds:.1f} s"
    warnings.warn(text, RecompilationWarning, stacklevel=4)


@contextmanager
def _within(programs: Programs | None) -> Iterator[None]:
    before = getattr(_here, "step", None)
    _here.step = programs
    try:
        yield
    finally:
        _here.step = before


@cache
def _listening() -> None:
    """From here on JAX tells of what it compiles, in the thread that compiles it."""
    from jax import monitoring

    def heard(event: str, duration_secs: float, **kwargs: str | int) -> None:
        programs = getattr(_here, "step", None)
        if event == _COMPILED and programs is not None:
            programs.other(f"{kwargs.get('fun_name', 'an op')}", duration_secs)

    monitoring.register_event_duration_secs_listener(heard)
