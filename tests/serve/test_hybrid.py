"""A model with recurrent layers, whose states are stored and saved beside the caches of the others."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest
from serve_client import Client, serving

from kvjax.config import DeltaNetConfig
from kvjax.models import Params, init

BLOCK = 16
TURNS = ["abcdefghijklmnopqrstuvwxyzABCDEFGHIJ", "KLMNOPQRSTUVWXYZ", "again"]
OPTIONS: dict[str, Any] = {"temperature": 0.8, "max_tokens": 6, "logprobs": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def hybrid(letters: Params) -> Params:
    """A random model of a recurrent layer and one with keys and values, whose tokens are letters."""
    layer = letters.config.layers[0]
    recurrent = dataclasses.replace(layer, mixer=DeltaNetConfig(1, 2, 8, 8))
    params = init(dataclasses.replace(letters.config, layers=(recurrent, layer)), jax.random.key(0))
    return params.replace(tokenizer=letters.tokenizer)


def ask(client: Client, text: str, session: str | None = None) -> Any:
    """The answer to a message."""
    body = OPTIONS | {"messages": [{"role": "user", "content": text}], "session": session, "seed": len(text)}
    reply = client.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.text
    return reply.json


def sampled(answer: Any) -> tuple[list[int], list[float]]:
    (choice,) = answer["choices"]
    return choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]


def test_states_of_recurrent_layers_outlive_requests_and_servers(hybrid: Params, tmp_path: Path) -> None:
    """A stored prefix and a restart change no bit. A state that is missing or of another moment changes log-probabilities."""
    kept = {"block": BLOCK, "folder": tmp_path / "sessions"}
    prompts = [TURNS[0] + text for text in ("KLMNOPQRSTUVW", "NOPQRSTUVWXYZ01", "TUVWXYZ01234567")]
    with serving(hybrid, "snapkv:40", **kept, prefixes=2) as client:
        name = ask(client, TURNS[0], "new")["session"]["id"]
        expected = [sampled(ask(client, text, name)) for text in TURNS[1:]]
        again = ask(client, TURNS[0], "new")["session"]["id"]
        stored = [ask(client, text) for text in prompts]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in stored]
        assert cached[-1] == 32
        alone = sampled(ask(client, TURNS[2]))
    with serving(hybrid, "snapkv:40", **kept) as restarted:  # and which stores no prefixes
        assert [sampled(ask(restarted, text, again)) for text in TURNS[1:]] == expected
        plain = [ask(restarted, text) for text in prompts]
    assert {answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in plain} == {0}
    assert list(map(sampled, stored)) == list(map(sampled, plain))
    assert alone[1] != expected[1][1]  # the conversation matters
