"""`ModelConfig`: a frozen, hashable description that fully determines the transformer."""

import dataclasses

from .rope import RopeConfig

MAX_LAYERS = 4096
"""Limit on the number of layers, far above that of any model. A configuration with more is damaged."""

_MOST_TOKENS = 2**31 - 1
"""Largest position that int32 can count."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Configuration of a decoder-only transformer of the Llama lineage.

    Attributes:
        family: Hugging Face `model_type`, which determines tensor names and tokenizer conventions.
        vocab_size: V.
        hidden_size: D, width of the residual stream.
        intermediate_size: F, width of the gated MLP.
        num_layers: L.
        num_heads: N, query heads.
        num_kv_heads: K, key-value heads; N is a multiple of K.
        head_dim: H; need not be D / N.
        max_position: window in tokens, as in the checkpoint. `context_length` includes linear and YaRN scaling.
        rope: rotary embedding.
        norm_eps: epsilon of every RMS norm.
        tied: whether the output head shares the embedding.
        qkv_bias, output_bias, mlp_bias: which projections have a bias.
        qk_norm: whether queries and keys are RMS-normalised per head before rotation (Qwen3).
        sandwich_norms: whether attention and MLP outputs are normalised too (GLM-4-0414).
        windows: sliding attention window of each layer in tokens; None for full attention.
        eos: token ids that end a sequence.
        bos: token id that starts a sequence, if the family uses one.

    Raises:
        ValueError: a value is out of range, or values contradict each other.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope: RopeConfig
    norm_eps: float = 1e-5
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    windows: tuple[int | None, ...] = ()
    eos: tuple[int, ...] = ()
    bos: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_position < 1 or any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"max_position={self.max_position} and windows={self.windows} must be at least one token")
        if self.num_layers > MAX_LAYERS:
            raise ValueError(f"num_layers={self.num_layers} must be at most {MAX_LAYERS}")
        if not 0 < self.norm_eps < 1:
            raise ValueError(f"norm_eps={self.norm_eps} must lie between 0 and 1")
        for name, tokens in (("eos", self.eos), ("bos", () if self.bos is None else (self.bos,))):
            for token in tokens:
                if not 0 <= token < self.vocab_size:
                    raise ValueError(f"{name} token id {token} is outside the vocabulary of {self.vocab_size}")
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise ValueError(
                f"windows has {len(self.windows)} entries for {self.num_layers} layers; give one per layer"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: "
                "each KV head serves the same number of query heads"
            )
        if self.rope.dim % 2 or not 0 <= self.rope.dim <= self.head_dim:
            raise ValueError(f"rope.dim={self.rope.dim} must be even and at most head_dim={self.head_dim}")

    @property
    def context_length(self) -> int:
        """Context length in tokens: the window, extended by linear scaling or YaRN."""
        scaling = self.rope.scaling
        extended = self.max_position if scaling is None else scaling.extended(self.max_position)
        return min(max(self.max_position, extended), _MOST_TOKENS)

    def cache_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of a full cache per token: a key and a value in every KV head of every layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize
