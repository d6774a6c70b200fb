"""kvjax as a rollout engine of tunix, over several devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from integrations.tunix_layout import theirs
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.integrations.tunix import mesh_from
from kvjax.integrations.tunix_weights import Weights
from kvjax.models import Params
from kvjax.models.sharding import get_shard, unpadded
from kvjax.runtime.rollouts import Rollouts


def devices(*shape: int) -> np.ndarray:
    return np.asarray(jax.devices()[: np.prod(shape)]).reshape(shape)


def trained(params: Params, mesh: Mesh) -> dict[str, Any]:
    """Weights as tunix's trainer has them: matrices are sharded over its mesh, and norms are on all devices."""

    def put(array: Any) -> Any:
        axes = zip(mesh.axis_names, array.shape, strict=False)
        spec = [axis if array.ndim > 1 and size % mesh.shape[axis] == 0 else None for axis, size in axes]
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(put, theirs(params))


def check_updates(params: Params, weights: Weights, rollouts: Rollouts, given: Mesh, prompts: list[list[int]]) -> None:
    """Updates with other weights and back. Then the rollouts are those of the weights, and the trainer's are intact."""
    others = [jax.tree.map(lambda x: x * 1.5, params), params]
    states = [trained(other, given) for other in others]
    sizes = {"rows": 4, "max_prompt_tokens": 64, "max_new_tokens": 8}
    for other, state in zip(others, states, strict=True):
        # As in RLCluster.sync_weights on CPUs.
        with (
            jax.transfer_guard_device_to_host("disallow_explicit"),
            jax.transfer_guard_host_to_device("disallow_explicit"),
        ):
            rollouts.update(weights.update(state))
        jax.tree.map(np.testing.assert_array_equal, unpadded(weights.params), other)
        found = rollouts.generate(prompts, temperature=0.0, ignore_eos=True)
        want = Rollouts(other, "rkv:40", **sizes).generate(prompts, temperature=0.0, ignore_eos=True)
        assert [[sample.tokens for sample in group] for group in found] == [[s.tokens for s in group] for group in want]
    for other, state in zip(others, states, strict=True):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(jnp.copy, state), theirs(other))


@pytest.mark.parametrize(
    ("axes", "shape", "own"),
    [
        pytest.param(("fsdp", "tp"), (2, 2), (0, 1, 2, 3), id="same devices"),
        pytest.param(
            ("tp", "fsdp"), (2, 1), (0, 1), id="same devices, axes in another order", marks=pytest.mark.rotating
        ),
        pytest.param(("fsdp",), (2,), (0, 1), id="one axis", marks=pytest.mark.rotating),
        pytest.param(("fsdp", "tp"), (1, 2), (1, 2), id="some of the trainer's devices", marks=pytest.mark.rotating),
        pytest.param(("fsdp", "tp"), (2, 2), (4, 5, 6, 7), id="other devices"),
    ],
)
def test_weights_and_rollouts_over_tunix_meshes(axes, shape, own, uneven, prompts) -> None:
    given = Mesh(np.asarray(jax.devices())[list(own)].reshape(shape), axes)
    mesh = mesh_from(given)
    assert dict(mesh.shape) == {"data": given.shape.get("fsdp", 1), "model": given.shape.get("tp", 1)}
    assert sorted(device.id for device in mesh.devices.flat) == sorted(device.id for device in given.devices.flat)
    trainer = given if own[0] == 0 else Mesh(devices(2, 2), ("fsdp", "tp"))
    weights = Weights(uneven.config, trained(uneven, trainer), jnp.float32, get_shard(mesh, uneven.config), None)
    rollouts = Rollouts(weights.params, "rkv:40", mesh=mesh, rows=4, max_prompt_tokens=64, max_new_tokens=8)
    check_updates(uneven, weights, rollouts, trainer, prompts)


@pytest.mark.parametrize("own", [2, 5])
def test_rollouts_on_one_device_of_a_trainer_with_several(own: int, uneven, prompts) -> None:
    trainer = Mesh(devices(2, 2), ("fsdp", "tp"))
    shard = get_shard(None, uneven.config)
    weights = Weights(uneven.config, trained(uneven, trainer), jnp.float32, shard, jax.devices()[own])
    rollouts = Rollouts(weights.params, "rkv:40", rows=4, max_prompt_tokens=64, max_new_tokens=8)
    check_updates(uneven, weights, rollouts, trainer, prompts)
    assert {device.id for leaf in jax.tree.leaves(weights.params) for device in leaf.devices()} == {own}


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
