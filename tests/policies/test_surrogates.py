"""KVzap and Fast KVzip against the literal algorithms, within models, and from files of the published layouts."""

import argparse
import collections
import dataclasses
import math
import pickle
import struct
import zipfile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from policies import oracle_surrogates as oracle
from policies import surrogates
from policies.driver import TINY, make_case
from policies.slots import kept
from safetensors.numpy import save_file

import kvjax
from kvjax._util import torch_files
from kvjax.cache import PromptKV
from kvjax.models import transformer
from kvjax.pallas_kernels import prefill_attention
from kvjax.policies import FastKVzip, KVzap, PolicyError, Surrogate, by_head, get_policy, prefill_alone
from kvjax.policies.attention_context import AttentionContext
from kvjax.policies.budget import budget_tokens

# The cases worked out by hand.


def test_a_gate_by_hand():
    """k · q / √r = ln 2 beside two keys with logits of 0: half."""
    weights = {
        "q_proj.weight": np.zeros((1, 1)),
        "q_proj.bias": np.ones(1),
        "k_proj.weight": np.ones((1, 1)),
        "q_norm.weight": np.ones(1),
        "k_norm.weight": np.full(1, math.log(2)),
        "k_base": np.zeros((1, 1, 2, 1)),
        "b": np.zeros((1, 1, 1)),
    }
    assert oracle.gate(weights, np.ones(1)) == pytest.approx([0.5], abs=1e-5)
    arrays = {name: array.astype(np.float32) for name, array in weights.items()}
    found = predicted(FastKVzip(), arrays, np.ones((1, 1, 1), np.float32), np.arange(1))
    np.testing.assert_allclose(found, 0.5, atol=1e-5)


def predicted(policy, arrays, x, heads):
    """What the policy predicts of inputs, by one program."""
    return np.asarray(jax.jit(policy.predicted)(arrays, x, heads.astype(np.int32)))


def test_a_network_has_the_exact_gelu():
    """Small inputs, of which the approximation by tanh would make other numbers."""
    weights = surrogates.kvzap(TINY)
    x = 0.1 * np.random.default_rng(0).normal(size=(1, 7, TINY.hidden_size)).astype(np.float32)
    arrays = dict(weights.layers[0])
    expected = np.stack([oracle.kvzap(weights.layers[0], token) for token in x[0].astype(np.float64)], axis=1)
    np.testing.assert_allclose(predicted(KVzap(), arrays, x, np.arange(2))[0], expected, atol=2e-5)


def test_the_last_tokens_that_are_kept():
    """Of 16000 tokens or more 4096, of fewer 2 %; the budget is not exceeded."""
    policy = FastKVzip()
    lengths, few = np.asarray([49, 50, 15999, 16000, 100000], np.int32), np.asarray([50, 16000], np.int32)
    np.testing.assert_array_equal(jax.jit(policy.recent)(lengths), [0, 1, 319, 4096, 4096])
    np.testing.assert_array_equal(jax.jit(FastKVzip(short_window=0.0).recent)(few), [0, 4096])
    given = np.ones((1, 2, 20), np.float32), np.asarray([20], np.int32), np.asarray([6], np.int32)
    mask = jax.jit(KVzap(budget=6, window=8, sinks=1).keep_mask)(*given)
    np.testing.assert_array_equal(np.nonzero(np.asarray(mask)[0, 1])[0], [0, 15, 16, 17, 18, 19])


# Random cases against the oracle.

