"""The forward pass against transformers: every supported architecture, every position, prompts of ragged length."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import oracles
import pytest

import kvjax
from kvjax.conversion import from_hf, from_state_dict
from kvjax.models import Params
from kvjax.models.transformer import forward
from kvjax.runtime.generation import generate

pytestmark = pytest.mark.oracle

LENGTHS = (40, 23, 7, 1)

LONGER = {"qwen3.5": (70, 64, 7, 2), "phi-3-longrope-long": (40, 23, 7, 5)}
"""Lengths of other prompts. Prompts of a gated delta net are longer than a chunk, and shorter than its convolution.

LongRoPE picks its factors by the length of the batch: all rows are on the same side of the original window.
"""

IN_FLOAT64 = {"qwen3.5"}
"""Compared with transformers' model in float64. Its logits in float32 are further than the tolerance from those in float64."""

# Between them: mixed windows, biases, YaRN's amplitude, query and key norms, LongRoPE, partial and interleaved rotation,
# sandwich norms, tied embeddings, layers that differ in more than windows. Each compiles a decode loop; the other architectures follow under `-m slow`.
DECODED_FIRST = {"smollm2", "qwen2-windows", "qwen3-yarn-biased", "phi-4-mini", "glm-4-0414", "gemma-3"}


def transformers_logits(model: Any, prompt: np.ndarray) -> np.ndarray:
    """Logits [T, V] of one prompt by itself."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return model(torch.from_numpy(prompt)[None].long()).logits[0].numpy()


def logits_in_float64(model: Any, prompt: np.ndarray) -> np.ndarray:
    """As `transformers_logits`, in float64 also where transformers' code asks for float32."""
    torch = pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        logits = transformers_logits(copy.deepcopy(model).double(), prompt)
    assert logits.dtype == np.float64
    return logits


def ragged(vocab_size: int, lengths: tuple[int, ...]) -> np.ndarray:
    """A batch [B, T] of random tokens. Those past a row's length are random too: nothing may depend on them."""
    return np.random.default_rng(0).integers(0, vocab_size, (len(lengths), max(lengths)), dtype=np.int32)


def largest_difference(
    model: Any,
    params: Params,
    lengths: tuple[int, ...],
    reference: Callable[[Any, np.ndarray], np.ndarray] = transformers_logits,
) -> float:
    tokens = ragged(params.config.vocab_size, lengths)
    got = np.asarray(jax.jit(forward)(params, tokens))
    worst = 0.0
    for row, length in enumerate(lengths):
        want = reference(model, tokens[row, :length])
        assert 0.3 < want.std() < 3, "the comparison is meant for logits of order 1"
        worst = max(worst, np.abs(got[row, :length] - want).max())
    return worst


@pytest.mark.parametrize("name", oracles.ARCHITECTURES)
def test_logits_equal_transformers(name: str) -> None:
    model = oracles.transformers_model(name)
    reference = logits_in_float64 if name in IN_FLOAT64 else transformers_logits
    assert largest_difference(model, oracles.converted(model), LONGER.get(name, LENGTHS), reference) <= 1e-4


@pytest.mark.rotating  # the test above compares each architecture's logits in every run
@pytest.mark.parametrize(
    "name", [n if n in DECODED_FIRST else pytest.param(n, marks=pytest.mark.slow) for n in oracles.ARCHITECTURES]
)
def test_greedy_decoding_equals_transformers(name: str) -> None:
    """Prompts of ragged length in one batch, with the full cache; each token is the one that transformers would generate next after
    those before it, so that by induction it generates the same 64.
    """
    model = oracles.transformers_model(name)
    params = oracles.converted(model)
    prompts = [row[:length].tolist() for row, length in zip(ragged(101, (30, 9)), (30, 9), strict=True)]
    results = generate(params, prompts, policy="full", max_new_tokens=64, ignore_eos=True)
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.tokens) == 64
        logits = transformers_logits(model, np.asarray(prompt + result.tokens))
        assert result.tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize(
    "name",
    [
        "gemma-3",
        "smollm3",
        "olmo2",
        "olmo3",
        "granite",
        "ministral-3",
        "qwen3-moe-mixed",
        "qwen2-moe",
        "olmoe",
        "mixtral",
        "glm-4.5-air",
        "gpt-oss",
        pytest.param("qwen3.5", marks=pytest.mark.slow),
        pytest.param("qwen3.5-moe", marks=pytest.mark.slow),
        "qwen3-next",
    ],
)
def test_what_is_written_is_the_same_model(name: str, tmp_path: Path) -> None:
    """Read back by kvjax and by transformers."""
    transformers = pytest.importorskip("transformers")
    params = oracles.converted(oracles.transformers_model(name))
    kvjax.save(params, tmp_path / "hf", format="safetensors")
    tokens = ragged(101, (30,))
    want = np.asarray(oracles.logits(params, tokens))
    again = kvjax.load(tmp_path / "hf", dtype="float32")
    assert again.config == params.config
    np.testing.assert_array_equal(oracles.logits(again, tokens), want)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    np.testing.assert_allclose(transformers_logits(theirs, tokens[0]), want[0], atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_the_text_model_of_qwen3_vl(tied: bool) -> None:
    """Logits of text alone, by the weights of the model with its vision tower."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 36}
    config = transformers.Qwen3VLConfig(
        text_config=oracles.SIZES
        | {"head_dim": 16, "rope_parameters": {"rope_theta": 5e5, "mrope_section": [4, 2, 2]}},
        vision_config=vision | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        tie_word_embeddings=tied,
    )
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    oracles.randomise(torch, model)
    params = oracles.converted(model)
    assert (params.config.family, params.config.tied) == ("qwen3", tied)
    assert largest_difference(model, params, (40, 7)) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_the_text_model_of_qwen3_5(kind: str) -> None:
    """Logits of text alone, by the weights of the model with its vision tower. Layers that predict tokens at once are left out."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 36}
    _, text = oracles.ARCHITECTURES["qwen3.5" if kind == "Qwen3_5" else "qwen3.5-moe"]
    text = {key: value for key, value in text.items() if key != "tie_word_embeddings"}
    config = getattr(transformers, f"{kind}Config")(
        text_config=oracles.SIZES | text, vision_config=vision | {"num_position_embeddings": 16}
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    oracles.randomise(torch, model, gain=0.0)
    tensors = {name: np.asarray(tensor.detach()) for name, tensor in model.state_dict().items()}
    tensors["mtp.layers.0.self_attn.q_proj.weight"] = np.zeros((2, 2), np.float32)
    read = from_hf(model.config.to_dict())
    params = from_state_dict(read, tensors)
    assert params.config.family == ("qwen3_5_text" if kind == "Qwen3_5" else "qwen3_5_moe_text")
    assert largest_difference(model, params, (40, 7)) <= 1e-4
