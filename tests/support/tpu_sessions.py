"""The TPU backend as it is on TPUs, on the host's devices: for checks that open engines, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ml4core.api import Deployment, Session
from ml4core_tpu.backend import TpuBackend


class ResidentTpu(TpuBackend):
    """Whatever opens it gets the session whose weights, caches and rows stay on devices."""

    def open(self, deployment: Deployment) -> Session:
        from ml4core_tpu.resident_session import ResidentSession

        config: dict[str, Any] = {"device": "interpreted", **deployment.additional_config}
        own = config.get("tpu", {})
        if isinstance(own, Mapping):
            config["tpu"] = {"resident": True, **own}
        session = super().open(replace(deployment, additional_config=config))
        assert isinstance(session, ResidentSession)
        return session
