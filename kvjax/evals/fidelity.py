"""Compare attention under a policy with full attention, by layer and head, without decoding a token.

The plain model reads a text once. A policy then gets the queries, keys and values of every layer: a prompt, and the tokens after it
one by one. One-hot values, which name their tokens, show what attention reads of each token. The result is exact for policies that
evict, merge, select or move tokens, if they choose by queries and keys, not by values.

Over a mesh, all devices of the model read the text together; one device of each process then runs the policy.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from kvjax._util.any_rank import any_rank
from kvjax.analysis.layers import jaccard
from kvjax.cache import LayerSpec, PromptKV, Token, layer_specs
from kvjax.cache.shard import HEADS
from kvjax.models import Params, transformer
from kvjax.models.sharding import get_shard, partitions
from kvjax.policies import Policy, get_policy, prefill_alone
from kvjax.policies.layer import CacheLayer, Carry
from kvjax.runtime.mesh import ALL, on_host, on_mesh
from kvjax.runtime.program import Partition, Program

from .budgets import bytes_held


@dataclasses.dataclass(frozen=True)
class Fidelity:
    """A policy's attention compared with full attention: L layers, N query heads, averaged over the queries after the prompt.

    Attributes:
        recall: share of the tokens with the most attention that the policy still reads.
        output_error: |o' - o| / |o|, where o is the output of full attention and o' that under the policy.
        cosine: cosine similarity of the two attention distributions over all tokens.
        jaccard: for any two layers, the Jaccard index of the prompt tokens that they read at some step, averaged over KV heads.
        cache_bytes: bytes of the policy's cache, on device and host together.
    """

    recall: Float[np.ndarray, "L N"]
    output_error: Float[np.ndarray, "L N"]
    cosine: Float[np.ndarray, "L N"]
    jaccard: Float[np.ndarray, "L L"]
    cache_bytes: int

    def means(self) -> dict[str, float]:
        """The mean of each measure over all layers and heads; that of the Jaccard index over adjacent layers."""
        adjacent = np.diagonal(self.jaccard, offset=1)
        return {
            "recall": float(np.mean(self.recall)),
            "output_error": float(np.mean(self.output_error)),
            "cosine": float(np.mean(self.cosine)),
            "jaccard": float(np.mean(adjacent)) if len(adjacent) else 1.0,
        }


class Reading(NamedTuple):
    """Inputs of the plain model's attention for a text of T tokens: unrotated queries and keys, and values, by cached layer."""

    q: tuple[Float[Array, "T N H"], ...]
    k: tuple[Float[Array, "T K H"], ...]
    v: tuple[Float[Array, "T K H"], ...]


def read(params: Params, tokens: Sequence[int], mesh: Mesh | str | None = None) -> Reading:
    """Read a text once, for any number of policies.

    Args:
        mesh: devices to run over, as for `kvjax.Engine`. There is one text, which devices along "data" repeat.

    Raises:
        ValueError: the text is empty, or the model has attention sinks.
    """
    if not len(tokens):
        raise ValueError("the text is empty; give a prompt and at least one token more")
    if params.config.has_sinks:
        raise ValueError(f"fidelity is not implemented for models with attention sinks, such as {params.config.family}")
    params, mesh = on_mesh(params, mesh)
    shard = get_shard(mesh, params.config)
    specs = tuple(spec.on(shard) for spec in layer_specs(params.config, shard.data, len(tokens), 0, params.dtype))
    found = read_text(specs, params, jnp.asarray([tokens], jnp.int32))
    if mesh is not None:
        found = jax.tree.map(lambda x: jnp.asarray(on_host(x)), found)
    return Reading(*zip(*found, strict=True))


