"""Parts of the forward pass by hand; that the whole is the model's is checked against transformers in `test_parity`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.conversion.state_dict import quantize_weights
from kvjax.models import Params
from kvjax.models.attention import heads_of, joined, split_heads
from kvjax.models.layer import layers_of


def test_biases_are_added(tiny: Params) -> None:
    """To all numbers of a projection, before they are divided among heads."""
    random = np.random.default_rng(0)
    q, q_bias, k, k_bias = (
        jnp.asarray(random.normal(size=shape).astype(np.float32)) for shape in ((2, 3, 64), 64, (2, 3, 32), 32)
    )
    (layer, *_) = layers_of(tiny)
    biases = dataclasses.replace(layer.params.attn, q_bias=q_bias, k_bias=k_bias)
    layer = layer._replace(params=dataclasses.replace(layer.params, attn=biases))
    got_q, got_k, got_v, _ = jax.jit(lambda q, k: split_heads(layer, [q, k, k], jnp.zeros(q.shape[:-1], jnp.int32)))(
        q, k
    )
    np.testing.assert_allclose(got_q, (q + q_bias).reshape(2, 3, 4, 16), rtol=1e-6)
    np.testing.assert_allclose(got_k, (k + k_bias).reshape(2, 3, 2, 16), rtol=1e-6)
    np.testing.assert_array_equal(got_v, k.reshape(2, 3, 2, 16))


def test_joined_matrices_give_the_same_heads(tiny: Params) -> None:
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 48)).astype(np.float32))
    pos = jnp.zeros((3,), jnp.int32)
    both = joined(tiny)
    assert both.layers[0].attn.qkv is not None
    assert both.layers[0].attn.qkv.shape == (128, 48)
    for layer, other in zip(layers_of(tiny), layers_of(both), strict=True):
        for one, two in zip(heads_of(layer, x, pos)[:3], heads_of(other, x, pos)[:3], strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_quantised_matrices_are_not_joined(tiny: Params) -> None:
    assert all(block.attn.qkv is None for block in joined(quantize_weights(tiny, "int8")).layers)
