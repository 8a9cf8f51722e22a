"""Contents of a section, from the links of its page: ``<!-- contents -->`` lists the pages that the rest of the page links to.

So the page that people read on GitHub, a list of links, is the order of the site, too. ``<!-- contents: PATTERN -->`` lists the
pages whose paths match.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx


MARK = re.compile(r"^<!-- contents(?:: (?P<pattern>\S+))? -->$", re.MULTILINE)
LINK = re.compile(r"\]\(([\w./-]+)\.md(?:#[\w-]*)?\)")


def put_contents(_app: Sphinx, _docname: str, source: list[str]) -> None:
    """Put a table of contents in the place of the mark."""
    found = MARK.search(source[0])
    if found is None:
        return
    if found["pattern"]:
        lines = [":glob:", ":maxdepth: 1", "", found["pattern"]]
    else:
        lines = [":hidden:", ":maxdepth: 1", "", *dict.fromkeys(LINK.findall(source[0], found.end()))]
    source[0] = MARK.sub("\n".join(["```{toctree}", *lines, "```"]), source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Rewrite pages as they are read."""
    app.connect("source-read", put_contents)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
