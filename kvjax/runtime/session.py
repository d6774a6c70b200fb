"""`Session`: a text or chat in a compressed cache, for many questions about it or for a conversation."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax._util import interrupts
from kvjax._util.arguments import amount, short, shown
from kvjax.conversion import turns
from kvjax.models import Params
from kvjax.models.sharding import bytes_per_device, get_mesh, get_shard, mesh_of
from kvjax.policies import Policy, PolicyError, get_policy
from kvjax.runtime import decoding
from kvjax.runtime.engine import Engine, blocks
from kvjax.runtime.exclusive import Exclusive, alone
from kvjax.runtime.generation import STREAM_STEPS, Reply
from kvjax.runtime.prompts import (
    Message,
    PromptLike,
    Question,
    check_message,
    check_messages,
    for_chat,
    question_ids,
    token_ids,
)
from kvjax.runtime.request import Request, SessionOptions, check_params, check_request, row_seeds
from kvjax.runtime.row import Row

PIECE = 128
"""Tokens processed per call of the compiled loop."""

ENDLESS = 2**29 - 1
"""Tokens after the prompt of a session without an end: as many as 32-bit positions count, when sizes are rounded up."""


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
        begun: for a chat, the given beginning of that answer, which ends at that index.
    """

    state: decoding.Decoding
    ids: list[int]
    read: int
    prompt: int
    at_once: int
    messages: list[Message]
    answer: int | None
    begun: str = ""


@dataclasses.dataclass(frozen=True)
class _Given:
    """What is appended before an answer.

    Attributes:
        tokens: the tokens.
        messages: for a chat, its messages with the user's.
        replaced: number of last tokens that are dropped first.
    """

    tokens: Sequence[int]
    messages: list[Message] | None = None
    replaced: int = 0


