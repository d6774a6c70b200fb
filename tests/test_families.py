"""The table of supported families."""

import subprocess

import families
import pytest
from oracles import ARCHITECTURES

from kvjax.conversion.hf_config import FAMILIES


def test_the_page_has_the_table() -> None:
    assert families.table() in (families.ROOT / "docs/howto/own_model.md").read_text(encoding="utf-8")


def test_every_family_is_compared_with_transformers() -> None:
    assert {kind for kind, _ in ARCHITECTURES.values()} == set(FAMILIES)


def test_models_with_real_weights_have_a_test() -> None:
    assert families.REAL.keys() <= FAMILIES.keys()
    assert all((families.ROOT / path).is_file() for _, path in families.REAL.values())


def test_a_family_that_computes_nothing_new_is_in_six_files() -> None:
    """Seed-OSS is such a family. Its GGUF file in the tests' data is made by a script."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=families.ROOT, capture_output=True, text=True, check=False)
    if not listed.stdout:
        pytest.skip("needs a git checkout")
    files = [families.ROOT / name for name in listed.stdout.split("\0") if name.endswith((".py", ".md"))]
    texts = {str(file.relative_to(families.ROOT)): file.read_text(encoding="utf-8") for file in files if file.is_file()}
    naming = {name for name, text in texts.items() if "seed_oss" in text or "Seed-OSS" in text}
    assert naming - {"CONTRIBUTING.md", "tests/test_families.py"} == {
        "conversion/hf_config.py",
        "conversion/gguf_file.py",
        "tests/oracles.py",
        "tests/converted.py",
        "docs/howto/own_model.md",
        "CHANGELOG.md",
    }
