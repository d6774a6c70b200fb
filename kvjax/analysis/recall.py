"""Whether queries select the tokens that matter, and how often those are on the device already (ClusterKV, section V-B and V-C).

Queries are those of the plain model reading a text, so that all policies are asked the same.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax._util.any_rank import any_rank
from kvjax.cache import LayerSpec, Prompt, Token
from kvjax.config import Rope
from kvjax.policies import ClusterKV, InfiniGen, Quest, SparseLayer

from .recording import Recorded

SparsePolicy = ClusterKV | Quest | InfiniGen
"""Policies with sparse attention that leave some first layers dense."""


class Selected(NamedTuple):
    """What one layer's queries select after a prompt: S steps, N query heads, T tokens of the whole text.

    Attributes:
        chosen: what is read of the tokens before the tail, ClusterKV's sinks among them: of `budget` tokens all, where there
            are so many.
        logits: attention logits, -inf for tokens that are read anyway (of the tail) or are yet to come.
    """

    chosen: Bool[np.ndarray, "S N T"]
    logits: Float[np.ndarray, "S N T"]


def replay(policy: SparsePolicy, layer: Recorded, prompt: int) -> Selected:
    """Give a layer's recorded prompt to the policy, then the rest of the text token by token.

    Args:
        policy: not bound to a model; only what it does beyond its dense layers matters. InfiniGen is given the layer's own queries,
            where it would otherwise look ahead from the layer before, and takes its directions from the prompt's.
        layer: what `kvjax.analysis.recording.record` found in this layer.
        prompt: how many of the T tokens are the prompt.

    Raises:
        ValueError: nothing comes before or after the prompt's end, or the budget covers the whole text.
    """
    spec, heads = _spec(policy, layer, prompt), layer.q.shape[1]
    total = spec.max_tokens
    chosen, tail = (np.asarray(x) for x in _replay(policy, spec, *map(jnp.asarray, (layer.q, layer.k, layer.v))))
    chosen = np.repeat(chosen, heads // chosen.shape[1], axis=1)
    keys = np.repeat(layer.k, heads // layer.k.shape[1], axis=1)
    logits = np.einsum("snh,tnh->snt", layer.q[prompt:], keys) * np.float32(spec.scale)
    asked = np.arange(total) < tail[:, None]
    return Selected(chosen, np.where(asked[:, None], logits, -np.inf))


def clusters(policy: ClusterKV, layer: Recorded, prompt: int) -> Int[np.ndarray, "K T"]:
    """Which cluster each of the T tokens of a prompt is in, in each KV head; -1 for sinks.

    Args and errors: as for `replay`.
    """
    spec = _spec(policy, layer, prompt)
    lengths = jnp.full((1,), prompt, jnp.int32)
    q, k, v = (jnp.asarray(x)[None, :prompt] for x in (layer.q, layer.k, layer.v))
    state, _ = jax.jit(policy.layer(spec).prefill)(Prompt.of(spec.rope, q, k, v, lengths, spec.totals(None)), {})
    found = np.full((spec.num_kv_heads, prompt), -1)
    heads = (np.asarray(x[0]) for x in (state.order, state.starts, state.sizes))
    for labels, order, starts, sizes in zip(found, *heads, strict=True):
        for cluster, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            labels[order[start : start + size]] = cluster
    return found


def recall_rate(chosen: Bool[np.ndarray, "*S T"], logits: Float[np.ndarray, "*S T"]) -> Float[np.ndarray, "*S"]:
    """|I ∩ I*| / |I*|: the share of the most attended tokens I* that are among the chosen ones I, where |I*| = |I|.

    Of tokens with equal logits the first counts as more attended. Where nothing is chosen, the rate is 1.
    """
    size = chosen.sum(axis=-1, keepdims=True)
    ranked = np.take_along_axis(chosen, np.argsort(-logits, axis=-1, kind="stable"), axis=-1)
    both = np.sum(ranked & (np.arange(ranked.shape[-1]) < size), axis=-1)
    return np.where(size[..., 0] > 0, both / np.maximum(size[..., 0], 1), 1.0)


def hit_rate(chosen: Bool[np.ndarray, "S *N T"], steps: int = 1) -> float:
    """Share of the chosen tokens that one of the last `steps` queries of the same head chose too (section IV-D).

    It is what a cache of the selections of R = `steps` steps saves of the transfer from host memory. Of a cluster that was cut
    to fit the budget, the tokens that were left out count as not on the device. The first query, which finds nothing, is left out.

    Raises:
        ValueError: there are fewer than two queries, or `steps` is less than 1.
    """
    if len(chosen) < 2 or steps < 1:
        raise ValueError(f"{len(chosen)} queries and steps={steps}; give two queries or more, and 1 or more steps")
    hits = 0
    for i in range(1, len(chosen)):
        hits += int(np.sum(chosen[i] & np.any(chosen[max(0, i - steps) : i], axis=0)))
    return hits / max(int(np.sum(chosen[1:])), 1)


def _spec(policy: SparsePolicy, layer: Recorded, prompt: int) -> LayerSpec:
    """A layer that is not dense, for a recorded text; errors as for `replay`."""
    total, heads, dim = layer.q.shape
    if not 0 < prompt < total:
        raise ValueError(f"prompt={prompt} in a text of {total} tokens; give 1 to {total - 1}")
    spec = LayerSpec(
        layer=policy.dense_layers,
        num_layers=policy.dense_layers + 1,
        batch=1,
        num_heads=heads,
        num_kv_heads=layer.k.shape[1],
        head_dim=dim,
        prompt_len=prompt,
        new_tokens=total - prompt,
        dtype=jnp.dtype(jnp.float32),
        rope=Rope((0.0,)),  # recorded queries and keys are rotated already
        scale=dim**-0.5,
        window=layer.window,
    )
    if not policy.layer(spec).traits.sparse:
        raise ValueError(
            f"a budget of {policy.budget} covers the text of {total} tokens, so all is read; give a smaller one"
        )
    return spec


@partial(jax.jit, static_argnums=(0, 1))
@any_rank
def _replay(
    policy: SparsePolicy, spec: LayerSpec, q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"]
) -> tuple[Bool[Array, "S R T"], Int[Array, " S"]]:
    """What each head chooses at each step of the tokens before the tail, and where the tail begins by then."""
    layer, size = cast(SparseLayer[Any], policy.layer(spec)), spec.prompt_len
    lengths = jnp.full((1,), size, jnp.int32)
    start, _ = layer.prefill(
        Prompt.of(spec.rope, q[None, :size], k[None, :size], v[None, :size], lengths, spec.totals(None)), {}
    )
    position = jnp.arange(size, spec.max_tokens, dtype=jnp.int32)[:, None]

    def step(state: Any, inputs: tuple[Array, Array, Array, Array]) -> tuple[Any, tuple[Array, Array]]:
        token = Token(*inputs, spec.rope)
        state = layer.append(state, token)
        index, valid = (x[0] for x in layer.slots_to_read(state, token.query))
        tail = layer.tail_start(state)[0]
        valid &= index < tail
        chosen = jnp.zeros((len(index), layer.capacity), bool)
        chosen = chosen.at[jnp.arange(len(index), dtype=jnp.int32)[:, None], index].max(valid)
        return layer.compress(state), (chosen[:, : spec.max_tokens], tail)

    return jax.lax.scan(step, start, (q[size:, None], k[size:, None], v[size:, None], position))[1]
