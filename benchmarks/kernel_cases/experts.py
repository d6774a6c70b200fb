"""Benchmark cases of `expert_mlp`: decode steps and prefill of a mixture of experts.

One layer of Qwen3-30B-A3B's shape, in which each token has 8 of 128 experts, and decode steps of gpt-oss-20b's, in which
it has 4 of 32 experts in MXFP4, with biases.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

import weakref
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import GroupedMatrix, Norm, expert_mlp
from kvjax.pallas_kernels.experts import few_pairs_pallas_triton as few_pairs
from kvjax.pallas_kernels.experts import many_pairs_pallas_triton as many_pairs
from kvjax.pallas_kernels.experts.tiles import Biases

from .case import Case, relative_error

EPS = 1e-6
"""Epsilon of the tokens' norm."""

CHECKED = 3
"""Number of tokens compared with float64."""


class Layer(NamedTuple):
    """Sizes of a layer. Experts in MXFP4 have biases and "clamped_swiglu", others neither."""

    experts: int
    each: int
    dim: int
    width: int
    mxfp4: bool = False

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the stacked gate, up and down projections."""
        hidden, outputs = self.experts * self.width, self.experts * self.dim
        return (hidden, self.dim), (hidden, self.dim), (outputs, self.width)

    @property
    def expert_bytes(self) -> float:
        """Bytes of an expert."""
        numbers = 3 * self.dim * self.width
        return numbers * 4.25 / 8 + 2 * (2 * self.width + self.dim) if self.mxfp4 else 2.0 * numbers


QWEN, GPT_OSS = Layer(128, 8, 2048, 768), Layer(32, 4, 2880, 2880, mxfp4=True)


def cases() -> Iterator[Case]:
    """Even load of the experts, which norm their tokens."""
    for layer, counts in ((QWEN, (1, 8, 16, 64, 4096, 16384)), (GPT_OSS, (1, 8))):
        for tokens in counts:
            hit = layer.experts * (1 - (1 - layer.each / layer.experts) ** tokens)
            options = {"activation": "clamped_swiglu"} if layer.mxfp4 else {}
            variants = {
                name: partial(_normed, expert_mlp, implementation=name, **options) for name in ("xla", "auto", "gpu")
            }
            yield Case(
                operation="expert_mlp",
                shape=f"{tokens} x {layer.dim}, {layer.each} of {layer.experts} x {layer.width}",
                dtype="mxfp4" if layer.mxfp4 else "bfloat16",
                inputs=partial(_inputs, layer, tokens),
                variants=variants | dict(_sized(layer, tokens)),
                error=_Error(layer),
                tolerance=1e-2,
                bytes=round(hit * layer.expert_bytes + tokens * layer.dim * 6),
                flops=6 * tokens * layer.each * layer.dim * layer.width,
            )


def _sized(layer: Layer, tokens: int) -> Iterator[tuple[str, Any]]:
    options: dict[str, Any] = {"activation": "clamped_swiglu" if layer.mxfp4 else "silu", "total": None}
    if layer.mxfp4:
        if tokens == 1:
            cuts = product(((32, 8, 2), (32, 8, 4), (32, 8, 8), (32, 16, 4), (32, 16, 8), (64, 16, 8)), (16, 32, 64))
            for (units, warps, together), outputs in cuts:
                sizes = {"units": units, "outputs": outputs, "warps": warps, "together": together}
                yield _name(sizes), partial(_normed, few_pairs.expert_mlp, sizes=sizes, **options)
            return
        for (outputs, warps), inputs, stages in product(((16, 1), (64, 4)), (4, 8), (1, 2, 3, 4)):
            sizes = {"inputs": inputs, "warps": warps, "stages": stages, "outputs": outputs}
            yield _name(sizes), partial(_normed, few_pairs.expert_mlp, sizes=sizes, **options)
        return
    if tokens <= few_pairs.FEW_ROWS:
        for inputs, warps, stages in product((64, 128, 256), (1, 2, 4), (3, 4)):
            sizes = {"inputs": inputs, "warps": warps, "stages": stages}
            yield _name(sizes), partial(_normed, few_pairs.expert_mlp, sizes=sizes, **options)
        return
    tiles = (16, 32) if tokens < 1024 else (64, 128)
    for pairs, columns, inputs, warps, stages in product(tiles, (64, 128), (64,), (4, 8), (3, 4)):
        sizes = {"pairs": pairs, "columns": columns, "inputs": inputs, "warps": warps, "stages": stages}
        yield _name(sizes), partial(_normed, many_pairs.expert_mlp, sizes=sizes, **options)


def _normed(function: Any, gain: jax.Array, *arrays: jax.Array, **options: Any) -> jax.Array:
    return function(*arrays, norm=Norm(gain, EPS), **options)


def _name(sizes: dict[str, int]) -> str:
    return "gpu " + " ".join(f"{name}={value}" for name, value in sizes.items())


def _inputs(layer: Layer, tokens: int, seed: int) -> tuple[Any, ...]:
    keys = iter(jax.random.split(jax.random.key(seed), 10))
    _, experts = jax.lax.top_k(jax.random.normal(next(keys), (tokens, layer.experts)), layer.each)
    weights = jax.nn.softmax(jax.random.normal(next(keys), (tokens, layer.each)))
    x = jax.random.normal(next(keys), (tokens, layer.dim), jnp.bfloat16)
    make = _mxfp4 if layer.mxfp4 else _floats
    matrices = [make(next(keys), *shape) for shape in layer.matrices]
    gain = 1 + 0.1 * jax.random.normal(next(keys), (layer.dim,), jnp.bfloat16)
    given = gain, x, experts.astype(jnp.int32), weights, *matrices
    if not layer.mxfp4:
        return given
    return *given, Biases(*(0.1 * jax.random.normal(next(keys), shape[:1], jnp.bfloat16) for shape in layer.matrices))


def _floats(key: jax.Array, outputs: int, inputs: int) -> jax.Array:
    return jax.random.normal(key, (outputs, inputs), jnp.bfloat16) * inputs**-0.5


def _mxfp4(key: jax.Array, outputs: int, inputs: int) -> GroupedMatrix:
    """Random codes, with scales between 2^-9 and 2^-6."""
    first, second = jax.random.split(key)
    levels = jax.random.bits(first, (outputs, 16, inputs // 32), jnp.uint8)
    return GroupedMatrix(levels, 118 + jax.random.bits(second, (outputs, inputs // 32), jnp.uint8) % 4)


class _Error:
    """Relative errors of a layer's outputs. The expected ones are computed once as long as inputs are the same."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._tokens: Any = lambda: None
        self._expected = np.zeros(())

    def __call__(self, inputs: tuple[Any, ...], out: jax.Array) -> float:
        tokens = inputs[1]
        if self._tokens() is not tokens:
            self._tokens, self._expected = weakref.ref(tokens), _expected(self._layer, inputs)
        return relative_error(np.asarray(out[_checked(tokens)], np.float64), self._expected)


