"""`ModelConfig`: a frozen, hashable description that fully determines the transformer, layer by layer."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from .rope import NO_ROPE, Rope, RopeConfig

MAX_LAYERS = 4096
"""Limit on the number of layers, far above that of any model. A configuration with more is damaged."""

MOST_TOKENS = 2**31 - 1
"""Largest position that int32 can count."""

Norms = Literal["pre", "post", "both"]
"""Where a layer has RMS norms: before attention and MLP, after each, or both."""

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
"""Activation of an MLP's gate, see `kvjax.pallas_kernels.activations`. "gelu_tanh" is the tanh approximation of GELU, and
"clamped_swiglu" that of gpt-oss, which changes the up projection, too.
"""

Router = Literal["softmax", "sigmoid"]
"""How a router turns logits into weights of experts: a softmax over all experts, or a sigmoid of each expert's logit."""


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Attention of one layer.

    Attributes:
        num_heads: N, query heads.
        num_kv_heads: K, key-value heads; N is a multiple of K.
        head_dim: H; need not be D / N.
        rope: rotary embedding. One with `dim=0` rotates nothing.
        window: sliding attention window in tokens; None for full attention.
        scale: factor on attention logits; None for 1 / sqrt(H).
        qkv_bias, output_bias: which projections have a bias.
        qk_norm: whether queries and keys are RMS-normalised before rotation.
        joint_qk_norm: whether `qk_norm` is over all heads of a token together instead of each head.
        query_growth: β. Queries at position p are multiplied by 1 + β · log(1 + floor(p / `query_period`)). 0 for none.
        query_period: positions after which the factor on queries grows; None without one.
        gated: whether outputs of heads are multiplied by the sigmoid of a projection of the layer's input. The query matrix
            then has [query, gate] of each head.
        sinks: whether each query head has a learned logit that takes a share of every softmax, without a value.

    Raises:
        ValueError: a value is out of range, or values contradict each other.

    Example:
        >>> from kvjax.config import AttentionConfig, RopeConfig
        >>> attention = AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=64, rope=RopeConfig(1e4, dim=64))
        >>> attention.num_heads // attention.num_kv_heads  # query heads of a group
        4
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    window: int | None = None
    scale: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    query_growth: float = 0.0
    query_period: int | None = None
    gated: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        """Check the values. A scale that is the default becomes None, so that equal layers are equal values."""
        _at_least_one(self, "num_heads", "num_kv_heads", "head_dim")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} must be at least one token")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: "
                "each KV head serves the same number of query heads"
            )
        if self.rope.dim % 2 or not 0 <= self.rope.dim <= self.head_dim:
            raise ValueError(f"rope.dim={self.rope.dim} must be even and at most head_dim={self.head_dim}")
        if self.joint_qk_norm and not self.qk_norm:
            raise ValueError("joint_qk_norm=True needs qk_norm=True")
        if not 0 <= self.query_growth < 1e6 or (self.query_growth > 0) != (self.query_period is not None):
            raise ValueError(
                f"query_growth={self.query_growth} and query_period={self.query_period} must be given together, or neither; "
                "query_growth must lie between 0 and 1e6"
            )
        if self.query_period is not None:
            _at_least_one(self, "query_period")
        if self.scale is not None and not 0 < self.scale < 1e6:
            raise ValueError(f"scale={self.scale} must lie between 0 and 1e6")
        if self.scale == self.head_dim**-0.5:
            object.__setattr__(self, "scale", None)

    @property
    def output_width(self) -> int:
        """Inputs of the output projection."""
        return self.num_heads * self.head_dim

    @property
    def logit_scale(self) -> float:
        """Factor on attention logits."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig:
    """Gated delta net of one layer: a recurrent mixer, which has a state of fixed size instead of keys and values of tokens.

    Attributes:
        key_heads: Hk, heads of queries and keys.
        value_heads: Hv, heads of values; a multiple of Hk. Value head j uses query and key head j // (Hv / Hk).
        key_dim: channels of each query and key.
        value_dim: channels of each value.
        conv: tokens that the causal convolution of queries, keys and values reads.

    Raises:
        ValueError: a value is out of range, or values contradict each other.

    Example:
        >>> kvjax.config.DeltaNetConfig(key_heads=16, value_heads=32, key_dim=128, value_dim=128).conv
        4
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int = 4

    def __post_init__(self) -> None:
        _at_least_one(self, "key_heads", "value_heads", "key_dim", "value_dim")
        if self.conv < 2:
            raise ValueError(f"conv={self.conv} must be at least two tokens")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads={self.value_heads} is not a multiple of key_heads={self.key_heads}: each key head serves the same "
                "number of value heads"
            )

    @property
    def key_width(self) -> int:
        """Channels of the queries or keys of all heads."""
        return self.key_heads * self.key_dim

    @property
    def output_width(self) -> int:
        """Channels of the values of all heads, which are the inputs of the output projection."""
        return self.value_heads * self.value_dim

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of one sequence's state: a float32 matrix per value head, and the inputs that the convolution reads again."""
        inputs = (self.conv - 1) * (2 * self.key_width + self.output_width)
        return 4 * self.output_width * self.key_dim + inputs * itemsize


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """Gated MLP of one layer.

    Attributes:
        width: F, hidden units.
        bias: whether its three projections have a bias.
        activation: activation of the gate.

    Example:
        >>> kvjax.config.MLPConfig(width=96).activation
        'silu'
    """

    width: int
    bias: bool = False
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        _at_least_one(self, "width")

    @property
    def active_width(self) -> int:
        """Hidden units that one token passes through."""
        return self.width


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts of one layer. A token passes through the experts with the highest router weights.

    The router's weights multiply the experts' outputs. A sigmoid router has a learned bias for each expert, which is added
    to the weights only to choose experts.

    Attributes:
        experts: E, number of experts.
        per_token: number of experts that a token passes through.
        width: F, hidden units of each expert, which is a gated MLP.
        normalized: whether the weights of a token's experts are divided by their sum.
        shared: hidden units of an MLP through which all tokens pass; None without one.
        shared_gate: whether the shared MLP's output is multiplied by the sigmoid of a projection of its input.
        activation: activation of the gates.
        router: how the router turns logits into weights.
        groups, groups_per_token: number of groups of consecutive experts, and of those that a token's experts are chosen
            from. The chosen groups have the highest sum of two experts. A softmax router has one group.
        output_scale: factor on the weights of a token's experts, after `normalized`.
        bias: whether the router and each expert's projections have a bias.

    Example:
        >>> experts = kvjax.config.MoEConfig(experts=64, per_token=4, width=768)
        >>> experts.per_token / experts.experts  # share of the experts that a token passes through
        0.0625
    """

    experts: int
    per_token: int
    width: int
    normalized: bool = True
    shared: int | None = None
    shared_gate: bool = False
    activation: Activation = "silu"
    router: Router = "softmax"
    groups: int = 1
    groups_per_token: int = 1
    output_scale: float = 1.0
    bias: bool = False

    def __post_init__(self) -> None:
        _at_least_one(self, "experts", "per_token", "width", "groups", "groups_per_token")
        if self.per_token > self.experts:
            raise ValueError(f"per_token={self.per_token} must be at most experts={self.experts}")
        if self.router == "softmax" and self.groups > 1:
            raise ValueError(f"groups={self.groups} need router='sigmoid'; a softmax router has groups=1")
        if self.experts % self.groups or (self.groups > 1 and self.experts < 2 * self.groups):
            raise ValueError(f"groups={self.groups} must divide experts={self.experts} into groups of at least 2")
        if self.groups_per_token * self.experts < self.per_token * self.groups or self.groups_per_token > self.groups:
            raise ValueError(
                f"groups_per_token={self.groups_per_token} must be at most groups={self.groups}, and these groups must have "
                f"per_token={self.per_token} experts"
            )
        if not 0 < self.output_scale < 1e6:
            raise ValueError(f"output_scale={self.output_scale} must lie between 0 and 1e6")
        if self.shared is not None:
            _at_least_one(self, "shared")
        elif self.shared_gate:
            raise ValueError("shared_gate needs a shared MLP; give the width of one")

    @property
    def active_width(self) -> int:
        """Hidden units that one token passes through."""
        return self.per_token * self.width + (self.shared or 0)

    def experts_hit(self, tokens: int) -> float:
        """Expected number of different experts that `tokens` tokens pass through, if a router chooses at random."""
        return self.experts * (1 - (1 - self.per_token / self.experts) ** tokens)


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """One layer: a mixer of tokens, then an MLP or experts. Equal layers are equal values.

    Attributes:
        mixer: attention, or a gated delta net.
        mlp: the MLP, or the mixture of experts.
        norms: where the layer has RMS norms.

    Example:
        >>> layer = params.config.layers[0]
        >>> layer.mixer.head_dim, layer.mlp.width, layer.norms
        (16, 96, 'pre')
    """

    mixer: AttentionConfig | DeltaNetConfig
    mlp: MLPConfig | MoEConfig
    norms: Norms = "pre"

    @property
    def cached(self) -> bool:
        """Whether the layer has keys and values to cache."""
        return isinstance(self.mixer, AttentionConfig)

    @property
    def attention(self) -> AttentionConfig:
        """The mixer of a layer with attention.

        Raises:
            TypeError: the layer has another mixer.
        """
        if not isinstance(self.mixer, AttentionConfig):
            raise TypeError(
                f"the layer has a {type(self.mixer).__name__} and no attention; use a layer that is `cached`"
            )
        return self.mixer

    @property
    def unrotated(self) -> "LayerConfig":
        """The layer without a rotary embedding."""
        rope = dataclasses.replace(self.attention.rope, dim=0, scaling=None)
        return dataclasses.replace(self, mixer=dataclasses.replace(self.attention, rope=rope))


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Configuration of a decoder-only transformer. `uniform` makes one whose layers are equal.

    Attributes of layers, such as `num_heads` and `rope`, are also properties of the model. They raise an error if the
    layers differ. Those of attention are of the layers that have attention.

    Attributes:
        family: Hugging Face `model_type`, which determines tensor names and tokenizer conventions.
        vocab_size: V.
        hidden_size: D, width of the residual stream.
        layers: one configuration per layer.
        max_position: window in tokens, as in the checkpoint. `context_length` includes linear and YaRN scaling.
        norm_eps: epsilon of every RMS norm.
        norm_offset: number added to the gain of every RMS norm. The product with the gain is then computed in float32.
            None adds nothing, and rounds the normalised value before the product.
        tied: whether the output head shares the embedding.
        embed_scale: factor on embeddings.
        residual_scale: factor on the outputs of attention and MLP before they are added to the residual stream.
        logit_divisor: number that logits are divided by, before `logit_cap`.
        logit_cap: c of logits c · tanh(logits / c); None for plain logits.
        eos: token ids that end a sequence.
        bos: token id that starts a sequence, if the family uses one.

    Raises:
        ValueError: a value is out of range, or values contradict each other.

    Example:
        >>> from kvjax.config import RopeConfig
        >>> config = kvjax.models.ModelConfig.uniform(
        ...     "llama", vocab_size=64, hidden_size=48, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
        ...     head_dim=16, max_position=256, rope=RopeConfig(theta=10000.0, dim=16),
        ... )
        >>> config.num_layers, config.layers[1].mixer.num_kv_heads
        (2, 2)
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    max_position: int
    norm_eps: float = 1e-5
    norm_offset: float | None = None
    tied: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    logit_cap: float | None = None
    eos: tuple[int, ...] = ()
    bos: int | None = None

    def __post_init__(self) -> None:
        _at_least_one(self, "vocab_size", "hidden_size", "max_position")
        if not 0 < len(self.layers) <= MAX_LAYERS:
            raise ValueError(f"num_layers={len(self.layers)} must be at least 1 and at most {MAX_LAYERS}")
        if not 0 < self.norm_eps < 1:
            raise ValueError(f"norm_eps={self.norm_eps} must lie between 0 and 1")
        for name in ("embed_scale", "residual_scale", "logit_divisor", "logit_cap"):
            if not 0 < (1.0 if (value := getattr(self, name)) is None else value) < 1e6:
                raise ValueError(f"{name}={value} must lie between 0 and 1e6")
        for name, tokens in (("eos", self.eos), ("bos", () if self.bos is None else (self.bos,))):
            for token in tokens:
                if not 0 <= token < self.vocab_size:
                    raise ValueError(f"{name} token id {token} is outside the vocabulary of {self.vocab_size}")
        if not self.cached:
            raise ValueError("no layer has attention; at least one layer must have keys and values to cache")
        # Equal layers are one object, so that they compare at once.
        same: dict[LayerConfig, LayerConfig] = {}
        object.__setattr__(self, "layers", tuple(same.setdefault(layer, layer) for layer in self.layers))

    def __hash__(self) -> int:
        """Hash of the fields, computed once, because a configuration is part of the key of every program."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __getstate__(self) -> dict[str, Any]:
        """The fields. Hashes differ between processes."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def uniform(
        cls,
        family: str,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_position: int,
        rope: RopeConfig,
        norm_eps: float = 1e-5,
        tied: bool = False,
        qkv_bias: bool = False,
        output_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        sandwich_norms: bool = False,
        windows: Sequence[int | None] = (),
        eos: tuple[int, ...] = (),
        bos: int | None = None,
    ) -> "ModelConfig":
        """Configuration of a model whose layers are equal, except for their windows.

        Args:
            family, vocab_size, hidden_size, max_position, norm_eps, tied, eos, bos: as in `ModelConfig`.
            intermediate_size, mlp_bias: width and bias of every MLP.
            num_layers: L.
            num_heads, num_kv_heads, head_dim, rope, qkv_bias, output_bias, qk_norm: as in `AttentionConfig`.
            sandwich_norms: whether outputs of attention and MLP are normalised too.
            windows: sliding attention window of each layer; by default all layers have full attention.

        Raises:
            ValueError: a value is out of range, or values contradict each other.
        """
        if not 0 < num_layers <= MAX_LAYERS:
            raise ValueError(f"num_layers={num_layers} must be at least 1 and at most {MAX_LAYERS}")
        windows = windows or (None,) * num_layers
        if len(windows) != num_layers:
            raise ValueError(f"windows has {len(windows)} entries for {num_layers} layers; give one per layer")
        mixer = AttentionConfig(
            num_heads, num_kv_heads, head_dim, rope, qkv_bias=qkv_bias, output_bias=output_bias, qk_norm=qk_norm
        )
        layer = LayerConfig(mixer, MLPConfig(intermediate_size, mlp_bias), "both" if sandwich_norms else "pre")
        kinds = {
            window: dataclasses.replace(layer, mixer=dataclasses.replace(mixer, window=window)) for window in windows
        }
        return cls(
            family=family,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            layers=tuple(kinds[window] for window in windows),
            max_position=max_position,
            norm_eps=norm_eps,
            tied=tied,
            eos=eos,
            bos=bos,
        )

    def with_depth(self, num_layers: int) -> "ModelConfig":
        """The model with its first `num_layers` layers, which repeat if there are fewer.

        Raises:
            ValueError: none of these layers has attention. Qwen3.5 has it in every fourth layer.
        """
        return dataclasses.replace(self, layers=tuple(itertools.islice(itertools.cycle(self.layers), num_layers)))

    def with_attention(self, **changes: Any) -> "ModelConfig":
        """The model with other attention in every layer that has attention.

        Args:
            changes: new values of fields of `AttentionConfig`.

        Example:
            >>> params.config.with_attention(window=32).windows
            (32, 32)
        """

        def changed(layer: LayerConfig) -> LayerConfig:
            if not layer.cached:
                return layer
            return dataclasses.replace(layer, mixer=dataclasses.replace(layer.attention, **changes))

        return dataclasses.replace(self, layers=tuple(map(changed, self.layers)))

    @functools.cached_property
    def kinds(self) -> tuple[LayerConfig, ...]:
        """The different layers, in the order of their first appearance."""
        return tuple(dict.fromkeys(self.layers))

    @functools.cached_property
    def differ_in_windows_only(self) -> bool:
        """Whether all layers are equal, except for their windows."""
        if not all(layer.cached for layer in self.kinds):
            return False
        mixers = (dataclasses.replace(layer.attention, window=None) for layer in self.kinds)
        return len({dataclasses.replace(a, mixer=b) for a, b in zip(self.kinds, mixers, strict=True)}) == 1

    @property
    def num_layers(self) -> int:
        """L, number of layers."""
        return len(self.layers)

    @functools.cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding attention window of each layer in tokens; None for full attention, and for a layer without attention."""
        return tuple(layer.attention.window if layer.cached else None for layer in self.layers)

    @functools.cached_property
    def cached(self) -> tuple[int, ...]:
        """Layers with keys and values to cache. The others are recurrent."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.cached)

    @functools.cached_property
    def attention_kinds(self) -> tuple[AttentionConfig, ...]:
        """The different kinds of attention, in the order of their first appearance."""
        return tuple(dict.fromkeys(layer.attention for layer in self.kinds if layer.cached))

    @functools.cached_property
    def recurrent_kinds(self) -> tuple[DeltaNetConfig, ...]:
        """The different recurrent mixers, in the order of their first appearance."""
        mixers = (layer.mixer for layer in self.kinds)
        return tuple(dict.fromkeys(mixer for mixer in mixers if isinstance(mixer, DeltaNetConfig)))

    @functools.cached_property
    def compressed(self) -> tuple[int, ...]:
        """Layers that a policy compresses: those with full attention, or all cached layers if each has a window."""
        return tuple(i for i in self.cached if self.windows[i] is None) or self.cached

    @functools.cached_property
    def for_policy(self) -> "ModelConfig":
        """The model as a policy sees it: only its `compressed` layers."""
        return self.with_layers(self.compressed)

    def with_layers(self, layers: Iterable[int]) -> "ModelConfig":
        """The model with some of its layers only, by their indices."""
        return dataclasses.replace(self, layers=tuple(self.layers[i] for i in layers))

    @functools.cached_property
    def num_heads(self) -> int:
        """N, query heads of every layer."""
        return self._shared("mixer", "num_heads")

    @functools.cached_property
    def num_kv_heads(self) -> int:
        """K, key-value heads of every layer."""
        return self._shared("mixer", "num_kv_heads")

    @functools.cached_property
    def head_dim(self) -> int:
        """H of every layer."""
        return self._shared("mixer", "head_dim")

    @functools.cached_property
    def rope(self) -> RopeConfig:
        """Rotary embedding of every layer."""
        return self._shared("mixer", "rope")

    @functools.cached_property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values of every layer have a bias."""
        return self._shared("mixer", "qkv_bias")

    @functools.cached_property
    def output_bias(self) -> bool:
        """Whether attention's output projection has a bias in every layer."""
        return self._shared("mixer", "output_bias")

    @functools.cached_property
    def qk_norm(self) -> bool:
        """Whether queries and keys of every layer are RMS-normalised."""
        return self._shared("mixer", "qk_norm")

    @property
    def has_sinks(self) -> bool:
        """Whether a layer has attention sinks."""
        return any(mixer.sinks for mixer in self.attention_kinds)

    @functools.cached_property
    def intermediate_size(self) -> int:
        """F, width of every MLP."""
        return self._shared("mlp", "width")

    @functools.cached_property
    def mlp_bias(self) -> bool:
        """Whether every MLP has biases."""
        return self._shared("mlp", "bias")

    def _shared(self, part: str, name: str) -> Any:
        """Value that all layers share.

        Raises:
            ValueError: layers differ.
        """
        parts = self.attention_kinds if part == "mixer" else [layer.mlp for layer in self.kinds]
        found = {getattr(each, name) for each in parts}
        if len(found) > 1:
            raise ValueError(
                f"{part}.{name} differs between layers of this {self.family} model: {', '.join(map(str, found))}. "
                f"Read it from config.layers[i].{part}."
            )
        return next(iter(found))

    @property
    def heads_text(self) -> str:
        """Heads of the layers as text, such as "9 query heads on 3 KV heads of 64"."""
        found = [
            f"{x.num_heads} query heads on {x.num_kv_heads} KV heads of {x.head_dim}" for x in self.attention_kinds
        ]
        found += [f"{x.value_heads} recurrent heads of {x.key_dim} x {x.value_dim}" for x in self.recurrent_kinds]
        return " and ".join(dict.fromkeys(found))

    @functools.cached_property
    def context_length(self) -> int:
        """Context length in tokens: the window, extended by linear scaling or YaRN of every layer that rotates."""
        scalings = {mixer.rope.scaling for mixer in self.attention_kinds if mixer.rope.dim}
        extended = min(
            (self.max_position if scaling is None else scaling.extended(self.max_position) for scaling in scalings),
            default=self.max_position,
        )
        return min(max(self.max_position, extended), MOST_TOKENS)

    @functools.cached_property
    def rope_changes_after(self) -> int | None:
        """Sequence length in tokens beyond which a layer's rotation changes; None if none ever does."""
        lengths = [mixer.rope.changes_after for mixer in self.attention_kinds]
        return min((length for length in lengths if length is not None), default=None)

    def resolve_ropes(self, length: int) -> tuple[Rope, ...]:
        """Rotation of each of `kinds` for a sequence of `length` positions. Layers without attention rotate nothing."""
        return tuple(layer.attention.rope.resolve(length) if layer.cached else NO_ROPE for layer in self.kinds)

    def cache_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of a full cache per token inside all windows: a key and a value in every KV head of every cached layer."""
        return self.cache_bytes(1, itemsize)

    def cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of the keys and values in a full cache of `tokens` tokens. Layers with a window keep only the window.

        States of recurrent layers (`state_bytes`) are not included.
        """

        def kept(layer: AttentionConfig) -> int:
            return layer.num_kv_heads * layer.head_dim * min(tokens, layer.window or tokens)

        return 2 * sum(kept(self.layers[i].attention) for i in self.cached) * itemsize

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of the states of all recurrent layers for one sequence of any length."""
        mixers = (layer.mixer for layer in self.layers)
        return sum(mixer.state_bytes(itemsize) for mixer in mixers if isinstance(mixer, DeltaNetConfig))


def _at_least_one(config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 1")
