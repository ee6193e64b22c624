"""A backend asked in a process of its own. Imports nothing heavy: what is loaded there is judged.

The parent calls ``ask``; the child runs one of the questions below and answers in JSON.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ml4core.api import Backend, Deployment, Refused
from ml4core.registry import PluginRecord

VENDORS = (
    "aiter", "cupy", "cutlass", "deep_gemm", "flash_attn", "flash_mla", "flashinfer", "hip",
    "jax", "jaxlib", "libtpu", "nixl", "numba", "pallas", "pycuda", "pynvml", "rocm", "tilelang",
    "torch_xla", "triton",
)  # fmt: skip
"""Libraries of a vendor or for its devices: none may be loaded when a plugin is found."""

_BOOT = (
    "import json, sys; job = json.loads(sys.argv[1]); sys.path[:] = job['path']; "
    "from ml4core_conformance.rigs.child import main; main(job)"
)


class ChildFailed(Exception):
    """The child gave no answer: it died, hung, or what it was asked raised."""


def ask(
    question: str,
    backend: Backend | PluginRecord,
    *,
    limit_s: float,
    path: Sequence[str] = (),
    deployment: Deployment | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The answer of ``question``, a name of ``QUESTIONS``, about a backend, which is pickled; or
    about a plugin, which is not imported here.

    Raises ``ChildFailed`` with what became of the child; it has ended by then.
    """
    with TemporaryDirectory(prefix="ml4-ask-") as folder:
        answer = Path(folder) / "answer.json"
        job = {
            "path": [*path, *sys.path],
            "question": question,
            "backend": base64.b64encode(pickle.dumps(backend)).decode(),
            "deployment": base64.b64encode(pickle.dumps(_plain(deployment))).decode(),
            "answer": str(answer),
        }
        output = Path(folder) / "output.txt"
        with output.open("wb") as stream:
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(job)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        try:
            code = child.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"{question}: no answer within {limit_s:g} s") from None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        if not answer.exists():
            words = output.read_text("utf-8", errors="replace").strip().splitlines()[-3:]
            raise ChildFailed(f"{question}: its process ended with {code}: {' | '.join(words)}")
        found: dict[str, Any] = json.loads(answer.read_text("utf-8"))
        if "raised" in found:
            raise ChildFailed(f"{question}: raised {found['raised']}")
        return found


def _plain(deployment: Deployment | None) -> Deployment | None:
    """The same without views of mappings, which can't be pickled."""
    if deployment is None:
        return None
    model = deployment.model
    model = replace(model, assumptions=dict(model.assumptions), extras=dict(model.extras))
    return replace(deployment, model=model)


def main(job: Mapping[str, Any]) -> None:
    """The child's side."""
    start = time.process_time()  # a busy machine makes no plugin slower
    before = set(sys.modules)
    backend = pickle.loads(base64.b64decode(job["backend"]))
    deployment = pickle.loads(base64.b64decode(job["deployment"]))
    try:
        found = QUESTIONS[job["question"]](backend, deployment)
    except (Exception, SystemExit) as error:
        found = {"raised": f"{type(error).__name__}: {error}"}
    found["seconds"] = time.process_time() - start
    found["modules"] = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
    Path(job["answer"]).write_text(json.dumps(found), "utf-8")
    os._exit(0)  # what a library does in its teardown is not judged here


def _register(backend: Backend, deployment: Deployment | None) -> dict[str, Any]:
    """What the registry does with a backend once its module is imported."""
    members = {name: hasattr(backend, name) for name in ("probe", "capabilities", "open")}
    name, priority = backend.name, backend.priority
    loaded = sorted({name.partition(".")[0] for name in sys.modules})
    return {
        "members": members,
        "name": name,
        "priority": priority,
        "vendors": [name for name in loaded if name in VENDORS],
        "device": _device_in_use(),
    }


def _device_in_use() -> str:
    """The accelerator that torch has initialised, if it was even imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_initialized():
            return name
    return ""


def _probe(backend: Backend, deployment: Deployment | None) -> dict[str, Any]:
    """Two probes, as JSON."""
    answers = []
    for _ in range(2):
        probe = backend.probe()
        answers.append(
            {
                "kind": type(probe).__name__,
                "devices": [asdict(device) for device in probe.devices],
                "refusals": [asdict(refusal) for refusal in probe.refusals],
            }
        )
    return {"probes": answers}


def _serve(backend: Backend, deployment: Deployment | None) -> dict[str, Any]:
    """Probes, declares and opens, as a process of its own."""
    assert deployment is not None
    devices = backend.probe().devices
    declared = [sorted(backend.capabilities(device).features) for device in devices]
    session = backend.open(deployment)
    session.close()
    return {"devices": [device.name for device in devices], "declared": declared}


def _refuse(backend: Backend, deployment: Deployment | None) -> dict[str, Any]:
    """Every reason against a deployment; none if it opens."""
    assert deployment is not None
    try:
        backend.open(deployment).close()
    except Refused as refused:
        return {"reasons": [asdict(reason) for reason in refused.refusals]}
    return {"reasons": []}


def _checks(record: PluginRecord, deployment: Deployment | None) -> dict[str, Any]:
    """The checks that a plugin adds."""
    from ml4core_conformance.own_checks import facts, own_checks

    return {"checks": facts(own_checks(record))}


def _rank(backend: Backend, deployment: Deployment | None) -> dict[str, Any]:
    """One rank's logits."""
    from ml4core_conformance.rigs.ranks import rank_process

    assert deployment is not None
    return rank_process(backend, deployment)


QUESTIONS: Mapping[str, Callable[[Any, Deployment | None], dict[str, Any]]] = {
    "checks": _checks,
    "register": _register,
    "probe": _probe,
    "serve": _serve,
    "refuse": _refuse,
    "rank": _rank,
}
