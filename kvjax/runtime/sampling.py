"""Samplers: choose the next token from logits, on the device.

A sampler is a small pytree whose numbers are leaves, so another temperature does not recompile the program. A filter
that is None is not part of the program.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from kvjax._util.arguments import number, whole
from kvjax._util.randomness import categorical, random_key

_GREEDY_BELOW = 1e-6
"""Temperatures below this value are treated as 0, as logits divided by them can overflow float32."""

OPTIONS = "temperature", "top_k", "top_p", "min_p"
"""Numbers that a `Sampling` may have."""

_MOST = jnp.iinfo(jnp.int32).max


class Sampler(Protocol):
    """Samples one token per row. With `seed` and `pos`, a row's sample does not depend on the rest of the batch.

    Example:
        >>> def second(logits, seed, pos):  # a sampler of one's own: the second most likely token
        ...     return jnp.argsort(logits, axis=-1)[:, -2].astype(jnp.int32)
        >>> second(jnp.asarray([[0.1, 0.7, 0.2]]), jnp.zeros(1, jnp.uint32), jnp.zeros(1, jnp.int32)).tolist()
        [2]
    """

    def __call__(
        self, logits: Float[Array, "B V"], seed: UInt32[Array, " B"], pos: Int[Array, " B"]
    ) -> Int[Array, " B"]: ...


class RequestSampler:
    """Base of the samplers of requests: what their prompts need, besides a function of logits.

    Class attributes:
        on_host: whether the host chooses what the next step may sample. Each decode call is then a single step.
    """

    on_host: ClassVar[bool] = False

    @property
    def is_own(self) -> bool:
        """Whether the sampler is the user's, instead of one of numbers, which may differ between the rows of a batch."""
        return False

    @property
    def filters(self) -> tuple[str, ...]:
        """Names of the numbers that the sampler has, among `OPTIONS`."""
        return ()

    def check_prompts(self, count: int, shards: int) -> None:
        """Raise `ValueError` unless the sampler is for `count` prompts, in a batch that is sharded over `shards` devices."""

    def group(self, given: int) -> Any:
        """Return what the prompts of one batch have in common.

        Args:
            given: tokens of a prompt that are processed one by one before the first is sampled.
        """
        return tuple(jax.tree.leaves(jax.tree.map(float, self))), jax.tree.structure(self)

    def for_step(self, numbers: Sequence[int | None], tokens: Sequence[Sequence[int]], vocabulary: int) -> Sampler:
        """Return the sampler of the next decode call.

        Args:
            numbers: index of each row's prompt; None for a row that samples nothing that counts.
            tokens: what each row has sampled so far.
            vocabulary: V.
        """
        sampler: Any = self
        return sampler


@flax.struct.dataclass
class Greedy(RequestSampler):
    """Choose the most likely token. Ties go to the lowest id.

    Example:
        >>> from kvjax.runtime.sampling import Greedy
        >>> logits, seed, pos = jnp.asarray([[0.1, 0.7, 0.2]]), jnp.zeros(1, jnp.uint32), jnp.zeros(1, jnp.int32)
        >>> Greedy()(logits, seed, pos).tolist()
        [1]
    """

    def __call__(
        self, logits: Float[Array, "B V"], seed: UInt32[Array, " B"], pos: Int[Array, " B"]
    ) -> Int[Array, " B"]:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@flax.struct.dataclass