CONFIGURATIONS = {
    "kvzap, mlp": (KVzap(budget=14, window=3), {"units": 7}, 4, 2),
    "kvzap, linear, each head": (KVzap(budget=0.4, window=0, sinks=2, scope="head"), {"units": None}, 4, 4),
    "gate": (FastKVzip(budget=16, short_window=0.1), {}, 4, 2),
    "gate, each head, long": (FastKVzip(budget=20, long=30, window=5, sinks=0, scope="head"), {"rank": 16, "beside": 16}, 4, 1),
    "gate, mha, a fraction": (FastKVzip(budget=0.35, sinks=1, short_window=0.0), {"rank": 3}, 3, 3),
}  # fmt: skip
STEPS = 2
FAST = ("kvzap, mlp", "gate")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.long) for n in CONFIGURATIONS])
def test_equals_the_literal_algorithm(name):
    """A ragged batch, prompts shorter and longer than the budget."""
    policy, options, heads, kv_heads = CONFIGURATIONS[name]
    config = TINY.with_attention(num_heads=heads, num_kv_heads=kv_heads)
    zap = isinstance(policy, KVzap)
    weights = (surrogates.kvzap if zap else surrogates.gates)(config, **options)
    policy = dataclasses.replace(policy, weights=weights).bind(config)
    random = np.random.default_rng(len(name))
    lengths = random.integers(3, 64, size=20 if name in FAST else 70)
    case = make_case(6, lengths, STEPS, heads, kv_heads)
    x = random.normal(size=(len(lengths), case.spec.prompt_len, config.hidden_size)).astype(np.float32)
    held = kept(policy, case, run_with_inputs(policy, case, x))
    for row, length in enumerate(lengths.tolist()):
        network = oracle.kvzap if zap else oracle.gate
        scores = np.stack([network(weights.layers[0], token) for token in x[row, :length].astype(np.float64)], axis=1)
        last = policy.window if zap or length >= policy.long else math.floor(policy.short_window * length + 1e-9)
        budget = budget_tokens(policy.budget, length + STEPS)
        expected = oracle.survivors(scores, budget, policy.scope, min(policy.sinks, length), last)
        assert held[row] == expected


def run_with_inputs(policy, case, x):
    """The state after a prompt, of whose attention the inputs are these; padding is NaN."""
    layer, size = policy.layer(case.spec), case.spec.prompt_len
    there = np.arange(size) < case.lengths[:, None]

    def padded(array):
        whole = np.zeros((len(array), size, *array.shape[2:]), np.float32)
        whole[:, : min(size, array.shape[1])] = array[:, :size]
        return np.where(there.reshape(*there.shape, *[1] * (array.ndim - 2)), whole, np.nan)

    @jax.jit
    def prefill(q, k, v, x):
        lengths = jnp.asarray(case.lengths)
        prompt = PromptKV.of(case.spec.rope, q, k, v, lengths, lengths + STEPS)
        around = AttentionContext(lambda: x, lambda: jnp.zeros((case.spec.num_heads, case.spec.head_dim, 1)))
        return prefill_alone(layer, prompt, around.with_context({}))[0]

    return prefill(*(padded(array) for array in (case.q, case.k, case.v, x)))


# Within a model.


def inputs_of(params, tokens):
    """What attention reads in each layer, from the queries, keys and values that it makes of it."""
    found = []
    for layer, (q, k, v) in zip(params.layers, made_of(params, np.asarray([tokens], np.int32)), strict=True):
        p = layer.attn
        made = np.concatenate([np.asarray(a[0]).reshape(len(tokens), -1) for a in (q, k, v)], axis=1)
        matrix = np.concatenate([np.asarray(m) for m in (p.q, p.k, p.v)])
        found.append(np.linalg.lstsq(matrix.astype(np.float64), made.T.astype(np.float64), rcond=None)[0].T)
    return found


@jax.jit
def made_of(params, tokens):
    """Queries, keys and values of each layer."""
    made, length = [], tokens.shape[1]

    def attend(i, q, k, v):
        made.append((q, k, v))
        size = jnp.full(1, length, jnp.int32)
        prompt = PromptKV.of(params.config.rope.resolve(length), q, k, v, size, size)
        return prefill_attention(prompt.q_rotated, prompt.k_rotated, v, scale=params.config.head_dim**-0.5)

    transformer.hidden(params, tokens, attend)
    return made


