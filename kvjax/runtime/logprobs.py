"""Log-probabilities of given tokens with the full cache."""

from typing import Any

from jaxtyping import Array, Float, Int

from kvjax.cache import Shard
from kvjax.models import Params, transformer
from kvjax.models.sharding import get_shard, mesh_of, partitions
from kvjax.runtime.mesh import ALL, ROWS
from kvjax.runtime.program import Partition, Program


def token_logprobs(params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T-1"]:
    """Log-probability of each token given those before it, compiled; on the mesh of the weights, if there is one.

    Rows are sharded along "data" if its size divides them; otherwise they are replicated.
    """
    return _score(get_shard(mesh_of(params), params.config), params, tokens)


def _scored(shard: Shard, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T-1"]:
    return transformer.token_logprobs(params, tokens, shard)


def _scoring(shard: Shard, params: Params, tokens: Any) -> Partition | None:
    rows = ALL if tokens.shape[0] % shard.data else ROWS
    return None if shard.mesh is None else (shard, (partitions(params), rows), rows)


_score = Program(_scored, static=1, partition=_scoring)
