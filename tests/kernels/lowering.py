"""Programs lowered for GPUs that are not there."""

import jax

from kvjax.bench import states
from kvjax.bench.case import Case
from kvjax.models.transformer import decode_step


def on(kind="NVIDIA H200", cores=132):
    """Programs traced within are for this device."""
    device = jax.sharding.AbstractDevice(device_kind=kind, platform="gpu", num_cores=cores)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def decoding_step(case: Case) -> str:
    """A step of a model and policy, lowered for an H200."""
    with on():
        engine = case.engine(case.shapes, case.batch)
        state = states.shapes(engine.policy, engine.specs)

        def step(params, caches, token, pos):
            return decode_step(params, caches, token, pos, engine.layers)

        traced = jax.jit(step).trace(engine.weights, state.caches, state.token, state.pos)
        return traced.lower(lowering_platforms=("cuda",)).as_text()
