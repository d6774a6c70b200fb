"""Model parameters: a pytree of weights, with configuration and tokenizer as static fields.

`abstract(config)` defines all shapes; random initialisation, conversion and sharding start from it. Projections are
stored [out, in], as in checkpoints. Tensors then go from a memory map to the device unchanged. On CPU, the
matrix-vector products of decoding read contiguous rows, which is 1.1 to 2 times as fast as [in, out] (projection shapes
of the default model).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray
from rich.filesize import decimal

from kvjax.config import AttentionConfig, DeltaNetConfig, LayerConfig, MLPConfig, ModelConfig, MoEConfig
from kvjax.pallas_kernels import GroupedMatrix, Int8Matrix, Matrix, is_quantized

EXPERTS = frozenset({"gate_experts", "up_experts", "down_experts"})
"""Matrices of all experts of a layer, one below the other, by the last part of their names."""

PROJECTIONS = frozenset({"q", "k", "v", "z", "o", "gate", "up", "down"}) | EXPERTS
"""Matrices of a layer, by the last part of their names."""

TABLES = frozenset({"embed", "head"})
"""Matrices with one row per token of the vocabulary."""

ALWAYS_FLOAT32 = frozenset({"choice_bias"})
"""Parameters that stay in float32 whatever the type of the model, by the last part of their names. Differences between biases
of experts are too small for 16 bits.
"""

_DEVIATION_OF_E2M1 = 2.926
"""Standard deviation of 4-bit floats with random codes."""

GROUP = 32
"""Inputs that share a scale and a minimum when floats are quantised to 4 bits."""


@flax.struct.dataclass
class Attention:
    """Projections of one attention layer: q [NH, D], k and v [KH, D], o [D, NH]. N query heads, K KV heads, H head dim, D model dim.

    In a gated layer, q is [2NH, D], and its rows are [query, gate] of each head.
    `q_norm` and `k_norm` are [H], or [NH] and [KH] if they are over all heads together. `sinks` are the logits of the query
    heads' attention sinks.
    """

    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    q_bias: Float[Array, " NH"] | None = None
    k_bias: Float[Array, " KH"] | None = None
    v_bias: Float[Array, " KH"] | None = None
    o_bias: Float[Array, " D"] | None = None
    q_norm: Float[Array, " _"] | None = None
    k_norm: Float[Array, " _"] | None = None
    sinks: Float[Array, " N"] | None = None


@flax.struct.dataclass
class DeltaNet:
    """Parameters of one gated delta net. Q channels of all keys, P of all values, M value heads, Y value dim, D model dim, W width of the convolution.

    q and k are [Q, D], v and z [P, D], alpha and beta [M, D], o [D, P]. `z` is the gate of the output, `alpha` of the
    decay, and `beta` of the rate.
    """

    q: Matrix
    k: Matrix
    v: Matrix
    z: Matrix
    o: Matrix
    alpha: Float[Array, "M D"]
    beta: Float[Array, "M D"]
    q_conv: Float[Array, "Q W"]
    k_conv: Float[Array, "Q W"]
    v_conv: Float[Array, "P W"]
    log_decay: Float[Array, " M"]
    dt_bias: Float[Array, " M"]
    out_norm: Float[Array, " Y"]


@flax.struct.dataclass
class MLP:
    """Gated MLP: down(silu(gate(x)) * up(x)); gate and up [F, D], down [D, F]. D model dim, F hidden dim."""

    gate: Matrix
    up: Matrix
    down: Matrix
    gate_bias: Float[Array, " F"] | None = None
    up_bias: Float[Array, " F"] | None = None
    down_bias: Float[Array, " D"] | None = None


@flax.struct.dataclass
class Experts:
    """Mixture of experts: each expert is a gated MLP. D model dim, E experts, F hidden dim of an expert.

    Matrices of expert e are rows e·F to (e+1)·F of `gate_experts` and `up_experts` [EF, D], and rows e·D to (e+1)·D of
    `down_experts` [ED, F]. `router` is [E, D], and `shared_gate` [1, D]. `choice_bias` is in float32.
    Biases of the experts' projections are stacked as their rows are.
    """

    router: Float[Array, "E D"]
    gate_experts: Matrix
    up_experts: Matrix
    down_experts: Matrix
    shared: MLP | None = None
    shared_gate: Float[Array, "1 D"] | None = None
    choice_bias: Float[Array, " E"] | None = None
    router_bias: Float[Array, " E"] | None = None
    gate_experts_bias: Float[Array, " EF"] | None = None
    up_experts_bias: Float[Array, " EF"] | None = None
    down_experts_bias: Float[Array, " ED"] | None = None


@flax.struct.dataclass
class Block:
    """One transformer block. It has the norms that `LayerConfig.norms` says, and `attn` is its mixer."""

    attn_norm: Float[Array, " D"] | None
    attn: Attention | DeltaNet
    mlp_norm: Float[Array, " D"] | None
    mlp: MLP | Experts
    attn_post_norm: Float[Array, " D"] | None = None
    mlp_post_norm: Float[Array, " D"] | None = None

    @property
    def sinks(self) -> Float[Array, " N"] | None:
        """Logits of the attention sinks of the layer's query heads, if it has any."""
        return self.attn.sinks if isinstance(self.attn, Attention) else None


