"""Options of a continuation, validated in one place for `generate`, `stream`, sessions and servers."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax._util.arguments import amount, plain, short, shown, whole
from kvjax.conversion.tokenizer import Tokenizer
from kvjax.models import Params
from kvjax.runtime.prompts import refuse_rows
from kvjax.runtime.sampling import Constrained, Own, RequestSampler, make_sampler


class SamplingOptions(TypedDict, total=False):
    """Sampling options; see `kvjax.generate`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int
    ignore_eos: bool


class SessionOptions(SamplingOptions, total=False):
    """Options of a session's answers."""

    stop: str | Sequence[str] | None


class RequestOptions(SamplingOptions, total=False):
    """Options of `kvjax.stream`."""

    stop: str | Sequence[str]
    sampler: Any


class GenerateOptions(RequestOptions, total=False):
    """Options of `kvjax.generate`."""

    prefill_block: int | None
    chat_template_kwargs: Mapping[str, Any] | None
    mesh: Mesh | str | None
    progress: Callable[[int, int], Any] | None
    return_state: bool
    room: int


class ListOptions(TypedDict, total=False):
    """Options of `kvjax.generate` and `kvjax.iterate` for a list of prompts: one value, or one for each prompt."""

    temperature: float | Sequence[float]
    top_k: int | Sequence[int | None] | None
    top_p: float | Sequence[float | None] | None
    min_p: float | Sequence[float | None] | None
    seed: int | Sequence[int]
    ignore_eos: bool | Sequence[bool]
    stop: str | Sequence[str] | Sequence[Sequence[str]]
    sampler: Any
    prefill_block: int | None
    chat_template_kwargs: Mapping[str, Any] | None
    mesh: Mesh | str | None
    progress: Callable[[int, int], Any] | None
    rows: int | None
    max_total_tokens: int | None
    return_state: bool
    room: int


@dataclasses.dataclass(frozen=True)
class Request:
    """Validated options of a continuation.

    Attributes:
        max_new_tokens: maximum number of tokens to sample per sequence.
        sampler: how tokens are sampled, a `RequestSampler`.
        seed: seed of the first sequence, 0 to 2**32 - 1. The others' seeds follow from it.
        stop: strings that end a text.
        eos: end tokens of the model; empty if they are ignored.
        stop_ids: special tokens that are in `stop`.
    """

    max_new_tokens: int
    sampler: Any
    seed: int
    stop: tuple[str, ...]
    eos: tuple[int, ...]
    stop_ids: tuple[int, ...] = ()

    @property
    def ends(self) -> tuple[int, ...]:
        """All token ids that end a sequence."""
        return tuple(dict.fromkeys((*self.eos, *self.stop_ids)))


def check_request(
    params: Params,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    sampler: Any = None,
) -> Request:
    """Validate the options of `kvjax.generate`. Numbers may be from NumPy or JAX.

    Raises:
        ValueError: an option has the wrong type or is out of range.
    """
    check_params(params)
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(string, str) and string for string in strings):
        raise ValueError(f"stop={short(stop)}; give a string, or a list of strings, none of them empty")
    if strings and params.tokenizer is None:
        raise ValueError(
            f"stop={short(stop)}, but this model has no tokenizer; give stop strings to a model with a tokenizer"
        )
    return Request(
        max_new_tokens=amount("max_new_tokens", max_new_tokens),
        sampler=_sampler(params, sampler, temperature, top_k, top_p, min_p),
        seed=whole("seed", seed) % 2**32,
        stop=tuple(strings),
        eos=() if flag("ignore_eos", ignore_eos) else params.config.eos,
        stop_ids=() if params.tokenizer is None else _stop_ids(params.tokenizer, strings),
    )


