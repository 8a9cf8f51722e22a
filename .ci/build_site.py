"""Build the documentation site into ``build/site``, strictly: ``python .ci/build_site.py``.

Warnings are errors, links between pages are followed, and a page that would ask anything of a network is refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"

_LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["'](?P<src>[^"']+)|"""
    r"""<link\b(?=[^>]*\brel=["'](?:stylesheet|preload|icon|shortcut icon|preconnect)["'])[^>]*\bhref=["'](?P<href>[^"']+)|"""
    r"""url\(\s*["']?(?P<url>[^"')]+)|@import\s+["'](?P<import>[^"']+)""",
)
"""What a browser loads with a page or a style sheet."""


def build(site: Path = SITE) -> int:
    """Return Sphinx's exit code, or 1 if a page loads something from a network."""
    from sphinx.cmd.build import main as sphinx_build

    code = sphinx_build(["-b", "html", "-E", "-W", "--keep-going", "-q", str(ROOT / "docs"), str(site)])
    remote = sorted(set(loaded_from_a_network(site)))
    for line in remote:
        print(f"error: {line}", file=sys.stderr)
    return code or int(bool(remote))


def loaded_from_a_network(site: Path) -> Iterator[str]:
    """Yield the file and address of everything that pages and style sheets load from another place."""
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".css"):
            for found in _LOADED.finditer(path.read_text(encoding="utf-8")):
                address = next(filter(None, found.groups()))
                if re.match(r"(https?:)?//", address):
                    yield f"{path.relative_to(site)} loads {address}"


if __name__ == "__main__":
    code = build()
    if code == 0:
        print(f"wrote {SITE / 'index.html'}")
    sys.exit(code)
