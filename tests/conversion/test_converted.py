"""GGUF files that llama.cpp's own converter made of tiny random checkpoints, which `converted.py` describes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from converted import CHECKPOINTS, FOLDER, checkpoint
from oracles import logits

import kvjax
from kvjax.conversion.gguf_file import ARCHITECTURE_OF

MOST_BYTES = 100_000
TOKENS = np.random.default_rng(0).integers(0, 261, (1, 40))


def test_each_checkpoint_has_a_file_of_a_known_converter() -> None:
    assert {path.stem for path in FOLDER.glob("*.gguf")} == set(CHECKPOINTS)
    assert all(path.stat().st_size <= MOST_BYTES for path in FOLDER.glob("*.gguf"))
    made = json.loads((FOLDER / "converter.json").read_text())
    assert re.fullmatch(r"[0-9a-f]{9,40}", made["commit"])


def test_each_family_of_gguf_files_has_one() -> None:
    assert {fields["model_type"] for fields in CHECKPOINTS.values()} == set(ARCHITECTURE_OF)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_file_is_the_hugging_face_folder(name: str, tmp_path: Path) -> None:
    """Logits of the GGUF file, of the folder that was converted, and its tokens."""
    kvjax.save(checkpoint(name), tmp_path / "hf", format="safetensors")
    folder = kvjax.load(tmp_path / "hf", dtype="float32")
    file = kvjax.load(FOLDER / f"{name}.gguf", dtype="float32")
    assert file.config.family == folder.config.family
    assert file.config.windows == folder.config.windows
    want = np.asarray(logits(folder, TOKENS))
    assert 0.3 < want.std() < 10
    np.testing.assert_allclose(logits(file, TOKENS), want, atol=2e-5 * max(1, want.std()))
    assert file.tokenizer.decode(file.tokenizer.encode("hello there")) == "hello there"
