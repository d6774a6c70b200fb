"""GGUF files that llama.cpp's own converter made of tiny random checkpoints, which `converted.py` describes."""

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from converted import CHECKPOINTS, FOLDER, WRITTEN_AS, write_folder
from oracles import logits, numbers

import kvjax
from kvjax.conversion.gguf_file import ARCHITECTURE_OF, ARCHITECTURES, FAMILY_OF
from kvjax.models.params import Experts
from kvjax.pallas_kernels import GroupedMatrix

MOST_BYTES = 100_000
TOKENS = np.random.default_rng(0).integers(0, 261, (1, 40))


def test_each_checkpoint_has_a_file_of_a_known_converter() -> None:
    assert {path.stem for path in FOLDER.glob("*.gguf")} == set(CHECKPOINTS)
    assert all(path.stat().st_size <= MOST_BYTES for path in FOLDER.glob("*.gguf"))
    made = json.loads((FOLDER / "converter.json").read_text())
    assert re.fullmatch(r"[0-9a-f]{9,40}", made["commit"])


def test_each_family_and_architecture_of_gguf_files_has_one() -> None:
    assert {fields["model_type"] for fields in CHECKPOINTS.values()} == {*ARCHITECTURE_OF, *WRITTEN_AS}
    readers = (gguf.GGUFReader(path) for path in FOLDER.glob("*.gguf"))
    assert {reader.fields["general.architecture"].contents() for reader in readers} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_file_is_the_hugging_face_folder(name: str, tmp_path: Path) -> None:
    """Logits of the GGUF file, of the folder that was converted, and its tokens."""
    write_folder(name, tmp_path / "hf")
    folder = kvjax.load(tmp_path / "hf", dtype="float32")
    file = kvjax.load(FOLDER / f"{name}.gguf", dtype="float32")
    others = [FAMILY_OF[architecture] for architecture in WRITTEN_AS.get(folder.config.family, ())]
    assert file.config.family in (others or [folder.config.family])
    assert file.config.windows == folder.config.windows
    want = np.asarray(logits(folder, TOKENS))
    assert 0.3 < want.std() < 10
    np.testing.assert_allclose(logits(file, TOKENS), want, atol=2e-5 * max(1, want.std()))
    assert file.tokenizer.decode(file.tokenizer.encode("hello there")) == "hello there"


def test_experts_in_mxfp4_are_those_of_the_folder(tmp_path: Path) -> None:
    """The converter packs them in another order, and both are kept in 4 bits."""
    write_folder("gpt_oss_mxfp4", tmp_path / "hf")
    models = kvjax.load(tmp_path / "hf"), kvjax.load(FOLDER / "gpt_oss_mxfp4.gguf", weights="as stored")
    for folder, file in zip(*(model.layers for model in models), strict=True):
        assert isinstance(folder.mlp, Experts)
        assert isinstance(file.mlp, Experts)
        for part in ("gate_experts", "up_experts", "down_experts"):
            pair = [getattr(layer.mlp, part) for layer in (folder, file)]
            assert all(isinstance(matrix, GroupedMatrix) and matrix.kind == "mxfp4" for matrix in pair)
            np.testing.assert_array_equal(*map(numbers, pair))
