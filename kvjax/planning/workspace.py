"""Estimates the bytes of a model's cache and of its programs' temporary memory, without running them."""

import functools
import math
from typing import Any

from kvjax.config import AttentionConfig, DeltaNetConfig
from kvjax.models.params import MLP
from kvjax.models.sharding import bytes_per_device
from kvjax.pallas_kernels import GroupedMatrix, is_quantized
from kvjax.pallas_kernels.delta_rule.reference import CHUNK
from kvjax.pallas_kernels.device import tpu_layout
from kvjax.pallas_kernels.projection.api import MOST_SLICED
from kvjax.policies.layer import CacheLayer, held_bytes
from kvjax.runtime.engine import Engine

_SPARE = 1.5
"""Factor on the temporary memory of prefill, since XLA runs some operations concurrently."""


@functools.lru_cache(maxsize=1 << 14)
def layer_bytes(layer: CacheLayer[Any]) -> tuple[int, int, int]:
    """Bytes of one layer's cache on the device, on the host, and read per decode step."""
    return *held_bytes(layer), layer.bytes_read


def cache_bytes(engine: Engine) -> tuple[int, int, int]:
    """Sums of `layer_bytes` over all layers."""
    held, host, read = zip(*map(layer_bytes, engine.layers), strict=True)
    return sum(held), sum(host), sum(read)


def workspace(engine: Engine, *, tpu: bool) -> tuple[int, int]:
    """Estimate the bytes that prefill and decoding need besides weights and cache.

    Prefill needs, for all tokens that are processed together: the residual stream, its norm, and the wider half of a
    layer. It also needs the layer's kept keys and values, those of the prompt, and the wider half's matrices as floats
    if they have 4-bit groups. A factor of 1.5 accounts for concurrent operations.

    Decoding needs the logits, a copy of a layer's cache, and a copy of a quantised embedding. On a TPU it also needs
    twice the cache if that is compressed when full, from keys and values.

    A TPU that stores the embedding by columns copies it by rows to look up many tokens, as of a prompt. Prefill frees the
    copy before its first layer.

    Peaks are 5 % below to 4 % above those of the TPU compiler (`benchmarks/results/fits-v5e.json`), and 0 to 13 % above
    those of programs on an H200 (`decode-h200.json` in the same folder).
    """
    c, shard, itemsize = engine.config, engine.shard, engine.weights.dtype.itemsize
    rows = engine.batch // shard.data
    caches = [layer_bytes(each) for each in engine.layers]
    layer = max(held + host for held, host, _ in caches)
    # A sharded layer is whole while the policy selects.
    chooses = not engine.block or any(each.attention == "kept" for each in engine.layers)
    chosen = (
        max(sum(layer_bytes(engine.policy.layer(spec))[:2]) for spec in engine.specs)
        if shard.slots > 1 and chooses
        else layer
    )
    kinds = c.kinds
    mixer = max(_mixer_bytes(x.mixer, itemsize, tpu) for x in kinds) // shard.heads
    tokens = rows * (engine.block or engine.specs[0].prompt_len)
    half = max(mixer, 2 * max(x.mlp.active_width for x in kinds) * itemsize // shard.model)
    logits = 4 * rows * c.vocab_size
    # Experts are dequantised one at a time.
    gates = [each.mlp.gate for each in engine.weights.layers if isinstance(each.mlp, MLP)]
    wide = max((math.prod(gate.shape) for gate in gates if isinstance(gate, GroupedMatrix)), default=0)
    floats = 2 * wide // shard.model * itemsize
    keys = max(x.num_kv_heads * x.head_dim for x in c.attention_kinds) // shard.heads
    pairs = 2 * tokens * keys * itemsize
    reading = tokens * (3 * c.hidden_size * itemsize + half) + 2 * (chosen + pairs) + floats + logits
    table = engine.weights.embed
    by_columns = tpu and tpu_layout((table.shape[0] // shard.model, table.shape[1])) == (1, 0)
    by_rows = bytes_per_device(table) if by_columns and not is_quantized(table) else 0
    looked_up = by_rows if rows > MOST_SLICED else 0
    decoding = 2 * logits + 2 * layer + (bytes_per_device(table) if is_quantized(table) else looked_up)
    if tpu and any(each.compress_reads_kv and each.when == "when_full" for each in engine.layers):
        decoding += 2 * sum(held for held, _, _ in caches)
    return max(int(_SPARE * reading), by_rows) if engine.specs[0].prompt_len else 0, decoding


def _mixer_bytes(mixer: AttentionConfig | DeltaNetConfig, itemsize: int, tpu: bool) -> int:
    """Bytes per token of a mixer's arrays in prefill.

    An attention layer has queries, keys, values and gates, twice. A gated delta net computes all chunks at once, in
    float32. For each value head, that is queries, keys, right-hand sides and solutions of the triangular systems (each
    as wide as a key and a value), and two matrices with a column for each token of the chunk. TPUs pad them to 128. The
    GPU kernels need less.
    """
    if isinstance(mixer, DeltaNetConfig):
        columns = max(CHUNK, 128) if tpu else CHUNK
        return 4 * mixer.value_heads * (4 * mixer.key_dim + 2 * mixer.value_dim + 2 * columns)
    queries = (2 if mixer.gated else 1) * mixer.output_width
    return 2 * (queries + 2 * mixer.num_kv_heads * mixer.head_dim) * itemsize
