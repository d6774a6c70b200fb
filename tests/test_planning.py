"""`kvjax.plan`: its bytes are an engine's, its estimate of workspace near the compiler's word, and what it refuses."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from kernels.ahead_of_time import chip

import kvjax
from kvjax.bench.case import Case
from kvjax.bench.floor import weight_bytes
from kvjax.config import PRESETS, Linear, Yarn
from kvjax.conversion import CheckpointError, to_hf
from kvjax.devices import PRESETS as DEVICES
from kvjax.devices import device_of
from kvjax.models import ModelConfig, abstract
from kvjax.models.params import nbytes
from kvjax.models.sharding import bytes_per_device
from kvjax.planning.plan import bound_for
from kvjax.planning.sums import step_sums, sums_seconds
from kvjax.planning.workspace import workspace
from kvjax.runtime.engine import Engine, Memory

RESULTS = Path(__file__).parents[1] / "benchmarks/results"


def rows(name: str) -> list[dict]:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def shallow(name: str, layers: int) -> ModelConfig:
    """The first layers of a large model."""
    return PRESETS[name].with_depth(layers)


@pytest.mark.parametrize("name", ["fits-v5e", "fits-v5e-2x2"])
def test_workspace_is_near_the_tpu_compilers(name: str) -> None:
    for row in rows(name):
        params = abstract(PRESETS["llama-3.1-8b"], "bfloat16", weights=row["weights"], embedding=row["embedding"])
        mesh = AbstractMesh((1, 4), ("data", "model")) if "2x2" in name else None
        sizes = {"prompt_len": row["tokens"], "max_new_tokens": row["new_tokens"], "block": row["block"]}
        engine = Engine(params, row["policy"], **row["settings"], **sizes, mesh=mesh)
        assert engine.cache_bytes == row["cache_bytes"]
        assert bytes_per_device(engine.weights) == row["weight_bytes"]
        held = row["weight_bytes"] + row["cache_bytes"] + max(workspace(engine, tpu=True))
        assert 0.95 <= held / max(row["prefill_bytes"], row["decode_bytes"]) <= 1.04


def test_workspace_is_near_a_gpus() -> None:
    measured = [row for row in rows("decode-h200") if "prefill" in row.get("program_bytes", ())]
    assert {row["policy"] for row in measured} >= {"full", "chelsea", "clusterkv"}
    for row in measured:
        fields = row["policy"], row["settings"], row["context"], row["batch_run"], row["shape"], row["new_tokens"]
        case = Case(*fields, dtype=row["dtype"], layers=row["layers"])
        engine = case.engine(case.config, row["batch_run"])
        held = bytes_per_device(engine.weights) + engine.cache_bytes + max(workspace(engine, tpu=False))
        assert 1 <= held / row["peak_bytes"] <= 1.13
        read = weight_bytes(engine.weights) + engine.step_bytes_read
        assert (
            1 <= 1e3 * read / DEVICES["h200"].bandwidth / row["floor_ms"] <= 1.03
        )  # the floor counts slots that are filled


def test_a_large_model_on_four_devices() -> None:
    config = shallow("llama-3.1-70b", 8)
    ways = kvjax.plan(config, device="h200", count=4, context=1_000_000, policy="catekv")
    assert {(way.mesh, way.weights) for way in ways} == {
        (f"data={data},model={4 // data}", weights) for data in (1, 2, 4) for weights in ("bfloat16", "int8", "int4")
    }
    _, policy, notes = bound_for(config, "catekv")
    for way in ways:
        data, model = (int(part.partition("=")[2]) for part in way.mesh.split(","))
        kind = "float" if way.weights == "bfloat16" else way.weights
        params = abstract(config, "bfloat16", weights=kind)
        engine = Engine(
            params,
            policy,
            batch=data,
            prompt_len=1_000_000,
            max_new_tokens=128,
            block=4096,
            mesh=AbstractMesh((data, model), ("data", "model")),
        )
        assert (way.cache_bytes, way.weight_bytes) == (engine.cache_bytes, bytes_per_device(engine.weights))
        assert way.batch == data
        assert way.step_bytes == weight_bytes(engine.weights) + engine.step_bytes_read
        assert way.floor_ms == pytest.approx(1e3 * way.step_bytes / 4.8e12)
        assert way.sums == (18 + 16 if model > 1 else 0)  # in each layer two groups of heads, whose slots are sharded
        assert any("is replicated on all" in note for note in way.notes) == (model > 1)
        assert set(notes) < set(way.notes)
        assert way.fits == (way.peak_bytes <= 105_750_000_000)
        assert bool(way.largest_batch) == way.fits
    assert [way.fits for way in ways] == sorted((way.fits for way in ways), reverse=True)
    assert len(times := [way.ms for way in ways if way.fits]) > 1
    assert times == sorted(times)
    held = {way.mesh: way.cache_bytes for way in ways if way.weights == "int8"}
    # Slots of unequal heads are sharded, but for what each device knows of them.
    assert 0.25 < held["data=1,model=4"] / held["data=4,model=1"] < 0.27


def test_slots_are_sharded_where_heads_cannot_be() -> None:
    """Of a model with 4 KV heads, the slots of each by 2 devices; a policy whose caches cannot be sharded says so."""
    config = shallow("qwen2.5-7b", 2)
    full = {way.mesh: way for way in kvjax.plan(config, device="h200", count=8, context=100_000, weights="float")}
    assert "data=1,model=4,sequence=2" in full
    assert "data=1,model=2,sequence=4" not in full
    few, many = full["data=1,model=8"], full["data=1,model=4,sequence=2"]
    assert any(note.endswith("2 devices hold the same KV heads") for note in few.notes)
    assert not any("hold the same KV heads" in note for note in many.notes)
    assert few.weight_bytes == many.weight_bytes
    assert 0.5 < many.cache_bytes / few.cache_bytes < 0.51
    assert many.sums == few.sums + 2
    (tova,) = kvjax.plan(
        config, device="h200", mesh="model=4,sequence=2", context=100_000, policy="tova", weights="float"
    )
    assert any("100 % of the cache of a device is replicated on all 2 that share slots" in note for note in tova.notes)
    assert tova.sums == few.sums


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    options = {"device": "v5e", "context": 8192, "policy": "snapkv:1024", "weights": "int8", "embedding": "int8"}
    (way,) = kvjax.plan("llama-3.1-8b", **options)
    (most,) = kvjax.plan("llama-3.1-8b", **options, batch=way.largest_batch)
    (more,) = kvjax.plan("llama-3.1-8b", **options, batch=way.largest_batch + 1)
    assert way.largest_batch > 1
    assert most.fits
    assert not more.fits
    assert most.largest_batch == more.largest_batch == way.largest_batch


def test_fit_takes_the_widest_weights_and_then_the_largest_budget() -> None:
    config = shallow("llama-3.1-8b", 4)
    options = {"device": "v5e", "context": 131_072, "memory": 4_000_000_000, "policy": "snapkv:8192", "fit": True}
    (way,) = kvjax.plan(config, **options)
    assert (way.weights, way.policy) == ("int8", "snapkv:budget=8192")
    (way,) = kvjax.plan(config, **options | {"policy": "full"})  # which has no budget
    budget = int(way.policy.removeprefix("snapkv:budget="))
    larger = kvjax.plan(config, **options | {"policy": f"snapkv:{budget + 256}", "fit": False})
    assert not any(way.fits for way in larger)
    assert kvjax.plan(config, **options | {"memory": 2_000_000_000}) == ()


@pytest.mark.parametrize("scaling", [Yarn(4.0, 256), Linear(4.0)])
def test_scaled_windows(tiny, scaling) -> None:
    """The default context is the window with its scaling, and no more than that is said to be beyond it."""
    config = tiny.config.with_attention(rope=dataclasses.replace(tiny.config.rope, scaling=scaling))
    (way,) = kvjax.plan(config, device="t4", weights="float", new_tokens=24)
    assert (way.context, way.notes) == (1000, ())
    (way,) = kvjax.plan(config, device="t4", weights="float", context=1001, new_tokens=24)
    assert way.notes == ("beyond the 1024 tokens that the model was trained on",)


def test_heads_of_kinds_without_a_profile() -> None:
    config = PRESETS["llama-3.1-8b"]
    for text in ("catekv", "catekv:budget=4096", kvjax.get_policy("catekv", eta=0.5), "duoattention"):
        assert len(bound_for(config, text)[2]) == 1
    assert bound_for(config, "catekv:share_adaptive=0.3", 1024)[::2] == ("catekv:share_adaptive=0.3,budget=1024", ())
    assert not bound_for(PRESETS["smollm2-135m"], "catekv")[2]  # a profile comes with the library
    with pytest.raises(kvjax.PolicyError, match="kvjax calibrate triattention"):
        bound_for(config, "triattention")


def test_models_without_weights(tiny, tmp_path: Path) -> None:
    options = {"device": "t4", "context": 100, "weights": "int8"}
    (by_config,) = kvjax.plan(tiny.config, **options)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(to_hf(tiny.config)))
    assert kvjax.plan(file, **options) == kvjax.plan(tmp_path, **options) == (by_config,)
    assert by_config.weight_bytes == nbytes(abstract(tiny.config, "bfloat16", weights="int8"))
    kvjax.save(tiny, tmp_path / "model", format="safetensors")
    assert kvjax.plan(tmp_path / "model", **options) == (by_config,)
    (stored,) = kvjax.plan(tmp_path / "model", **options | {"weights": "as stored"})
    assert stored.weight_bytes == nbytes(abstract(tiny.config, "bfloat16"))
    with pytest.raises(CheckpointError, match="no stored weights"):
        kvjax.plan(file, **options | {"weights": "as stored"})
    with pytest.raises(CheckpointError, match=r"not a shape of llama-3\.1-8b"):
        kvjax.plan("nowhere", **options)


@pytest.mark.parametrize(
    ("variables", "gpu"),
    [
        ({}, 60e9),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}, 72e9),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, 40e9),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "4"}, 75e9),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, 60e9),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, 75e9),
    ],
    ids=str,
)
def test_memory_is_what_jax_takes(tiny, monkeypatch, variables, gpu) -> None:
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for device, memory in (("h100", gpu), ("v5e", 15e9)):
        (way,) = kvjax.plan(tiny.config, device=device, context=100, weights="float")
        assert way.memory == memory
    (way,) = kvjax.plan(tiny.config, device="h100", context=100, weights="float", memory=10**9)
    assert way.memory == 10**9


@pytest.mark.parametrize("value", ["x", "0", "-1", "nan"])
def test_fractions_that_jax_cannot_take(tiny, monkeypatch, value) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", value)
    with pytest.raises(
        ValueError, match=f"XLA_PYTHON_CLIENT_MEM_FRACTION='{value}'; give a fraction above 0, or unset it"
    ):
        kvjax.plan(tiny.config, device="h100", context=100)


def test_what_is_refused(tiny) -> None:
    with pytest.raises(ValueError, match="Did you mean 'h200'"):
        kvjax.plan(tiny.config, device="h300")
    with pytest.raises(ValueError, match="give memory"):
        kvjax.plan(tiny.config, device="cpu")
    with pytest.raises(ValueError, match="of 4 devices, but count=3"):
        kvjax.plan(tiny.config, device="t4", count=3, mesh="data=2,model=2")
    with pytest.raises(kvjax.PolicyError, match="unknown policy"):
        kvjax.plan(tiny.config, device="t4", policy="nope")
    with pytest.raises(ValueError, match="batch=0"):
        kvjax.plan(tiny.config, device="t4", batch=0)
    (way,) = kvjax.plan("llama-3.1-8b", device="h200", mesh="model=3", weights="float", context=1000)
    assert "cannot share 32 query heads" in (way.refused or "")
    assert not way.fits


def test_sums_are_as_measured() -> None:
    assert step_sums(PRESETS["llama-3.1-8b"]) == 66
    assert sums_seconds(DEVICES["h200"], 2, 8192) == sums_seconds(DEVICES["h200"], 2, 10) == pytest.approx(60e-6)
    assert sums_seconds(DEVICES["h200"], 1, 33_000_000) == pytest.approx(185e-6)
    assert sums_seconds(DEVICES["v5e"], 2, 8192) is None
    assert sums_seconds(DEVICES["v5e"], 0, 8192) == 0


def test_the_compiler_is_asked_for_the_mesh(tiny, monkeypatch) -> None:
    """One device has none; for more than there are there is no compiler."""
    asked = []

    def compile(engine: Engine) -> Memory:
        asked.append(engine.shard.mesh)
        return Memory(weights=1000, cache=100, host_cache=0, prefill=1234, decode=1200)

    monkeypatch.setattr(Engine, "compile", compile)
    options = {"device": "cpu", "memory": 10**9, "context": 60, "weights": "int8", "compile": True}
    (way,) = kvjax.plan(tiny.config, **options)
    assert asked == [None]
    assert (way.memory_by, way.weight_bytes, way.cache_bytes, way.workspace_bytes) == ("compiler", 1000, 100, 134)
    (way,) = kvjax.plan(tiny.config, **options, mesh="data=64")
    assert any(note.startswith("not compiled: 64 CPU devices are needed") for note in way.notes)


@pytest.mark.slow
def test_the_cpus_compiler_is_asked(tiny) -> None:
    (way,) = kvjax.plan(tiny.config, device="cpu", memory=10**9, context=60, weights="int8", compile=True)
    engine = Engine(abstract(tiny.config, "bfloat16", weights="int8"), "full", prompt_len=60, max_new_tokens=128)
    memory = engine.compile()
    assert way.memory_by == "compiler"
    assert (way.peak_bytes, way.weight_bytes, way.cache_bytes) == (memory.peak, memory.weights, memory.cache)
    assert way.ms is None


@pytest.mark.long
@pytest.mark.parametrize(("device", "count"), [("v5e", 1), ("v5e", 4)])
def test_the_tpus_compiler_is_asked(device: str, count: int) -> None:
    chip(device)  # or there is none
    config = shallow("llama-3.1-8b", 1)
    ways = kvjax.plan(
        config, device=device, count=count, context=1000, weights="int8", policy="snapkv:256", compile=True
    )
    assert [way.memory_by for way in ways] == ["compiler", *["formula"] * (len(ways) - 1)]
    formula = kvjax.plan(config, device=device, count=count, context=1000, weights="int8", policy="snapkv:256")[0]
    assert formula.mesh == ways[0].mesh
    assert (formula.weight_bytes, formula.cache_bytes) == (ways[0].weight_bytes, ways[0].cache_bytes)
    assert 0.7 < formula.peak_bytes / ways[0].peak_bytes < 1.3


def test_where_there_is_no_compiler_it_is_said(tiny) -> None:
    (way,) = kvjax.plan(tiny.config, device="h200", context=60, weights="float", compile=True)
    assert way.memory_by == "formula"
    assert any(note.startswith("not compiled") for note in way.notes) or jax.default_backend() == "gpu"
    assert way.weight_bytes == nbytes(abstract(tiny.config, jnp.bfloat16))


@pytest.mark.parametrize(
    ("told", "kind"),
    {
        "NVIDIA H200": "H200",
        "NVIDIA GH200 480GB": None,
        "NVIDIA L4": "L4",
        "NVIDIA L40": None,
        "NVIDIA L40S": "L40S",
        "NVIDIA T400 4GB": None,
        "NVIDIA A100-PCIE-40GB": "A100",
        "TPU v5": "TPU v5",
        "TPU v5 lite": "TPU v5 lite",
        "TPU v6 lite": "TPU v6",
    }.items(),
)
def test_devices_by_what_jax_calls_them(told: str, kind: str | None) -> None:
    found = device_of(told)
    assert (None if found is None else found.kind) == kind


def test_what_is_proposed_in_place_of_another_policy_is_said() -> None:
    (way,) = kvjax.plan("llama-3.1-8b", device="t4", context=131_072, policy="quest:1024", fit=True)
    assert way.policy.startswith("snapkv")
    assert any("quest:1024 does not fit" in note for note in way.notes)


def test_memory_is_checked(tiny) -> None:
    (way,) = kvjax.plan(tiny.config, device="t4", memory=1, context=60, weights="float")
    assert (way.memory, way.fits) == (1, False)
    with pytest.raises(ValueError, match="memory"):
        kvjax.plan("llama-3.1-8b", device="t4", memory=-5)
    with pytest.raises(ValueError, match="prefill_block"):
        kvjax.plan("llama-3.1-8b", device="t4", prefill_block=-3)
