"""DuoAttention's gate values: how much each head needs full attention, learned by distillation (Xiao et al. 2024, section 2.2).

Every KV head mixes full attention, with weight α, and streaming attention (sinks and recent tokens), with weight 1 - α.
On texts that end by reciting passkeys, the mixture is trained to match the full model's hidden states with small α.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from kvjax.config import Rope
from kvjax.models import Params, transformer
from kvjax.models.attention import causal_attention
from kvjax.pallas_kernels.masking import MASKED
from kvjax.pallas_kernels.sinks import softmax_with_sinks
from kvjax.policies.duoattention import head_labels
from kvjax.policies.profile import Labels

CUE = 4
"""Tokens before a passkey that introduce its recital."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How gate values are learned. The paper trains for 2000 steps on texts of up to 32 thousand tokens.

    Attributes:
        steps: steps of Adam. Each uses the next text, in a cycle.
        rate: initial learning rate; it decays linearly to a tenth over the last fifth of the steps.
        penalty: λ, weight of the mean gate value relative to a distillation loss that is normalised by the size of
            hidden states. (The paper uses an absolute loss and 0.05.)
        sinks, recent: tokens that streaming attention sees; fewer than in use, as texts are shorter.
        passkeys: number of passkeys per text.
        length: tokens of a passkey (the paper has 10 passkeys of 32).
        sparsity: fraction of streaming heads in a profile's labels; the policy uses its own.
        seed: random seed of the passkeys and their places.
    """

    steps: int = 60
    rate: float = 0.05
    penalty: float = 0.05
    sinks: int = 16
    recent: int = 64
    passkeys: int = 6
    length: int = 12
    sparsity: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for field, least in (("steps", 1), ("sinks", 0), ("recent", 1), ("passkeys", 1), ("length", 1)):
            if getattr(self, field) < least:
                raise ValueError(f"{field}={getattr(self, field)}; give {least} or more")
        if not 0 <= self.sparsity <= 1:
            raise ValueError(f"sparsity={self.sparsity}; give a fraction, 0 to 1")


def with_passkeys(
    samples: Int[np.ndarray, "S T"], settings: Settings
) -> tuple[Int[np.ndarray, "S T"], Bool[np.ndarray, "S T"]]:
    """Insert passkeys into texts, which recite them at the end. Each is introduced by the `CUE` tokens before its first occurrence.

    Passkeys are random tokens of the samples. They overwrite the text at evenly spaced places before the recital. (The
    paper introduces and asks for them in words.)

    Returns:
        The texts, and a mask of the recited tokens.

    Raises:
        ValueError: the texts are too short.
    """
    count, size = settings.passkeys, settings.length
    texts = samples.copy()
    length = texts.shape[1]
    story = length - count * (CUE + size)  # start of the recital
    if story < 2 * count * (CUE + size):
        raise ValueError(
            f"samples of {length} tokens are too short for {count} passkeys of {size}; give {3 * count * (CUE + size)} tokens or more"
        )
    random, recited = np.random.default_rng(settings.seed), np.zeros(texts.shape, bool)
    for text, recital in zip(texts, recited, strict=True):
        for i in range(count):
            place = CUE + story * i // count + random.integers(story // count - CUE - size + 1)
            text[place : place + size] = random.choice(samples.reshape(-1), size)
            start = story + i * (CUE + size)
            text[start : start + CUE + size] = text[place - CUE : place + size]
            recital[start + CUE : start + CUE + size] = True
    return texts, recited


def gated_attention(
    gates: Float[Array, " K"],
    rope: Rope,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    sinks: int,
    recent: int,
    window: int | None = None,
    scale: float | None = None,
    attention_sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Mix causal full attention (weight `gates` per head) with streaming attention over sinks and recent tokens.

    Args:
        q, k: unrotated queries and keys.
        v: values.
        gates: weight of full attention of each KV head.
        rope: rotary embedding.
        sinks: number of first tokens that streaming attention sees.
        recent: number of last tokens that streaming attention sees, including the query's own.
        window: sliding attention window of the layer in tokens, if it has one.
        scale: factor on attention logits; None for 1 / sqrt(H).
        attention_sinks: logit of each query head's attention sink, which is in both softmaxes; None without sinks.
    """
    batch, length, heads, dim = q.shape
    kv_heads, pos = k.shape[2], jnp.arange(length, dtype=jnp.int32)
    q, k = (rope.rotate(x, pos[None, :, None]) for x in (q, k))
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, dim)
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32)
    logits = logits * (dim**-0.5 if scale is None else scale)
    distance = pos[:, None] - pos
    full = (distance >= 0) & (distance < (length if window is None else window))
    streaming = full & ((pos < sinks) | (distance < recent))
    share = gates[:, None, None, None]
    beside = None if attention_sinks is None else attention_sinks.reshape(kv_heads, -1, 1)
    probs = (softmax_with_sinks(jnp.where(mask, logits, MASKED), beside) for mask in (full, streaming))
    mixed = sum(part * weight for part, weight in zip(probs, (share, 1 - share), strict=True))
    out = jnp.einsum("bkgts,bskh->btkgh", jnp.asarray(mixed).astype(v.dtype), v)
    return out.reshape(batch, length, heads, dim)


