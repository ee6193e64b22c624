"""What requests for chats and for completions have in common."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

from ml4core import __version__
from ml4core.engine.errors import RequestError
from ml4core.engine.image_inputs import PlacedImage
from ml4core.engine.sampling_params import SamplingParams
from ml4core.serving.http.exchange import Job
from ml4core.serving.http.service import Service
from ml4core.serving.inputs import check_priority
from ml4core.serving.protocol import SamplingFields

ID_LENGTH = 128
"""Characters of a request's id that a client may give."""
SALT_LENGTH = 1024


@dataclass(frozen=True)
class Header:
    """What stands in each object of an answer, and how it is told."""

    id: str
    model: str
    created: int
    stream: bool
    usage: bool
    usage_always: bool

    def body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"ml4core-{__version__}",
            "choices": choices,
        }


def make_header(service: Service, request: SamplingFields, prefix: str, own_id: str) -> Header:
    """``own_id``: of the HTTP request. Raises ``RequestError``."""
    options, stream = request.stream_options, bool(request.stream)
    if options is not None and not stream:
        raise RequestError("stream_options", "given without stream", "with stream true")
    given = request.request_id
    if given is not None and not good_id(given):
        works = f"1 to {ID_LENGTH} printable characters of ASCII, no spaces"
        raise RequestError("request_id", given, works)
    return Header(
        id=f"{prefix}-{given or own_id}",
        model=request.model or service.names[0],
        created=int(time.time()),
        stream=stream,
        usage=bool(options and options.include_usage),
        usage_always=bool(options and options.include_usage and options.continuous_usage_stats),
    )


def good_id(text: str) -> bool:
    """Whether a client's id may stand in headers and logs."""
    return 0 < len(text) <= ID_LENGTH and text.isascii() and all(33 <= ord(c) < 127 for c in text)


def new_id() -> str:
    return secrets.token_hex(16)


def check_salt(salt: str | None) -> None:
    if salt == "":
        raise RequestError("cache_salt", "empty", "a text of at least one character, or none")
    if salt is not None and len(salt) > SALT_LENGTH:  # each prompt of a request is sent with it
        works = f"at most {SALT_LENGTH:,}"
        raise RequestError("cache_salt", f"{len(salt):,} characters", works)


def check_streaming(request: SamplingFields) -> None:
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs", request.prompt_logprobs, "without stream")


def logprob_limit(service: Service, field: str, count: int | None) -> None:
    most = service.server.max_logprobs
    if count is not None and not 0 <= count <= most:
        raise RequestError(field, count, f"0 to {most}: --max-logprobs")


def common_job(
    service: Service,
    request: SamplingFields,
    ids: list[int],
    params: SamplingParams,
    images: tuple[PlacedImage, ...] = (),
) -> Job:
    priority = request.priority or 0
    check_priority(priority, service.args)
    return Job(ids, params, priority, request.cache_salt, images)
