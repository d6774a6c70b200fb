"""The site: `python -m sphinx -W --keep-going -j 2 docs site` builds it, notebooks executed (`pip install ".[docs]"`)."""

import os
import re
import sys
import tomllib
from pathlib import Path

import kvjax

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]  # the extensions, and benchmarks, which has the tables
sys.path.append(str(DOCS.parent / "tests"))  # imports.py, which has the order of the packages, and tiny_model.py
# Pages are the same wherever they are built, and need no accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

_about = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
project = "kvjax"
author = "kvjax contributors"
copyright = "kvjax contributors"
release = version = kvjax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "extensions.docstrings",
    "extensions.drawings",
    "extensions.elsewhere",
    "extensions.links",
    "extensions.methods",
    "extensions.provenance",
    "extensions.public",
    "extensions.support",
    "extensions.typography",
]
exclude_patterns = ["extensions", "_templates", "_build", "jupyter_execute"]
templates_path = ["_templates"]
# Not nitpicky: shapes in jaxtyping's annotations are strings that name nothing. Links in prose and roles are checked all the same.
nitpicky = False
# Fields of several classes have the same name, and their descriptions name their neighbours.
suppress_warnings = ["ref.python"]

autodoc_typehints_format = "short"
maximum_signature_line_length = 80
autodoc_member_order = "bysource"
autosummary_generate = True
autosummary_imported_members = True  # of kvjax.policies.methods, the one module that has a page of its own
# Examples of pages and docstrings run: `python -m sphinx -b doctest docs doctest`. docs/api/index.rst has the names that they share.
doctest_global_setup = """
import jax
import jax.numpy as jnp
import numpy as np
import kvjax
import kvjax.cache, kvjax.config, kvjax.pallas_kernels
from tiny_model import chatting, layer, tiny
params, chat = tiny(), chatting()
spec, prompt, token, block = layer()
"""
doctest_test_doctest_blocks = "default"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
# Executed once: what the notebooks' tests have run already is taken from where they kept it (tests/test_notebooks.py).
nb_execution_mode = "cache"
nb_execution_cache_path = os.environ.get("KVJAX_NOTEBOOK_CACHE", "")
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_output_stderr = "error"
nb_merge_streams = True
nb_render_markdown_format = "myst"  # which has tables, as pages have


def _compile_quickly(app):
    """Compile the many small programs of the doctests as the tests do."""
    if app.builder.name == "doctest":
        import quick_programs

        quick_programs.use_quick_flags()
        quick_programs.share_contexts()
        if folder := os.environ.get(quick_programs.FOLDER):
            quick_programs.keep_programs(Path(folder))


def setup(app):
    app.connect("builder-inited", _compile_quickly)


html_theme = "sphinx_book_theme"
html_title = "kvjax"
html_baseurl = _about["urls"]["Homepage"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "repository_url": _about["urls"]["Repository"],
    "use_repository_button": True,
    "path_to_docs": "docs",
    "navbar_persistent": [],
    "show_navbar_depth": 1,
    "collapse_navbar": True,
    "show_toc_level": 2,
}
copybutton_exclude = ".linenos, .gp, .go"

# Other people's pages: `python -m sphinx -b linkcheck -D nb_execution_mode=off docs linkcheck`. Links to the project's own are checked as
# the site is built (extensions/links.py), also before they are published.
linkcheck_ignore = [re.escape(_about["urls"][name]) + ".*" for name in ("Homepage", "Repository")]
linkcheck_ignore += [r"https://colab\.research\.google\.com/.*"]  # answers for any notebook
linkcheck_anchors_ignore_for_url = [r"https://github\.com/.*"]  # which makes them in the browser
linkcheck_timeout, linkcheck_retries = 30, 2
