"""Which backend a command runs on. Imports no torch: refusals are quick."""

from __future__ import annotations

from ml4core import registry
from ml4core.api import Refused
from ml4core.engine.args import EngineArgs
from ml4core.engine.replicas.launch import refusals as replica_refusals
from ml4core.models.hub import is_local


def choose_backend(args: EngineArgs, *, serves: bool = False) -> registry.Choice:
    """The backend that ``args`` ask for, found before any model is looked for; ``serves``: for an
    engine that goes along with other replicas, see ``open_engine``.

    Raises ``Refused`` with every reason; flags whose part has not landed are among them, and are
    alone enough where a model would have to be downloaded first.
    """
    refusals = [*args.refusals(), *replica_refusals(args, serves)]
    kind = args.additional_config.get("device")
    try:
        choice = registry.select(args.backend, device_kind=str(kind) if kind else None)
    except Refused as refused:
        raise Refused([*refusals, *refused.refusals], refused.what) from None
    if refusals and not is_local(args.model):
        raise Refused(refusals)
    return choice
