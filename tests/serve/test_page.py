"""The web page at `/`, and the reports of the cache that it draws, without a browser."""

import asyncio
import base64
import dataclasses
import hashlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import jax
import numpy as np
import pytest
from serve_client import Client, serving

from kvjax import policies
from kvjax.config import DeltaNetConfig
from kvjax.models import Params, init
from kvjax.runtime.batch import Batch, Job
from kvjax.runtime.inspection import retained_positions
from kvjax.serve.cache_report import CacheSizes
from kvjax.serve.settings import digest

POLICY, KEY = "treekv:32", "secret"
KEYED = {"headers": {"authorization": f"Bearer {KEY}"}}
TEXT = "abcdefghijklmnopqrstuvwxyz" * 2
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": TEXT}],
    "max_tokens": 20,
    "temperature": 0,
    "ignore_eos": True,
    "cache_report": True,
}


@pytest.fixture(scope="module")
def paged(letters: Params) -> Iterator[Client]:
    """A server with the page and an API key, which reports after each call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvjax.serve.worker.LOOK_SECONDS", 0.0)
        with serving(letters, POLICY, steps=2, page=True, reports=True, keys=frozenset({digest(KEY)})) as client:
            yield client


class Outside(HTMLParser):
    """Collects what a page loads from elsewhere, and handlers and styles that its policy forbids."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name.startswith("on") or name == "style":
                self.found.append(f"{tag} {name}")
            elif name in ("src", "href", "action") and not (value or "").startswith("data:"):
                self.found.append(f"{tag} {name}={value}")


def test_the_page_is_one_file_that_loads_nothing_else(paged: Client) -> None:
    reply = paged.get("/")  # without a key, as browsers open pages without
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    reader = Outside()
    reader.feed(reply.text)
    assert not reader.found
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)|eval\(|innerHTML", reply.text)
    rules = dict(rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; "))
    assert (rules["default-src"], rules["connect-src"], rules["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    for tag in ("script", "style"):
        inline = re.findall(rf"<{tag}>(.*?)</{tag}>", reply.text, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in inline]
        assert len(hashes) == 1
        assert rules[f"{tag}-src"] == f"'sha256-{hashes[0]}'"


def test_the_page_is_guarded_as_other_routes(paged: Client, client: Client) -> None:
    assert paged.get("/", headers={"host": "evil.example"}).status == 403
    assert paged.get("/", headers={"origin": "https://evil.example"}).status == 403
    assert paged.get("/v1/models").status == 401
    assert paged.post("/v1/chat/completions", CHAT).status == 401
    own = KEYED["headers"] | {"origin": "http://localhost"}
    assert paged.post("/v1/chat/completions", CHAT | {"max_tokens": 1}, headers=own).status == 200
    form = own | {"content-type": "text/plain"}
    assert paged.post("/v1/chat/completions", CHAT, headers=form).status == 415
    assert client.get("/").status == 404
    refused = client.post("/v1/chat/completions", CHAT)
    assert (refused.status, refused.json["error"]["param"]) == (400, "cache_report")


def test_reports_say_which_tokens_are_kept(paged: Client, letters: Params) -> None:
    """As recorded in a run of the engine, at each step that is reported."""
    compiled = metric(paged, "compilations_total")
    chunks = paged.post("/v1/chat/completions", CHAT | {"stream": True}, **KEYED).events[:-1]
    assert metric(paged, "compilations_total") == compiled
    reports = [chunk["cache"] for chunk in chunks if "cache" in chunk]
    ids = letters.tokenizer.encode(TEXT + " ", add_special=False)
    expected = retained_positions(letters, ids, policies.get_policy(POLICY), CHAT["max_tokens"])
    texts = [text for report in reports for text in report["texts"]]
    heads = sum(layer.mixer.num_kv_heads for layer in letters.config.layers)
    slots = paged.server.batch.engine.layers[0].capacity * heads
    assert len(reports) >= 3
    for report in reports:
        kept = np.frombuffer(base64.b64decode(report["kept"]), np.uint8)
        assert report["tokens"] == len(kept) >= len(ids)
        steps = expected[len(kept) - len(ids)]
        np.testing.assert_array_equal(kept, np.floor(255 * steps[: len(kept)] + 1e-4))
        assert report["bytes"] == round(report["row_bytes"] * round(steps.sum() * heads) / slots)
        assert report["full_bytes"] == letters.config.cache_bytes(len(kept), 4)
    last = reports[-1]
    assert last["tokens"] == len(ids) + CHAT["max_tokens"] - 1
    assert last["bytes"] < last["full_bytes"]
    assert last["ms_per_token"] > 0
    content = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
    assert "".join(texts).startswith(TEXT + " ")
    assert "".join(texts[len(ids) :]) == content[: CHAT["max_tokens"] - 1]


def test_a_whole_answer_has_the_last_report(paged: Client) -> None:
    plain = paged.post("/v1/chat/completions", CHAT | {"cache_report": False}, **KEYED).json
    reply = paged.post("/v1/chat/completions", CHAT, **KEYED).json
    assert "cache" not in plain
    assert reply["choices"] == plain["choices"]
    assert reply["cache"]["tokens"] == len(reply["cache"]["texts"]) == reply["usage"]["total_tokens"] - 1
    two = paged.post("/v1/chat/completions", CHAT | {"n": 2}, **KEYED)
    assert (two.status, two.json["error"]["param"]) == (400, "cache_report")


def test_nobody_is_disturbed_by_reports(paged: Client) -> None:
    """Nor by a client that asks for them and leaves."""
    bodies = [CHAT | {"cache_report": report, "stream": False} for report in (True, False)]

    async def together() -> list[Any]:
        calls = [paged.call("POST", "/v1/chat/completions", body, **KEYED) for body in bodies]
        gone = paged.call("POST", "/v1/chat/completions", CHAT | {"stream": True}, leave_after=2, **KEYED)
        return (await asyncio.gather(*calls, gone))[:2]

    alone = paged.post("/v1/chat/completions", bodies[1], **KEYED).json["choices"]
    assert [reply.json["choices"] for reply in paged.run(together())] == [alone] * 2
    paged.wait_until(lambda: paged.server.admitted == 0 and not paged.server.worker.scheduler.busy)


def metric(client: Client, name: str) -> float:
    text = client.get("/metrics", **KEYED).text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"kvjax:{name}"))


def test_recurrent_layers_have_no_tokens_but_bytes(tiny: Params) -> None:
    """With the full cache, all heads that have tokens keep each, and the row has as many bytes as a full cache."""
    layer = tiny.config.layers[0]
    recurrent = dataclasses.replace(layer, mixer=DeltaNetConfig(1, 2, 8, 8))
    params = init(dataclasses.replace(tiny.config, layers=(recurrent, layer)), jax.random.key(0))
    batch = Batch(params, "full", rows=1, prompt_len=64, max_new_tokens=8)
    job = Job(list(range(1, 33)), 1)
    batch.admit([job], [0])
    kept = batch.kept_positions(0)
    assert int(kept.tokens[0]) == 32
    np.testing.assert_array_equal(np.asarray(kept.shares)[:40], [255] * 32 + [0] * 8)
    sizes = CacheSizes(batch)
    states = params.config.state_bytes(4)
    assert states > 0
    assert sizes.full(32) == states + params.config.cache_bytes(32, 4)
    assert sizes.in_use(0, 72) == states
    assert sizes.in_use(72, 72) == batch.row_bytes
