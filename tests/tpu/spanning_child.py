"""Run in processes of their own: an engine on a mesh of virtual devices, and what it makes of its
prompts, as JSON. The argument is ``{"flags": ..., "prompts": ..., "tokens": ...}``, JSON too. It
steps along with its replicas until its input ends.
"""

from __future__ import annotations

import json
import select
import sys

import torch

from ml4core.api import Device
from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import Engine, open_engine
from ml4core.registry import Choice, FoundDevice, find, load_plugin
from support.answers import Answers

DEVICE = Device("interpreted", "XLA on the host", "tpu7x", "cpu")


def choice() -> Choice:
    """The tpu backend, without a process that looks for devices."""
    plugin = load_plugin(find("tpu"))
    return Choice(plugin, (FoundDevice(DEVICE, plugin.backend.capabilities(DEVICE)),))


def run(engine: Engine, prompts: list[list[int]], tokens: int) -> None:
    """Answers first, then steps for others' sake, until the input ends or another replica does."""
    answers, told = Answers(engine, prompts, tokens), False
    while True:
        if engine.core.has_work:
            try:
                answers.step()
            except RuntimeError:
                if told:  # by then another replica may close, which is a fault here
                    return
                raise
            continue
        if not told:
            found = {"made": answers.made, "steps": answers.steps}
            text = json.dumps(found | {"switches": dict(engine.report()["switches"])})
            print(f"\n{text}", flush=True)  # gloo may be within a line of its own
            told = True
        if 0 in select.select([0, *engine.alarms], [], [])[0] or engine.look() is not None:
            return


def main() -> None:
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    flags = {"backend": "tpu", "additional_config": {"device": "interpreted"}, **asked["flags"]}
    engine = open_engine(
        EngineArgs(**flags), choice=choice(), sequences=3, tokens_each=64, serves=True
    )
    try:
        run(engine, asked["prompts"], asked["tokens"])
    finally:
        engine.close()


if __name__ == "__main__":
    main()
