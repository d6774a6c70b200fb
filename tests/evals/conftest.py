"""A small model with a byte-level tokenizer, for tasks given as text."""

import pytest
from checkpoints import HF_CONFIG, write_hf

from kvjax.conversion import load
from kvjax.models import Params


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Params:
    """A random Llama of window 8192 that reads bytes, and has a chat template."""
    path = tmp_path_factory.mktemp("talker") / "small"
    write_hf(path, HF_CONFIG | {"max_position_embeddings": 8192}, tokenizer=True)
    return load(path)
