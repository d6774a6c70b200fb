"""Requests in saved conversations, and what they are compared with."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from serve_client import NEW, ROWS, SAMPLING, TOTAL, Client, Reply, serving

from kvjax.models import Params
from kvjax.runtime import decoding
from kvjax.runtime import rows as programs
from kvjax.runtime.batch import Batch, Job
from kvjax.runtime.prefixes import blocks_from_start
from kvjax.runtime.request import row_seeds
from kvjax.runtime.sampling import make_sampler
from kvjax.serve.settings import digest

POLICY, BLOCK, KEYS = "snapkv:40", 16, frozenset({digest("one"), digest("two")})
TURNS = ["abcdefghijklmnopqrstuvwxyzABCDEFGHIJ", "KLMNOPQRSTUVWXYZ0123456789", "again"]
OPTIONS: dict[str, Any] = {"temperature": 0.8, "max_tokens": 6, "logprobs": True, "return_token_ids": True}


def ask(client: Client, text: str, name: str, key: str = "one", **more: Any) -> Reply:
    body = OPTIONS | {"messages": [{"role": "user", "content": text}], "session": name, "seed": len(text)} | more
    return client.post("/v1/chat/completions", body, headers={"authorization": f"Bearer {key}"})


def call(client: Client, method: str, name: str = "", key: str = "one") -> Reply:
    path = "/v1/sessions" + (f"/{name}" if name else "")
    return client.run(client.call(method, path, headers={"authorization": f"Bearer {key}"}))


def server(letters: Params, folder: Path, policy: str = POLICY, **options: Any) -> Any:
    return serving(letters, policy, block=BLOCK, prefixes=2, folder=folder, keys=KEYS, **options)


def sampled(reply: Reply) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of an answer, whole or streamed."""
    assert reply.status == 200, reply.text
    chunks = [reply.json] if reply.headers["content-type"] == "application/json" else reply.events[:-1]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    scores = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
    tokens = [token for choice in choices for token in choice.get("token_ids", [])]
    return tokens, [each["logprob"] for part in scores for each in part]


def finish(batch: Batch, reading: Any, job: Job, row: int) -> tuple[list[int], list[float]]:
    """Run a row to its end."""
    first = batch.insert(reading, job, row)
    tokens, logprobs = [int(first.token[0])], [float(first.logprob[0])]
    live = True
    while live:
        found = batch.serve(4)
        count, live = int(found.filled[row]), bool(found.live[row])
        tokens += np.asarray(found.tokens)[row, :count].tolist()
        logprobs += np.asarray(found.logprobs)[row, :count].tolist()
    return tokens, logprobs


def without_files(batch: Batch, turns: Sequence[tuple[Sequence[int], Any]]) -> list[tuple[list[int], list[float]]]:
    """Answers to turns of a conversation whose cache never leaves the device. A turn has tokens, and a job's options."""
    found: list[tuple[list[int], list[float]]] = []
    ids: list[int] = []
    reading: Any = None
    for row, (tail, options) in enumerate(turns):
        done = len(ids) - 1 if ids else 0
        ids = [*ids, *tail]
        job = Job(ids, **options)
        total: Any = np.asarray([job.total], np.int32)
        if reading is None:
            (*_, (reading, _)) = batch.reading(job)
        else:
            for part in blocks_from_start(ids[done:], BLOCK):
                block = decoding.padded([part], BLOCK)
                reading = programs.read_block(batch.policy, batch.reader, batch.weights, reading, *block, total)
        found.append(finish(batch, reading, job, row % batch.rows))
        ids += found[-1][0]
        at: Any = np.asarray([row % batch.rows], np.int32)
        taken, _ = programs.take(batch.policy, batch.specs, batch.state, at)
        logits: Any = np.zeros((1, batch.engine.config.vocab_size), np.float32)
        reading = dataclasses.replace(taken, logits=jax.numpy.array(logits))
    return found


def exact(letters: Params, policy: str, turns: Sequence[tuple[str, int]]) -> list[tuple[list[int], list[float]]]:
    """Answers to a conversation whose cache never leaves the device.

    Args:
        letters: the model.
        policy: the policy.
        turns: what the user says, and the number of tokens at which the answer ends.
    """
    sizes: dict[str, Any] = {"rows": ROWS, "prompt_len": TOTAL - NEW, "max_new_tokens": NEW, "block": BLOCK}
    batch = Batch(letters, policy, **sizes, anchor="start", sampling=SAMPLING, masked=True)
    jobs: list[tuple[Sequence[int], Any]] = []
    for i, (text, count) in enumerate(turns):
        ids = letters.tokenizer.encode(f" {text} " if i else f"{text} ", add_special=False)
        sampler = jax.tree.map(np.asarray, make_sampler(OPTIONS["temperature"], None, None, None))
        seed = row_seeds(len(text), [0])[0]
        jobs.append((ids, {"max_new_tokens": count, "seed": seed, "ends": (63,), "sampler": sampler}))
    return without_files(batch, jobs)
