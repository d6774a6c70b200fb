"""`reproduction` uses kvjax as any user can: what it imports is in the reference of the API, or in the list of what is missing there."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]

MISSING = {
    # Result files that a later run continues, and the fingerprint of a model.
    "kvjax.evals.report": {"ResultFile", "header", "model_fingerprint", "read_rows", "write"},
    "kvjax.evals.runner": {"described"},
    # Tasks by name, and what tasks are made of.
    "kvjax.evals.tasks": {"Inputs", "make_task"},
    "kvjax.evals.needle": {"Kind"},
    "kvjax.evals.longbench": {"tasks"},
    "kvjax.evals.ruler.scoring": {"match_all"},
    # Perplexity of the text after a compressed prompt.
    "kvjax.evals.perplexity": {"compile_read", "read"},
    # `generate`, with questions, in programs of given sizes that are compiled already.
    "kvjax.runtime.generation": {"Run"},
    "kvjax.runtime.row": {"Row"},
    "kvjax.runtime.request": {"check_request"},
    # A list of policies as text, and the fingerprint of a model's shape.
    "kvjax.policies.text": {"split_policies"},
    "kvjax.policies.profile": {"fingerprint", "load"},
    # Steps of a calibration, where `make_profile` has all of it.
    "kvjax.calibration.catekv": {"Settings", "adaptive_by_sample", "head_scores", "vote"},
    "kvjax.calibration.recording": {"cut"},
}
"""What research needs and the reference does not have. This list only ever gets shorter."""


def reference() -> set[str]:
    """Packages and modules whose names are public, as the site's build checks them."""
    tree = ast.parse((ROOT / "docs/extensions/public.py").read_text(encoding="utf-8"))
    return {
        name
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("PACKAGES", "MODULES")
        for name in ast.literal_eval(node.value)
    }


def test_what_research_imports_is_public_or_known_to_be_missing():
    public, used = reference(), set[str]()
    for file in (ROOT / "reproduction").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "kvjax":
                names = {alias.name for alias in node.names}
                if node.module not in public:
                    used |= {f"{node.module}.{name}" for name in names} - public
                assert not any(name.startswith("_") for name in names), (file.name, names)
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("kvjax.") for alias in node.names), file.name
    missing = {f"{module}.{name}" for module, names in MISSING.items() for name in names}
    assert used - missing == set(), "not in the reference; use something that is, or add it to MISSING"
    assert missing - used == set(), "no longer used, or public by now; take it out of MISSING"
