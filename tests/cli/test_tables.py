"""`kvjax policies` and `kvjax inspect`: the same facts for people, pipes and programs."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from checkpoints import HF_CONFIG, write_hf

import kvjax
from kvjax.conversion import describe
from kvjax.policies import PolicyError, get_policy, policies
from kvjax.runtime.memory import sequence_bytes


def test_policies_as_json(kvjax_command) -> None:
    listed = json.loads(kvjax_command("policies", "--json").stdout)
    assert [entry["name"] for entry in listed] == list(policies())
    for entry in listed:
        cls = policies()[entry["name"]]
        assert entry["hyperparameters"] == dataclasses.asdict(cls())
        assert (entry["paper"], entry["summary"]) == (cls.about.paper, cls.about.summary)
        assert (entry["memory"], entry["stage"], entry["positions"]) == (
            cls.about.memory,
            cls.about.stage,
            cls.about.positions,
        )


def test_policies_in_a_pipe_are_a_line_each(kvjax_command) -> None:
    lines = kvjax_command("policies").stdout.splitlines()
    assert len(lines) == 1 + len(policies())
    for line, cls in zip(lines[1:], policies().values(), strict=True):
        assert line.startswith(cls.about.name)
        assert cls.about.paper in line
        assert cls.about.summary in line
        assert line == line.rstrip()
    assert not set("\n".join(lines)) & set("│┃─\x1b")


def test_inspect_as_json(kvjax_command, checkpoint: Path) -> None:
    memory, found = 2_000_000, describe(checkpoint)
    report = json.loads(
        kvjax_command("inspect", checkpoint, "--memory", "2MB", "--prompt-len", 100, "-n", 20, "--json").stdout
    )
    assert report["parameters"] == found.parameters
    assert report["weight_bytes"] == 4 * found.parameters
    assert report["stored_types"] == {"float32": 4 * found.parameters}
    assert report["cache_bytes_per_token"] == 2 * 2 * 2 * 8 * 4  # k and v, layers, KV heads, head dim, bytes
    assert report["full_cache_bytes_at_window"] == 128 * report["cache_bytes_per_token"]
    assert report["tokenizer"]
    assert report["chat_template"]
    assert [entry["policy"] for entry in report["caches"]] == list(policies())
    free = memory - report["weight_bytes"]
    for entry in report["caches"]:
        policy = get_policy(entry["policy"])
        if entry["cache_bytes"] is None:
            with pytest.raises(PolicyError) as refusal:
                policy.bind(found.config)
            assert entry["refused"] == str(refusal.value)
            continue
        assert entry["cache_bytes"] == policy.nbytes(found.config, 1, 100, 20, "float32")
        sized = get_policy(policy, budget=entry["fits"]) if "budget" in entry else policy
        assert sequence_bytes(sized, found.config, entry["fits"], jnp.float32) <= free
        more = entry["fits"] + 128
        larger = get_policy(policy, budget=more) if "budget" in entry else policy
        assert sequence_bytes(larger, found.config, more, jnp.float32) > free


def test_inspect_of_a_scaled_window(kvjax_command, tmp_path: Path) -> None:
    write_hf(tmp_path, HF_CONFIG | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    report = json.loads(kvjax_command("inspect", tmp_path, "-n", 12, "--json").stdout)
    assert (report["context_length"], report["config"]["max_position"], report["prompt_len"]) == (512, 128, 500)
    assert report["full_cache_bytes_at_window"] == 512 * report["cache_bytes_per_token"]
    assert "512 tokens" in kvjax_command("inspect", tmp_path).stdout


def test_inspect_for_people(kvjax_command, checkpoint: Path) -> None:
    result = kvjax_command("inspect", checkpoint, "--memory", "1kB")
    assert result.exit_code == 0
    rows = dict(line.split(None, 1) for line in result.stdout.splitlines() if line)
    assert rows["Attention"] == "4 query heads on 2 KV heads of 8"
    assert rows["Weights"].endswith("as float32")
    assert rows["full"].endswith("nothing")  # the weights alone are larger
    assert "no profile of the heads of" in rows["catekv:"]


def test_inspect_in_another_type(kvjax_command, checkpoint: Path) -> None:
    wide, narrow = (
        json.loads(kvjax_command("inspect", checkpoint, "--dtype", dtype, "--json").stdout)
        for dtype in ("float32", "bfloat16")
    )
    for key in ("weight_bytes", "cache_bytes_per_token"):
        assert wide[key] == 2 * narrow[key]
    assert wide["stored_bytes"] == narrow["stored_bytes"]


@pytest.mark.parametrize("memory", ["lots", "8XB", "-1GB"])
def test_inspect_with_a_memory_that_is_none(kvjax_command, checkpoint: Path, memory: str) -> None:
    result = kvjax_command("inspect", checkpoint, f"--memory={memory}")
    assert result.exit_code == 1
    assert (
        result.stderr == f"error: {memory!r} is not a memory size; write a number and a unit, such as 8GB or 512MiB\n"
    )


def test_plan_is_what_the_function_says(kvjax_command, checkpoint: Path) -> None:
    options = ["--model", checkpoint, "--device", "l4", "--count", 2, "--context", 90, "--policy", "snapkv", "-b", "32"]
    told = json.loads(kvjax_command("plan", *options, "--weights", "as-stored,int8", "--json").stdout)
    ways = kvjax.plan(
        checkpoint, device="l4", count=2, context=90, policy="snapkv", budget=32, weights=("as stored", "int8")
    )
    assert [entry["peak_bytes"] for entry in told] == [way.peak_bytes for way in ways]
    assert [entry | {"notes": ()} for entry in told] == [
        dataclasses.asdict(way) | {"peak_bytes": way.peak_bytes, "fits": way.fits, "ms": way.ms, "notes": ()}
        for way in ways
    ]


def test_plan_for_people(kvjax_command, checkpoint: Path) -> None:
    result = kvjax_command("plan", "--model", checkpoint, "--device", "t4", "--count", 2, "--context", 50, "-n", 9)
    facts, table = result.stdout.split("\n\n")
    rows = dict(line.split(None, 1) for line in facts.splitlines())
    assert rows["Devices"] == "2 x t4, 12.0 GB each"
    assert rows["Time"].endswith("not measured")
    lines = table.splitlines()
    assert lines[0].split()[:3] == ["Mesh", "Weights", "in"]
    assert {tuple(line.split()[:2]) for line in lines[1:6]} == {
        *(("data=1,model=2", weights) for weights in ("bfloat16", "int8")),
        *(("data=2,model=1", weights) for weights in ("bfloat16", "int8", "int4")),
    }
    assert "which model=2 devices do not divide" in lines[6]
    refused = kvjax_command("plan", "--model", "llama-3.1-8b", "--device", "h200", "--mesh", "model=3", "--context", 90)
    assert "divides 4096" in refused.stdout
    assert "Nothing fits" in kvjax_command("plan", "--device", "t4", "--memory", "1MB", "--context", 90, "--fit").stdout
