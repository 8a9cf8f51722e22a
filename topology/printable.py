"""Text as a terminal, a picture and a page may show it: control characters as what they are.

A name out of a file can hold the escape that colours or erases a terminal, or the mark that turns the writing round. Whatever is
shown to people passes here; files keep the names.
"""

from __future__ import annotations

import unicodedata

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str) -> str:
    r"""Return a text with its control characters escaped, but for ends of lines and tabs.

    Examples
    --------
    >>> printable("\x1b[31mred\u202e")
    '\\x1b[31mred\\u202e'
    """
    return _escaped(text, kept="\n\t")


def one_line(text: str) -> str:
    r"""Return a text as one line, its control characters escaped.

    Examples
    --------
    >>> one_line("two\nlines")
    'two\\nlines'
    """
    return _escaped(text, kept="")


def _escaped(text: str, kept: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept or not _is_hidden(c) else _name(c) for c in text)


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN


def _name(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
