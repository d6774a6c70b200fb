"""Parts of the forward pass by hand; that the whole is the model's is checked against transformers in `test_parity`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models import Params
from kvjax.models.attention import split_heads
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
