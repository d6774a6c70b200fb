"""The schema at `/openapi.json`: what requests may hold, with the limits of this server.

A few rules cannot be stated by a JSON schema, such as the number of tokens of a text. Errors of these have a code of `UNSTATED`.
"""

from typing import Any

from .grammar import UNSUPPORTED
from .schema import FILLED, MOST_CHOICES
from .serving import Server
from .tools import tool_format

UNSTATED = frozenset(
    {
        "context_length_exceeded",  # a text or a chat has too many tokens
        "invalid_messages",  # the chat template refuses these messages or its arguments, or a call has no arguments in JSON
        "invalid_prompt",  # the tokenizer refuses a text
        "invalid_stop",  # a stop string has a special token and other text, or there are too many ends
        "invalid_tools",  # two have the same name
        "too_many_sequences",  # prompts times `n`
        "unknown_tool",
        UNSUPPORTED,
    }
)


def limited(schema: dict[str, Any], server: Server) -> dict[str, Any]:
    """Add a server's limits to FastAPI's schema, which is changed."""
    models, batch, settings = schema["components"]["schemas"], server.batch, server.settings
    spec, preparer = batch.specs[0], server.preparer
    for name in ("CompletionRequest", "ChatRequest", "TokenizeRequest"):
        _one_of(models[name], "model", settings.name)
        if "messages" in models[name]["properties"]:
            _list(models[name]["properties"]["messages"])["maxItems"] = settings.max_messages
    for name in ("CompletionRequest", "ChatRequest"):
        fields = models[name]["properties"]
        for field, most in (
            ("max_tokens", spec.new_tokens),
            ("max_completion_tokens", spec.new_tokens),
            ("n", min(MOST_CHOICES, server.most)),
            ("top_logprobs" if name == "ChatRequest" else "logprobs", batch.most_tops),
        ):
            if field in fields:
                _number(fields[field])["maximum"] = most
        _list(fields["stop_token_ids"])["maxItems"] = preparer.most_ends
        for field, neutral in {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0}.items():
            if field not in batch.sampling:
                _sampled_without(models[name], field, neutral)
    ids, rows = (each for each in models["CompletionRequest"]["properties"]["prompt"]["anyOf"][2:])
    for each in (ids, rows["items"]):
        each["items"]["maximum"], each["maxItems"] = batch.engine.config.vocab_size - 1, spec.prompt_len
    chat = models["ChatRequest"]
    if server.sessions is None:
        _one_of(chat, "session")
    if not settings.reports:
        _one_of(chat, "cache_report", False)
    if tool_format(None if preparer.tokenizer is None else preparer.tokenizer.chat_template) is None:
        calling = {"properties": {"tools": FILLED.schema, "tool_choice": {"not": {"const": "none"}}}}
        chat["allOf"].append({"not": calling | {"required": ["tools"]}})
    return schema


def _one_of(model: dict[str, Any], field: str, *values: Any) -> None:
    model["properties"][field]["enum"] = [None, *values]


def _sampled_without(model: dict[str, Any], field: str, neutral: int) -> None:
    """State that a sampling option has no other value than the one without effect."""
    if field == "top_k":
        _number(model["properties"][field])["maximum"] = neutral
    elif field == "temperature":  # by default it is not neutral
        model["properties"][field]["enum"] = [neutral]
        model.setdefault("required", []).append(field)
    else:
        _one_of(model, field, neutral)


def _alternatives(field: dict[str, Any]) -> list[dict[str, Any]]:
    return field.get("anyOf", [field])


def _number(field: dict[str, Any]) -> dict[str, Any]:
    """The alternative of a field that is a number."""
    return next(each for each in _alternatives(field) if each.get("type") == "integer")


def _list(field: dict[str, Any]) -> dict[str, Any]:
    """The alternative of a field that is a list."""
    return next(each for each in _alternatives(field) if each.get("type") == "array")