@flax.struct.dataclass
class Params:
    """Parameters of a model; embed and head are [V, D]. V vocabulary, D model dim.

    Matrices may be quantised to 8 or 4 bits, and remain so in memory (`kvjax.pallas_kernels.QuantizedMatrix`). `head`
    is None if it is tied to the embedding. `config` and `tokenizer` are static: they are part of the tree structure.
    `tokenizer` is None for a model without text, and tokenizers compare by content.

    Example:
        >>> params.embed.shape, len(params.layers), params.config.family  # vocabulary and width
        ((64, 48), 2, 'llama')
    """

    embed: Matrix
    layers: tuple[Block, ...]
    norm: Float[Array, " D"]
    head: Matrix | None = None
    config: ModelConfig = flax.struct.field(pytree_node=False, kw_only=True)
    tokenizer: Any = flax.struct.field(pytree_node=False, default=None, kw_only=True)

    @property
    def dtype(self) -> jnp.dtype:
        """Floating-point type of activations, cache, and weights that are not quantised."""
        return self.norm.dtype

    @classmethod
    def from_tree(cls, tree: Any, layout: str, config: Any, *, dtype: Any = None, tokenizer: Any = None) -> "Params":
        """Make parameters from the tree of tunix, gemma or MaxText. See `kvjax.conversion.from_tree`.

        Example:
            >>> tree = params.to_tree("tunix")  # or `nnx.state(model, nnx.Param)`
            >>> kvjax.Params.from_tree(tree, "tunix", params.config).config == params.config
            True
        """
        return _registered(TREES.read)(tree, layout, config, dtype=dtype, tokenizer=tokenizer)

    def to_tree(self, layout: str, *, stacked: bool = True) -> dict[Any, Any]:
        """Write the parameters as the tree of tunix, gemma or MaxText. See `kvjax.conversion.to_tree`.

        Example:
            >>> tree = params.to_tree("maxtext")
            >>> sorted(tree)
            ['decoder', 'token_embedder']
        """
        return _registered(TREES.write)(self, layout, stacked=stacked)

    def __repr__(self) -> str:
        """Summary of the model. Leaves may be of any type, as after `jax.tree.map`."""
        c, leaves = self.config, jax.tree.leaves(self)
        arrays = [leaf for leaf in leaves if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
        weights = jax.tree.leaves(self, is_leaf=is_quantized)
        numbers = sum(math.prod(weight.shape) for weight in weights if hasattr(weight, "shape"))
        nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays)
        kinds = {
            weight.kind if is_quantized(weight) else str(getattr(weight, "dtype", type(weight).__name__))
            for weight in weights
        }
        return (
            f"Params({c.family}, {numbers:,} parameters, {' and '.join(sorted(kinds))}, {decimal(nbytes)}\n"
            f"  {c.num_layers} layers of width {c.hidden_size}, {c.heads_text}, vocabulary of {c.vocab_size}, "
            f"window of {c.context_length} tokens\n"
            f"  tokenizer={self.tokenizer!r})"
        )


@dataclasses.dataclass
class TreeFunctions:
    """What reads and writes trees of other libraries.

    `kvjax.conversion` builds on this package, and puts its functions here.

    Attributes:
        read, write: `from_tree` and `to_tree` of `kvjax.conversion`; None before it is imported.
    """

    read: Callable[..., Any] | None = None
    write: Callable[..., Any] | None = None


TREES = TreeFunctions()
"""The functions of this process."""


