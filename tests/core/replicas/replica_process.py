"""An engine that is one of several replicas: flags as JSON; then lines on stdin are what is asked,
and those on stdout what became of it, JSON both.

[name, prompt, tokens]     a request
null                       the end
[name, token ids]          an answer
["open", report]           it is open, with what it tells of its ranks
["fault", code, text]      the end, after a fault; ["refused", text] after a start that was none
["closed"]                 the end
"""

from __future__ import annotations

import json
import os
import select
import sys
from typing import Any

import torch

from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import Engine, open_engine
from ml4core.engine.sampling_params import SamplingParams
from ml4core.registry import Choice, FoundDevice, find, load_plugin


def tell(*message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def asked(wait: list[int]) -> list[Any]:
    """Lines that have come; with descriptors ``wait``, once something has."""
    found = []
    while select.select([0, *wait], [], [], None if wait else 0)[0]:
        ready = select.select([0], [], [], 0)[0]
        if not ready:
            break
        text = b""
        while not text.endswith(b"\n"):
            byte = os.read(0, 1)
            if not byte:
                return [*found, None]
            text += byte
        found.append(json.loads(text))
        wait = []
    return found


def run(engine: Engine) -> None:
    core, made = engine.core, {}
    while True:
        wait = [] if core.has_work else list(engine.alarms)
        for message in asked(wait):
            if message is None:
                return
            name, prompt, tokens = message
            made[name] = []
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            core.add_request(name, prompt, params)
        if engine.look() is None and not core.has_work:
            continue
        outputs = core.step() if core.fault is None else []
        if core.fault is not None:
            return tell("fault", core.fault.code, core.fault.message)
        for output in outputs:
            made[output.request_id] += [int(one) for one in output.token_ids]
            if output.finish_reason:
                tell(output.request_id, made.pop(output.request_id), core.stats().steps)


def choice() -> Choice:
    """The cpu backend, without a process that looks for devices."""
    plugin = load_plugin(find("cpu"))
    (device,) = plugin.backend.probe().devices
    return Choice(plugin, (FoundDevice(device, plugin.backend.capabilities(device)),))


def main() -> None:
    torch.set_num_threads(1)
    flags = json.loads(sys.argv[1])
    model = flags.pop("model")
    try:
        args = EngineArgs(model, backend="cpu", **flags)
        engine = open_engine(args, choice=choice(), sequences=4, tokens_each=96, serves=True)
    except Exception as error:
        return tell("refused", f"{type(error).__name__}: {error}")
    tell("open", engine.report()["parallel"])
    try:
        run(engine)
    finally:
        engine.close()
    tell("closed")


if __name__ == "__main__":
    main()