class Sampling(RequestSampler):
    """Sample from softmax(logits / temperature), filtered in this order.

    Each number is one for all rows, or one for each row, [B]. A row whose temperature is 0 is greedy.

    Attributes:
        temperature: 0 or more.
        top_k: keep the k most likely tokens, and ties with the k-th.
        top_p: keep the smallest set of most likely tokens with at least this probability (Holtzman et al. 2020).
        min_p: keep tokens with at least this fraction of the highest probability (Nguyen et al. 2024).
        scaled: whether log-probabilities of sampled tokens are those of logits / temperature.

    Example:
        >>> from kvjax.runtime.sampling import Sampling
        >>> logits, seed, pos = jnp.asarray([[0.1, 0.7, 0.2]] * 2), jnp.arange(2, dtype="uint32"), jnp.zeros(2, jnp.int32)
        >>> sampler = Sampling(jnp.asarray([0.0, 0.8]), top_k=jnp.asarray(1))  # a greedy row, and one with a temperature
        >>> sampler(logits, seed, pos).tolist()  # only the most likely token is left
        [1, 1]
    """

    temperature: Float[Array, "..."]
    top_k: Int[Array, "..."] | None = None
    top_p: Float[Array, "..."] | None = None
    min_p: Float[Array, "..."] | None = None
    scaled: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def is_own(self) -> bool:
        return self.scaled

    @property
    def filters(self) -> tuple[str, ...]:
        return tuple(name for name in OPTIONS if getattr(self, name) is not None)

    def __call__(
        self, logits: Float[Array, "B V"], seed: UInt32[Array, " B"], pos: Int[Array, " B"]
    ) -> Int[Array, " B"]:
        greedy, temperature = Greedy()(logits, seed, pos), jnp.broadcast_to(self.temperature, seed.shape)
        logits = self.tempered(logits)
        for limit, keep in ((self.top_k, _top_k), (self.top_p, _top_p), (self.min_p, _min_p)):
            if limit is not None:
                logits = jnp.where(keep(logits, jnp.broadcast_to(limit, seed.shape)[:, None]), logits, -jnp.inf)

        def sample(logits: Float[Array, " V"], seed: Array, pos: Array) -> Int[Array, ""]:
            return categorical(jax.random.fold_in(random_key(seed), pos), logits)

        return jnp.where(temperature > 0, jax.vmap(sample)(logits, seed, pos).astype(jnp.int32), greedy)

    def tempered(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Logits divided by the temperature; unchanged in greedy rows."""
        temperature = jnp.broadcast_to(self.temperature, logits.shape[:1])
        return logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]


@flax.struct.dataclass
class Own(RequestSampler):
    """A sampler of the user's, for all prompts.

    Attributes:
        sampler: a callable pytree.

    Example:
        >>> from kvjax.runtime.sampling import Own
        >>> def second(logits, seed, pos):  # the second most likely token
        ...     return jnp.argsort(logits, axis=-1)[:, -2].astype(jnp.int32)
        >>> Own(jax.tree_util.Partial(second)).is_own
        True
    """

    sampler: Any

    @property
    def is_own(self) -> bool:
        return True

    def __call__(
        self, logits: Float[Array, "B V"], seed: UInt32[Array, " B"], pos: Int[Array, " B"]
    ) -> Int[Array, " B"]:
        return self.sampler(logits, seed, pos)

    def group(self, given: int) -> Any:
        return ()


@flax.struct.dataclass
class Masked:
    """Sample from the tokens that a bitmask allows.

    The bitmask is an argument of the program. A row whose bits are all set samples as without a bitmask, bit for bit.

    Attributes:
        sampler: samples from the allowed tokens; the logits of the others are -inf.
        allowed: bit i of number j of a row is 1 if token 32 j + i is allowed. W = ceil(V / 32).

    Example:
        >>> from kvjax.runtime.sampling import Greedy, Masked
        >>> logits, allowed = jnp.asarray([[0.1, 0.7, 0.2]]), jnp.asarray([[0b101]], jnp.uint32)  # tokens 0 and 2
        >>> Masked(Greedy(), allowed)(logits, jnp.zeros(1, jnp.uint32), jnp.zeros(1, jnp.int32)).tolist()
        [2]
    """

    sampler: Sampler
    allowed: UInt32[Array, "B W"]

    def __call__(
        self, logits: Float[Array, "B V"], seed: UInt32[Array, " B"], pos: Int[Array, " B"]
    ) -> Int[Array, " B"]:
        bits = self.allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
        allowed = bits.reshape(bits.shape[0], -1)[:, : logits.shape[-1]] > 0
        return self.sampler(jnp.where(allowed, logits, -jnp.inf), seed, pos)


Grammar = Callable[[Sequence[int]], Any]
"""Returns the tokens that may follow those that a row has sampled so far, as bits: whole numbers of 32 bits, as `Masked.allowed`. Missing numbers at the end are 0. It is called once before each token."""


@dataclasses.dataclass(frozen=True)
class Constrained(RequestSampler):
    """Restrict the tokens of each prompt by a grammar, which runs on the host between two steps.

    Each decode call is then a single step. `kvjax.generate` passes the bits to its programs, see `Masked`.

    Attributes:
        grammars: one per prompt; None for prompts without.
        sampler: samples from the allowed tokens.

    Example:
        >>> from kvjax.runtime.sampling import Constrained
        >>> def even(tokens):  # bits of the tokens that may follow
        ...     return np.full(2, 0x55555555, np.uint32)
        >>> result = kvjax.generate(params, [5, 9, 2] * 16, max_new_tokens=4, sampler=Constrained([even]))
        >>> all(token % 2 == 0 for token in result.tokens)
        True
    """

    on_host: ClassVar[bool] = True

    grammars: Sequence[Grammar | None]
    sampler: Any = Greedy()  # noqa: RUF009 - has no fields

    @property
    def is_own(self) -> bool:
        return True

    def check_prompts(self, count: int, shards: int) -> None:
        if len(self.grammars) != count:
            raise ValueError(
                f"sampler has {len(self.grammars)} grammars, but there are {count} prompts; give one grammar, or None, for each"
            )
        if shards > 1:
            raise ValueError(
                f"sampler has grammars, but the mesh shards the batch over {shards} devices; give a mesh without 'data'"
            )

    def group(self, given: int) -> Any:
        return given  # rows of a batch sample at the same steps

    def for_step(self, numbers: Sequence[int | None], tokens: Sequence[Sequence[int]], vocabulary: int) -> Masked:
        """Return the sampler of the next decode call, see `RequestSampler.for_step`.

        Raises:
            ValueError: a grammar returned something else than bits, or allows no token of the vocabulary.
        """
        width = -(-vocabulary // 32)
        bits = np.full((len(numbers), width), 0xFFFFFFFF, np.uint32)
        for row, i, sampled in zip(bits, numbers, tokens, strict=True):
            if i is not None and (grammar := self.grammars[i]) is not None:
                row[:] = checked_bits(grammar(sampled), vocabulary, f"the grammar of prompt {i + 1}")
        return Masked(self.sampler, jnp.asarray(bits))


def checked_bits(given: Any, vocabulary: int, name: str) -> np.ndarray:
    """The bits that a grammar has returned, as `Masked.allowed` has them for one row, [W].

    Args:
        given: the bits.
        vocabulary: V.
        name: what the grammar is called in messages.

    Raises:
        ValueError: these are no bits, or they allow no token of the vocabulary.

    Example:
        >>> from kvjax.runtime.sampling import checked_bits
        >>> checked_bits(np.asarray([0b1010, 0], np.uint32), 64, "grammar").tolist()  # tokens 1 and 3 of 64
        [10, 0]
    """
    found, width = np.asarray(given), -(-vocabulary // 32)
    if found.ndim != 1 or str(found.dtype) not in ("uint32", "int32") or len(found) > width:
        raise ValueError(
            f"{name} returned {found.dtype}{list(found.shape)}; return up to {width} numbers of 32 bits, uint32 or int32, "
            "with one bit per token"
        )
    bits = np.zeros(width, np.uint32)
    bits[: len(found)] = found.view(np.uint32)
    if vocabulary % 32:
        bits[-1] &= np.uint32((1 << vocabulary % 32) - 1)
    if not bits.any():
        raise ValueError(f"{name} allows no token; let a finished text go on with the model's end tokens")
    return bits


def make_sampler(
    temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> Greedy | Sampling:
    """Build a sampler from plain numbers. A temperature below 0.000001 is greedy.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> from kvjax.runtime.sampling import make_sampler
        >>> make_sampler(), make_sampler(temperature=0.5, top_p=0.9).filters
        (Greedy(), ('temperature', 'top_p'))
    """
    temperature = number("temperature", temperature, lambda t: t >= 0, "0 (greedy) or more")
    top_k = None if top_k is None else min(whole("top_k", top_k, 1), _MOST)
    if top_p is not None:
        top_p = number("top_p", top_p, lambda p: 0 < p <= 1, "a number above 0, up to 1")
    if min_p is not None:
        min_p = number("min_p", min_p, lambda p: 0 <= p <= 1, "a number from 0 to 1")
    if temperature < _GREEDY_BELOW:
        return Greedy()
    return Sampling(
        temperature=jnp.asarray(min(temperature, float(jnp.finfo(jnp.float32).max)), jnp.float32),
        top_k=None if top_k is None else jnp.asarray(top_k, jnp.int32),
        top_p=None if top_p is None else jnp.asarray(top_p, jnp.float32),
        min_p=None if min_p is None else jnp.asarray(min_p, jnp.float32),
    )


def _top_k(logits: Float[Array, "B V"], k: Int[Array, "B 1"]) -> Bool[Array, "B V"]:
    def enough(kept: Bool[Array, "B V"]) -> Bool[Array, "B 1"]:
        return jnp.sum(kept, axis=-1, keepdims=True, dtype=jnp.int32) >= k

    return _largest(logits, k < logits.shape[-1], enough)


def _top_p(logits: Float[Array, "B V"], p: Float[Array, "B 1"]) -> Bool[Array, "B V"]:
    probs = jax.nn.softmax(logits, axis=-1)

    def enough(kept: Bool[Array, "B V"]) -> Bool[Array, "B 1"]:
        return jnp.sum(jnp.where(kept, probs, 0.0), axis=-1, keepdims=True) >= p

    return _largest(logits, p < 1, enough)


def _largest(
    logits: Float[Array, "B V"],
    limited: Bool[Array, "B 1"],
    enough: Callable[[Bool[Array, "B V"]], Bool[Array, "B 1"]],
) -> Bool[Array, "B V"]:
    """Keep the largest logits of each row, as few as are `enough`, and ties with the smallest of them.

    The smallest logit to keep is found bit by bit, the highest bit first, as floats have the order of their bits. That takes
    32 passes over the logits. A sort takes seven times as long, or more (CPU, 128,256 logits in each of 64 rows).

    Args:
        logits: float32.
        limited: rows to filter. The others keep all. If no row is limited, there is no pass.
        enough: whether kept logits are enough. If some are, then so are more.
    """
    rows = logits.shape[0]

    def bit(i: Array, found: UInt32[Array, "B 1"]) -> UInt32[Array, "B 1"]:
        tried = found | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(logits >= _float(tried)), tried, found)

    passes = jnp.where(jnp.any(limited), 32, 0)
    found = jax.lax.fori_loop(0, passes, bit, jnp.zeros((rows, 1), jnp.uint32))
    return (logits >= _float(jnp.maximum(found, _LOWEST))) | ~limited


_LOWEST = np.uint32(0x007FFFFF)
"""Number of minus infinity, see `_float`."""


def _float(number: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """The float32 whose place in the order of floats is `number`. Numbers below `_LOWEST` are of no number (NaN)."""
    sign = jnp.uint32(1 << 31)
    return jax.lax.bitcast_convert_type(jnp.where(number >= sign, number ^ sign, ~number), jnp.float32)


def _min_p(logits: Float[Array, "B V"], p: Float[Array, "B 1"]) -> Bool[Array, "B V"]:
    probs = jax.nn.softmax(logits, axis=-1)
    return probs >= p * jnp.max(probs, axis=-1, keepdims=True)
