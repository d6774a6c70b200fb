"""Rules of measured block sizes, and which file they come from."""

import json
from pathlib import Path

import jax
import pytest

from kvjax.pallas_kernels import tuning

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
FILES = sorted((Path(tuning.__file__).parent / "tuned").glob("*.json"))


def on(kind):
    device = jax.sharding.AbstractDevice(device_kind=kind, platform="gpu", num_cores=132)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def rules_of(name, operation):
    """The rules that a file states itself."""
    return json.loads((FILES[0].parent / f"{name}.json").read_text()).get(operation, [])


@pytest.mark.parametrize("rule", rules_of("nvidia-h200", "projection"), ids=lambda rule: str(rule["when"]["outputs"]))
def test_an_h100_has_the_h200s_sizes_of_matmuls(rule):
    default = dict.fromkeys(rule["use"], -1)
    with on(H100):
        assert tuning.tuned("projection", rule["when"], default) == rule["use"]
        assert tuning.tuned("projection", rule["when"] | {"rows": 2}, default) == default
    with on(H200):
        assert tuning.tuned("projection", rule["when"], default) == rule["use"]


@pytest.mark.parametrize("operation", ["gather_attention", "nearest"])
def test_other_operations_of_an_h100_have_no_rules(operation):
    """Only the matmuls were found to have the same best sizes on both."""
    for rule in rules_of("nvidia-h200", operation):
        case = {name: value[0] if isinstance(value, list) else value for name, value in rule["when"].items()}
        default = dict.fromkeys(rule["use"], -1)
        with on(H100):
            assert tuning.tuned(operation, case, default) == default
        with on(H200):
            assert tuning.tuned(operation, case, default) == rule["use"]


def test_rules_are_tried_in_the_order_of_the_file(tmp_path, monkeypatch):
    def rule(rows, size):
        return {"when": {"rows": rows}, "use": {"size": size}}

    files = {
        "one": {"op": [rule(1, 1), {"base": "two"}, rule(2, 5), rule(4, 6)], "other": [rule(1, 7)]},
        "two": {"op": [rule(1, 2), rule(2, 3)], "another": [rule(1, 8)]},
    }
    (tmp_path / "tuned").mkdir()
    for name, content in files.items():
        (tmp_path / "tuned" / f"{name}.json").write_text(json.dumps(content))
    monkeypatch.setattr(tuning.importlib.resources, "files", lambda _: tmp_path)
    tuning._rules.cache_clear()
    try:
        with on("One"):
            assert [tuning.tuned("op", {"rows": rows}, {"size": 0})["size"] for rows in (1, 2, 3, 4)] == [1, 3, 0, 6]
            assert tuning.tuned("other", {"rows": 1}, {"size": 0}) == {"size": 7}
            assert tuning.tuned("another", {"rows": 1}, {"size": 0}) == {"size": 0}
    finally:
        tuning._rules.cache_clear()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_bases_have_rules_of_the_operation(path):
    for operation, entries in json.loads(path.read_text()).items():
        for entry in entries:
            assert set(entry) in ({"base"}, {"when", "use"})
            assert "base" not in entry or rules_of(entry["base"], operation)