@pytest.mark.parametrize("kind", [pytest.param("kvzap", marks=pytest.mark.slow), "fast_kvzip"])
def test_a_model_brings_what_attention_reads(kind, tiny):
    """In every layer, with the weights of that layer; and parts of heads have their own."""
    make, network = {"kvzap": (surrogates.kvzap, oracle.kvzap), "fast_kvzip": (surrogates.gates, oracle.gate)}[kind]
    weights = make(tiny.config)
    policy = get_policy(kind, budget=12, weights=weights, sinks=1, scope="head", window=0)
    both = by_head({"a": policy, "b": dataclasses.replace(policy, budget=12, sinks=1)}, [["a", "b"]] * 2)
    random = np.random.default_rng(2)
    prompts = [random.integers(0, 64, size=n).tolist() for n in (48, 9, 31)]
    expected = {}
    for row, prompt in enumerate(prompts):
        for layer, x in enumerate(inputs_of(tiny, prompt)):
            scores = np.stack([network(weights.layers[layer], token) for token in x], axis=1)
            expected[row, layer] = oracle.survivors(scores, 12, "head", 1, 0)
    for chosen in (policy, both):
        engine = kvjax.Engine(tiny, chosen, batch=3, prompt_len=48, max_new_tokens=4)
        state, _ = engine.prefill(prompts)
        layers = zip(engine.layers, state.caches, strict=True)
        held = [jax.device_get(jax.jit(layer.view)(cached)) for layer, cached in layers]
        for (row, layer), want in expected.items():
            slots = held[layer]
            assert [set(p[m].tolist()) for p, m in zip(slots.pos[row], slots.weight[row] > 0, strict=True)] == want


# Files in the published layouts.


