"""Whether queries select the tokens that matter, and how often these are already on the device (ClusterKV, sections V-B and V-C).

Queries are those of the uncompressed model on a text, so that all policies get the same queries.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax._util.any_rank import any_rank
from kvjax.cache import LayerSpec, PromptKV, Token
from kvjax.config import Rope
from kvjax.policies import ClusterKV, InfiniGen, Quest, SparseLayer

from .recording import Recorded

SparsePolicy = ClusterKV | Quest | InfiniGen
"""Sparse attention policies whose first layers are dense."""


class Selected(NamedTuple):
    """Selection of one layer's queries after a prompt: S steps, N query heads, T tokens of the whole text.

    Attributes:
        chosen: tokens before the tail that are selected, including ClusterKV's sinks; `budget` tokens, or all if there
            are fewer.
        logits: attention logits; -inf for tokens of the tail, which are always attended, and for future tokens.

    Example:
        >>> from kvjax.analysis.recall import recall_rate, replay
        >>> from kvjax.analysis.recording import record
        >>> layer = record(params, [5, 9, 2, 7] * 8)[0]
        >>> selected = replay(kvjax.Quest(budget=8, page=4, dense_layers=0), layer, prompt=28)
        >>> recall_rate(selected.chosen, selected.logits).shape  # steps, query heads
        (4, 4)
    """

    chosen: Bool[np.ndarray, "S N T"]
    logits: Float[np.ndarray, "S N T"]


def replay(policy: SparsePolicy, layer: Recorded, prompt: int) -> Selected:
    """Run a policy on a layer's recorded text: prefill the prompt, then append the other tokens one by one.

    Args:
        policy: a policy that is not bound to a model. Its dense layers are skipped. InfiniGen gets the layer's own
            queries instead of those predicted from the previous layer, and takes its directions from the prompt.
        layer: recorded layer from `kvjax.analysis.recording.record`.
        prompt: number of tokens of the prompt.

    Raises:
        ValueError: the prompt or the rest of the text is empty, or the budget covers the whole text.

    Example:
        >>> from kvjax.analysis.recall import replay
        >>> from kvjax.analysis.recording import record
        >>> layer = record(params, [5, 9, 2, 7] * 8)[0]
        >>> selected = replay(kvjax.Quest(budget=8, page=4, dense_layers=0), layer, prompt=28)
        >>> selected.chosen.shape  # steps, query heads, tokens
        (4, 4, 32)
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
    """Cluster of each of the T tokens of a prompt, in each KV head; -1 for sinks.

    Arguments and errors as for `replay`.

    Example:
        >>> from kvjax.analysis.recall import clusters
        >>> from kvjax.analysis.recording import record
        >>> layer = record(params, [5, 9, 2, 7] * 8)[0]
        >>> policy = kvjax.ClusterKV(budget=8, sinks=2, dense_layers=0, n_clusters=4)
        >>> clusters(policy, layer, prompt=28)[0, :4].tolist()  # -1 are the sinks
        [-1, -1, 3, 0]
    """
    spec = _spec(policy, layer, prompt)
    lengths = jnp.full((1,), prompt, jnp.int32)
    q, k, v = (jnp.asarray(x)[None, :prompt] for x in (layer.q, layer.k, layer.v))
    state, _ = jax.jit(policy.layer(spec).prefill)(PromptKV.of(spec.rope, q, k, v, lengths, spec.totals(None)), {})
    found = np.full((spec.num_kv_heads, prompt), -1)
    heads = (np.asarray(x[0]) for x in (state.order, state.starts, state.sizes))
    for labels, order, starts, sizes in zip(found, *heads, strict=True):
        for cluster, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            labels[order[start : start + size]] = cluster
    return found


def recall_rate(chosen: Bool[np.ndarray, "*S T"], logits: Float[np.ndarray, "*S T"]) -> Float[np.ndarray, "*S"]:
    """|I ∩ I*| / |I*|: fraction of the most attended tokens I* that are among the selected tokens I, where |I*| = |I|.

    Ties in the logits go to the earlier token. If nothing is selected, the rate is 1.

    Example:
        >>> from kvjax.analysis.recall import recall_rate
        >>> chosen = np.asarray([True, True, False, False])
        >>> recall_rate(chosen, np.asarray([3.0, 0.0, 2.0, 1.0], np.float32)).item()  # of tokens 0 and 2
        0.5
    """
    size = chosen.sum(axis=-1, keepdims=True)
    ranked = np.take_along_axis(chosen, np.argsort(-logits, axis=-1, kind="stable"), axis=-1)
    both = np.sum(ranked & (np.arange(ranked.shape[-1]) < size), axis=-1)
    return np.where(size[..., 0] > 0, both / np.maximum(size[..., 0], 1), 1.0)


def hit_rate(chosen: Bool[np.ndarray, "S *N T"], steps: int = 1) -> float:
    """Fraction of the selected tokens that one of the last `steps` queries of the same head also selected (section IV-D).

    This is the fraction of transfers from host memory that caching the last R = `steps` selections saves. If a cluster
    is cut to fit the budget, its other tokens count as not on the device. The first query, which cannot hit, is
    excluded.

    Raises:
        ValueError: there are fewer than two queries, or `steps` is less than 1.

    Example:
        >>> from kvjax.analysis.recall import hit_rate
        >>> chosen = np.asarray([[True, True, False], [False, True, True]])  # steps, tokens
        >>> hit_rate(chosen)  # of the second query's two tokens, the first had selected one
        0.5
    """
    if len(chosen) < 2 or steps < 1:
        raise ValueError(f"{len(chosen)} queries and steps={steps}; give two queries or more, and 1 or more steps")
    hits = 0
    for i in range(1, len(chosen)):
        hits += int(np.sum(chosen[i] & np.any(chosen[max(0, i - steps) : i], axis=0)))
    return hits / max(int(np.sum(chosen[1:])), 1)


def _spec(policy: SparsePolicy, layer: Recorded, prompt: int) -> LayerSpec:
    """Spec of a sparse layer for a recorded text. Errors as for `replay`."""
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
        rope=Rope((0.0,)),  # recorded queries and keys are already rotated
        scale=dim**-0.5,
        window=layer.window,
    )
    if policy.layer(spec).attention != "sparse":
        raise ValueError(f"a budget of {policy.budget} covers the whole text of {total} tokens; give a smaller one")
    return spec


@partial(jax.jit, static_argnums=(0, 1))
@any_rank
def _replay(
    policy: SparsePolicy, spec: LayerSpec, q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"]
) -> tuple[Bool[Array, "S R T"], Int[Array, " S"]]:
    """Tokens before the tail that each head selects at each step, and where the tail begins."""
    layer, size = cast(SparseLayer[Any], policy.layer(spec)), spec.prompt_len
    lengths = jnp.full((1,), size, jnp.int32)
    start, _ = layer.prefill(
        PromptKV.of(spec.rope, q[None, :size], k[None, :size], v[None, :size], lengths, spec.totals(None)), {}
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