def _checked(tokens: jax.Array) -> np.ndarray:
    """Tokens that are compared with float64."""
    return np.linspace(0, len(tokens) - 1, min(CHECKED, len(tokens))).astype(int)


def _expected(layer: Layer, inputs: tuple[Any, ...]) -> np.ndarray:
    """Outputs of the checked tokens, in float64."""
    gain, x, experts, weights, *matrices = inputs
    biases = matrices.pop() if layer.mxfp4 else None
    rows = _checked(x)
    expected = np.zeros((len(rows), layer.dim))
    for at, row in enumerate(rows):
        token = np.asarray(x[row], np.float64)
        token = token / np.sqrt(np.mean(token**2) + EPS) * np.asarray(gain, np.float64)
        for expert, weight in zip(np.asarray(experts[row]), np.asarray(weights[row], np.float64), strict=True):
            gate, up, down = (_wide(w, expert, layer.experts) for w in matrices)
            first, second = gate @ token, up @ token
            if biases is None:
                expected[at] += weight * (down @ (first / (1 + np.exp(-first)) * second))
                continue
            added = [np.asarray(b.reshape(layer.experts, -1)[expert], np.float64) for b in biases]
            first, second = np.minimum(first + added[0], 7), np.clip(second + added[1], -7, 7)
            hidden = first / (1 + np.exp(-1.702 * first)) * (second + 1)
            expected[at] += weight * (down @ hidden + added[2])
    return expected


def _wide(matrix: Any, expert: int, experts: int) -> np.ndarray:
    """Matrix of one expert."""
    own = jax.tree.map(lambda array: array.reshape(experts, -1, *array.shape[1:])[expert], matrix)
    if not isinstance(own, GroupedMatrix):
        return np.asarray(own, np.float64)
    codes, scale = np.asarray(own.levels), np.asarray(own.scale, np.float64)
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = np.concatenate([np.where(half < 8, 1, -1) * sizes[half % 8] for half in (codes % 16, codes // 16)], 1)
    return (numbers * 2 ** (scale - 127)[:, None]).swapaxes(1, 2).reshape(len(codes), -1)