def write_kvzap(folder, weights, dtype=np.float32):
    folder.mkdir()
    arrays = {f"layers.{i}.{n}": a.astype(dtype) for i, layer in enumerate(weights.layers) for n, a in layer.items()}
    save_file(arrays, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("units", [pytest.param(None, marks=pytest.mark.slow), 9])
def test_kvzap_from_its_folder(tmp_path, tiny, units):
    weights = surrogates.kvzap(tiny.config, units)
    folder = write_kvzap(tmp_path / "kvzap", weights)
    for path in (folder, folder / "model.safetensors"):
        assert KVzap(weights=str(path)).bind(tiny.config) == KVzap(weights=weights).bind(tiny.config)
    answer = kvjax.generate(tiny, [5, 9, 2] * 12, f"kvzap:budget=12,window=2,weights={folder}", max_new_tokens=4)
    assert answer.stats.cache_bytes < answer.stats.full_cache_bytes


def test_kvzap_in_bfloat16(tmp_path, tiny):
    weights = surrogates.kvzap(tiny.config)
    folder = write_kvzap(tmp_path / "kvzap", weights, ml_dtypes.bfloat16)
    found = KVzap(weights=str(folder)).bind(tiny.config).weights
    assert found.layers[1]["0.weight"].dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(
        found.layers[1]["2.weight"].astype(np.float32), weights.layers[1]["2.weight"], rtol=2**-8
    )


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_gates_that_torch_saved(tmp_path, tiny, dtype):
    """A file of the published layout, with what training leaves beside the gates; scores are those of the authors' function."""
    torch = pytest.importorskip("torch", reason="torch is in the `oracle` extra")
    weights, kind = surrogates.gates(tiny.config), getattr(torch, dtype)
    module = [
        {name: torch.nn.Parameter(torch.tensor(array).to(kind)) if name == "b" else torch.tensor(array).to(kind) for name, array in layer.items()}
        for layer in weights.layers
    ]  # fmt: skip
    module[0] = collections.OrderedDict(module[0])
    module[1]["q_proj.weight"] = module[1]["q_proj.weight"].T.contiguous().T
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    file = tmp_path / "q2_dim6_sink5.pt"
    torch.save({"module": module, "args": argparse.Namespace(lr=kind), "optim": optimizer.state_dict()}, file)
    policy = FastKVzip(budget=12, weights=str(file)).bind(tiny.config)
    x = np.random.default_rng(0).normal(size=(1, 7, tiny.config.hidden_size)).astype(np.float32)
    arrays = {name: array.astype(np.float32) for name, array in policy.weights.layers[1].items()}
    found = predicted(policy, arrays, x, np.arange(2))
    given = {name: tensor.detach().float() for name, tensor in module[1].items()}
    np.testing.assert_allclose(found, published(torch, given, torch.tensor(x)), rtol=2e-5)


def published(torch, w, hidden):
    """The gate of the authors' code, transcribed: heads of 6 numbers, one row."""
    heads, dim = w["k_base"].shape[0], w["q_norm.weight"].shape[0]

    def norm(x, weight):
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    hidden = hidden.squeeze(0)
    shape = (hidden.shape[0], heads, -1, dim)
    queries = norm((hidden @ w["q_proj.weight"].T + w["q_proj.bias"]).view(shape), w["q_norm.weight"])
    keys = norm((hidden @ w["k_proj.weight"].T).view(shape), w["k_norm.weight"]).transpose(0, 1)
    queries = queries.transpose(0, 1).transpose(-1, -2)
    logit = torch.matmul(keys, queries) / math.sqrt(dim) + w["b"].unsqueeze(2)
    base = torch.matmul(w["k_base"], queries) / math.sqrt(dim)
    return (1 / (1 + torch.exp(base - logit).sum(2, keepdim=True))).mean(-1).squeeze(-1).unsqueeze(0).numpy()


def test_nothing_in_a_file_is_run(tmp_path):
    """Whatever a pickle names is not called, and what it makes is nothing."""
    ran = tmp_path / "ran"

    class Trap:
        def __reduce__(self):
            return open, (str(ran), "w")

    file = tmp_path / "trap.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("trap/data.pkl", pickle.dumps({"module": [Trap(), {"n": 1}]}))
    found = torch_files.read(file)
    assert found["module"][1] == {"n": 1}
    assert not ran.exists()
    with pytest.raises(PolicyError, match=r"trap.pt: not gates of Fast KVzip: 'module' is not a list of dictionaries"):
        FastKVzip(weights=str(file)).bind(TINY)


@pytest.mark.parametrize("content", [b"", b"no archive", pickle.dumps({"module": []})])
def test_files_that_torch_did_not_save(tmp_path, content):
    file = tmp_path / "gates.pt"
    file.write_bytes(content)
    with pytest.raises(PolicyError, match=r"gates.pt is not a readable file of torch.save"):
        FastKVzip(weights=str(file)).bind(TINY)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("FloatStorage", 4, (2, 3), (3, 1)), "does not fit"),
        (("FloatStorage", 4, (2, 2), (9, 1)), "does not fit"),
        (("FloatStorage", 4, (1 << 40,), (0,)), "does not fit"),
        (("FloatStorage", 4, (2, 2), (-1, 1)), "does not fit"),
        (("FloatStorage", 5, (2, 2), (2, 1)), "4 numbers stored of 5"),
        (("QInt8Storage", 4, (2, 2), (2, 1)), "of type 'QInt8Storage'"),
    ],
)
def test_damaged_tensors(tmp_path, arguments, says):
    kind, count, shape, strides = arguments

    class Tensor:
        def __reduce__(self):
            return Named("torch._utils", "_rebuild_tensor_v2"), (Stored(), 0, shape, strides, False, None)

    class Stored: ...

    class Named:
        def __init__(self, module, name):
            self.__module__, self.__qualname__ = module, name

        def __call__(self): ...

    class Writer(pickle._Pickler):  # the one in Python can be told what to write
        def persistent_id(self, obj):
            return ("storage", Named("torch", kind), "0", "cpu", count) if isinstance(obj, Stored) else None

        def save(self, obj, save_persistent_id=True):
            if isinstance(obj, Named):
                self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__qualname__}\n".encode())
            else:
                super().save(obj, save_persistent_id)

    with zipfile.ZipFile(tmp_path / "t.pt", "w") as archive:
        with archive.open("t/data.pkl", "w") as stream:
            Writer(stream, 2).dump({"module": [{"b": Tensor()}]})
        archive.writestr("t/data/0", np.arange(4, dtype="<f4").tobytes())
    with pytest.raises(ValueError, match=says):
        torch_files.read(tmp_path / "t.pt")


