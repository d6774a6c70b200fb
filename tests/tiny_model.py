"""The model of most tests, and of the pages' doctests: small, with random weights, so that no file is needed."""

import functools

import jax
import jax.numpy as jnp
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from kvjax.cache import LayerSpec, PromptKV, Token, TokenBlock
from kvjax.config import RopeConfig
from kvjax.conversion import Tokenizer
from kvjax.models import ModelConfig, Params, init


@functools.cache
def tiny() -> Params:
    """A random Llama in float32: 2 layers, 4 query heads on 2 KV heads of 16, vocabulary 64, window 256, no tokenizer."""
    return init(_config(64), jax.random.key(0))


def _config(vocabulary: int) -> ModelConfig:
    return ModelConfig.uniform(
        family="llama",
        vocab_size=vocabulary,
        hidden_size=48,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=256,
        rope=RopeConfig(theta=10000.0, dim=16),
    )


TEMPLATE = (
    "{% if tools %}<|tools|>{{ tools | tojson }}</s>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def chatting() -> Params:
    """The same model with a token for each byte, and a chat template that reads `tools`, for the pages' chats."""
    vocabulary = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(vocabulary)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    params = init(_config(len(vocabulary)), jax.random.key(0))
    return params.replace(tokenizer=Tokenizer(backend, eos=(1,), chat_template=TEMPLATE))


@functools.cache
def layer() -> tuple[LayerSpec, PromptKV, Token, TokenBlock]:
    """One layer for the examples of docstrings: 2 query heads on 1 KV head of 4, without rotation.

    A prompt of 6 tokens in one row, a token after it, and a block of 2 tokens after it. Numbers are random.
    """
    spec = LayerSpec(num_heads=2, num_kv_heads=1, head_dim=4, prompt_len=6, new_tokens=2)
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 8, heads, 4)) for i, heads in enumerate((2, 1, 1)))
    six, eight = jnp.asarray([6]), jnp.asarray([8])
    prompt = PromptKV.of(spec.rope, q[:, :6], k[:, :6], v[:, :6], six, eight)
    block = TokenBlock(q[:, 6:], k[:, 6:], v[:, 6:], six, jnp.asarray([2]), eight, spec.rope)
    return spec, prompt, Token(q[:, 6], k[:, 6], v[:, 6], six, spec.rope), block
