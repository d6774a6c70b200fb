"""Mutated checkpoints, and the process that tries to load them within limits of time and memory.

``python fuzzing.py folder first last`` writes sound checkpoints into an empty folder, mutates them once for every case in
the range, and prints what became of each case as a line of JSON.
"""

import copy
import faulthandler
import json
import resource
import shutil
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from checkpoints import HF_CONFIG, byte_tokenizer, write_gguf, write_hf

from kvjax.conversion import CheckpointError, convert, from_hf, load, to_hf
from kvjax.models import Params
from kvjax.models.transformer import forward

SEED = 20240229

SECONDS = 10
"""That one case may take."""

BYTES = 1 << 30
"""That one case may add to the memory of the process."""

FIELDS = HF_CONFIG | {
    "num_hidden_layers": 1,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}

EXTREMES: list[Any] = [
    *(None, True, False, "", "x", "\ud800", "../x", "a" * 5000, [], {}, [[]], [1], {"a": 1}, [None] * 3),
    *(0, 1, 2, 3, -1, 7, 255, 256, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**7, 10**30, 10**400),
    *(0.0, -0.5, 0.1, 1.5, 1e-300, 1e300, float("nan"), float("inf"), -float("inf")),
]

SOURCES = ("single", "shards", "plain.gguf", "quantised.gguf", "orbax")


