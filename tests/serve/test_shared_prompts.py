"""Prompts that begin alike: prefilled once for each API key, with the same answers."""

from typing import Any

import numpy as np
from serve_client import Client, serving

from kvjax.models import Params
from kvjax.serve.settings import digest

KEYS = frozenset({digest("one"), digest("two")})


def ask(client: Client, prompt: list[int], key: str, **more: Any) -> tuple[int, Any]:
    """Number of reused tokens, and the choices."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 0, "return_token_ids": True} | more
    reply = client.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"}).json
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"], reply["choices"]


def talk(client: Client) -> list[tuple[int, int, Any]]:
    """A conversation that sends all messages at each turn, as the web page does: tokens of each prompt, reused ones, and choices."""
    messages: list[dict[str, Any]] = []
    found: list[tuple[int, int, Any]] = []
    for text in ("abcdefghijklmn", "opqrstuvwxyzAB", "CDEFGHIJKLMNOP", "QRSTUVWXYZ0123"):
        messages = [*messages, {"role": "user", "content": text}]
        body = {"messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": True, "ignore_eos": True}
        reply = client.post("/v1/chat/completions", body, headers={"authorization": "Bearer one"}).json
        usage, choices = reply["usage"], reply["choices"]
        found.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], choices))
        messages.append({"role": "assistant", "content": choices[0]["message"]["content"]})
    return found


def metric(client: Client, name: str) -> float:
    """A metric by its name."""
    lines = client.get("/metrics", headers={"authorization": "Bearer one"}).text.splitlines()
    return float(next(line for line in lines if line.startswith(f"kvjax:{name}{{")).split()[-1])


def test_stored_states_are_used_by_their_own_key(letters: Params) -> None:
    random = np.random.default_rng(0)
    begun = random.integers(0, 62, 60).tolist()
    prompts = [begun + random.integers(0, 62, 20).tolist() for _ in range(4)]
    with serving(letters, "snapkv:40", block=16, keys=KEYS) as plain:
        expected = [ask(plain, prompt, "one") for prompt in prompts]
        talked = talk(plain)
    assert [reused for reused, _ in expected] == [0] * 4
    with serving(letters, "snapkv:40", block=16, prefixes=4, keys=KEYS) as client:
        found = [ask(client, prompt, "one") for prompt in prompts]
        assert [choices for _, choices in found] == [choices for _, choices in expected]
        assert [reused for reused, _ in found] == [0, 0, 48, 48]
        assert [ask(client, prompt, "two")[0] for prompt in prompts[:2]] == [0, 0]
        assert ask(client, prompts[0], "two", cache_salt="a")[0] == 0
        assert ask(client, prompts[0], "two")[0] == 48
        reused, choices = ask(client, prompts[3], "one", n=3)
        assert reused >= 48
        assert [choice["token_ids"] for choice in choices] == [expected[3][1][0]["token_ids"]] * 3
        assert len(client.server.batch.prefixes) <= 4
        again = talk(client)
        assert [choices for *_, choices in again] == [choices for *_, choices in talked]
        # A turn goes on from the whole blocks of the turn before the last, but for its last tokens, which are in one block.
        assert [reused for _, reused, _ in again] == [0, 0, 0, (again[1][0] - 16) // 16 * 16]
        assert again[3][1] > 0
    with serving(letters, "snapkv:40", block=16, prefixes=1, prefix_host_bytes=1 << 20, keys=KEYS) as client:
        compiled = metric(client, "compilations_total")
        for key in ("one", "two"):  # the state of the one moves to host memory when that of the other is stored
            assert [ask(client, prompt, key)[0] for prompt in prompts[:2]] == [0, 0]
        for restored, (i, key) in enumerate(((2, "one"), (2, "two"), (3, "one")), 1):
            assert ask(client, prompts[i], key) == (48, expected[i][1])
            assert metric(client, "prefix_states_restored_total") == restored
        assert ask(client, prompts[0], "two", cache_salt="a")[0] == 0
        names = "prefix_states_on_device", "prefix_states_on_host"
        assert [metric(client, name) for name in names] == [1, 1]
        assert 0 < metric(client, "prefix_host_bytes") <= 1 << 20
        assert metric(client, "compilations_total") == compiled
