"""Parts of the forward pass by hand; that the whole is the model's is checked against transformers in `test_parity`."""

import jax
import numpy as np

from kvjax.models import Params
from kvjax.models.transformer import _heads


def test_biases_are_added(tiny: Params) -> None:
    """To all numbers of a projection, before they are divided among heads."""
    random = np.random.default_rng(0)
    h, bias = (random.normal(size=shape).astype(np.float32) for shape in ((2, 3, 32), (32,)))
    got = jax.jit(lambda h, bias: _heads(tiny.config, h, bias))(h, bias)
    np.testing.assert_allclose(got, (h + bias).reshape(2, 3, 2, 16), rtol=1e-6)