class Session:
    """A cached prompt that can be queried, continued and forked.

        session = kvjax.Session(params, document, policy="snapkv", budget=1024)
        answers = session.ask(["Who calls himself Ishmael?", "Where does he go?"])  # each from a fork of the session
        session.generate(" And then")                                               # continues the session itself
        for piece in session.stream(" And then"): ...                               # the same, piece by piece

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
        prompt: text, token ids or chat messages, as for `kvjax.generate`, with at least two tokens.
        policy, budget: as for `kvjax.generate`. Fractions refer to prompt + `max_new_tokens`.
        max_new_tokens: maximum number of tokens after the prompt, given and sampled together. Where they are used up,
            an answer ends with `stop_reason` "length". With LongRoPE, prompt and new tokens together select the rotation
            for the whole session. None is a session without an end, for policies whose memory is bounded and which
            renumber positions (`PolicyInfo.positions` is "cache_rank"), such as `streaming_llm` and `treekv`.
        prefill_block: block size in tokens of chunked prefill, as for `kvjax.generate`. It is needed for `extend`.
        max_prompt_tokens: maximum length of the prompt including what `extend` adds; by default the prompt's length.
        stop: strings at which answers end, as for `kvjax.generate`, unless a method is given others. A stop string is
            not part of the answer's text, but the session has read its tokens.
        chat_template_kwargs: arguments of the chat template for all turns, as for `kvjax.generate`. With
            `continue_final_message`, `answer` continues the last message.
        mesh: devices to run on, as for `kvjax.Engine`. There is one sequence, so it is replicated along "data".

    Raises:
        ValueError: there is not exactly one prompt, it has fewer than two tokens, or an argument is out of range.
        PolicyError: the policy is unknown, does not support this budget or chunked prefill, or a session without an end.

    Example:
        >>> session = kvjax.Session(params, [5, 9, 2] * 16, "snapkv:16,window=8", max_new_tokens=16)
        >>> answers = session.ask([[7, 8], [9]], max_new_tokens=4)  # each from a fork of the session
        >>> [len(answer.tokens) for answer in answers], session.remaining
        ([4, 4], 16)
    """

    def __init__(
        self,
        params: Params,
        prompt: PromptLike,
        policy: str | Policy = "full",
        budget: int | float | None = None,
        max_new_tokens: int | None = 1000,
        *,
        prefill_block: int | None = None,
        max_prompt_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mesh: Mesh | str | None = None,
    ) -> None:
        check_params(params)
        check_request(params, 1, stop=stop)
        most = ENDLESS if max_new_tokens is None else amount("max_new_tokens", max_new_tokens)
        block = None if prefill_block is None else amount("prefill_block", prefill_block)
        longest = None if max_prompt_tokens is None else amount("max_prompt_tokens", max_prompt_tokens)
        if longest is not None and block is None:
            raise ValueError(
                f"max_prompt_tokens={longest}, but a prompt that grows needs chunked prefill; give prefill_block, such as 512"
            )
        policy = get_policy(policy, budget=budget).for_model(params.config)
        params, continued = for_chat(params, prompt, chat_template_kwargs)
        ids = list(token_ids(params, prompt, one=True, continued=continued)[0][0])
        messages, begun = _messages(prompt), ""
        if continued:
            *messages, last = messages
            begun = turns.text_of(last)
            if not params.tokenizer.decode(ids).endswith(begun):  # templates strip texts
                begun = begun.rstrip()
            if last["role"] != "assistant" or not messages:
                raise ValueError(
                    "continue_final_message=True, but a session continues only an assistant's message that answers another; "
                    "end the messages with one, or call kvjax.generate"
                )
        elif messages and messages[-1]["role"] != "user":
            ids = params.tokenizer.encode(turns.history(params.tokenizer, messages), add_special=False)
        if len(ids) < 2:
            raise ValueError("the prompt has one token; give one prompt of two tokens or more")
        if longest is not None and longest < len(ids):
            raise ValueError(
                f"the prompt has {len(ids)} tokens, more than max_prompt_tokens={longest}; give as many or more"
            )
        longest = len(ids) if longest is None else longest
        self._use = Exclusive()
        self._params, self._max_new_tokens, self._max_prompt_tokens, self._stop = params, most, longest, stop
        # One more, for the prompt's last token.
        mesh = mesh_of(params) if mesh is None else get_mesh(mesh)
        self._rows = get_shard(mesh, params.config).data
        sizes: dict[str, Any] = {"batch": self._rows, "prompt_len": longest - 1, "max_new_tokens": most + 1}
        self._engine = Engine(params, policy, **sizes, block=block, mesh=mesh)
        if max_new_tokens is None:
            _check_endless(self._engine, sizes, params)
        state, _ = self._engine.prefill([ids[:-1]] * self._rows, [longest + most - len(ids) + 1] * self._rows)
        asked = bool(begun) or (bool(messages) and messages[-1]["role"] == "user")
        answer = len(ids) if asked else None
        self._at = _Point(state, ids, len(ids) - 1, len(ids), len(ids) - 1, messages, answer, begun)

    @property
    def tokens(self) -> list[int]:
        """All tokens so far: prompt, given and sampled tokens."""
        return list(self._at.ids)

    @property
    def messages(self) -> list[Message]:
        """All messages of a chat so far. Tokens after the user's last message are the assistant's answer to it."""
        at = self._at
        if at.answer is None or (at.answer == len(at.ids) and not at.begun):
            return list(at.messages)
        text = at.begun + self._params.tokenizer.decode_after(at.ids[: at.answer], at.ids[at.answer :])
        return [*at.messages, {"role": "assistant", "content": text}]

    @property
    def remaining(self) -> int:
        """Number of tokens that can still be added; 0 if the session is over. A session without an end counts from 2^29."""
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

    def __copy__(self) -> "Session":
        return self.fork()  # a shallow copy would share the cache, which a session rewrites in place

    def __deepcopy__(self, memo: dict[int, Any]) -> "Session":
        return self.fork()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Session cannot be pickled: its compiled programs and its cache belong to this process. Keep `tokens` or "
            "`messages` and begin a new session with them, or keep the cache of a `kvjax.Engine` with `Engine.save`."
        )

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
        self, text: Question | None = None, max_new_tokens: int = 128, **options: Unpack[SessionOptions]
    ) -> Reply:
        """Append `text`, if it is given, and generate. Options are as for `kvjax.generate`.

        Args:
            text: text or token ids.
            max_new_tokens: maximum number of tokens to sample. There may be less room, see `remaining`: the reply then
                ends with `stop_reason` "length", and may be empty.
            options: sampling options of `kvjax.generate`, and `stop`. Stop strings cost a copy of the cache every few
                tokens.

        Raises:
            ValueError: as `read`, or an option is out of range.
            RuntimeError: the session is over, or in use by another thread.
        """
        request = self._request(max_new_tokens, options)
        self._append(self._text(text), request)
        return self._reply(request)

    @alone
    def chat(self, message: str | Sequence[Any], max_new_tokens: int = 128, **options: Unpack[SessionOptions]) -> Reply:
        """Answer the user's next message, in a session that began with chat messages.

        Only new tokens are processed, rendered by the chat template.

        Args:
            message: text, or a list of parts {"type": "text", "text": ...}.
            max_new_tokens, options: as for `generate`.

        Raises:
            ValueError: the session is not a chat, it is the assistant's turn, or as `generate`.
            RuntimeError: the session is over, or in use by another thread.
        """
        request = self._request(max_new_tokens, options)
        self._append(self._turn(message), request)
        return self._reply(request)

    @alone
    def answer(self, max_new_tokens: int = 128, **options: Unpack[SessionOptions]) -> Reply:
        """Answer the messages so far, or continue the answer that the session began with. Options are as for `generate`.

        Raises:
            ValueError: the last message is not the user's, or as `generate`.
            RuntimeError: the session is over, or in use by another thread.
        """
        if self._at.answer != len(self._at.ids):
            raise ValueError("there is no message of the user's to answer; use chat(message), or generate(text)")
        return self.generate(None, max_new_tokens, **options)

    @alone
    def stream(
        self, text: Question | None = None, max_new_tokens: int = 128, **options: Unpack[SessionOptions]
    ) -> Iterator[str]:
        """Answer piece by piece: `chat(text)` for a chat, otherwise `generate(text)`. Without `text`, continue from here.

        The arguments are checked at once. Each piece is generated when it is asked for, so a stream that is left ends the
        answer there, and the session continues from there. The iterator returns the `Reply`, as the value of `yield
        from`. Incomplete characters, and text that may begin a stop string, are withheld until they are certain.

        Args:
            text, max_new_tokens, options: as for `chat` or `generate`.

        Raises:
            ValueError: as `chat` or `generate`, or the model has no tokenizer.
            RuntimeError: the session is over, in use by another thread, or was used otherwise between two pieces.

        Example:
            >>> session = kvjax.Session(chat, "Call me Ishmael.", "streaming_llm:16", max_new_tokens=16)
            >>> pieces = list(session.stream(" And then", max_new_tokens=4))  # each as soon as it is decoded
            >>> session.remaining  # 9 given bytes and 4 sampled tokens are used
            3
        """
        request = self._request(max_new_tokens, options)
        if self._params.tokenizer is None:
            raise ValueError("this model has no tokenizer, so there is no text to stream; call generate with token ids")
        given = self._text(None) if text is None else self._turn(text) if self._at.messages else self._text(text)
        return self._pieces(given, request, self._at)

    def ask(
        self, questions: Sequence[Any], max_new_tokens: int = 128, **options: Unpack[SessionOptions]
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
        """Validate the options of an answer. It has at most as many tokens as there is room for.

        Raises:
            ValueError: an option is out of range.
            TypeError: an option is unknown.
        """
        known = list(SessionOptions.__annotations__)
        if unknown := [name for name in options if name not in known]:
            raise TypeError(f"{unknown[0]} is not an option of a session's answers; give some of {', '.join(known)}")
        given = dict(options)
        if given.get("stop") is None:
            given["stop"] = self._stop
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

    def _text(self, text: Question | None) -> _Given:
        """Text or token ids to append; None for nothing."""
        if text is None:
            return _Given([])
        (new,) = question_ids(self._params, text, None)
        self._check_fits(len(new), self.remaining)
        return _Given(new)

    def _turn(self, content: Any) -> _Given:
        """The user's next message to append."""
        messages = self.messages
        if not messages:
            raise ValueError("this session did not begin with chat messages; use generate(text)")
        if messages[-1]["role"] == "user":
            raise ValueError("the last message is the user's, so it is the assistant's turn; use answer()")
        said = {"role": "user", "content": content}
        check_message(said)
        tail = self._tail(messages, said)
        # The last token is not in the cache yet. If it is a sampled end token, the template's end token replaces it.
        sampled, first, ends = self._at.ids[-1], tail[:1], self._params.config.eos
        same = (sampled in ends and any(token in ends for token in first)) or (
            first == [sampled] and self._params.tokenizer.is_silent(sampled)
        )
        ended = int(self._at.answer is not None and self._at.answer < len(self._at.ids) and same)
        self._check_fits(len(tail) - ended, self.remaining)
        return _Given(tail, [*messages, said], ended)

    def _append(self, given: _Given, request: Request) -> None:
        if given.tokens:
            self._take_in(given.tokens, request, given.messages, given.replaced)

    def _take_in(
        self, new: Sequence[int], request: Request, messages: list[Message] | None = None, replaced: int = 0
    ) -> None:
        """Append tokens, and process all but the last piece. With `messages`, they end with the user's message.

        The last `replaced` tokens, which are not in the cache yet, are dropped first.
        """
        ids = [*self._at.ids[: len(self._at.ids) - replaced], *new]
        said = {} if messages is None else {"messages": messages, "answer": len(ids), "begun": ""}
        self._at = dataclasses.replace(self._at, ids=ids, **said)
        while len(ids) - self._at.read > PIECE:  # the last piece is processed together with sampling
            self._run(1, request)

    def _reply(self, request: Request) -> Reply:
        """Sample from the current position."""
        row = self._row(request)
        while self._wants_more(row):
            self._run(min(row.request.max_new_tokens - len(row.tokens), _steps(request)), request, row)
        return Reply(row.text(), row.tokens, row.logprobs, row.stop_reason or "length")

    def _pieces(self, given: _Given, request: Request, at: _Point) -> Iterator[str]:
        """See `stream`. `at` is the point at which it begins."""
        row, text = None, None
        while row is None or self._wants_more(row):
            with self._use.for_long() as free:
                self._check(free)
                if self._at is not at:
                    raise RuntimeError(
                        "this session was used between two pieces of a stream; finish the stream first, or stream from a session.fork()"
                    )
                if row is None:
                    self._append(given, request)
                    row = self._row(request, streamed=True)
                    text = row.growing
                if self._wants_more(row):
                    count = min(row.request.max_new_tokens - len(row.tokens), STREAM_STEPS)
                    self._run(count, request, row)
                at = self._at
            if text and (piece := text.take()):
                yield piece
        if text and (rest := text.rest()):
            yield rest
        return Reply(row.text(), row.tokens, row.logprobs, row.stop_reason or "length")

    def _row(self, request: Request, streamed: bool = False) -> Row:
        """The answer from the current position, with as many tokens as there is room for."""
        request = dataclasses.replace(request, max_new_tokens=min(request.max_new_tokens, self.remaining))
        row = Row(self._at.ids, [], self._params.tokenizer, request)
        if streamed or request.stop:
            row.watch()
        return row

    def _wants_more(self, row: Row) -> bool:
        return row.stop_reason is None and len(row.tokens) < row.request.max_new_tokens

    def _run(self, count: int, request: Request, row: Row | None = None) -> None:
        """Process one piece. If it is the last, also sample up to `count` tokens, which are appended to `row`.

        Where `row` ends at a stop string, before the last sampled token, the session goes back to before the piece: the
        tokens up to the stop string are then processed again with what follows.
        """
        at = self._at
        piece = at.ids[at.read :][:PIECE]
        last = at.read + len(piece) == len(at.ids)
        copy = jax.tree.map(jnp.copy, at.state) if last and request.stop else None
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
                new, scores = (np.asarray(found)[0, :sampled].tolist() for found in (tokens, logprobs))
                read += len(new) - 1
            if copy is not None and row is not None:
                self._at, before = dataclasses.replace(at, state=copy), len(row.tokens)
                row.extend(new, scores)
                kept = len(row.tokens) - before
                if kept < len(new):
                    self._at = dataclasses.replace(self._at, ids=at.ids + new[:kept])
                    return
            self._at = dataclasses.replace(at, state=state, ids=at.ids + new, read=read)
        if copy is None and row is not None:
            row.extend(new, scores)


def _steps(request: Request) -> int:
    """Tokens to sample before the host looks for stop strings."""
    return STREAM_STEPS if request.stop else decoding.CHUNK


def _check_endless(engine: Engine, sizes: Mapping[str, Any], params: Params) -> None:
    """Raise `PolicyError` unless a session may go on without an end.

    Args:
        engine: the session's engine.
        sizes: its sizes.
        params: the model.
    """
    name, reason = engine.policy.info.name, None
    positions = {layer.policy.info.positions for layer in engine.layers}
    shorter = Engine(params, engine.policy, **{**sizes, "max_new_tokens": ENDLESS // 2}, mesh=engine.mesh)
    if params.config.rope_changes_after is not None:
        reason = "this model's rotation depends on the number of tokens"
    elif positions != {"cache_rank"}:
        some = "cache_rank" in positions
        which = "some layers, such as those of sliding windows, leave" if some else f"{name} leaves"
        reason = f"{which} tokens at their positions in the text, which outgrow those that the model was trained on"
    elif shorter.cache_bytes != engine.cache_bytes or shorter.host_cache_bytes != engine.host_cache_bytes:
        reason = f"the cache of {name} grows with the number of tokens"
    if reason is not None:
        raise PolicyError(
            f"max_new_tokens=None, a session without an end, but {reason}; give a number of tokens, or a policy such as streaming_llm or "
            "treekv with a budget in tokens"
        )


def _messages(prompt: Any) -> list[Message]:
    chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    return list(prompt) if chat else []