def saved(path, listed, compression=zipfile.ZIP_STORED, **entries):
    """A file as `torch.save` writes them, of a pickle and of storages by their names."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("t/data.pkl", listed)
        for name, content in entries.items():
            archive.writestr(f"t/data/{name.removeprefix('_')}", content)
    return path


def tensors_of(torch_type, count, times):
    """A pickle of the same tensor, several times."""
    storage = b"(X\x07\0\0\0storagectorch\n%s\nX\x01\0\0\x000X\x03\0\0\0cpuJ%stQ" % (
        torch_type,
        struct.pack("<i", count),
    )
    one = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0J%s\x85K\x01\x85\x89NtR" % struct.pack("<i", count)
    return b"\x80\x02](" + one * times + b"e."


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_tensors_of_one_storage_are_read_once(tmp_path, monkeypatch, compression):
    numbers = np.arange(1000, dtype="<f4")
    file = saved(tmp_path / "t.pt", tensors_of(b"FloatStorage", 1000, 3), compression, _0=numbers.tobytes())
    found = torch_files.read(file)
    np.testing.assert_array_equal(found, [numbers] * 3)
    assert all(np.shares_memory(found[0], array) for array in found)
    monkeypatch.setattr(torch_files, "MOST_BYTES", 2 * numbers.nbytes + 1000)
    with pytest.raises(ValueError, match="its tensors have more than 9000 bytes"):
        torch_files.read(saved(file, tensors_of(b"FloatStorage", 1000, 3), compression, _0=numbers.tobytes()))


def test_a_small_file_does_not_become_a_large_one(tmp_path, monkeypatch):
    """Of a file that unpacks to more than it may have, nothing is unpacked, whatever it says of its size."""
    monkeypatch.setattr(torch_files, "MOST_BYTES", 1 << 20)
    listed, zeros = tensors_of(b"FloatStorage", 1 << 20, 1), bytes(1 << 22)
    file = saved(tmp_path / "t.pt", listed, zipfile.ZIP_DEFLATED, _0=zeros)
    assert file.stat().st_size < 10_000
    with pytest.raises(
        ValueError, match=r"t.pt is not a readable file of torch.save .* unpacks to \d+ bytes; at most 1048576"
    ):
        torch_files.read(file)
    content = file.read_bytes().replace(struct.pack("<I", len(zeros)), struct.pack("<I", 1000))
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"not a readable file of torch.save"):
        torch_files.read(file)
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with pytest.raises(ValueError, match="compressed, but not with deflate"):
            torch_files.read(saved(file, listed, method, _0=bytes(1000)))
    (tmp_path / "large").write_bytes(bytes(2_000_000))
    with pytest.raises(ValueError, match="it has 2000000 bytes; at most 1048576 are read"):
        torch_files.read(tmp_path / "large")


@pytest.mark.parametrize(
    "listed", [b"\x80\x02]r\xff\xff\xff\x7f.", b"\x80\x02]p99999999999\n.", b"\x80\x02K\x01q\x05."]
)
def test_numbers_of_objects_are_bounded(tmp_path, listed):
    """Python's unpickler takes memory for all numbers up to the highest: 32 GB for the first of these."""
    if listed.endswith(b"q\x05."):
        assert torch_files.read(saved(tmp_path / "t.pt", listed)) == 1
        return
    with pytest.raises(ValueError, match="its list of tensors is damaged: an object has number"):
        torch_files.read(saved(tmp_path / "t.pt", listed))