def fidelity(
    params: Params,
    reading: Reading,
    prompt: int,
    policy: str | Policy,
    budget: int | float | None = None,
    top: int = 64,
) -> Fidelity:
    """Compare a policy's attention with full attention, for every token after the prompt.

    Args:
        reading: of the whole text.
        prompt: number of tokens of the prompt.
        budget: as for `generate`; a fraction is of the whole text.
        top: for each query, number of tokens with the most full attention that count as important.

    Raises:
        ValueError: the prompt is empty or the whole text, or `top` is less than 1.
        PolicyError: the policy is unknown or cannot work with this budget.
    """
    total, dim = len(reading.k[0]), params.config.head_dim
    if not 0 < prompt < total:
        raise ValueError(f"prompt={prompt} in a text of {total} tokens; give 1 to {total - 1}")
    if top < 1:
        raise ValueError(f"top={top}; give 1 or more")
    policy = get_policy(policy, budget=budget).for_model(params.config)
    policy.validate(total)
    rows = 1 + -(-total // dim)
    specs = layer_specs(params.config, rows, prompt, total - prompt, jnp.float32)
    specs = tuple(spec for spec in specs if spec.recurrent is None)
    outputs = _replay(policy, specs, prompt, reading)
    found: dict[str, list[np.ndarray]] = {"recall": [], "output_error": [], "cosine": []}
    seen = []
    for layer, (spec, q, k, v) in enumerate(zip(specs, *reading, strict=True)):
        attended = np.asarray(outputs[layer], np.float32)  # [S, rows, N, H]
        weights = np.moveaxis(attended[:, 1:], 1, 2).reshape(total - prompt, spec.num_heads, -1)[..., :total]
        full = np.asarray(_attention(spec, prompt, q, k))
        values = np.repeat(np.asarray(v, np.float32), spec.num_heads // spec.num_kv_heads, axis=1)
        exact = np.einsum("snt,tnh->snh", full, values)
        important = np.argsort(-full, axis=-1, kind="stable")[..., :top]
        counted = np.take_along_axis(full, important, axis=-1) > 0
        present = np.take_along_axis(weights, important, axis=-1) > 0
        found["recall"].append(np.sum(present & counted, axis=-1) / np.sum(counted, axis=-1))
        found["output_error"].append(_norm(attended[:, 0] - exact) / _norm(exact))
        found["cosine"].append(np.sum(weights * full, axis=-1) / (_norm(weights) * _norm(full)))
        read = np.any(weights[..., :prompt] > 0, axis=0).reshape(spec.num_kv_heads, -1, prompt)
        seen.append(np.any(read, axis=1))
    return Fidelity(
        **{name: np.stack([np.mean(x, axis=0, dtype=np.float64) for x in layers]) for name, layers in found.items()},
        jaccard=jaccard(np.stack(seen)),
        cache_bytes=bytes_held(policy, params.config, prompt, total - prompt, params.dtype),
    )


@dataclasses.dataclass(frozen=True)
class _ReaderLayer(CacheLayer[Policy]):
    """Keeps the inputs of attention for a prompt."""

    def prefill(self, prompt: PromptKV, carry: Carry) -> tuple[Any, Carry]:
        return tuple(x[0].astype(jnp.float32) for x in (prompt.q, prompt.k, prompt.v)), carry

    def advance(self, state: Any) -> None:
        """Recurrent layers have no attention."""


def _read(specs: tuple[LayerSpec, ...], params: Params, tokens: Array) -> tuple[Any, ...]:
    lengths = jnp.full((1,), tokens.shape[1], jnp.int32)
    layers = [_ReaderLayer(Policy(), spec) for spec in specs]
    found = transformer.prefill(params, tokens, lengths, lengths, layers)[1]
    return tuple(found[i] for i in params.config.cached)


def _sharded(specs: tuple[LayerSpec, ...], params: Params, tokens: Any) -> Partition | None:
    """How `read_text` is sharded over the devices of a mesh."""
    shard, by_heads = specs[0].shard, PartitionSpec(None, HEADS)
    return (
        None
        if shard.mesh is None
        else (shard, (partitions(params), ALL), ((by_heads,) * 3,) * len(params.config.cached))
    )


read_text = Program(_read, static=1, partition=_sharded)
"""`read_text(specs, params, tokens)`: queries, keys and values of a text [1, T], by layer, compiled. On a mesh they are sharded by heads."""


@partial(jax.jit, static_argnums=(0, 1, 2))
@any_rank
def _replay(policy: Policy, specs: tuple[LayerSpec, ...], prompt: int, reading: Reading) -> tuple[Array, ...]:
    """Attention outputs of every token after the prompt, by layer: [S, rows, N, H].

    Row 0 has the real values. Row r has one-hot values that name tokens (r - 1) H to r H - 1.
    """
    rows, total = specs[0].batch, len(reading.k[0])
    lengths = jnp.full((rows,), prompt, jnp.int32)

    def spread(x: Array) -> Array:
        return jnp.broadcast_to(x[None], (rows, *x.shape))

    def named(v: Array) -> Array:
        dim = v.shape[-1]
        token = jnp.arange(total, dtype=jnp.int32)[None, :, None]
        names = jnp.arange((rows - 1) * dim, dtype=jnp.int32).reshape(rows - 1, 1, dim)
        names = jnp.broadcast_to((token == names)[:, :, None], (rows - 1, *v.shape))
        return jnp.concatenate([v[None], names.astype(v.dtype)])

    def padded(x: Array) -> Array:
        return jnp.pad(x[:, :prompt], ((0, 0), (0, specs[0].prompt_len - prompt), (0, 0), (0, 0)))

    layers = [(spread(q), spread(k), named(v)) for q, k, v in zip(*reading, strict=True)]
    caches = [policy.layer(spec) for spec in specs]
    states: list[Any] = []
    carry: Carry = {}
    for cache, layer in zip(caches, layers, strict=True):
        q, k, v = (padded(x) for x in layer)
        given = PromptKV.of(cache.spec.rope, q, k, v, lengths, jnp.full((rows,), total, jnp.int32))
        state, carry = prefill_alone(cache, given, carry)
        states.append(state)

    def step(states: list[Any], inputs: tuple[Any, Array]) -> tuple[list[Any], list[Array]]:
        arrays, at = inputs
        pos = jnp.full((rows,), at, jnp.int32)
        kept, outputs = [], []
        carry: Carry = {}
        for cache, state, (q, k, v) in zip(caches, states, arrays, strict=True):
            token = Token(q, k, v, pos, cache.spec.rope)
            out, state, carry = cache.attend(cache.append(state, token), token, carry)
            kept.append(cache.compress(state))
            outputs.append(out)
        return kept, outputs

    rest = [tuple(jnp.moveaxis(x[:, prompt:], 1, 0) for x in layer) for layer in layers]
    _, outputs = jax.lax.scan(step, states, (rest, jnp.arange(prompt, total, dtype=jnp.int32)))
    return tuple(outputs)


@partial(jax.jit, static_argnums=(0, 1))
@any_rank
def _attention(spec: LayerSpec, prompt: int, q: Array, k: Array) -> Float[Array, "S N T"]:
    """Probabilities of full attention for every token after the prompt."""
    position = jnp.arange(len(k), dtype=jnp.int32)[:, None]
    q, k = spec.rope.rotate(q, position)[prompt:], spec.rope.rotate(k, position)
    group = q.shape[1] // k.shape[1]
    logits = jnp.einsum("snh,tnh->snt", q, jnp.repeat(k, group, axis=1)) * jnp.float32(spec.scale)
    distance = jnp.arange(prompt, len(k), dtype=jnp.int32)[:, None] - jnp.arange(len(k), dtype=jnp.int32)
    visible = (distance >= 0) & (distance < (len(k) if spec.window is None else spec.window))
    return jax.nn.softmax(jnp.where(visible[:, None], logits, -jnp.inf), axis=-1)


def _norm(x: Float[np.ndarray, "*B H"]) -> Float[np.ndarray, "*B"]:
    return np.sqrt(np.sum(np.square(x), axis=-1))


def sweep(
    params: Params,
    tokens: Sequence[int],
    prompt: int,
    policies: Sequence[Policy],
    top: int = 64,
    progress: Callable[[int, int], None] | None = None,
    mesh: Mesh | str | None = None,
) -> list[Fidelity]:
    """`fidelity` of several policies on one text.

    Args:
        progress: called with the number of policies done and in all.
        mesh: as for `read`.
    """
    reading, found = read(params, tokens, mesh), []
    for i, policy in enumerate(policies, 1):
        found.append(fidelity(params, reading, prompt, policy, top=top))
        if progress is not None:
            progress(i, len(policies))
    return found