def _registered(function: Callable[..., Any] | None) -> Callable[..., Any]:
    if function is None:
        raise RuntimeError("trees are read and written by kvjax.conversion, which is not imported; import it first")
    return function


def without_text(params: Params) -> Params:
    """Copy without tokenizer and without the ids of start and end tokens, on which no program depends."""
    return dataclasses.replace(params, tokenizer=None, config=dataclasses.replace(params.config, eos=(), bos=None))


def abstract(
    config: ModelConfig,
    dtype: Any = jnp.float32,
    tokenizer: Any = None,
    weights: str = "float",
    embedding: str = "float",
) -> Params:
    """Shapes of a model's parameters, as `jax.ShapeDtypeStruct` leaves. Nothing is allocated.

    Args:
        config: the model's configuration.
        dtype: type of parameters that are not quantised, except for `ALWAYS_FLOAT32`.
        tokenizer: tokenizer to attach.
        weights: kind of the layers' matrices: "float", "int8", "int4", or "mxfp4" for experts beside floats.
        embedding: kind of embedding and head.

    Example:
        >>> shapes = kvjax.models.abstract(params.config, "bfloat16")
        >>> shapes.embed.shape, shapes.embed.dtype, sum(leaf.size for leaf in jax.tree.leaves(shapes))
        ((64, 48), dtype(bfloat16), 52464)
    """
    c = config
    if weights == "mxfp4" and not any(isinstance(kind.mlp, MoEConfig) for kind in c.kinds):
        raise ValueError(
            f"weights='mxfp4' is for experts, which this {c.family} model does not have; give float, int8 or int4"
        )
    array = functools.partial(_struct, dtype=dtype)
    kinds = {kind: _abstract_block(kind, c.hidden_size, dtype) for kind in c.kinds}
    shapes = Params(
        embed=array(c.vocab_size, c.hidden_size),
        layers=tuple(kinds[kind] for kind in c.layers),
        norm=array(c.hidden_size),
        head=None if c.tied else array(c.vocab_size, c.hidden_size),
        config=config,
        tokenizer=tokenizer,
    )
    return tree_map_named(lambda name, leaf: quantized_shape(leaf, kind_of(name, weights, embedding)), shapes)


def float_of(name: str, dtype: Any) -> Any:
    """Type of a parameter that is not quantised, in a model of type `dtype`."""
    return jnp.dtype(jnp.float32) if name.rpartition(".")[-1] in ALWAYS_FLOAT32 else dtype


def _abstract_block(kind: LayerConfig, width: int, dtype: Any) -> Block:
    """Shapes of one layer's parameters, for a residual stream of `width`."""
    array = functools.partial(_struct, dtype=dtype)

    def optional(present: bool, *shape: int) -> Any:
        return array(*shape) if present else None

    a, mlp, pre, post = kind.mixer, kind.mlp, kind.norms != "post", kind.norms != "pre"
    is_delta = isinstance(a, DeltaNetConfig)
    return Block(
        attn_norm=optional(pre, width),
        attn=_abstract_delta_net(a, width, dtype) if is_delta else _abstract_attention(a, width, dtype),
        mlp_norm=optional(pre, width),
        mlp=_abstract_experts(mlp, width, dtype) if isinstance(mlp, MoEConfig) else _abstract_mlp(mlp, width, dtype),
        attn_post_norm=optional(post, width),
        mlp_post_norm=optional(post, width),
    )


def _abstract_attention(a: AttentionConfig, width: int, dtype: Any) -> Attention:
    array = functools.partial(_struct, dtype=dtype)

    def optional(present: bool, *shape: int) -> Any:
        return array(*shape) if present else None

    queries, keys = a.output_width, a.num_kv_heads * a.head_dim
    rows = 2 * queries if a.gated else queries
    return Attention(
        q=array(rows, width),
        k=array(keys, width),
        v=array(keys, width),
        o=array(width, queries),
        q_bias=optional(a.qkv_bias, rows),
        k_bias=optional(a.qkv_bias, keys),
        v_bias=optional(a.qkv_bias, keys),
        o_bias=optional(a.output_bias, width),
        q_norm=optional(a.qk_norm, queries if a.joint_qk_norm else a.head_dim),
        k_norm=optional(a.qk_norm, keys if a.joint_qk_norm else a.head_dim),
        sinks=optional(a.sinks, a.num_heads),
    )


