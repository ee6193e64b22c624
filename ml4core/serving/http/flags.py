"""The flags of the server itself: one table, like that of the engine's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import ArgumentsError
from ml4core.engine.flag_spec import Flag, flag, flags_of

PORT_MAX = 65535
KEYS_VARIABLE = "ML4_API_KEY"
"""Environment variable with API keys, comma between them."""


@dataclass(frozen=True, kw_only=True)
class Server:
    host: str = flag("127.0.0.1", "address to listen at; 0.0.0.0 for all", metavar="HOST")
    port: int = flag(8000, "port to listen at; 0 for a free one", minimum=0, maximum=PORT_MAX)
    api_key: tuple[str, ...] = flag(
        (), f"keys, one of which a request must have; may also be in {KEYS_VARIABLE}", metavar="KEY"
    )
    ssl_certfile: str | None = flag(None, "certificate to serve https with", metavar="FILE")
    ssl_keyfile: str | None = flag(None, "its private key", metavar="FILE")
    max_queue: int = flag(
        1024, "answers that wait for a place in a step at most; more get a 429", minimum=0
    )
    max_request_bytes: int = flag(32 * 2**20, "size of a request's body at most", units=True)
    max_logprobs: int = flag(20, "alternatives of a token that can be asked for at most", minimum=0)
    allowed_media_domains: tuple[str, ...] = flag(
        (), "hosts that images may be fetched from; else only data: is read", metavar="HOST"
    )
    allowed_local_media_path: str | None = flag(
        None, "a folder of this machine whose images may be named as file://", metavar="FOLDER"
    )
    shutdown_grace_s: float = flag(
        30.0, "seconds that open requests have to end after SIGTERM", minimum=0, maximum=86400
    )
    ready_timeout_s: float = flag(
        5.0, "seconds that the step of /ready may take", minimum=0, maximum=3600, exclusive=True
    )
    header_timeout_s: float = flag(
        30.0,
        "seconds that the headers of a request may take to come",
        minimum=0,
        maximum=86400,
        exclusive=True,
    )
    body_timeout_s: float = flag(
        60.0,
        "seconds that a request's body may take, and one more for each 16 KiB of it",
        minimum=0,
        maximum=86400,
        exclusive=True,
    )
    slow_reader_timeout_s: float = flag(
        60.0,
        "seconds after which a client that reads nothing is dropped",
        minimum=0,
        maximum=86400,
        exclusive=True,
    )
    timeout_keep_alive: int = flag(
        75, "seconds that a connection may wait for its next request", minimum=1, maximum=86400
    )
    h11_max_incomplete_event_size: int = flag(
        65536, "bytes of a request's headers at most", minimum=1024, units=True
    )
    limit_concurrency: int | None = flag(
        None,
        "connections at most; more get a 503. Default: what the limit of open files leaves",
        minimum=1,
    )
    log_format: str = flag("text", "form of log lines", choices=("text", "json"))
    vllm_metrics: bool = flag(False, "give each metric a second time, under vLLM's name")
    otlp_traces_endpoint: str | None = flag(
        None, "where OpenTelemetry traces go, by OTLP over HTTP", metavar="URL"
    )
    null_step_ms: float | None = flag(
        None,
        "compute nothing, and take this long for each step: measures the server alone",
        minimum=0,
        maximum=60000,
    )
    dry_run: bool = flag(
        False, "say whether it could be served, and with what cache, without weights or port"
    )


@dataclass(frozen=True)
class ServerArgs(Server):
    """Every flag of the server. Raises ``ArgumentsError`` with every fault."""

    def __post_init__(self) -> None:
        problems = [
            f"{one.name}: {text}"
            for field, one in SERVER_FLAGS.items()
            if (text := one.problem(getattr(self, field)))
        ]
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            problems.append("--ssl-certfile: works together with --ssl-keyfile, not without")
        if not all(key.strip() and key.isascii() for key in self.api_key):
            problems.append("--api-key: a key is empty or has letters beyond ASCII")
        if problems:
            raise ArgumentsError(problems)


SERVER_FLAGS: Mapping[str, Flag] = MappingProxyType(flags_of(ServerArgs))
"""Every flag by its field, in the order of the help text."""

TOOL_FLAGS = ("tool_call_parser", "enable_auto_tool_choice", "reasoning_parser")


def without_server_flags(args: EngineArgs) -> EngineArgs:
    """What the engine is opened with: flags of vLLM's engine that only a server looks at are left
    out.
    """
    return replace(
        args,
        served_model_name=(),
        tool_call_parser=None,
        enable_auto_tool_choice=False,
        reasoning_parser=None,
    )