def test_lists_and_archives_are_bounded(tmp_path, monkeypatch):
    file = saved(tmp_path / "t.pt", b"]" * (torch_files._PICKLE_BYTES + 1), zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="its list of tensors has 4194305 bytes; at most 4194304 are read"):
        torch_files.read(file)
    monkeypatch.setattr(torch_files, "_ENTRIES", 5)
    saved(file, b"]0.", **{f"_{i}": b"" for i in range(5)})
    with pytest.raises(ValueError, match="its archive has more than 5 entries"):
        torch_files.read(file)
    with pytest.raises(ValueError, match="not a regular file"):
        torch_files.read(tmp_path)


def test_weights_of_another_model_are_refused(tmp_path):
    other = TINY.with_attention(num_kv_heads=1)
    for policy, make in ((KVzap, surrogates.kvzap), (FastKVzip, surrogates.gates)):
        with pytest.raises(PolicyError, match="no weights are given"):
            policy().bind(TINY)
        with pytest.raises(PolicyError, match="layer 0 has weights"):
            policy(weights=make(other)).bind(TINY)
        with pytest.raises(PolicyError, match="weights have 3 layers"):
            policy(weights=make(TINY.with_depth(3))).bind(TINY)
        with pytest.raises(PolicyError, match="Give a Surrogate"):
            policy(weights=3)
    with pytest.raises(FileNotFoundError):
        KVzap(weights=str(tmp_path / "nothing")).bind(TINY)
    (tmp_path / "x.safetensors").write_bytes(b"no tensors")
    with pytest.raises(PolicyError, match="not a safetensors file"):
        KVzap(weights=str(tmp_path / "x.safetensors")).bind(TINY)
    for name in ("model.embed.weight", "layers.1.weight"):
        save_file({name: np.zeros(2, np.float32)}, tmp_path / f"{name}.safetensors")
        with pytest.raises(PolicyError, match="not weights of KVzap"):
            KVzap(weights=str(tmp_path / f"{name}.safetensors")).bind(TINY)


def test_weights_without_norms_are_told_the_published_rank():
    """Its 16 numbers are what is asked for where the weights do not tell."""
    layers = [
        {name: x for name, x in layer.items() if name != "q_norm.weight"} for layer in surrogates.gates(TINY).layers
    ]
    with pytest.raises(PolicyError, match=r"but this model needs .*'q_norm\.weight': \(16,\)"):
        FastKVzip(weights=Surrogate.of(layers)).bind(TINY)


def test_weights_are_compared_by_their_numbers():
    one, same, other = surrogates.kvzap(TINY), surrogates.kvzap(TINY), surrogates.kvzap(TINY, seed=9)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one.digest in repr(KVzap(weights=one))
    with pytest.raises(ValueError, match="not finite"):
        Surrogate.of([{"weight": np.asarray([np.inf], np.float32)}])
    with pytest.raises(ValueError, match=r"0\.weight of layer 0 is a single number"):
        Surrogate.of([{"0.weight": np.zeros(())}])
    with pytest.raises(ValueError, match="no layers"):
        Surrogate.of([])
    with pytest.raises(ValueError, match="layer 1 has b, but layer 0 has a"):
        Surrogate.of([{"a": np.zeros(1)}, {"b": np.zeros(1)}])


def test_bad_hyperparameters():
    for options, says in (
        ({"short_window": 1.5}, "Give a share"),
        ({"sinks": -1}, "sinks=-1"),
        ({"scope": "model"}, "scope='model'"),
    ):
        with pytest.raises(PolicyError, match=says):
            FastKVzip(**options)
    with pytest.raises(PolicyError, match=r"window=-1 is too small\. Give 0 or more"):
        KVzap(window=-1)
    with pytest.raises(PolicyError, match="budget of 3 gives 3 slots"):
        FastKVzip(budget=3)
