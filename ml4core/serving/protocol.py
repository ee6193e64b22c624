"""Bodies of requests, as the OpenAI API and vLLM name their fields.

What is known and would change nothing is taken and dropped; an unknown field is refused, since it
might change the meaning. Values within a field's type are judged by ``SamplingParams``. Lists are
read up to their first fault: a body of nothing else is not to cost a thousand times its size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ml4core.engine.errors import RequestError
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.structured_outputs import StructuredOutputsParams
from ml4core.models.errors import shown

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

NO_EFFECT = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Fields of clients that say nothing of what is to be answered. They are taken, and dropped."""


class Body(BaseModel):
    """Types are strict: a number in quotes is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, given: Any) -> Any:
        """Of a great many fields that aren't known one suffices: each would be an error object."""
        if not isinstance(given, Mapping) or len(given) <= len(cls.model_fields) + 1:
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        first = next(name for name in given if name not in known)
        return {name: value for name, value in given.items() if name in known or name == first}


BodyT = TypeVar("BodyT", bound=BaseModel)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Taken, and dropped: nothing is padded."""


class StructuredOutputs(Body):
    """vLLM's field for the form of an answer; exactly one of these."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str] | None, Field(fail_fast=True)] = None
    grammar: str | None = None
    json_object: bool | None = None

    def params(self) -> StructuredOutputsParams:
        """Raises ``RequestError``."""
        choice = None if self.choice is None else tuple(self.choice)
        return StructuredOutputsParams(
            self.json_, self.regex, choice, self.grammar, self.json_object
        )


class SamplingFields(Body):
    """What requests for chats and for completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    """Numbers by token id."""
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int] | None, Field(fail_fast=True)] = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    allowed_token_ids: Annotated[list[int] | None, Field(fail_fast=True)] = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None

    def sampling_params(self, **chosen: Any) -> SamplingParams:
        """How the answer is drawn. ``chosen``: fields of ``SamplingParams`` that this body names
        otherwise, or does not have; they hold over its own. Raises ``RequestError``.
        """
        values: dict[str, Any] = {}
        for field in _SAMPLING:
            value = getattr(self, field)
            if value is not None:
                values[field] = value
        if self.logit_bias is not None:
            values["logit_bias"] = {_token_id(key): v for key, v in self.logit_bias.items()}
        if self.structured_outputs is not None:
            values["structured_outputs"] = self.structured_outputs.params()
        return SamplingParams(**(values | chosen))


_SAMPLING = (
    "n",
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "allowed_token_ids",
    "skip_special_tokens",
    "prompt_logprobs",
)


class FunctionTool(Body):
    """A function that the model may call. ``parameters``: a JSON schema of an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionTool


class FunctionName(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"]
    function: FunctionName


class JsonSchema(Body):
    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(SamplingFields):
    """The body of ``/v1/chat/completions``. ``messages`` are read by ``ml4core.serving.chat``,
    which names the message and the part that is at fault.
    """

    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    tools: Annotated[list[Tool] | None, Field(fail_fast=True)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    """Taken if it says what is so anyway: true, unless the last message is continued."""


def read_body(kind: type[BodyT], given: object) -> BodyT:
    """A body of decoded JSON. Raises ``RequestError`` that names the first field at fault."""
    if not isinstance(given, Mapping):
        raise RequestError("body", given, "a JSON object")
    known = {name: value for name, value in given.items() if name not in NO_EFFECT}
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        raise _refusal(kind, error, known) from error


def _refusal(
    kind: type[BaseModel], error: ValidationError, given: Mapping[str, Any]
) -> RequestError:
    problems = error.errors(include_url=False)
    of_first = [p for p in problems if p["loc"][0] == problems[0]["loc"][0]]
    # Of a field that may be of several types, the one that the value comes nearest to.
    problem = max(of_first, key=lambda p: len(p["loc"]))
    place = _place(problem["loc"], given)
    name = field_path(place)
    if problem["type"] == "extra_forbidden":
        return RequestError(name, "unknown", f"one of {', '.join(_names(kind, place))}")
    if problem["type"] == "missing":
        return RequestError(name, "missing", "a value: it has no default")
    works = problem["msg"].removeprefix("Input should be ")
    return RequestError(name, shown(problem["input"]), works)


def _place(location: Sequence[str | int], given: Any) -> list[str | int]:
    """A location without the names of types, which stand in it where there was a choice of them."""
    place: list[str | int] = []
    at: Any = given
    for part in location:
        if isinstance(at, Mapping) and (part in at or part is location[-1]):
            at = at.get(part)
        elif isinstance(at, list) and isinstance(part, int):
            at = at[part]
        else:
            continue
        place.append(part)
    return place


def _names(kind: type[BaseModel], place: Sequence[Any]) -> list[str]:
    """The fields of the object that a place is in."""
    nested: dict[str, dict[str, type[BaseModel]]] = {
        "tools": {"function": FunctionTool, "": Tool},
        "tool_choice": {"function": FunctionName, "": NamedToolChoice},
        "response_format": {"json_schema": JsonSchema, "": ResponseFormat},
        "stream_options": {"": StreamOptions},
        "structured_outputs": {"": StructuredOutputs},
    }
    if len(place) == 1:
        return sorted(kind.model_fields)
    inner = nested.get(place[0], {})
    deeper = next((model for name, model in inner.items() if name and name in place[1:-1]), None)
    model = deeper or inner.get("", kind)
    return sorted(field.alias or name for name, field in model.model_fields.items())


def field_path(place: Sequence[str | int]) -> str:
    """``tools[0].function.name`` of ("tools", 0, "function", "name")."""
    path = ""
    for part in place:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _token_id(key: str) -> int:
    if not key.isdecimal() or len(key) > 10:
        raise RequestError("logit_bias", key, "token ids, 0 or above, as keys")
    return int(key)
