"""The mixture of experts of one layer.

Over a mesh, each device has some of the experts, whole, and computes their outputs. An all-reduce adds them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Shard
from kvjax.config import MoEConfig
from kvjax.pallas_kernels import Norm, best_experts, expert_mlp, projection
from kvjax.pallas_kernels.experts.tiles import Biases

from .layer import Layer
from .mlp import hidden_units
from .params import Experts
from .residual import add_summed


def add_experts(layer: Layer, p: Experts, x: Float[Array, "... D"], shard: Shard) -> Float[Array, "... D"]:
    """Add the output of a layer's experts to the residual stream `x`."""
    config = layer.config.mlp
    assert isinstance(config, MoEConfig)
    y, norm = x.reshape(-1, x.shape[-1]), layer.maybe_norm(layer.params.mlp_norm)
    out = routed(config, p, y, norm, shard)
    if p.shared is not None:
        (own,) = projection(hidden_units(p.shared, y, config.activation, norm), p.shared.down, dtype=jnp.float32)
        if p.shared_gate is not None:
            own = own * jax.nn.sigmoid(projection(y, p.shared_gate, norm=norm, dtype=jnp.float32)[0])
        out = out + own
    return add_summed(layer, x, out.reshape(x.shape), None, layer.params.mlp_post_norm, shard)


def route(
    config: MoEConfig,
    router: Float[Array, "E D"],
    x: Float[Array, "R D"],
    choice_bias: Float[Array, " E"] | None = None,
    bias: Float[Array, " E"] | None = None,
    norm: Norm | None = None,
) -> tuple[Array, Array]:
    """Experts of each token [R, k], and the weights of their outputs [R, k] in float32. Ties go to the first expert.

    Logits of a softmax router, and the weights, have the type of `x`. Those of a sigmoid router are in float32.
    """
    if config.router == "softmax":
        (logits,) = projection(x, router, norm=norm, biases=[bias])
        return best_experts(logits, config.per_token, normalized=config.normalized, scale=config.output_scale)
    weights = jax.nn.sigmoid(projection(x, router, norm=norm, biases=[bias], dtype=jnp.float32)[0])
    choice = weights if choice_bias is None else weights + jnp.broadcast_to(choice_bias, weights.shape)
    _, experts = jax.lax.top_k(_in_best_groups(config, choice), config.per_token)
    weights = jnp.take_along_axis(weights, experts, axis=-1)
    if config.normalized:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return experts.astype(jnp.int32), weights * config.output_scale


def _in_best_groups(config: MoEConfig, choice: Float[Array, "R E"]) -> Float[Array, "R E"]:
    """Weights that experts are chosen by, -inf outside of the groups with the highest sums of two weights."""
    if config.groups == config.groups_per_token:
        return choice
    grouped = choice.reshape(len(choice), config.groups, -1)
    sums = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    _, best = jax.lax.top_k(sums, config.groups_per_token)
    inside = jnp.any(best[:, :, None] == jnp.arange(config.groups, dtype=best.dtype), axis=1)
    return jnp.where(inside[..., None], grouped, -jnp.inf).reshape(choice.shape)


def routed(
    config: MoEConfig, p: Experts, x: Float[Array, "R D"], norm: Norm | None, shard: Shard
) -> Float[Array, "R D"]:
    """Weighted sum of the outputs of each token's experts in float32; over a mesh, of the experts of this device.

    Args:
        norm: RMS norm of `x`, which the router and the experts apply.
    """
    experts, weights = route(config, p.router, x, p.choice_bias, p.router_bias, norm)
    biases = None
    if p.gate_experts_bias is not None:
        assert p.up_experts_bias is not None
        assert p.down_experts_bias is not None
        biases = Biases(p.gate_experts_bias, p.up_experts_bias, p.down_experts_bias)
    local = p.gate_experts.shape[0] // config.width
    return expert_mlp(
        x,
        experts - shard.model_index() * local,
        weights,
        p.gate_experts,
        p.up_experts,
        p.down_experts,
        biases,
        norm=norm,
        activation=config.activation,
        total=None if shard.model == 1 else config.experts,
    )
