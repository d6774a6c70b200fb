"""kvjax as a rollout engine of tunix, over several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from integrations.tunix_layout import theirs
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.integrations.tunix import mesh_from
from kvjax.integrations.tunix_weights import Weights
from kvjax.models.sharding import get_shard, unpadded
from kvjax.runtime.rollouts import Rollouts


def devices(*shape: int) -> np.ndarray:
    return np.asarray(jax.devices()[: np.prod(shape)]).reshape(shape)


@pytest.mark.parametrize(("axes", "shape"), [(("fsdp", "tp"), (2, 2)), (("tp", "fsdp"), (2, 1)), (("fsdp",), (2,))])
def test_weights_and_rollouts_over_tunix_meshes(axes, shape, uneven, prompts) -> None:
    given = Mesh(devices(*shape), axes)
    mesh = mesh_from(given)
    assert dict(mesh.shape) == {"data": given.shape.get("fsdp", 1), "model": given.shape.get("tp", 1)}
    assert sorted(device.id for device in mesh.devices.flat) == sorted(device.id for device in given.devices.flat)
    # The trainer's weights are on its mesh.
    state = jax.device_put(theirs(uneven), NamedSharding(given, PartitionSpec()))
    weights = Weights(uneven.config, state, jnp.float32, get_shard(mesh, uneven.config), None)
    sizes = {"rows": 4, "max_prompt_tokens": 64, "max_new_tokens": 8}
    rollouts = Rollouts(weights.params, "rkv:40", mesh=mesh, **sizes)
    other = jax.tree.map(lambda x: x * 1.5, uneven)
    for params in (uneven, other):
        if params is other:
            rollouts.update(weights.update(jax.device_put(theirs(other), NamedSharding(given, PartitionSpec()))))
        jax.tree.map(np.testing.assert_array_equal, unpadded(weights.params), params)
        found = rollouts.generate(prompts, temperature=0.0, ignore_eos=True)
        want = Rollouts(params, "rkv:40", **sizes).generate(prompts, temperature=0.0, ignore_eos=True)
        assert [[sample.tokens for sample in group] for group in found] == [[s.tokens for s in group] for group in want]
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_other_axes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"an axis 'sp' of 2\. Use axes among fsdp"):
        mesh_from(Mesh(devices(2, 2), ("tp", "sp")))


def test_rollouts_on_another_device_than_the_trainer(uneven, prompts) -> None:
    """All arrays are copies then, and each is freed before its successor is made."""
    there = jax.devices()[1]
    weights = Weights(uneven.config, theirs(uneven), jnp.float32, get_shard(None, uneven.config), there)
    before = weights.params
    assert {device for leaf in jax.tree.leaves(before) for device in leaf.devices()} == {there}
    sizes = {"rows": 4, "max_prompt_tokens": 64, "max_new_tokens": 8}
    rollouts = Rollouts(before, "rkv:40", **sizes)
    want = Rollouts(uneven, "rkv:40", **sizes).generate(prompts, temperature=0.0)
    rollouts.update(weights.update(theirs(uneven)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    found = rollouts.generate(prompts, temperature=0.0)
    assert [[sample.tokens for sample in group] for group in found] == [[s.tokens for s in group] for group in want]
    assert rollouts.batches[0].weights.embed.devices() == {there}
