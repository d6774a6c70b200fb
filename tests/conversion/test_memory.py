"""Loading holds one tensor at a time beside what has been loaded, writing a few."""

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import HF_CONFIG, weights, write_gguf, write_hf

from kvjax.conversion import convert, from_hf

FIELDS = HF_CONFIG | {
    "vocab_size": 12288,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
"""172 MB in float32, 50 MB of them one tensor; weights that are held twice, or a second tensor, would show."""

# Linux keeps the peak of resident memory, file-backed pages included, and can reset it.
PROBE = """
import sys, jax
from pathlib import Path
from kvjax.conversion import load

def status(key):
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1])

load(sys.argv[1], dtype=sys.argv[3], progress=False)
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
params = load(sys.argv[2], dtype=sys.argv[3], progress=False)
print(status("VmHWM") - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
      max(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


WRITER = """
import sys
from pathlib import Path
from kvjax.conversion import convert

def status(key):
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1])

convert(sys.argv[1], Path(sys.argv[2]) / "small", format=sys.argv[4], progress=False)
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
convert(sys.argv[3], Path(sys.argv[2]) / "large", format=sys.argv[4], progress=False)
print(status("VmHWM") - before)
"""

peaks = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of peak memory")


@peaks
@pytest.mark.parametrize("form", [pytest.param("orbax", marks=pytest.mark.slow), "safetensors"])
def test_writing_does_not_hold_the_model(tmp_path: Path, form: str) -> None:
    """Of 240 MB in 64 tensors, the largest 13 MB; Orbax takes some tens of MB besides, whatever the model's size."""
    fields = FIELDS | {"vocab_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 5}
    write_hf(tmp_path / "few")
    tensors = write_hf(tmp_path / "many", fields)
    size = sum(tensor.nbytes for tensor in tensors.values())
    arguments = [tmp_path / "few", tmp_path, tmp_path / "many", form]
    peak = int(probed(WRITER, *arguments))
    assert peak < 0.6 * size, f"{peak / 1e6:.0f} MB to write {size / 1e6:.0f} MB"


def probed(script: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@peaks
@pytest.mark.parametrize(
    "form",
    ["float32", *(pytest.param(form, marks=pytest.mark.slow) for form in ("bfloat16 as float32", "gguf", "orbax"))],
)
def test_peak_is_below_the_checkpoint_and_its_largest_tensor(tmp_path: Path, form: str) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    for path, fields in ((small, HF_CONFIG), (large, FIELDS)):
        config = from_hf(fields)
        if form == "gguf":
            write_gguf(path, config, "Q8_0")
            continue
        tensors = weights(config)
        if form.startswith("bfloat16"):
            tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
        write_hf(path, fields, tensors)
        if form == "orbax":
            convert(path, tmp_path / f"{path.name}-orbax")
    if form == "orbax":
        small, large = tmp_path / "small-orbax", tmp_path / "large-orbax"
    peak, size, largest = (int(word) for word in probed(PROBE, small, large, "float32").split())
    assert size <= peak, "the measure counts what was loaded"
    assert peak < size + largest, f"{(peak - size) / largest:.2f} of the largest tensor beside the parameters"
    assert np.dtype(np.float32).itemsize * 12288 * 1024 == largest
