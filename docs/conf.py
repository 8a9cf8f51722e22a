"""Configuration of the documentation site: ``python3 .ci/tasks.py docs`` builds it into ``build/site``."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent)]

project = "zosim"
extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "claims_box",
    "contents",
    "mathml",
    "public_names",
]
exclude_patterns = ["_extensions"]

# Strict: the build turns every warning into an error. Names of types in signatures are not links, as most of them are private.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r".*")]

# Pages are read on GitHub, too, so they are plain Markdown: links to .md files, $...$ and $$...$$ for mathematics.
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
myst_highlight_code_blocks = True

toc_object_entries = False  # every page copies the tree of contents
public_packages = ["topology", "costmodel", "zosim", "executors", "proofs_checks.judging"]
autodoc_typehints = "none"  # signatures name the parameters, the docstrings say what they are
autosummary_generate = False  # the reference is one page a package, not a page a name
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

html_theme = "furo"
html_title = "zosim"
html_theme_options = {
    # Fonts that the reader's system has: no page asks anything of a network.
    "light_css_variables": {
        "font-stack": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif",
        "font-stack--monospace": "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace",
    },
}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
smartquotes = False  # they make a dash of the two hyphens of an option
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
