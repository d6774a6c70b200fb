"""From requests to jobs: prompts are tokenised and options are checked."""

import dataclasses
import functools
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.conversion import turns
from kvjax.conversion.tokenizer import Tokenizer
from kvjax.models import Params
from kvjax.runtime.batch import Batch, Begun, Job
from kvjax.runtime.growing_text import GrowingText
from kvjax.runtime.prompts import check_messages, for_chat, token_ids
from kvjax.runtime.request import Request, check_request, row_seeds

from .errors import APIError
from .grammar import UNSUPPORTED, Grammars, TextGrammar
from .parsing import Parsing
from .reasoning import is_open, thinks
from .schema import ChatRequest, CompletionRequest, Message, NamedTool, Sampled, TokenizeRequest
from .session_file import Conversation
from .sessions import Use
from .settings import Settings
from .tools import tool_format

COMPLETION_TOKENS = 16
"""Default `max_tokens` of `/v1/completions`, as OpenAI's."""

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt of a request, and the sequences that continue it.

    Attributes:
        ids: token ids.
        requests: options of each sequence.
        parsing: how the text of each is parsed.
        grammar: restricts the tokens of each; None if they are free.
        share: with whom states of the prompt may be shared, as `kvjax.runtime.batch.Job` has it.
        texts: the text of each token, if it is reported which of them are kept.
        saved: whether the conversation is saved at the end.
        tokenizer: by which rows end exactly at stop strings, if it is saved. Later tokens cannot be taken out of a cache.
        begun: the cache of the prompt's first tokens, if a saved conversation goes on.
        messages: the conversation so far, if it is saved.
        tops: how many of the most likely tokens of each step are reported.
    """

    ids: Sequence[int]
    requests: Sequence[Request]
    parsing: Parsing = Parsing()  # noqa: RUF009 - is frozen
    grammar: TextGrammar | None = None
    share: str | None = None
    texts: Sequence[str] | None = None
    saved: bool = False
    tokenizer: Tokenizer | None = None
    begun: Begun | None = None
    messages: Sequence[dict[str, Any]] = ()
    tops: int = 0

    @property
    def jobs(self) -> list[Job]:
        """A job for each sequence."""
        return [
            Job(
                self.ids,
                each.max_new_tokens,
                seed=each.seed,
                ends=each.ends,
                sampler=each.sampler,
                grammar=None if self.grammar is None else self.grammar.copy(),
                share=self.share,
                begun=self.begun,
                tops=self.tops,
                stop=self._stop_of(each),
            )
            for each in self.requests
        ]

    def _stop_of(self, request: Request) -> Callable[[int], bool] | None:
        if self.tokenizer is None or not request.stop:
            return None
        return GrowingText(self.tokenizer, self.ids, request.stop).push


class Preparer:
    """Makes jobs of requests. Its methods may run in any thread.

    Args:
        params: the model. Its weights are not used.
        batch: the batch that the jobs are for. Only its sizes are used.
        settings: limits.
    """

    def __init__(self, params: Params, batch: Batch, settings: Settings) -> None:
        self.params, self._settings = params, settings
        self.longest, self.most_new = batch.specs[0].prompt_len, batch.specs[0].new_tokens
        self._sampling, self._ends, self._masked = batch.sampling, batch.ends, batch.masked
        self.most_ends = max(batch.ends - len(params.config.eos), 0)
        self._most_tops = batch.most_tops
        self._characters = 0 if params.tokenizer is None else self.longest * _longest_token(params.tokenizer)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""
        return self.params.tokenizer

    def check_model(self, name: str | None) -> None:
        """Raise if a request names another model."""
        if name is not None and name != self._settings.name:
            raise APIError(
                404,
                f"the model {name!r} is not served here; the model is {self._settings.name!r}",
                param="model",
                code="model_not_found",
            )

    def check_count(self, request: Sampled, prompts: int, most: int) -> int:
        """Number of sequences of a request. Raises if the server can never run as many together."""
        count = prompts * (request.n or 1)
        if count > most:
            raise APIError(
                400,
                f"{count} sequences are asked for; this server takes at most {most} in a request",
                param="n",
                code="too_many_sequences",
            )
        return count

    def completion(self, request: CompletionRequest, client: str) -> list[Prompt]:
        """Prompts of a request to `/v1/completions` by a client, which an API key identifies."""
        prompts = listed(request.prompt)
        options = self._options(request, request.max_tokens or min(COMPLETION_TOKENS, self.most_new))
        found: list[Prompt] = []
        for prompt in prompts:
            self._check_size(prompt, "prompt")
            ids = self._ids(self.params, prompt, "prompt")
            found.append(self._prompt(request, ids, options, len(found) * (request.n or 1), client))
        return found

    def chat(self, request: ChatRequest, client: str, use: Use | None = None) -> Prompt:
        """Prompt of a request to `/v1/chat/completions` by a client, which may continue a saved conversation."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            said = "this model has no chat template; send a prompt to /v1/completions instead of messages"
            raise APIError(400, said, param="messages", code="invalid_messages")
        if use is not None:
            _check_session(request)
        arguments, kind = dict(request.chat_template_kwargs or {}), None
        if request.tools and request.tool_choice != "none":
            kind = tool_format(self.tokenizer.chat_template)
            if kind is None:
                raise APIError(
                    400, "the format in which this model calls tools is not known; omit tools", param="tools"
                )
            if "tools" in arguments:
                raise APIError(
                    400,
                    "chat_template_kwargs has tools, too; omit it there",
                    param="chat_template_kwargs",
                    code="invalid_messages",
                )
            names = [tool.function.name for tool in request.tools]
            if twice := {name for name in names if names.count(name) > 1}:
                said = f"tools: several are called {min(twice)!r}; give each a name of its own"
                raise APIError(400, said, param="tools", code="invalid_tools")
            arguments["tools"] = [tool.model_dump(exclude_none=True) for tool in request.tools]
        saved = None if use is None else use.load()
        if saved is None:
            ids = self.chat_ids(request.messages, arguments or None)
        else:
            ids = self._continued(saved[0], request.messages, arguments or None)
        parsing = Parsing(thinks(self.tokenizer), is_open(self.tokenizer, ids), kind)
        limits = [each for each in (request.max_completion_tokens, request.max_tokens) if each is not None]
        most = min(limits, default=self.most_new)
        prompt = self._prompt(request, ids, self._options(request, most), 0, client)
        prompt = dataclasses.replace(
            prompt, parsing=parsing, grammar=self._grammar(request, parsing), texts=self._texts_of(request, ids)
        )
        if use is None:
            return prompt
        said = [message.model_dump(exclude_none=True) for message in request.messages]
        messages, begun = ([*saved[0].messages, *said], saved[1]) if saved else (said, None)
        return dataclasses.replace(prompt, saved=True, tokenizer=self.tokenizer, messages=messages, begun=begun)

    def _continued(
        self, conversation: Conversation, messages: Sequence[Message], arguments: Mapping[str, Any] | None
    ) -> Sequence[int]:
        """Token ids of a saved conversation with further messages."""
        before = [_message(Message.model_validate(message)) for message in conversation.messages]
        new = [_message(message) for message in messages]
        for text in (text for message in new for text in _texts(message)):
            self._check_size(text, "messages")
        assert self.tokenizer is not None
        try:
            check_messages(new, "chat")
            tokenizer = self.tokenizer.for_chat(arguments)
            text = turns.following(tokenizer, [*before, *new], len(before) - 1)
        except ValueError as error:
            raise APIError(400, str(error), param="messages", code="invalid_messages") from None
        ids, tail = conversation.ids, tokenizer.encode(text, add_special=False)
        # The last token is in no cache yet. If it is a sampled end token, the template's end token replaces it.
        ends, last, first = self.params.config.eos, ids[-1], tail[:1]
        same = (last in ends and any(token in ends for token in first)) or (
            first == [last] and tokenizer.is_silent(last)
        )
        return [*(ids[:-1] if same else ids), *tail]

    def _texts_of(self, request: ChatRequest, ids: Sequence[int]) -> Sequence[str] | None:
        if not request.cache_report:
            return None
        if not self._settings.reports:
            raise APIError(
                400, "this server reports no caches; omit cache_report", param="cache_report", code="unsupported"
            )
        assert self.tokenizer is not None
        return [self.tokenizer.decode([token], skip_special=False) for token in ids]

    def _grammar(self, request: ChatRequest, parsing: Parsing) -> TextGrammar | None:
        schema = request.response_format and request.response_format.schema_of_text
        functions = self._functions(request)
        if schema is None and functions is None:
            return None
        field = "tool_choice" if schema is None else "response_format"
        if not self._masked:
            raise APIError(400, f"this server has no grammars; omit {field}", param=field)
        grammars = self.grammars
        if isinstance(grammars, str):
            raise APIError(400, f"this server has no grammars, since {grammars}; omit {field}", param=field)
        how = {"thoughts": parsing.thoughts, "opened": parsing.opened}
        if schema is not None:
            return grammars.json(schema, **how)
        assert functions is not None
        assert parsing.tools is not None
        return grammars.calls(parsing.tools, functions, several=request.parallel_tool_calls is not False, **how)

    def _functions(self, request: ChatRequest) -> dict[str, dict[str, Any] | None] | None:
        """The functions of which the answer must call one, with the schemas of their arguments; None if it need not."""
        found = {tool.function.name: tool.function.parameters for tool in request.tools or ()}
        for name, schema in found.items() if request.must_call else ():
            if (schema or {}).get("type", "object") != "object":
                raise APIError(
                    400, f"parameters of {name!r} are no object; send a schema of one", param="tools", code=UNSUPPORTED
                )
        if not request.must_call:
            return None
        if isinstance(request.tool_choice, NamedTool):
            name = request.tool_choice.function.name
            if name not in found:
                raise APIError(
                    400, f"tool_choice: no tool is called {name!r}", param="tool_choice", code="unknown_tool"
                )
            return {name: found[name]}
        return found

    @functools.cached_property
    def grammars(self) -> Grammars | str:
        """What makes grammars, or the reason if the model's tokenizer does not allow any. A large vocabulary takes a second."""
        if self.tokenizer is None:
            return "the model has no tokenizer"
        try:
            return Grammars(self.tokenizer, self.params.config.vocab_size, self.params.config.eos)
        except ValueError as error:
            reason = f"llguidance does not support the model's tokenizer ({str(error).splitlines()[0]})"
            log.warning("response_format and tool_choice: %s", reason)
            return reason

    def chat_ids(
        self, messages: Sequence[Message], arguments: Mapping[str, Any] | None, *, opened: bool = True
    ) -> Sequence[int]:
        """Token ids of a chat."""
        if len(messages) > self._settings.max_messages:
            most = self._settings.max_messages
            raise APIError(400, f"messages has {len(messages)}; this server takes at most {most}", param="messages")
        given = [_message(message) for message in messages]
        for text in (text for message in given for text in _texts(message)):
            self._check_size(text, "messages")
        params = self.params
        try:
            if not opened and params.tokenizer is not None:
                return params.tokenizer.chat(given, add_generation_prompt=False)
            params, continued = for_chat(params, given, arguments)
            return token_ids(params, given, one=True, continued=continued)[0][0]
        except ValueError as error:
            raise APIError(400, str(error), param="messages", code="invalid_messages") from None

    def tokenize(self, request: TokenizeRequest) -> Sequence[int]:
        """Token ids of a request to `/tokenize`."""
        if self.tokenizer is None:
            raise APIError(400, "this model has no tokenizer", param="prompt")
        if request.messages is not None:
            opened = request.add_generation_prompt is not False
            return self.chat_ids(request.messages, request.chat_template_kwargs, opened=opened)
        self._check_size(request.prompt or "", "prompt")
        try:
            return self.tokenizer.encode(request.prompt or "", add_special=request.add_special_tokens is not False)
        except ValueError as error:
            raise APIError(400, str(error), param="prompt", code="invalid_prompt") from None

    def _check_size(self, text: Any, name: str) -> None:
        """Raise if a text certainly has too many tokens. To tokenise it would take long."""
        if isinstance(text, str) and self.tokenizer is not None and len(text) > self._characters:
            raise APIError(
                400,
                f"a text has {len(text)} characters, which are more than the {self.longest} tokens that this server takes",
                param=name,
                code="context_length_exceeded",
            )

    def _ids(self, params: Params, prompt: Any, name: str) -> Sequence[int]:
        try:
            return token_ids(params, prompt, one=True)[0][0]
        except ValueError as error:
            raise APIError(400, str(error), param=name, code=f"invalid_{name}") from None

    def _options(self, request: Sampled, most: int) -> Request:
        """Options of the request's first sequence."""
        if most > self.most_new:
            raise APIError(
                400,
                f"max_tokens={most}, but this server generates at most {self.most_new} tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )
        given = {
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "top_k": request.top_k if request.top_k is not None and request.top_k > 0 else None,
            "top_p": request.top_p if request.top_p is not None and request.top_p < 1 else None,
            "min_p": request.min_p or None,
        }
        for name, value in given.items():
            if value and name not in self._sampling:
                have = ", ".join(sorted(self._sampling)) or "none, so send temperature=0"
                raise APIError(
                    400, f"this server samples without {name}; its options are: {have}", param=name, code="unsupported"
                )
        seed = secrets.randbits(32) if request.seed is None else request.seed
        try:
            options = check_request(
                self.params,
                most,
                **given,
                seed=seed,
                stop=request.stop or (),
                ignore_eos=bool(request.ignore_eos),
            )
        except ValueError as error:
            raise APIError(400, str(error), param="stop", code="invalid_stop") from None
        given_ends = request.stop_token_ids or ()
        if len(given_ends) > self.most_ends:
            raise APIError(
                400, f"stop_token_ids has {len(given_ends)}; send at most {self.most_ends}", param="stop_token_ids"
            )
        ends = (*options.stop_ids, *given_ends)
        # Arrays of the host are cheaper to pass on than those of the device.
        sampler = jax.tree.map(np.asarray, options.sampler)
        options = dataclasses.replace(options, stop_ids=tuple(dict.fromkeys(ends)), sampler=sampler)
        if len(options.ends) > self._ends:
            raise APIError(
                400,
                f"{len(options.ends)} tokens would end the text, with those of the model; at most {self._ends} can",
                param="stop",
                code="invalid_stop",
            )
        return options

    def _prompt(
        self, request: CompletionRequest | ChatRequest, ids: Sequence[int], options: Request, first: int, client: str
    ) -> Prompt:
        if len(ids) > self.longest:
            raise APIError(
                400,
                f"the prompt has {len(ids)} tokens; this server takes at most {self.longest}, and generates up to {self.most_new}",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
                code="context_length_exceeded",
            )
        tops, name = request.logprobs or 0, "logprobs"
        if isinstance(request, ChatRequest):
            tops, name = request.top_logprobs or 0, "top_logprobs"
        if tops > self._most_tops:
            most = self._most_tops
            raise APIError(400, f"{name}={tops}, but this server reports at most {most} tokens", param=name)
        seeds = row_seeds(options.seed, range(first, first + (request.n or 1)))
        requests = [dataclasses.replace(options, seed=seed) for seed in seeds]
        return Prompt(ids, requests, share=f"{client} {request.cache_salt or ''}", tops=tops)


def listed(prompt: Any) -> list[Any]:
    """The prompts of a request to `/v1/completions`, of which there may be one or a list."""
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return list(prompt) if several else [prompt]


def _longest_token(tokenizer: Tokenizer) -> int:
    """Number of characters of the longest token."""
    return max(map(len, tokenizer.backend.get_vocab(with_added_tokens=True)), default=1)


def _check_session(request: ChatRequest) -> None:
    """Raise unless the answer can be saved as the end of a conversation."""
    if request.messages[-1].role not in ("user", "tool"):
        raise APIError(
            400, "with session, the last message must be of a user or a tool", param="messages", code="invalid_messages"
        )


def _texts(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message."""
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _message(message: Message) -> dict[str, Any]:
    """A message as templates take it."""
    fields = {"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"}
    found = message.model_dump(exclude_none=True, include=fields)
    if found["role"] == "developer":
        found["role"] = "system"
    for i, call in enumerate(found.get("tool_calls", ())):
        call.pop("index", None)
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise APIError(
                400,
                f"tool_calls[{i}].function.arguments is no JSON object; send one as text",
                param="messages",
                code="invalid_messages",
            )
        call["function"]["arguments"] = arguments  # templates write it as JSON themselves
    return found
