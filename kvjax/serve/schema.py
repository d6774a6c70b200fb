"""What requests may hold. Fields that the server does not support are refused by name, unless they have no effect."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from kvjax.runtime.top_tokens import MOST as MOST_TOPS

MOST_CHOICES = 128
"""Maximum of `n`."""

MOST_STOPS = 16
"""Maximum number of stop strings."""


MOST_TOOLS = 128
"""Maximum number of tools."""


MOST_LEVELS = 64
"""Maximum depth of objects and lists with any content."""


class Strict(BaseModel):
    """A JSON object without other fields than those below."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _only(*values: Any) -> AfterValidator:
    """Accept values of a field that is not supported only where they have no effect."""

    def check(value: Any) -> Any:
        if value is not None and value not in values:
            raise ValueError(f"not supported; {'omit it' if not values else f'omit it or send {values[0]!r}'}")
        return value

    return AfterValidator(check)


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

Positive = Annotated[int, Field(ge=1, le=2**30)]
TopCount = Annotated[int, Field(ge=0, le=MOST_TOPS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
Item = TypeVar("Item")
Listed = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first wrong item is the only one that is reported, as there may be millions."""


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = None


class Sampled(Strict):
    """Fields of all requests that sample tokens."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Listed[TokenId] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    # Fields without support.
    frequency_penalty: Annotated[float | None, _only(0)] = None
    presence_penalty: Annotated[float | None, _only(0)] = None
    logit_bias: Annotated[dict[str, float] | None, _only({})] = None


class CompletionRequest(Sampled):
    """A request to `/v1/completions`."""

    prompt: str | Listed[str] | Listed[TokenId] | Listed[Listed[TokenId]]
    logprobs: TopCount | None = None
    echo: Annotated[bool | None, _only(False)] = None
    best_of: Annotated[int | None, _only(1)] = None
    suffix: Annotated[str | None, _only("")] = None


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
    index: int | None = None


class Message(Strict):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    # Answers have these fields, and clients send them back.
    refusal: Annotated[str | None, _only()] = None
    annotations: Annotated[list[Any] | None, _only([])] = None
    audio: Annotated[Any, _only()] = None
    function_call: Annotated[Any, _only()] = None


class JsonSchema(Strict):
    """A JSON schema, with a name that has no effect."""

    name: str
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[Free | None, Field(alias="schema")] = None


class ResponseFormat(Strict):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_of_text(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None if it is free."""
        if self.type == "text":
            return None
        return (self.json_schema.schema_ if self.json_schema else None) or {"type": "object"}

    @model_validator(mode="after")
    def _complete(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema and the type json_schema belong together")
        return self


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


class ChatRequest(Sampled):
    """A request to `/v1/chat/completions`."""

    messages: Annotated[Listed[Message], Field(min_length=1)]
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
            description="Save the conversation at the end: `new`, or the id of a session, which these messages continue.",
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

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Listed[Message], Field(min_length=1)] | None = None
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
