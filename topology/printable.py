"""Text as a terminal, a picture and a page may show it: control characters as what they are.

A name out of a file can hold the escape that colours or erases a terminal, or the mark that turns the writing round. Whatever is
shown to people passes here; files keep the names.
"""

from __future__ import annotations

import codecs
import io
import re
import sys
import unicodedata

_SPELLED = "zosim-spelled"
_SIGNS = {
    "≤": "<=", "≥": ">=", "≠": "!=", "≈": "~", "×": "x", "·": "*", "−": "-", "–": "-", "—": "-", "→": "->", "←": "<-", "√": "sqrt",
    "∞": "inf", "∈": "in", "‖": "||", "±": "+-", "“": '"', "”": '"', "‘": "'", "’": "'", "«": '"', "»": '"', "∑": "sum", "∏": "prod",
    "∂": "d", "∇": "grad ", "⌊": "floor(", "⌋": ")", "⌈": "ceil(", "⌉": ")", "ℓ": "l",
}  # fmt: skip

_LONG_WORD = re.compile(r"(?<!\S)\S{401,}")
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str) -> str:
    r"""Return a text with its control characters escaped, but for ends of lines and tabs.

    >>> printable("\x1b[31mred\u202e")
    '\\x1b[31mred\\u202e'
    """
    return _escaped(text, kept="\n\t")


def one_line(text: str) -> str:
    r"""Return a text as one line, its control characters escaped.

    What has very many characters without a space, such as a name somebody made up to fill a page, loses its middle.

    >>> one_line("two\nlines")
    'two\\nlines'
    >>> len(one_line("x" * 10_000))
    303
    """
    return _LONG_WORD.sub(lambda word: f"{word[0][:200]}...{word[0][-100:]}", _escaped(text, kept=""))


def spell_what_cannot_be_written() -> None:
    """Let stdout and stderr spell characters that their encoding lacks, instead of raising UnicodeEncodeError."""

    def spell(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        return "".join(map(in_ascii, error.object[error.start : error.end])), error.end

    codecs.register_error(_SPELLED, spell)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_SPELLED)


def in_ascii(character: str) -> str:
    r"""Return a character as ASCII writes it: a letter without its accent, a Greek letter's name, a line as a dash.

    >>> [in_ascii(character) for character in "é²θΔ─│≤漢"]
    ['e', '2', 'theta', 'Delta', '-', '|', '<=', '\\u6f22']
    """
    if character in _SIGNS:
        return _SIGNS[character]
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    if plain:
        return plain
    greek = re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER (?:FINAL )?(\w+)", unicodedata.name(character, ""))
    if greek:
        return greek[2].lower() if greek[1] == "SMALL" else greek[2].capitalize()
    if "BOX DRAWINGS" in unicodedata.name(character, ""):
        return {"HORIZONTAL": "-", "VERTICAL": "|"}.get(unicodedata.name(character).split()[-1], "+")
    return _name(character)


def _escaped(text: str, kept: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        _name(c) if not c.isprintable() and c not in kept and unicodedata.category(c) in _HIDDEN else c
        for c in text
    )


def _name(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