def gate_values(
    params: Params,
    samples: Int[np.ndarray, "S T"],
    settings: Settings = Settings(),
    progress: Callable[[int, int], None] | None = None,
) -> Float[np.ndarray, "L K"]:
    """Learn α of every KV head, between 0 (needs only sinks and recent tokens) and 1.

    Args:
        params: the model.
        samples: token ids of texts of equal length, into which passkeys are inserted.
        settings: how gate values are learned.
        progress: called with the number of finished steps and of all steps.

    Raises:
        ValueError: the samples are too short.
    """
    texts, recited = (jnp.asarray(x) for x in with_passkeys(samples, settings))
    config = params.config
    gates = jnp.ones((len(config.compressed), config.for_policy.num_kv_heads), jnp.float32)
    falling = settings.steps // 5
    rate = optax.linear_schedule(settings.rate, settings.rate / 10, max(falling, 1), settings.steps - falling)
    optimiser = optax.adam(rate)

    def states(params: Params, gates: Float[Array, "L K"], text: Int[Array, " T"]) -> Float[Array, "T D"]:
        ropes = dict(zip(config.kinds, config.resolve_ropes(text.shape[0]), strict=True))

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            kind = config.layers[layer]
            if layer not in config.compressed:
                return causal_attention(kind.attention, ropes[kind], q, k, v, params.layers[layer].sinks)
            own = gates[config.compressed.index(layer)]
            mix = partial(
                gated_attention,
                sinks=settings.sinks,
                recent=settings.recent,
                window=kind.attention.window,
                scale=kind.attention.logit_scale,
                attention_sinks=params.layers[layer].sinks,
            )
            # Attention is recomputed in the backward pass, as the attention weights of all layers would not fit in
            # memory.
            return jax.checkpoint(lambda gate, q, k, v: mix(gate, ropes[kind], q, k, v))(own, q, k, v)

        return transformer.hidden(params, text[None], attend)[0].astype(jnp.float32)

    @jax.jit
    def goal(params: Params, text: Int[Array, " T"]) -> Float[Array, "T D"]:
        return states(params, jnp.ones_like(gates), text)

    @jax.jit
    def step(
        params: Params, gates: Array, moments: optax.OptState, text: Array, recital: Array, wanted: Array
    ) -> tuple[Array, optax.OptState]:
        def loss(gates: Array) -> Array:
            off = jnp.sum(jnp.square(states(params, gates, text) - wanted), axis=-1) / jnp.sum(
                jnp.square(wanted), axis=-1
            )
            return jnp.sum(off * recital) / jnp.sum(recital) + settings.penalty * jnp.mean(jnp.abs(gates))

        gradient = jax.grad(loss)(gates)
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers
            updates, moments = optimiser.update(gradient, moments)
        return jnp.clip(jnp.asarray(optax.apply_updates(gates, updates)), 0.0, 1.0), moments

    moments, wanted = optimiser.init(gates), [goal(params, text) for text in texts]
    for i in range(settings.steps):
        j = i % len(texts)
        gates, moments = step(params, gates, moments, texts[j], recited[j].astype(jnp.float32), wanted[j])
        if progress is not None:
            jax.block_until_ready(gates)
            progress(i + 1, settings.steps)
    return np.asarray(gates)


def scores_and_labels(
    params: Params,
    samples: Int[np.ndarray, "S T"],
    settings: Settings = Settings(),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Float[np.ndarray, "L K"], Labels]:
    """Contents of a profile for the `duoattention` policy. Arguments as for `gate_values`."""
    gates = gate_values(params, samples, settings, progress)
    return gates, head_labels(gates.tolist(), settings.sparsity)
