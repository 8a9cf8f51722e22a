"""LaTeX of the pages as MathML, written when the site is built: browsers draw it without a script or a network."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from math_core import LatexError, LatexToMathML
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)
CONVERTER = LatexToMathML()


def _written(latex: str, node: nodes.Element, *, is_display: bool) -> str:
    """Return the MathML of a formula; one that is not understood is a warning, and so ends the strict build."""
    try:
        return CONVERTER.convert_with_local_state(latex, displaystyle=is_display)
    except LatexError as error:
        plain = re.sub(r"\x1b\[[\d;]*m", "", str(error))
        message = re.search(r"Error: (.*)", plain)
        logger.warning("%s in the formula %r", message[1] if message else plain, latex, location=node)
        return ""


def visit_math(self: Any, node: nodes.math) -> None:
    """Write a formula within a line."""
    self.body.append(_written(node.astext(), node, is_display=False))
    raise nodes.SkipNode


def visit_math_block(self: Any, node: nodes.math_block) -> None:
    """Write a formula on lines of its own."""
    self.body.append(f'<div class="math-block">{_written(node.astext(), node, is_display=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Take the place of the builders' own renderers."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    app.config.html_math_renderer = "mathml"
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