def write_sound(folder: Path) -> None:
    """One checkpoint of every kind."""
    write_hf(folder / "single", FIELDS, tokenizer=True)
    write_hf(folder / "shards", FIELDS, tokenizer=True, files=2)
    (folder / "shards" / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    tokens = [byte_tokenizer().id_to_token(i) for i in range(261)]
    bytewise = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "merges": ["h e", "l l", "he ll"],
        "eos_token_id": 1,
    }
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "h", "e", "l", "o", "he", "ll"]
    scored = {"model": "llama", "tokens": pieces, "scores": [-float(i) for i in range(len(pieces))], "bos_token_id": 1}
    scored |= {"token_type": [2, 3, 3] + [6] * 256 + [1] * 7, "eos_token_id": 2}
    config = from_hf(FIELDS | {"rope_scaling": None, "bos_token_id": None, "eos_token_id": None})
    for name, kind, fields in (("plain", "F32", bytewise), ("quantised", "Q8_0", scored)):
        metadata = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
        metadata |= {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
        metadata["tokenizer.chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
        write_gguf(folder / f"{name}.gguf", config, kind, metadata)
    convert(folder / "single", folder / "orbax", progress=False)


def mutate(case: int, sound: Path, folder: Path) -> tuple[Path, str]:
    """A damaged copy of one of the checkpoints, and what was done to it."""
    rng = np.random.default_rng([SEED, case])
    name = SOURCES[case % len(SOURCES)]
    target = folder / name
    if not (sound / name).is_dir():
        shutil.copy(sound / name, target)
        file = target
    else:
        shutil.copytree(sound / name, target)
        files = sorted(file for file in target.rglob("*") if file.is_file() and file.stat().st_size)
        file = files[rng.integers(len(files))]
    ways: list[Callable[[np.random.Generator, bytes], bytes]] = [_flip, _truncate, _copy, _extremes, _insert]
    if file.suffix == ".json":
        ways = [_json, _json, _json, _json, _flip, _truncate]
    elif file.suffix == ".safetensors":
        ways += [_safetensors_header] * 6
    elif file.suffix == ".gguf":
        ways += [_gguf_header] * 8
    way = ways[rng.integers(len(ways))]
    file.write_bytes(way(rng, file.read_bytes()))
    return target, f"{file.relative_to(folder)} {way.__name__[1:]}"


def _place(rng: np.random.Generator, content: bytes) -> int:
    """A position: half of the time among the first 4096, where headers are."""
    return int(rng.integers(min(len(content), 4096) if rng.random() < 0.5 else len(content)))


def _flip(rng: np.random.Generator, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.integers(1, 9)):
        changed[_place(rng, content)] ^= 1 << rng.integers(8)
    return bytes(changed)


def _truncate(rng: np.random.Generator, content: bytes) -> bytes:
    return content[: _place(rng, content)]


def _copy(rng: np.random.Generator, content: bytes) -> bytes:
    source, target, size = _place(rng, content), _place(rng, content), int(rng.integers(1, 200))
    piece = content[source : source + size]
    return content[:target] + piece + content[target + len(piece) :]


def _insert(rng: np.random.Generator, content: bytes) -> bytes:
    place = _place(rng, content)
    return content[:place] + rng.bytes(rng.integers(1, 64)) + content[place:]


def _extreme_number(rng: np.random.Generator) -> bytes:
    form = "<Q" if rng.random() < 0.5 else "<I"
    most = 2 ** (8 * struct.calcsize(form)) - 1
    values = (0, 1, 2, 9, most, most // 2, most // 2 + 1, 2**60, 2**31, 10**6, 10**9)
    return struct.pack(form, min(most, values[rng.integers(len(values))]))


def _extremes(rng: np.random.Generator, content: bytes) -> bytes:
    place, number = _place(rng, content), _extreme_number(rng)
    return content[:place] + number + content[place + len(number) :]


def _json(rng: np.random.Generator, content: bytes) -> bytes:
    return _mutated_json(rng, json.loads(content)).encode("utf-8", "surrogatepass")


def _safetensors_header(rng: np.random.Generator, content: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    text = _mutated_json(rng, json.loads(content[8 : 8 + length])).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def _mutated_json(rng: np.random.Generator, value: Any) -> str:
    """Text of a document in which one value is replaced or nested, or one key is left out or stands twice."""
    value = copy.deepcopy(value)
    place, key = value, ""
    while isinstance(place, dict | list) and place:
        parent, keys = place, list(place) if isinstance(place, dict) else range(len(place))
        key = keys[int(rng.integers(len(keys)))]
        place = parent[key]
        if rng.random() < 0.3:
            break
    extreme = EXTREMES[rng.integers(len(EXTREMES))]
    match rng.integers(8):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent["__twice__"] = extreme
            return json.dumps(value).replace('"__twice__"', json.dumps(str(key)))
        case 2:
            parent[key] = "__deep__"
            return json.dumps(value).replace('"__deep__"', "[" * 5000 + "]" * 5000)
        case 3 if isinstance(place, int | float):
            parent[key] = place * 2 if rng.random() < 0.5 else place + 1
        case _:
            parent[key] = extreme
    return json.dumps(value)


def _gguf_header(rng: np.random.Generator, content: bytes) -> bytes:
    """Another type, count or value for a field, or another size, type or offset of a tensor."""
    scratch = Path(sys.argv[1]) / "header.gguf"
    scratch.write_bytes(content)
    reader = gguf.GGUFReader(scratch)
    fields = [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]
    field = fields[rng.integers(len(fields))]
    sizes = np.cumsum([0, *(part.nbytes for part in field.parts)])
    place = field.offset + int(sizes[rng.integers(min(len(sizes), 7))])
    number = _extreme_number(rng) if rng.random() < 0.7 else struct.pack("<I", rng.integers(14))
    return content[:place] + number + content[place + len(number) :]


def attempt(source: Path, sound: Params) -> str:
    """Load, and use what was loaded: "refused", or "loaded" if it is a right model.

    Right is: the configuration makes sense in itself, weights are of its shapes, weights that are not finite were told, and
    where the files of weights are as they were, they and the logits of a sound configuration are finite.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            params = load(source, progress=False)
        except CheckpointError as error:
            return "refused" if len(str(error)) < 2000 else f"an error that no one reads: {error}"
    told = any("NaN or infinite" in str(warning.message) for warning in caught)
    for warning in caught:
        assert warning.category is UserWarning, f"{warning.category}: {warning.message}"
    leaves = jax.tree.leaves(params)
    finite = all(bool(np.isfinite(np.asarray(leaf)).all()) for leaf in leaves)
    assert finite or told, "weights that are not finite go untold"
    assert from_hf(to_hf(params.config)) == params.config
    tokenizer = params.tokenizer
    logits = np.asarray(_logits(params.replace(tokenizer=None), jnp.asarray([[5, 7]], jnp.int32)))
    assert logits.shape == (1, 2, params.config.vocab_size)
    same = [a.shape == b.shape and bool((a == b).all()) for a, b in zip(leaves, jax.tree.leaves(sound), strict=False)]
    if len(leaves) == len(jax.tree.leaves(sound)) and all(same):
        assert np.isfinite(logits).all(), "sound weights give logits that are not finite"
    if tokenizer is not None:
        _use(tokenizer)
    return "loaded"


_logits = jax.jit(forward)


def _use(tokenizer: Any) -> None:
    for call in (
        lambda: tokenizer.decode(tokenizer.encode("hello, wörld")),
        lambda: tokenizer.render([{"role": "user", "content": "hello"}]),
        lambda: hash(tokenizer),
    ):
        try:
            call()
        except ValueError as error:
            if type(error) is not ValueError:
                raise


def main(folder: Path, first: int, last: int) -> None:
    """Try the cases, each within its limits; a case that hangs ends the process with the place where it does."""
    jax.config.update("jax_disable_most_optimizations", True)
    sound = folder / "sound"
    sound.mkdir()
    write_sound(sound)
    models = {}
    for name in SOURCES:
        models[name] = load(sound / name, progress=False)
        assert attempt(sound / name, models[name]) == "loaded"
    held = _status("VmSize") + BYTES
    for case in range(first, last):
        # What compiled programs of other configurations take is not the case's.
        if case % 50 == 0:
            held = _status("VmSize") + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (held, resource.RLIM_INFINITY))
        damaged = folder / "damaged"
        damaged.mkdir()
        source, what = mutate(case, sound, damaged)
        print(json.dumps({"case": case, "what": what}), flush=True)
        Path("/proc/self/clear_refs").write_text("5")
        before, begun = _status("VmRSS"), time.monotonic()
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            outcome = attempt(source, models[source.name])
        except BaseException:
            outcome = traceback.format_exc()[-1500:]
        faulthandler.cancel_dump_traceback_later()
        report = {"outcome": outcome, "seconds": time.monotonic() - begun, "bytes": _status("VmHWM") - before}
        print(json.dumps(report), flush=True)
        shutil.rmtree(damaged)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
