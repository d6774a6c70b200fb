"""The table of supported families."""

import families
from oracles import ARCHITECTURES

from kvjax.conversion.hf_config import FAMILIES


def test_the_page_has_the_table() -> None:
    assert families.table() in (families.ROOT / "docs/howto/own_model.md").read_text(encoding="utf-8")


def test_every_family_is_compared_with_transformers() -> None:
    assert {kind for kind, _ in ARCHITECTURES.values()} == set(FAMILIES)


def test_models_with_real_weights_have_a_test() -> None:
    assert families.REAL.keys() <= FAMILIES.keys()
    assert all((families.ROOT / path).is_file() for _, path in families.REAL.values())