def _abstract_delta_net(a: DeltaNetConfig, width: int, dtype: Any) -> DeltaNet:
    array = functools.partial(_struct, dtype=dtype)
    return DeltaNet(
        q=array(a.key_width, width),
        k=array(a.key_width, width),
        v=array(a.output_width, width),
        z=array(a.output_width, width),
        o=array(width, a.output_width),
        alpha=array(a.value_heads, width),
        beta=array(a.value_heads, width),
        q_conv=array(a.key_width, a.conv),
        k_conv=array(a.key_width, a.conv),
        v_conv=array(a.output_width, a.conv),
        log_decay=array(a.value_heads),
        dt_bias=array(a.value_heads),
        out_norm=array(a.value_dim),
    )


def _abstract_mlp(config: MLPConfig, width: int, dtype: Any) -> MLP:
    array, hidden = functools.partial(_struct, dtype=dtype), config.width
    return MLP(
        gate=array(hidden, width),
        up=array(hidden, width),
        down=array(width, hidden),
        gate_bias=array(hidden) if config.bias else None,
        up_bias=array(hidden) if config.bias else None,
        down_bias=array(width) if config.bias else None,
    )


def _abstract_experts(config: MoEConfig, width: int, dtype: Any) -> Experts:
    array, rows = functools.partial(_struct, dtype=dtype), config.experts * config.width
    return Experts(
        router=array(config.experts, width),
        gate_experts=array(rows, width),
        up_experts=array(rows, width),
        down_experts=array(config.experts * width, config.width),
        shared=None if config.shared is None else _abstract_mlp(MLPConfig(config.shared), width, dtype),
        shared_gate=array(1, width) if config.shared_gate else None,
        choice_bias=_struct(config.experts, dtype=jnp.float32) if config.router == "sigmoid" else None,
        router_bias=array(config.experts) if config.bias else None,
        gate_experts_bias=array(rows) if config.bias else None,
        up_experts_bias=array(rows) if config.bias else None,
        down_experts_bias=array(config.experts * width) if config.bias else None,
    )


def kind_of(name: str, weights: Any, embedding: Any) -> Any:
    """Kind of a parameter: `weights` for matrices of layers, `embedding` for embedding and head, "float" for others.

    Only experts are in MXFP4.
    """
    last = name.rpartition(".")[-1]
    kind = weights if last in PROJECTIONS else embedding if last in TABLES else "float"
    return kind if kind != "mxfp4" or last in EXPERTS else "float"


