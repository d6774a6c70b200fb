"""Real checkpoints, against transformers' own reading of the same files."""

from pathlib import Path

import numpy as np
import pytest
from oracles import logits

from kvjax.conversion import default_model, load, to_hf
from kvjax.models import Params

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def gguf_file(smollm2: Params) -> Path:
    file = default_model.cache_directory() / default_model.GGUF_NAME
    if not file.exists():
        pytest.skip(f"the default model came from the hub, not as {file}")
    return file


@pytest.mark.slow
def test_weights_equal_transformers(gguf_file: Path, smollm2: Params) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):  # the loader asks a model for names only
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**to_hf(smollm2.config))
        )
    tensors = load_gguf_checkpoint(gguf_file, return_tensors=True, model_to_load=model)["tensors"]
    theirs = {name: np.asarray(value) for name, value in tensors.items()}
    assert len(theirs) == 272
    np.testing.assert_array_equal(smollm2.embed, theirs["model.embed_tokens.weight"])
    for i in (0, 13, 29):
        layer, prefix = smollm2.layers[i], f"model.layers.{i}."
        for ours, name in (
            (layer.attn.q, "self_attn.q_proj"),
            (layer.attn.k, "self_attn.k_proj"),
            (layer.attn.v, "self_attn.v_proj"),
            (layer.attn.o, "self_attn.o_proj"),
            (layer.mlp.down, "mlp.down_proj"),
            (layer.attn_norm, "input_layernorm"),
        ):
            np.testing.assert_array_equal(ours, theirs[f"{prefix}{name}.weight"])


def test_real_small_llama(shared: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    path = shared / "data/models/stories260K-hf"
    params = load(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    text = "Once upon a time, there was a little girl named Lily. She was 3."
    tokens = params.tokenizer.encode(text)
    assert tokens == tokenizer.backend_tokenizer.encode(text).ids
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits.numpy()
    ours = logits(params, np.asarray([tokens], np.int32))
    np.testing.assert_allclose(ours, expected, atol=1e-4)
