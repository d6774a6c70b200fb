"""What requests may hold. Fields that the server does not support are refused by name, unless they have no effect."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import core_schema

from kvjax.runtime.top_tokens import MOST as MOST_TOPS

from .errors import APIError

MOST_CHOICES = 128
"""Maximum of `n`."""

MOST_STOPS = 16
"""Maximum number of stop strings."""


MOST_TOOLS = 128
"""Maximum number of tools."""


MOST_LEVELS = 64
"""Maximum depth of objects and lists with any content."""


@dataclasses.dataclass(frozen=True)
class Only:
    """Accepts values of a field that is not supported only where they have no effect.

    Attributes:
        values: those values, besides null.
    """

    values: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """As pydantic asks for it: values are checked after their type."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        """As pydantic asks for it."""
        return {"enum": [None, *self.values]}

    def _check(self, value: Any) -> Any:
        if value is not None and value not in self.values:
            raise ValueError(f"not supported; {f'omit it or send {self.values[0]!r}' if self.values else 'omit it'}")
        return value


@dataclasses.dataclass(frozen=True)
class Value:
    """Some values of a field.

    Attributes:
        schema: JSON schema of these values.
        has: whether a value is one of them.
    """

    schema: dict[str, Any]
    has: Callable[[Any], bool]


GIVEN = Value({"not": {"type": "null"}}, lambda value: value is not None)
YES = Value({"const": True}, lambda value: value is True)
NO = Value({"const": False}, lambda value: value is False)
SEVERAL = Value({"type": "integer", "minimum": 2}, lambda value: value is not None and value > 1)
SOME = Value({"type": "integer", "minimum": 1}, lambda value: bool(value))
FILLED = Value({"type": ["array", "string"], "minItems": 1, "minLength": 1}, bool)
UNFILLED = Value({"anyOf": [{"type": "null"}, {"const": []}]}, lambda value: not value)


def but(value: Value) -> Value:
    """All other values, which include a field that is missing."""
    return Value({"not": value.schema}, lambda given: not value.has(given))


@dataclasses.dataclass(frozen=True)
class Refused:
    """Values of several fields that are refused together.

    Attributes:
        values: the values, by field.
        message: what to do instead.
        param: the field that errors name; by default the first one.
    """

    values: dict[str, Value]
    message: str
    param: str | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of requests without this."""
        # A field that is missing has the value null, which `required` tells apart where null is not among the values.
        needed = [name for name, value in self.values.items() if not value.has(None)]
        found: dict[str, Any] = {"properties": {name: value.schema for name, value in self.values.items()}}
        return {"not": found | ({"required": needed} if needed else {})}

    def check(self, request: Any) -> None:
        """Raise `APIError` if a request has these values."""
        if all(value.has(getattr(request, name)) for name, value in self.values.items()):
            raise APIError(400, self.message, param=self.param or next(iter(self.values)))


class Strict(BaseModel):
    """A JSON object without other fields than those below, and without values that are refused together."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    refused: ClassVar[tuple[Refused, ...]] = ()

    @model_validator(mode="after")
    def _check_together(self) -> "Strict":
        for each in self.refused:
            each.check(self)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        """As pydantic asks for it."""
        found = handler.resolve_ref_schema(handler(core))
        if cls.refused:
            found["allOf"] = [each.schema for each in cls.refused]
        return found


def _shallow(value: Any) -> Any:
    """Refuse values that are nested deeply, as what reads them is recursive."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_LEVELS:
            raise ValueError(f"nested more than {MOST_LEVELS} levels deep; send less")
        parts = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = [each for part in parts for each in part]
    return value


Free = Annotated[dict[str, Any], AfterValidator(_shallow)]
"""A JSON object with any content."""


def _whole(value: Any) -> Any:
    """2 for 2.0, which is the same number in JSON."""
    return int(value) if type(value) is float and value.is_integer() else value


def _wholes(value: Any) -> Any:
    return list(map(_whole, value)) if isinstance(value, list) and float in set(map(type, value)) else value


WHOLE = BeforeValidator(_whole)
"""Of whole numbers. It comes last, as limits before it are then in the JSON schema."""

Positive = Annotated[int, Field(ge=1, le=2**30), WHOLE]
TopCount = Annotated[int, Field(ge=0, le=MOST_TOPS), WHOLE]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
Item = TypeVar("Item")
Listed = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first wrong item is the only one that is reported, as there may be millions."""


Several = Annotated[list[Item], Field(fail_fast=True, min_length=1)]
"""Such a list, which is not empty."""


TokenIds = Annotated[Several[TokenId], BeforeValidator(_wholes)]


class StreamOptions(Strict):
    """Options of a stream. Without one they have no effect, as whole answers have the usage."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, Only((False,))] = None


class Sampled(Strict):
    """Fields of all requests that sample tokens."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES), WHOLE] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[Listed[TokenId], BeforeValidator(_wholes)] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, WHOLE] | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    # Fields without support.
    frequency_penalty: Annotated[float | None, Only((0,))] = None
    presence_penalty: Annotated[float | None, Only((0,))] = None
    logit_bias: Annotated[dict[str, float] | None, Only(({},))] = None


class CompletionRequest(Sampled):
    """A request to `/v1/completions`."""

    prompt: Text | Several[Text] | TokenIds | Several[TokenIds]
    logprobs: TopCount | None = None
    echo: Annotated[bool | None, Only((False,))] = None
    best_of: Annotated[int | None, Only((1,)), WHOLE] = None
    suffix: Annotated[str | None, Only(("",))] = None


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """A function that was called, with its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call of a tool in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, WHOLE] | None = None