def _sampler(params: Params, sampler: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
    made = make_sampler(temperature, top_k, top_p, min_p)
    if sampler is None:
        return made
    for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        if value is not None and value != 0:
            raise ValueError(
                f"sampler and {name}={short(value)} are given; omit {name}, and let the sampler apply it, such as "
                "sampler=make_sampler(temperature=0.7) of kvjax.runtime.sampling"
            )
    checked = check_sampler(sampler, params.config.vocab_size)
    return checked if isinstance(checked, RequestSampler) else Own(checked)


def check_sampler(sampler: Any, vocabulary: int) -> Any:
    """Validate a sampler of one's own. A function that is no pytree becomes one.

    Args:
        sampler: called as `Sampler`, or `Constrained`.
        vocabulary: number of logits.

    Raises:
        ValueError: the sampler is no such thing, or does not return one token id per row.
    """
    if isinstance(sampler, Constrained):
        return dataclasses.replace(sampler, sampler=check_sampler(sampler.sampler, vocabulary))
    if not callable(sampler):
        raise ValueError(
            f"sampler is {shown(sampler)}; give one sampler for all prompts: a function, or a pytree that is callable, of (logits, seed, pos)"
        )
    leaves = jax.tree.leaves(sampler)
    if any(leaf is sampler for leaf in leaves):
        sampler, leaves = jax.tree_util.Partial(sampler), []
    if strange := [leaf for leaf in leaves if not isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int)]:
        raise ValueError(
            f"sampler has {shown(strange[0])} among its leaves; give arrays and numbers, and mark other fields as static"
        )
    sampler = jax.tree.map(jnp.asarray, sampler)
    shape = jax.ShapeDtypeStruct
    row = shape((1, vocabulary), jnp.float32), shape((1,), jnp.uint32), shape((1,), jnp.int32)
    try:
        found = jax.eval_shape(sampler, *row)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"sampler cannot be called with logits of one row, [1, {vocabulary}], seed [1] and pos [1] ({error}); give one sampler for all "
            "prompts, whose arrays do not have one number per row"
        ) from error
    if not hasattr(found, "shape") or found.shape != (1,) or found.dtype != jnp.int32:
        said = f"{found.dtype}{list(found.shape)}" if hasattr(found, "shape") else shown(found)
        raise ValueError(f"sampler returned {said} for one row of logits; return one token id per row, int32")
    return sampler


def check_requests(params: Params, max_new_tokens: Any, **options: Any) -> "Request | list[Request]":
    """`check_request`, or one request per prompt if an option is a list. Prompts without their own seed get consecutive ones.

    Raises:
        ValueError: as `check_request`, or lists have different lengths. For lists, the message numbers all prompts with invalid options.
    """
    options["max_new_tokens"] = max_new_tokens
    if options.get("sampler") is not None:
        options["sampler"] = check_sampler(options["sampler"], params.config.vocab_size)
    lists = {name: list(value) for name, value in options.items() if _is_list(name, value)}
    if not lists:
        return check_request(params, **options)
    counts = {name: len(values) for name, values in lists.items()}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise ValueError(
            f"options have different numbers of values: {said}; give one value for all prompts, or one for each"
        )
    requests, errors = [], []
    for i in range(next(iter(counts.values()))):
        own = {name: lists[name][i] if name in lists else value for name, value in options.items()}
        if "seed" not in lists:
            own["seed"] = whole("seed", options.get("seed", 0)) + i
        try:
            requests.append(check_request(params, **own))
            errors.append(None)
        except ValueError as error:
            errors.append(f": {error}")
    refuse_rows("prompt", errors)
    return requests


def _is_list(name: str, value: Any) -> bool:
    if name == "sampler":
        return False
    if name == "stop":
        texts = isinstance(value, list | tuple) and all(isinstance(each, str | list | tuple) for each in value)
        return texts and any(not isinstance(each, str) for each in value)
    return isinstance(value, list | tuple) or (isinstance(value, np.ndarray | jax.Array) and value.ndim == 1)


def _stop_ids(tokenizer: Tokenizer, strings: Sequence[str]) -> tuple[int, ...]:
    """The special tokens among the stop strings. Decoded text does not contain special tokens, so their ids are compared.

    Raises:
        ValueError: a string contains a special token and other text.
    """
    found = []
    for string in strings:
        if string in tokenizer.special_ids:
            found.append(tokenizer.special_ids[string])
            continue
        ids = tokenizer.encode(string, add_special=False)
        within = [text for text, token in tokenizer.special_ids.items() if text in string and token in ids]
        if within:
            raise ValueError(
                f"stop={short(string)} contains the special token {short(within[0])} and other text, but text is decoded without special "
                f"tokens; give {short(within[0])} by itself"
            )
    return tuple(found)


def check_params(params: Any) -> None:
    """Raise `ValueError` unless `params` are a model's weights."""
    if not isinstance(params, Params):
        raise ValueError(f"params is {shown(params)}; give a model's weights, such as kvjax.load(...) returns")
    if isinstance(params.norm, jax.ShapeDtypeStruct):
        raise ValueError("params are shapes without weights; give weights, such as kvjax.load(...) returns")


def flag(name: str, value: Any) -> bool:
    """Validate a boolean option.

    Raises:
        ValueError: it is not a boolean.
    """
    if not isinstance(plain(value), bool):
        raise ValueError(f"{name}={short(value)}; give True or False")
    return bool(value)


def row_seeds(seed: int, rows: Sequence[int]) -> list[int]:
    """Seed of each row: `seed + row` modulo 2**32, so that a row samples as it would alone with that seed."""
    return [(seed + row) % 2**32 for row in rows]
