"""Weights from files into their places: the same as from one device, each part of a file read once, and in each process its own alone."""

import json
from typing import Any

import jax
import numpy as np
import pytest
from checkpoints import HF_CONFIG, write_gguf, write_hf
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import kvjax
from kvjax.conversion import mapped
from kvjax.conversion.hf_config import from_hf
from kvjax.models.sharding import get_shard, moved, place_all

from . import processes

WIDE = HF_CONFIG | {"vocab_size": 301, "num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 4096}
"""A vocabulary that devices do not divide, and matrices of four megabytes, of which Orbax makes as many pieces."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One model in floats by three formats, and in 8 and 4 bits."""
    path = tmp_path_factory.mktemp("models")
    write_hf(path / "safetensors", WIDE)
    write_gguf(path / "f32.gguf", from_hf(WIDE))
    write_gguf(path / "q4_1.gguf", from_hf(WIDE), "Q4_1")
    for name, weights in (("orbax", "float"), ("int8", "int8"), ("int4", "int4")):
        options: dict[str, Any] = {"weights": weights, "format": "orbax" if name == "orbax" else "safetensors"}
        kvjax.conversion.convert(path / "safetensors", path / name, dtype="float32", progress=False, **options)
    return path


@pytest.fixture
def looked_at(monkeypatch):
    """Bytes of memory maps that are looked at, as they come."""
    seen = []

    def counted(*args, **options):
        found = mapped.mapped(*args, **options)
        seen.append(found.nbytes)
        return found

    for module in ("huggingface", "gguf_file"):
        monkeypatch.setattr(f"kvjax.conversion.{module}.mapped", counted)
    return seen


FORMS = (
    ("safetensors", "float"),
    ("safetensors", "int8"),
    ("f32.gguf", "float"),
    ("q4_1.gguf", "as stored"),
    ("orbax", "float"),
    ("int8", "as stored"),
    ("int4", "as stored"),
)
"""Checkpoints, and what weights are to be kept in."""


# Heads that eight devices do not divide are read alike from all forms but where columns lie in groups.
@pytest.mark.parametrize(
    ("name", "weights", "mesh"),
    [
        *((*form, mesh) for form in FORMS for mesh in ("data=2,model=4", "model=2,sequence=2")),
        *((*form, "model=8") for form in (FORMS[0], FORMS[-1])),
    ],
)
def test_places_and_numbers(name, weights, mesh, folder, looked_at):
    """To the bit, and no part is looked at twice, though several devices have it."""
    one = kvjax.load(folder / name, weights=weights, progress=False)
    whole, _ = sum(looked_at), looked_at.clear()
    many = kvjax.load(folder / name, weights=weights, mesh=mesh, progress=False)
    expected = place_all(get_shard(mesh, one.config), one)
    for found, wanted in zip(jax.tree.leaves(many), jax.tree.leaves(expected), strict=True):
        assert found.sharding == wanted.sharding
        np.testing.assert_array_equal(found, wanted)
    assert sum(looked_at) == whole


PROCESS = """
import json, sys
from kvjax.cli.processes import join_processes
join_processes()
import jax, tensorstore
import kvjax
from kvjax.conversion import gguf_file, huggingface, mapped
from kvjax.runtime.mesh import on_host
folder, names, out = sys.argv[1:]
seen = [0]

def counted(*args, **options):
    found = mapped.mapped(*args, **options)
    seen[0] += found.nbytes
    return found

def of_store():
    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])  # none before the first

huggingface.mapped = gguf_file.mapped = counted
read, sums = {}, {}
for name, weights in json.loads(names):
    seen[0], before = 0, of_store()
    params = kvjax.load(f"{folder}/{name}", weights=weights, mesh="model=4", progress=False)
    read[name] = seen[0] + of_store() - before
    sums[name] = [float(abs(on_host(leaf).astype("float64")).sum()) for leaf in jax.tree.leaves(params)]
open(out + str(jax.process_index()), "w").write(json.dumps([read, sums]))
"""


def test_each_process_reads_its_own(folder, tmp_path):
    """Of two processes each reads half of what is sharded; norms, and scales of matrices whose columns are sharded, are in both."""
    names = [["safetensors", "float"], ["f32.gguf", "float"], ["q4_1.gguf", "as stored"], ["orbax", "float"]]
    names += [["int8", "as stored"], ["int4", "as stored"]]
    processes.run_both(*[["-c", PROCESS, str(folder), json.dumps(names), str(tmp_path / "told")]] * 2)
    told = [json.loads((tmp_path / f"told{i}").read_text()) for i in range(2)]
    for name, weights in names:
        one = kvjax.load(folder / name, weights=weights, progress=False)
        whole = sum(leaf.nbytes for leaf in jax.tree.leaves(one))
        sums = [float(np.abs(np.asarray(leaf, np.float64)).sum()) for leaf in jax.tree.leaves(one)]
        for read, held in told:
            np.testing.assert_allclose(held[name], sums, rtol=1e-12)
            assert 0.4 * whole < read[name] < 0.58 * whole, (name, read[name], whole)


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        pytest.param(((0, 1, 2, 3), ("a", "b")), ((0, 1, 2, 3), ("b",)), id="same devices"),
        pytest.param(((0, 1, 2, 3), ("a", "b")), ((3, 1, 2, 0), ("b",)), id="same devices in another order"),
        pytest.param(((0, 1, 2, 3), ("a", "b")), ((4, 5, 6, 7), ("b",)), id="other devices"),
        pytest.param(((0, 1, 2, 3), ("a", "b")), ((1, 2), ("b",)), id="some of the devices"),
        pytest.param(((0, 1, 2, 3), ("a", "b")), ((2,), ()), id="one of the devices"),
        pytest.param(((0, 1, 2, 3), ("a", "b")), ((4, 5, 6, 7), ("a", "b")), id="other devices with the same shards"),
        pytest.param(((5,), ()), ((0, 1, 2, 3), ("a", "b")), id="from one device"),
    ],
)
def test_arrays_move_between_devices_and_not_by_way_of_the_host(own, wanted) -> None:
    def sharding(ids: tuple[int, ...], spec: tuple[str, ...]) -> Any:
        devices = np.asarray(jax.devices())[list(ids)]
        if len(ids) == 1:
            return SingleDeviceSharding(devices[0])
        return NamedSharding(Mesh(devices.reshape(2, -1), ("a", "b")), PartitionSpec(*spec))

    values = np.arange(48.0, dtype=np.float32).reshape(8, 6)
    array, to = jax.device_put(values, sharding(*own)), sharding(*wanted)
    with (
        jax.transfer_guard_device_to_host("disallow_explicit"),
        jax.transfer_guard_host_to_device("disallow_explicit"),
    ):
        there = moved(array, to)
        assert there.sharding.is_equivalent_to(to, 2)
        again = moved(there, to)
    np.testing.assert_array_equal(there, values)
    np.testing.assert_array_equal(array, values)
    assert [x.data.unsafe_buffer_pointer() for x in again.addressable_shards] == [
        x.data.unsafe_buffer_pointer() for x in there.addressable_shards
    ]
