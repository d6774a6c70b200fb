"""A text or a conversation that stays in a compressed cache: read it once, then ask many questions, or go on turn by turn."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decoding
from kvjax.cache import layer_specs
from kvjax.generation import StopReason, continued
from kvjax.models import Params
from kvjax.policies import Policy, get_policy
from kvjax.prompts import Message, Prompt, Question, question_ids, token_ids
from kvjax.sampling import make_sampler

PIECE = 128
"""Tokens that are read in one call of the compiled loop."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a session wrote.

    Attributes:
        text: without special tokens; None for a model without tokenizer.
        tokens: ids, the end token included if one was drawn.
        logprobs: each token's log-probability under the model, before temperature and filters.
        stop_reason: "eos" or "length".
    """

    text: str | None
    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason


class Session:
    """A cache that has read a prompt, and reads and writes on.

        session = kvjax.Session(params, document, policy="snapkv", budget=1024)
        answers = session.ask(["Who calls himself Ishmael?", "Where does he go?"])  # each from a fork; the session stays as it is
        session.generate(" And then")                                               # this one goes on

    What follows the prompt is read token by token, as in decoding: what is kept of the prompt was chosen without knowing it. To let
    a question choose, put it at the prompt's end. The prompt's last token is read after compression too.

    Args:
        params: a model, from `kvjax.load`.
        prompt: text, token ids or chat messages, of two tokens or more.
        policy, budget: as for `generate`; fractions are of prompt + room.
        room: most tokens that may follow the prompt, read and drawn together.

    Attributes:
        messages: of a chat, all so far.

    Raises:
        ValueError: the prompt is not one prompt of two tokens or more, or `room` is less than 1.
        PolicyError: the policy is unknown, or cannot work with this budget.
    """

    def __init__(
        self,
        params: Params,
        prompt: Prompt,
        policy: str | Policy = "full",
        budget: int | float | None = None,
        room: int = 1024,
    ) -> None:
        ids, single, self.messages = *token_ids(params, prompt), _messages(prompt)
        if self.messages and self.messages[-1]["role"] != "user":
            ids = [params.tokenizer.chat(self.messages, add_generation_prompt=False)]
        if not single or len(ids[0]) < 2:
            raise ValueError(
                f"{len(ids)} prompts, the first of {len(ids[0])} tokens; give one prompt of two tokens or more"
            )
        if room < 1:
            raise ValueError(f"room={room}; give 1 or more")
        self._params, self._ids, self._unread = params, ids[0], ids[0][-1:]
        self._left = room
        self._policy = get_policy(policy, budget=budget).bind(params.config)
        self._policy.check(len(ids[0]) + room)
        # One more for the token that is held back.
        self._specs = layer_specs(params.config, 1, len(ids[0]) - 1, room + 1, params.dtype)
        prompts, ends = decoding.padded([ids[0][:-1]]), jnp.zeros((0,), jnp.int32)
        seed = jnp.zeros((1,), jnp.uint32)
        self._state, _ = decoding.prefill(self._policy, self._specs, params, *prompts, seed, make_sampler(), ends)

    @property
    def tokens(self) -> list[int]:
        """All tokens so far: the prompt, what was read, and what was drawn."""
        return list(self._ids)

    @property
    def room(self) -> int:
        """Tokens that may still follow."""
        return self._left

    @property
    def cache_bytes(self) -> int:
        """Bytes that the cache holds."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._state.caches))

    def fork(self) -> "Session":
        """A session that goes its own way from here; the cache is copied."""
        other = object.__new__(Session)
        other.__dict__.update(self.__dict__)
        other._state = jax.tree.map(jnp.copy, self._state)
        other._ids, other.messages = list(self._ids), list(self.messages)
        return other

    def read(self, text: Question) -> None:
        """Read text or token ids into the cache.

        Raises:
            ValueError: it is empty, of no known kind, or longer than there is room for.
        """
        (new,) = question_ids(self._params, text, None)
        self._take(len(new))
        self._ids += new
        self._unread = self._unread + new
        while len(self._unread) > PIECE:  # the rest waits: the token after it is drawn as it is read
            self._run(self._unread[:PIECE], 1, make_sampler(), ())
            self._unread = self._unread[PIECE:]

    def generate(
        self,
        text: Question | None = None,
        max_new_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int = 0,
        ignore_eos: bool = False,
    ) -> Reply:
        """Read `text`, if there is any, and go on from there; options as for `kvjax.generate`.

        Raises:
            ValueError: as `read`, or an option is out of range.
        """
        sampler = make_sampler(temperature, top_k, top_p, min_p)
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens}; give 1 or more")
        self._take(max_new_tokens)
        if text is not None:
            try:
                self.read(text)
            except ValueError:
                self._left += max_new_tokens
                raise
        ends = () if ignore_eos else self._params.config.eos
        given, tokens, logprobs = self._ids, [], []
        self._state = dataclasses.replace(self._state, seed=jnp.asarray([seed % 2**32], jnp.uint32))
        while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in ends):
            count = min(max_new_tokens - len(tokens), decoding.CHUNK)
            new, scores = self._run(self._unread, count, sampler, ends)
            self._unread = new[-1:]
            tokens += new
            logprobs += scores
        self._left += max_new_tokens - len(tokens)
        self._ids = given + tokens
        reason: StopReason = "eos" if tokens[-1] in ends else "length"
        tokenizer = self._params.tokenizer
        shown = None if tokenizer is None else continued(tokenizer.decode, given, tokens)
        return Reply(shown, tokens, logprobs, reason)

    def say(self, message: str, max_new_tokens: int = 128, **options: Any) -> Reply:
        """The assistant's answer to the user's next message, of a session that began with chat messages.

        Only what is new is read, in the form that the chat template gives it.

        Raises:
            ValueError: the session is no chat, it is the assistant's turn, or as `generate`.
        """
        if not self.messages:
            raise ValueError("this session did not begin with chat messages; use generate(text)")
        if self.messages[-1]["role"] == "user":
            raise ValueError("the last message is the user's, so it is the assistant's turn; use answer()")
        tail = self._tail({"role": "user", "content": message})
        if (
            self.messages[-1]["role"] == "assistant"
            and tail[:1] == self._unread
            and self._unread[0] in self._params.config.eos
        ):
            tail = tail[1:]  # the end token that the assistant drew already
        if tail:
            self.read(tail)
        self.messages.append({"role": "user", "content": message})
        return self.answer(max_new_tokens, **options)

    def answer(self, max_new_tokens: int = 128, **options: Any) -> Reply:
        """The assistant's answer to the messages so far; options as for `generate`.

        Raises:
            ValueError: the last message is not the user's, or as `generate`.
        """
        if not self.messages or self.messages[-1]["role"] != "user":
            raise ValueError("there is no message of the user's to answer; use say(message), or generate(text)")
        reply = self.generate(None, max_new_tokens, **options)
        self.messages.append({"role": "assistant", "content": reply.text})
        return reply

    def ask(self, questions: Sequence[Any], max_new_tokens: int = 128, **options: Any) -> list[Reply]:
        """An answer to each question, each from a fork of the session as it is now.

        Args:
            questions: messages of a chat; else text or token ids.
            options: as for `generate`.
        """
        forks = ((self.fork(), question) for question in questions)
        if self.messages:
            return [fork.say(question, max_new_tokens, **options) for fork, question in forks]
        return [fork.generate(question, max_new_tokens, **options) for fork, question in forks]

    def _tail(self, message: Message) -> list[int]:
        """What the template puts behind the last message, and this one, up to the assistant's answer."""
        mark = "\N{OBJECT REPLACEMENT CHARACTER}"
        before = [*self.messages[:-1], {**self.messages[-1], "content": mark}]
        tokenizer = self._params.tokenizer
        if self.messages[-1]["role"] == "assistant":
            text = tokenizer.render([*before, message]).rpartition(mark)[2]
        else:  # the prompt, which was read as far as its last message's end
            text, read = tokenizer.render([*before, message]), tokenizer.render(before, add_generation_prompt=False)
            if not text.startswith(read):
                raise ValueError(
                    "this model's chat template changes earlier messages when one is added; use generate(text)"
                )
            text = text[len(read) :]
        return tokenizer.encode(text, add_special=False)

    def _take(self, count: int) -> None:
        if count > self._left:
            raise ValueError(
                f"{count} tokens are more than the session's room for {self._left}; begin one with a larger room"
            )
        self._left -= count

    def _run(
        self, given: Sequence[int], count: int, sampler: Any, ends: Sequence[int]
    ) -> tuple[list[int], list[float]]:
        """Read tokens, then draw up to `count`."""
        read = np.zeros((1, PIECE), np.int32)
        read[0, : len(given)] = given
        lengths, before = jnp.asarray([len(given)], jnp.int32), int(self._state.steps)
        arrays = jnp.asarray(read), lengths, jnp.asarray(count, jnp.int32), sampler, jnp.asarray(ends, jnp.int32)
        self._state, tokens, logprobs = decoding.answer(self._policy, self._specs, self._params, self._state, *arrays)
        drawn = int(self._state.steps) - before - len(given) + 1
        return np.asarray(tokens)[0, :drawn].tolist(), np.asarray(logprobs)[0, :drawn].tolist()


def _messages(prompt: Any) -> list[Message]:
    chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], dict)
    return list(prompt) if chat else []
