"""Runs a phase in parts: saves atomically, resumes, stops when told or when time is up."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from tools.train_tiny import state
from tools.train_tiny.phases import Phase

SETTLED = 40
"""Steps of a part after which its speed is known: kernels are compiled by then."""
RESERVE = 15.0
"""Seconds kept for what follows the last step."""
CLIP = 1.0
AGREE = 10
"""Steps after which several processes ask whether to go on."""
GO, SAVE, PAUSE = range(3)


class Stop:
    """Set by SIGTERM or SIGINT."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


@contextmanager
def stopping() -> Iterator[Stop]:
    stop = Stop()
    names = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(name, stop.ask) for name in names]
    try:
        yield stop
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)


def run(
    phase: Phase,
    folder: Path,
    deadline: float,
    *,
    finish: bool = False,
    every: int = 50,
    save_seconds: float = 120.0,
) -> bool:
    """Go on with `phase` from what `folder` holds of it; whether it is done.

    `deadline`: time.monotonic() at which this part must end. `finish`: make do with fewer steps,
    so that the phase ends by then. Of several processes the first one decides, prints and saves.
    """
    path = folder / f"{phase.name}.pt"
    step = _resume(phase, path)
    settings, ranks = phase.settings, phase.ranks
    tokens = settings.batch * settings.length
    params = phase.optimizers.params
    ranks.align(params)
    ranks.say(f"{phase.name}: step {step} of {settings.steps}, {tokens} tokens each")
    saved = settled = shown = time.monotonic()
    first, shown_step = step, step
    with stopping() as stop:
        while step < settings.steps:
            now = time.monotonic()
            what = GO
            if stop.asked or now > deadline - RESERVE:
                what = PAUSE
            elif now - saved > save_seconds:
                what = SAVE
            asked = ranks.size == 1 or (step - first) % AGREE == 0
            what = ranks.agree(what) if asked else GO
            if what == PAUSE:
                _save(phase, path, step)
                ranks.say(f"{phase.name}: paused at step {step} of {settings.steps}")
                return False
            if what == SAVE:
                _save(phase, path, step)
                saved = time.monotonic()
            with phase.as_shipped(step):
                loss, metrics = phase.loss(step)
                loss.backward()
            ranks.average(p.grad for p in params if p.grad is not None)
            norm = torch.nn.utils.clip_grad_norm_(params, CLIP)
            phase.optimizers.step(phase.factor(step))
            step += 1
            if step - first == SETTLED:
                _synchronise(phase)
                settled = time.monotonic()
            if step % every == 0 or step == settings.steps or step - first in (1, SETTLED):
                means = ranks.mean(torch.stack([v.detach().float() for v in metrics.values()]))
                values = dict(zip(metrics, means.tolist(), strict=True))
                now = time.monotonic()
                speed = (step - shown_step) * tokens / max(1e-9, now - shown)
                text = " ".join(f"{name} {value:.4f}" for name, value in values.items())
                ranks.say(
                    f"{phase.name} {step}/{settings.steps} {text} norm {norm.item():.2f} "
                    f"{speed / 1e3:.0f}k tokens/s"
                )
                shown, shown_step = now, step
                if not all(map(math.isfinite, values.values())):
                    raise RuntimeError(f"{phase.name}: step {step} gave {text}; not saved")
                if not ranks.align(params):
                    ranks.say(f"{phase.name}: the processes had drifted apart; aligned again")
                if finish and step - first > SETTLED:
                    each = (now - settled) / (step - first - SETTLED)
                    left = int((deadline - RESERVE - 5 - now) / each)
                    cut = ranks.agree(step + max(1, left))
                    if cut < settings.steps:
                        settings.steps = cut
                        ranks.say(f"{phase.name}: cut to {cut} steps")
    _save(phase, path, step)
    return True


def _resume(phase: Phase, path: Path) -> int:
    if not path.is_file():
        return 0
    content = state.load(path, phase.device)
    for name, module in phase.modules.items():
        module.load_state_dict(content["modules"][name])
    if "optimizers" not in content:  # weights that `unpack` or `read` left, to begin with
        return 0
    phase.optimizers.load_state_dict(content["optimizers"])
    phase.settings.steps = content["steps"]
    step: int = content["step"]
    return step


def _save(phase: Phase, path: Path, step: int) -> None:
    if not phase.ranks.first:
        return
    state.save(
        path,
        {
            "step": step,
            "steps": phase.settings.steps,
            "modules": {name: module.state_dict() for name, module in phase.modules.items()},
            "optimizers": phase.optimizers.state_dict(),
        },
    )


def _synchronise(phase: Phase) -> None:
    if phase.device.type == "cuda":
        torch.cuda.synchronize(phase.device)
