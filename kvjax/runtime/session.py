"""`Session`: a text or chat in a compressed cache, for many questions about it or for a conversation."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax._util import interrupts
from kvjax._util.arguments import amount, short, shown
from kvjax.conversion import turns
from kvjax.models import Params
from kvjax.models.sharding import bytes_per_device, get_mesh, get_shard, mesh_of
from kvjax.policies import Policy, get_policy
from kvjax.runtime import decoding
from kvjax.runtime.engine import Engine, blocks
from kvjax.runtime.exclusive import Exclusive, alone
from kvjax.runtime.generation import Reply
from kvjax.runtime.prompts import Message, PromptLike, Question, check_message, check_messages, question_ids, token_ids
from kvjax.runtime.request import Request, SamplingOptions, check_params, check_request, row_seeds
from kvjax.runtime.row import StopReason

PIECE = 128
"""Tokens processed per call of the compiled loop."""


@dataclasses.dataclass(frozen=True)
class _Point:
    """Position of a session. It is replaced as a whole, so that its parts stay consistent after an interruption.

    Attributes:
        state: decoding state with `ids[:read]` in its caches.
        ids: all tokens so far. At least one is not in the caches yet; it is processed when the next token is sampled.
        read: number of tokens in the caches.
        prompt: number of prompt tokens, including those added by `extend`.
        at_once: number of tokens that were prefilled. Each of the others took a decode step.
        messages: for a chat, its complete messages.
        answer: for a chat, index in `ids` where the assistant's answer to the last message begins; None if that message
            is not the user's.
    """

    state: decoding.Decoding
    ids: list[int]
    read: int
    prompt: int
    at_once: int
    messages: list[Message]
    answer: int | None


class Session:
    """A cached prompt that can be queried, continued and forked.

        session = kvjax.Session(params, document, policy="snapkv", budget=1024)
        answers = session.ask(["Who calls himself Ishmael?", "Where does he go?"])  # each from a fork of the session
        session.generate(" And then")                                               # continues the session itself

    Policies that compress only the prompt, such as `snapkv`, keep every later token. Their cache has room for all
    `max_new_tokens` from the beginning, in addition to the budget. With a budget of 64 and 1000 new tokens it has 1088
    slots per head, as `max_new_tokens` + 1 is rounded up to 2^n or 1.5 × 2^n. Policies that compress while decoding,
    such as `treekv`, need no such room. `cache_bytes` reports the allocated size.

    Tokens after the prompt are processed one by one, after the prompt is compressed (question-agnostic compression). To
    let a question influence what is kept, put it at the end of the prompt. The prompt's last token is processed after
    compression too.

    A session does one thing at a time. Give each thread a fork. After Ctrl-C or an error, a session continues from
    where it stopped: `tokens`, `remaining` and `messages` include any accepted text, and `generate()` continues from
    it. A session that was interrupted while its cache was being rewritten is over, and raises an error on further use.

    Args:
        params: a model from `kvjax.load`.
        prompt: text, token ids or chat messages with at least two tokens.
        policy, budget: as for `kvjax.generate`. Fractions refer to prompt + `max_new_tokens`.
        max_new_tokens: maximum number of tokens after the prompt, given and sampled together. With LongRoPE, prompt and
            new tokens together select the rotation for the whole session.
        prefill_block: block size in tokens of chunked prefill, as for `kvjax.generate`. It is needed for `extend`.
        max_prompt_tokens: maximum length of the prompt including what `extend` adds; by default the prompt's length.
        mesh: devices to run on, as for `kvjax.Engine`. There is one sequence, so it is replicated along "data".

    Raises:
        ValueError: there is not exactly one prompt, it has fewer than two tokens, or an argument is out of range.
        PolicyError: the policy is unknown, does not support this budget, or does not support chunked prefill.
    """

    def __init__(
        self,
        params: Params,
        prompt: PromptLike,
        policy: str | Policy = "full",
        budget: int | float | None = None,
        max_new_tokens: int = 1000,
        *,
        prefill_block: int | None = None,
        max_prompt_tokens: int | None = None,
        mesh: Mesh | str | None = None,
    ) -> None:
        check_params(params)
        most = amount("max_new_tokens", max_new_tokens)
        block = None if prefill_block is None else amount("prefill_block", prefill_block)
        longest = None if max_prompt_tokens is None else amount("max_prompt_tokens", max_prompt_tokens)
        if longest is not None and block is None:
            raise ValueError(
                f"max_prompt_tokens={longest}, but a prompt that grows needs chunked prefill; give prefill_block, such as 512"
            )
        policy = get_policy(policy, budget=budget).for_model(params.config)
        ids = list(token_ids(params, prompt, one=True)[0][0])
        messages = _messages(prompt)
        if messages and messages[-1]["role"] != "user":
            ids = params.tokenizer.encode(turns.history(params.tokenizer, messages), add_special=False)
        if len(ids) < 2:
            raise ValueError("the prompt has one token; give one prompt of two tokens or more")
        if longest is not None and longest < len(ids):
            raise ValueError(
                f"the prompt has {len(ids)} tokens, more than max_prompt_tokens={longest}; give as many or more"
            )
        longest = len(ids) if longest is None else longest
        self._use = Exclusive()
        self._params, self._max_new_tokens, self._max_prompt_tokens = params, most, longest
        # One more, for the prompt's last token.
        mesh = mesh_of(params) if mesh is None else get_mesh(mesh)
        self._rows = get_shard(mesh, params.config).data
        sizes = {"batch": self._rows, "prompt_len": longest - 1, "max_new_tokens": most + 1}
        self._engine = Engine(params, policy, **sizes, block=block, mesh=mesh)
        state, _ = self._engine.prefill([ids[:-1]] * self._rows, [longest + most - len(ids) + 1] * self._rows)
        asked = bool(messages) and messages[-1]["role"] == "user"
        self._at = _Point(state, ids, len(ids) - 1, len(ids), len(ids) - 1, messages, len(ids) if asked else None)

    @property
    def tokens(self) -> list[int]:
        """All tokens so far: prompt, given and sampled tokens."""
        return list(self._at.ids)

    @property
    def messages(self) -> list[Message]:
        """All messages of a chat so far. Tokens after the user's last message are the assistant's answer to it."""
        at = self._at
        if at.answer is None or at.answer == len(at.ids):
            return list(at.messages)
        text = self._params.tokenizer.decode_after(at.ids[: at.answer], at.ids[at.answer :])
        return [*at.messages, {"role": "assistant", "content": text}]

    @property
    def remaining(self) -> int:
        """Number of tokens that can still be added; 0 if the session is over."""
        return 0 if self._over else self._max_new_tokens - (len(self._at.ids) - self._at.prompt)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on each device."""
        return 0 if self._over else bytes_per_device(self._at.state.caches)

    @property
    def compile_seconds(self) -> float:
        """Compile time so far in seconds, for this session and its forks."""
        return self._engine.compile_seconds

    def __repr__(self) -> str:
        """Model, policy and progress, in a few lines."""
        config = self._params.config
        return (
            f"Session({config.family} of {config.num_layers} layers, {self._params.dtype.name},\n"
            f"  policy={short(self._engine.policy, 300)},\n"
            f"  {len(self._at.ids)} tokens, room for {self.remaining}, cache of {self.cache_bytes} bytes{', over' * self._over})"
        )

    def fork(self) -> "Session":
        """Copy the session, including its cache. Both continue independently."""
        with self._use.for_a_moment() as free:
            self._check(free)
            other = object.__new__(Session)
            other.__dict__.update(self.__dict__, _use=Exclusive())
            other._at = dataclasses.replace(self._at, state=jax.tree.map(jnp.copy, self._at.state))
            return other

    @alone
    def read(self, text: Question) -> None:
        """Append text or token ids to the cache.

        Raises:
            ValueError: the text is empty, of an unknown kind, or longer than `remaining`.
            RuntimeError: the session is over, or in use by another thread.
        """
        (new,) = question_ids(self._params, text, None)
        self._check_fits(len(new), self.remaining)
        self._take_in(new, check_request(self._params, 1))

    @alone
    def extend(self, text: Question) -> None:
        """Append text or token ids to the prompt by chunked prefill. The session needs `prefill_block`.

        After each block the policy chooses again from the block and what was kept. A text that arrives in pieces can
        have up to `max_prompt_tokens` tokens.

        Raises:
            ValueError: the text is empty, of an unknown kind, or too long, or the session has no `prefill_block`.
            RuntimeError: the session is over, or in use by another thread.
        """
        if not self._engine.block:
            raise ValueError(
                "this session's prompt was prefilled whole; begin the session with prefill_block, such as 512"
            )
        (new,) = question_ids(self._params, text, None)
        at, room = self._at, self._max_prompt_tokens - self._at.prompt
        if len(new) > room:
            raise ValueError(
                f"{len(new)} tokens are more than the prompt has room for, {room}; begin a session with larger max_prompt_tokens"
            )
        ids = [*at.ids, *new]
        self._at = dataclasses.replace(at, ids=ids, prompt=at.prompt + len(new))
        for part in blocks([ids[at.read : -1]], self._engine.block):
            at = self._at
            total = self._max_prompt_tokens + self._max_new_tokens
            read = self._engine.extending(at.state, part * self._rows, [total] * self._rows)
            with interrupts.held_back():
                state, _ = read()
                count = len(part[0])
                self._at = dataclasses.replace(at, state=state, read=at.read + count, at_once=at.at_once + count)

    @alone
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
        stop: Sequence[str] | None = None,
    ) -> Reply:
        """Append `text`, if it is given, and generate. Options are as for `kvjax.generate`.

        Stop strings are not implemented, so `stop` has to be None or empty.

        Raises:
            ValueError: as `read`, or an option is out of range.
            RuntimeError: the session is over, or in use by another thread.
        """
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
        request = self._request(max_new_tokens, {**options, "ignore_eos": ignore_eos, "stop": stop})
        self._check_fits(request.max_new_tokens, self.remaining)
        if text is not None:
            (new,) = question_ids(self._params, text, None)
            self._check_fits(len(new), self.remaining - request.max_new_tokens)
            self._take_in(new, request)
        return self._sample(request)

    @alone
    def chat(self, message: str, max_new_tokens: int = 128, **options: Unpack[SamplingOptions]) -> Reply:
        """Answer the user's next message, in a session that began with chat messages.

        Only new tokens are processed, rendered by the chat template.

        Raises:
            ValueError: the session is not a chat, it is the assistant's turn, or as `generate`.
            RuntimeError: the session is over, or in use by another thread.
        """
        messages = self.messages
        if not messages:
            raise ValueError("this session did not begin with chat messages; use generate(text)")
        if messages[-1]["role"] == "user":
            raise ValueError("the last message is the user's, so it is the assistant's turn; use answer()")
        said = {"role": "user", "content": message}
        check_message(said)
        request = self._request(max_new_tokens, options)
        self._check_fits(request.max_new_tokens, self.remaining)
        tail = self._tail(messages, said)
        ends, sampled = self._params.config.eos, self._at.ids[-1]
        # The last token is not in the cache yet. If it is a sampled end token, the template's end token replaces it.
        ended = self._at.answer is not None and sampled in ends and any(token in ends for token in tail[:1])
        self._check_fits(len(tail) - ended, self.remaining - request.max_new_tokens)
        self._take_in(tail, request, [*messages, said], replaced=int(ended))
        return self._sample(request)

    @alone
    def answer(self, max_new_tokens: int = 128, **options: Unpack[SamplingOptions]) -> Reply:
        """Answer the messages so far. Options are as for `generate`.

        Raises:
            ValueError: the last message is not the user's, or as `generate`.
            RuntimeError: the session is over, or in use by another thread.
        """
        messages = self.messages
        if not messages or messages[-1]["role"] != "user":
            raise ValueError("there is no message of the user's to answer; use chat(message), or generate(text)")
        return self.generate(None, max_new_tokens, **options)

    def ask(
        self, questions: Sequence[Any], max_new_tokens: int = 128, **options: Unpack[SamplingOptions]
    ) -> list[Reply]:
        """Answer each question from its own fork. The session does not change.

        Args:
            questions: user messages for a chat; otherwise text or token ids.
            max_new_tokens: maximum number of tokens per answer.
            options: as for `generate`.

        Returns:
            One reply per question.

        Raises:
            ValueError: `questions` is not a list, or as `generate`.
            RuntimeError: the session is over, or in use by another thread.
        """
        if isinstance(questions, str | bytes) or not isinstance(questions, Iterable):
            raise ValueError(f"questions is {shown(questions)}; give a list of questions")
        questions = list(questions)
        self._request(max_new_tokens, options)
        if self._at.messages:
            check_messages([{"role": "user", "content": question} for question in questions], "question")
            return [self.fork().chat(question, max_new_tokens, **options) for question in questions]
        read = question_ids(self._params, questions, len(questions))
        return [self.fork().generate(question, max_new_tokens, **options) for question in read]

    @property
    def _over(self) -> bool:
        """Whether the cache is lost, because a program that reuses its memory was interrupted."""
        with self._use.for_a_moment() as free:  # another thread is about to store the new cache
            return free and any(leaf.is_deleted() for leaf in jax.tree.leaves(self._at.state))

    def _check(self, free: bool) -> None:
        if not free:
            raise RuntimeError(
                "this session is in use by another thread, and does one thing at a time; give each thread a session.fork() of its own"
            )
        if self._over:
            raise RuntimeError(
                "this session is over: it was interrupted while its cache was being rewritten; begin another one, for example "
                "from its tokens: kvjax.Session(params, session.tokens, ...)"
            )

    def _request(self, max_new_tokens: int, options: Mapping[str, Any]) -> Request:
        """Validate the options of an answer.

        Raises:
            ValueError: an option is out of range, or there are stop strings.
            TypeError: an option is unknown.
        """
        given = dict(options)
        stop = given.pop("stop", None)
        if stop is not None and (isinstance(stop, str) or not isinstance(stop, Sequence) or len(stop)):
            raise ValueError(
                f"stop={short(stop)}, but a session's answers end only at the model's end tokens; omit stop, or pass it to "
                "kvjax.generate"
            )
        known = SamplingOptions.__annotations__
        if unknown := [name for name in given if name not in known]:
            raise TypeError(f"{unknown[0]} is not an option of a session's answers; give some of {', '.join(known)}")
        return check_request(self._params, max_new_tokens, **given)

    def _check_fits(self, count: int, remaining: int) -> None:
        if count > remaining:
            raise ValueError(
                f"{count} tokens are more than the session has room for, {remaining}; begin one with larger max_new_tokens"
            )

    def _tail(self, messages: list[Message], message: Message) -> list[int]:
        """Tokens that the template adds for one more message, up to the assistant's answer."""
        tokenizer = self._params.tokenizer
        try:
            if self._at.answer is None:  # the end of its last message is already in the prompt
                text = turns.next_turn(tokenizer, messages, message)
            else:
                text = turns.following(tokenizer, [*messages, message], len(messages) - 1)
        except ValueError as error:
            raise ValueError(f"{error}; use generate(text)") from error
        return tokenizer.encode(text, add_special=False)

    def _take_in(
        self, new: Sequence[int], request: Request, messages: list[Message] | None = None, replaced: int = 0
    ) -> None:
        """Append tokens, and process all but the last piece. With `messages`, they end with the user's message.

        The last `replaced` tokens, which are not in the cache yet, are dropped first.
        """
        ids = [*self._at.ids[: len(self._at.ids) - replaced], *new]
        said = {} if messages is None else {"messages": messages, "answer": len(ids)}
        self._at = dataclasses.replace(self._at, ids=ids, **said)
        while len(ids) - self._at.read > PIECE:  # the last piece is processed together with sampling
            self._run(1, request)

    def _sample(self, request: Request) -> Reply:
        """Sample from the current position."""
        given, tokens, logprobs, ends = self._at.ids, [], [], request.eos
        while len(tokens) < request.max_new_tokens and not (tokens and tokens[-1] in ends):
            logprobs += self._run(min(request.max_new_tokens - len(tokens), decoding.CHUNK), request)
            tokens = self._at.ids[len(given) :]
        tokenizer = self._params.tokenizer
        reason: StopReason = "eos" if tokens[-1] in ends else "length"
        text = None if tokenizer is None else tokenizer.decode_after(given, tokens)
        return Reply(text, tokens, logprobs, reason)

    def _run(self, count: int, request: Request) -> list[float]:
        """Process one piece. If it is the last, also sample up to `count` tokens. Returns the samples' log-probabilities."""
        at = self._at
        piece = at.ids[at.read :][:PIECE]
        last = at.read + len(piece) == len(at.ids)
        state = dataclasses.replace(at.state, seed=jnp.asarray(row_seeds(request.seed, [0] * self._rows), jnp.uint32))
        # Compile outside of the critical section, as it takes long and may be interrupted.
        pieces, count = [piece] * self._rows, count if last else 1
        answer = self._engine.answering(state, pieces, count, request.sampler, request.eos, size=PIECE)
        with interrupts.held_back():
            state, tokens, logprobs = answer()
            steps = at.read - at.at_once + len(piece)  # steps up to the last given token
            sampled = int(state.steps) - steps + 1
            read, new, scores = at.read + len(piece), [], []
            if last:
                new, scores = (np.asarray(row)[0, :sampled].tolist() for row in (tokens, logprobs))
                read += len(new) - 1
            self._at = dataclasses.replace(at, state=state, ids=at.ids + new, read=read)
        return scores


def _messages(prompt: Any) -> list[Message]:
    chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    return list(prompt) if chat else []
