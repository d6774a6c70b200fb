"""Log-probabilities of given tokens with the full cache."""

from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache import Shard
from kvjax.models import Params, transformer
from kvjax.models.sharding import get_shard, mesh_of, partitions
from kvjax.runtime.mesh import ALL, ROWS
from kvjax.runtime.program import Options, Partition, Program, matmul_options


def token_logprobs(params: Params, tokens: Int[Array, "B T"], temperature: float = 1.0) -> Float[Array, "B T-1"]:
    """Log-probability of each token given those before it, compiled; on the mesh of the weights, if there is one.

    Logits are divided by `temperature`. Another temperature does not compile another program.
    Rows are sharded along "data" if its size divides them; otherwise they are replicated.
    """
    return _score(get_shard(mesh_of(params), params.config), params, tokens, np.float32(temperature))


def _scored(shard: Shard, params: Params, tokens: Int[Array, "B T"], temperature: Array) -> Float[Array, "B T-1"]:
    return transformer.token_logprobs(params, tokens, shard, temperature)


def _scoring(shard: Shard, params: Params, tokens: Any, temperature: Any) -> Partition | None:
    rows = ALL if tokens.shape[0] % shard.data else ROWS
    return None if shard.mesh is None else (shard, (partitions(params), rows, ALL), rows)


def _options(shard: Shard, params: Params, *_: Any) -> Options:
    return matmul_options(params)


_score = Program(_scored, static=1, gpu_options=_options, partition=_scoring)