def quantized_shape(leaf: Any, kind: str) -> Any:
    """Shapes of a matrix as "int8", "int4" or "mxfp4"; unchanged for "float"."""
    if kind == "float":
        return leaf
    outputs, inputs = leaf.shape
    if kind == "int8":
        return Int8Matrix(_struct(outputs, inputs, dtype=jnp.int8), _struct(outputs, dtype=jnp.float32))
    if kind not in ("int4", "mxfp4"):
        raise ValueError(f"weights={kind!r}; give float, int8, int4 or mxfp4")
    if kind == "mxfp4":
        if inputs % 32:
            raise ValueError(f"a matrix with {inputs} inputs cannot be in MXFP4, in which 32 inputs share a scale")
        levels = _struct(outputs, 16, inputs // 32, dtype=jnp.uint8)
        return GroupedMatrix(levels, _struct(outputs, inputs // 32, dtype=jnp.uint8))
    group = math.gcd(inputs, GROUP)
    if group % 2:
        raise ValueError(f"a matrix with {inputs} inputs cannot be in 4 bits, as two inputs share a byte")
    levels = _struct(outputs, group // 2, inputs // group, dtype=jnp.uint8)
    scale = _struct(outputs, inputs // group, dtype=jnp.float16)
    return GroupedMatrix(levels, scale, scale)


def retyped(params: Params, dtype: Any) -> Params:
    """Shapes of the parameters with another floating-point type. Quantised matrices and `ALWAYS_FLOAT32` do not change."""
    return jax.tree_util.tree_map_with_path(
        lambda path, weight: (
            jax.tree.map(lambda x: _struct(*x.shape, dtype=x.dtype), weight)
            if is_quantized(weight)
            else _struct(*weight.shape, dtype=float_of(name_of(path), dtype))
        ),
        params,
        is_leaf=is_quantized,
    )


def init(
    config: ModelConfig,
    key: PRNGKeyArray,
    dtype: Any = jnp.float32,
    tokenizer: Any = None,
    weights: str = "float",
    embedding: str = "float",
) -> Params:
    """Initialise random parameters, for tests and for benchmarks at the shapes of real models.

    Matrices are normal with variance 1/fan-in (quantised ones uniform with the same variance), norm gains one and
    biases zero. Weights are made on the device by one small program per shape, as a single program for all takes
    minutes to compile.

    Args:
        config: the model's configuration.
        key: random key.
        dtype, tokenizer, weights, embedding: as for `abstract`.

    Example:
        >>> copy = kvjax.models.init(params.config, jax.random.key(0), "bfloat16")
        >>> copy.embed.shape, copy.embed.dtype
        ((64, 48), dtype(bfloat16))
    """
    shapes = abstract(config, dtype, tokenizer, weights, embedding)
    paths, treedef = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=is_quantized)
    keys = jax.random.split(key, len(paths))
    return jax.tree_util.tree_unflatten(
        treedef, [initial(name_of(path), leaf, k, gain_of(config)) for (path, leaf), k in zip(paths, keys, strict=True)]
    )


def count(params: Params) -> int:
    """Number of parameters. Also works for an `abstract` tree."""
    return sum(math.prod(weight.shape) for weight in jax.tree.leaves(params, is_leaf=is_quantized))


def nbytes(params: Params) -> int:
    """Bytes of all weights. Also works for an `abstract` tree."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def same_shapes(params: Params, other: Params) -> bool:
    """Whether compiled programs accept either: equal configuration, and equal shapes and types of all weights."""
    bare = [dataclasses.replace(each, tokenizer=None) for each in (params, other)]
    (leaves, tree), (others, other_tree) = map(jax.tree.flatten, bare)
    return tree == other_tree and all(
        a is b or (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(leaves, others, strict=True)
    )


def tree_map_named(f: Callable[[str, Any], Any], params: Params) -> Params:
    """Map `f(name, leaf)` over the leaves; names look like ``layers.3.attn.q``."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: f(name_of(path), leaf), params)


def name_of(path: tuple[Any, ...]) -> str:
    """Dotted name of a leaf's key path."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _struct(*shape: int, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def gain_of(config: ModelConfig) -> float:
    """Stored gain of a norm that multiplies by one."""
    return 1.0 - (config.norm_offset or 0.0)


def initial(name: str, leaf: Any, key: PRNGKeyArray, gain: float = 1.0) -> Any:
    """Random parameter of the shape of `leaf`, see `init`. Only names that are ``embed`` or end with a part below matter.

    Vectors ending with ``bias`` or ``log_decay`` are zeros, and with ``out_norm`` ones. Others are `gain`.
    """
    if len(leaf.shape) == 2:
        deviation = 1.0 if name == "embed" else leaf.shape[1] ** -0.5
        if is_quantized(leaf):
            return _uniform(key, deviation, leaf)
        return _normal(key, deviation, leaf.shape, leaf.dtype)
    fill = 0.0 if name.endswith(("bias", "log_decay")) else 1.0 if name.endswith("out_norm") else gain
    return jnp.full(leaf.shape, fill, leaf.dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: PRNGKeyArray, scale: float, shape: tuple[int, ...], dtype: Any) -> Array:
    return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)


def _uniform(key: PRNGKeyArray, deviation: float, shapes: Any) -> Any:
    """Random quantised matrix with mean 0 and the given standard deviation, set by its scales and minima.

    Scales of MXFP4 are powers of two, so that the deviation is within a factor of 1.5.
    """
    levels = _bits(key, shapes.levels.shape, shapes.levels.dtype)
    if shapes.kind == "mxfp4":
        exponent = 127 + round(math.log2(deviation / _DEVIATION_OF_E2M1))
        return dataclasses.replace(shapes, levels=levels, scale=jnp.full(shapes.scale.shape, exponent, jnp.uint8))
    count = 16 if shapes.kind == "int4" else 256
    scale = deviation / ((count**2 - 1) / 12) ** 0.5

    def filled(leaf: jax.ShapeDtypeStruct | None, value: float) -> Array | None:
        return None if leaf is None else jnp.full(leaf.shape, value, leaf.dtype)

    found = {"levels": levels, "scale": filled(shapes.scale, scale)}
    if shapes.kind == "int4":
        found["minimum"] = filled(shapes.minimum, -scale * (count - 1) / 2)
    return dataclasses.replace(shapes, **found)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _bits(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any) -> Array:
    return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8), dtype)
