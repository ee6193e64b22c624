"""How the replicas of a deployment come together."""

from __future__ import annotations

from ml4core.api import Deployment, Refused
from ml4core.engine.args import EngineArgs
from ml4core.engine.replicas.launch import differences, facts_of
from ml4core.engine.replicas.lock_step import LockStep


def meet(args: EngineArgs, deployment: Deployment, backend: str) -> LockStep:
    """This replica among the others, once all have come. Raises ``Refused`` if they don't, or if
    they were launched unlike: then with all that differs, on each of them.
    """
    lock_step = LockStep(
        deployment.data_parallel_address,
        deployment.data_parallel_rpc_port,
        deployment.data_parallel_rank,
        deployment.data_parallel_size,
        args.step_timeout_s,
    )
    try:
        found = differences(lock_step.meet(facts_of(args, deployment, backend)))
        if found:
            raise Refused(found, "this launch")
    except BaseException:
        lock_step.close()
        raise
    return lock_step
