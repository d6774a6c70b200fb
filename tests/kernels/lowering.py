"""Programs lowered for GPUs that are not there."""

import jax

from kvjax.bench import states
from kvjax.bench.case import Case
from kvjax.cache import layer_specs
from kvjax.models import abstract
from kvjax.models.transformer import decode_step
from kvjax.runtime.decoding import layers_of


def on(kind="NVIDIA H200", cores=132):
    """Programs traced within are for this device."""
    device = jax.sharding.AbstractDevice(device_kind=kind, platform="gpu", num_cores=cores)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def decoding_step(case: Case) -> str:
    """A step of a model and policy, lowered for an H200."""
    with on():
        policy = case.bound_policy()
        specs = layer_specs(case.config, case.batch, case.context, case.new_tokens, case.dtype)
        state, params = states.shapes(policy, specs), abstract(case.config, case.dtype)

        def step(params, caches, token, pos):
            return decode_step(params, caches, token, pos, layers_of(policy, specs))

        traced = jax.jit(step).trace(params, state.caches, state.token, state.pos)
        return traced.lower(lowering_platforms=("cuda",)).as_text()
