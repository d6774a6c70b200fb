"""`kvjax generate` says what the library says, in the form that was asked for."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

import kvjax
from kvjax.cli.generate import _summary
from kvjax.models import Params
from kvjax.policies import ClusterKV, offloaded

PROMPT = "hello there, hell"


@pytest.fixture
def generate(kvjax_command, checkpoint: Path):
    return lambda *arguments, stdin=None: kvjax_command(
        "generate", "--model", checkpoint, "--max-new-tokens", 12, *arguments, stdin=stdin
    )


def expected(params: Params, prompt=PROMPT, **options) -> kvjax.Generation:
    return kvjax.generate(params, prompt, **{"max_new_tokens": 12, **options})


def test_piped_output_is_the_text_and_nothing_else(generate, params: Params) -> None:
    result = generate(PROMPT)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{expected(params).text}\n"


def test_json_is_the_whole_result(generate, params: Params, checkpoint: Path) -> None:
    result = generate("--policy", "treekv", "--budget", 8, "--set", "block=4", "--set", "recent=none", "--json", PROMPT)
    assert (result.exit_code, result.stderr) == (0, "")
    policy = kvjax.TreeKV(budget=8, block=4)
    wanted, found = expected(params, policy=policy), json.loads(result.stdout)
    assert found["text"] == wanted.text
    assert found["tokens"] == wanted.tokens
    assert found["logprobs"] == wanted.logprobs
    assert found["stop_reason"] == wanted.stop_reason == "length"
    assert found["policy"] == {"name": "treekv", **dataclasses.asdict(policy)}
    assert found["model"] == {"source": str(checkpoint), "family": "llama", "dtype": "float32"}
    for field in (
        "prompt_tokens",
        "new_tokens",
        "cache_bytes",
        "full_cache_bytes",
        "host_cache_bytes",
        "step_bytes_read",
    ):
        assert found["stats"][field] == getattr(wanted.stats, field)
    assert found["stats"]["hit_rate"] is None
    assert found["stats"].keys() >= {"decode_seconds", "compile_seconds", "decode_tokens_per_second"}


def test_a_budget_with_a_point_is_a_fraction(generate) -> None:
    result = generate("--policy", "streaming_llm", "--budget", "0.5", "--json", PROMPT)
    assert json.loads(result.stdout)["policy"]["budget"] == 0.5


@pytest.mark.parametrize("newline", ["", "\n"])
def test_files_and_standard_input_are_prompts_too(generate, params: Params, tmp_path: Path, newline: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + newline)
    texts = {
        generate("--prompt-file", file).stdout,
        generate(stdin=PROMPT + newline).stdout,
        generate("-", stdin=PROMPT + newline).stdout,
    }
    assert texts == {f"{expected(params).text}\n"}


def test_chat_goes_through_the_template(generate, params: Params) -> None:
    user = {"role": "user", "content": PROMPT}
    assert generate("--chat", PROMPT).stdout == f"{expected(params, [user]).text}\n"
    told = generate("--system", "hell", PROMPT).stdout
    assert told == f"{expected(params, [{'role': 'system', 'content': 'hell'}, user]).text}\n"


def test_another_tokenizer(generate, params: Params, checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "other"
    shutil.copytree(checkpoint, tokenizer, ignore=lambda *_: ["model.safetensors"])
    fields = json.loads((tokenizer / "tokenizer_config.json").read_text())
    fields["chat_template"] = "{{ messages[0].content }}!"
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(fields))
    result = generate("--chat", "--tokenizer", tokenizer, PROMPT)
    assert (result.exit_code, result.stdout) == (0, f"{expected(params, PROMPT + '!').text}\n")
    refused = generate("--tokenizer", tmp_path, PROMPT)
    assert refused.exit_code == 1
    assert "no tokenizer there; give a directory with a tokenizer.json" in refused.stderr.replace("\n", " ")


def test_sampling_options_reach_the_sampler(generate, params: Params) -> None:
    options = {"temperature": 1.5, "top_k": 50, "top_p": 0.95, "min_p": 0.001, "seed": 7}
    arguments = [str(part) for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    drawn = json.loads(generate(*arguments, "--json", PROMPT).stdout)["tokens"]
    assert drawn == expected(params, **options).tokens != expected(params).tokens


def test_stop_strings_end_the_text(generate, params: Params) -> None:
    text = expected(params).text
    assert text is not None
    stop = text[2:4]
    result = json.loads(generate("--stop", stop, "--json", PROMPT).stdout)
    assert result["stop_reason"] == "stop"
    assert result["text"] == text[: text.index(stop)]


def test_ignoring_the_end_token(generate, params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = kvjax.generate
    monkeypatch.setattr(kvjax, "generate", lambda *a, **options: seen.append(options) or real(*a, **options))
    generate("--ignore-eos", "--json", PROMPT)
    generate("--json", PROMPT)
    assert [options["ignore_eos"] for options in seen] == [True, False]


def test_verbose_adds_one_line_on_standard_error(generate, params: Params) -> None:
    result = generate("--verbose", "--policy", "streaming_llm", "--budget", 16, PROMPT)
    stats = expected(params, policy="streaming_llm", budget=16).stats
    assert result.stderr.count("\n") == 1
    assert f"{stats.prompt_tokens} + 12 tokens" in result.stderr
    assert "ended by length" in result.stderr
    assert " per step" in result.stderr


def test_the_summary_tells_what_lies_on_the_host_and_how_often_it_is_needed(params: Params) -> None:
    clusters = ClusterKV(budget=8, sinks=2, dense_layers=0, n_clusters=3, iterations=1, cluster_decode=False)
    result = expected(params, "hello there " * 4, policy=offloaded(clusters))
    assert re.search(
        r"cache \d.* and \d.* on the host, full .* · \d+ % of selected tokens on the device · ", _summary(result)
    )


def test_the_summary_tells_what_devices_have_alike(params: Params) -> None:
    result = expected(params)
    stats = dataclasses.replace(result.stats, devices=8, head_copies=2, slot_devices=4, repeated_cache_bytes=2000)
    told = _summary(dataclasses.replace(result, stats=stats))
    assert re.search(r"on each of 8 devices · replicated on 2 of them · 2.* kB of it replicated on 4 · reads ", told)


def test_dtype(generate) -> None:
    assert json.loads(generate("--dtype", "bfloat16", "--json", PROMPT).stdout)["model"]["dtype"] == "bfloat16"


@pytest.mark.network
@pytest.mark.slow
def test_the_default_model_under_treekv(kvjax_command, smollm2: Params) -> None:
    result = kvjax_command(
        "generate", "--policy", "treekv", "--budget", 256, "--max-new-tokens", 12, "--json", "The capital of France is"
    )
    assert result.exit_code == 0, result.stderr
    assert "Paris" in json.loads(result.stdout)["text"]