class Message(Strict):
    """A message of a chat."""

    refused = (
        Refused(
            {"content": but(GIVEN), "tool_calls": UNFILLED},
            "a message has no content; send some text",
            param="messages",
        ),
    )
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Several[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    # Answers have these fields, and clients send them back.
    refusal: Annotated[str | None, Only()] = None
    annotations: Annotated[list[Any] | None, Only(([],))] = None
    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only()] = None


class JsonSchema(Strict):
    """A JSON schema, with a name that has no effect."""

    name: str
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[Free | None, Field(alias="schema")] = None


class FreeText(Strict):
    """An answer without a form."""

    type: Literal["text"]
    schema_of_text: ClassVar[None] = None


class AnyObject(Strict):
    """An answer that is any JSON object."""

    type: Literal["json_object"]
    schema_of_text: ClassVar[dict[str, Any]] = {"type": "object"}


class OfSchema(Strict):
    """An answer that is JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema

    @property
    def schema_of_text(self) -> dict[str, Any]:
        """The schema."""
        return self.json_schema.schema_ or AnyObject.schema_of_text


ResponseFormat = Annotated[FreeText | AnyObject | OfSchema, Field(discriminator="type")]
"""The form of an answer."""


class Function(Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Free | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """The name of a function."""

    name: str


class NamedTool(Strict):
    """The function that the model must call."""

    type: Literal["function"]
    function: FunctionName


FORM = Value(
    {"type": "object", "properties": {"type": {"enum": ["json_object", "json_schema"]}}},
    lambda value: value is not None and value.schema_of_text is not None,
)
MUST_CALL = Value(
    {"anyOf": [{"const": "required"}, {"type": "object"}]}, lambda value: value not in (None, "auto", "none")
)
MAY_CALL = Value({"enum": [None, "auto"]}, lambda value: value in (None, "auto"))
STRICT = Value(
    {
        "type": "array",
        "contains": {"properties": {"function": {"required": ["strict"], "properties": {"strict": YES.schema}}}},
    },
    lambda value: any(tool.function.strict for tool in value or ()),
)
NO_GRAMMAR = "send tool_choice: required with it, or omit it"


class ChatRequest(Sampled):
    """A request to `/v1/chat/completions`."""

    refused = (
        Refused(
            {"top_logprobs": SOME, "logprobs": but(YES)}, "top_logprobs needs logprobs; send logprobs: true, or omit it"
        ),
        Refused({"cache_report": YES, "n": SEVERAL}, "cache_report and n > 1 are not supported together"),
        Refused(
            {"session": GIVEN, "n": SEVERAL},
            "n must be 1 with session, which continues from a single answer; send n: 1, or omit session",
            param="n",
        ),
        Refused({"response_format": FORM, "ignore_eos": YES}, "response_format and ignore_eos do not go together"),
        Refused({"response_format": FORM, "tools": FILLED}, "response_format and tools are not supported together"),
        Refused({"tool_choice": MUST_CALL, "ignore_eos": YES}, "tool_choice and ignore_eos do not go together"),
        Refused({"tool_choice": MUST_CALL, "tools": UNFILLED}, "tool_choice is given, but no tools are; send some"),
        Refused(
            {"parallel_tool_calls": NO, "tools": FILLED, "tool_choice": MAY_CALL},
            f"parallel_tool_calls: false is not supported here; {NO_GRAMMAR}",
        ),
        Refused({"tools": STRICT, "tool_choice": but(MUST_CALL)}, f"strict is not supported here; {NO_GRAMMAR}"),
    )
    messages: Several[Message]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    cache_report: Annotated[bool | None, Field(description="Report the cache's bytes and which tokens it keeps.")] = (
        None
    )
    session: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=64,
            description="Save the conversation at the end: `new`, or the id of a session, which these messages continue. "
            "A session has one answer to each request, so `n` must be 1.",
        ),
    ] = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Free | None = None

    @property
    def must_call(self) -> bool:
        """Whether the answer must call a tool."""
        return self.tool_choice not in (None, "auto", "none")


class TokenizeRequest(Strict):
    """A request to `/tokenize`."""

    refused = (
        Refused({"prompt": GIVEN, "messages": GIVEN}, "send prompt or messages, one of them"),
        Refused({"prompt": but(GIVEN), "messages": but(GIVEN)}, "send prompt or messages, one of them"),
        Refused(
            {"add_special_tokens": GIVEN, "messages": GIVEN},
            "messages have the special tokens of the template; omit add_special_tokens",
        ),
        Refused({"add_generation_prompt": GIVEN, "prompt": GIVEN}, "add_generation_prompt is for messages; omit it"),
        Refused({"chat_template_kwargs": GIVEN, "prompt": GIVEN}, "chat_template_kwargs is for messages; omit it"),
    )
    model: str | None = None
    prompt: str | None = None
    messages: Several[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Free | None = None


class ErrorFields(BaseModel):
    """What an error says."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error in OpenAI's format."""

    error: ErrorFields
