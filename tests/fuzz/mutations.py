"""How valid documents are broken: by their structure, by their text, and by their bytes.

JSON and YAML documents are changed as trees and written with :class:`Raw` literals in between, so that what no writer
would write (keys that stand twice, ``NaN``, integers of thousands of digits) comes out, too.
"""

from __future__ import annotations

import copy
import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import yaml

from tests.fuzz.cases import Case
from topology.checksummed import with_digest


class Raw(str):
    """Text that is written as it is."""

    __slots__ = ()


class Pairs(list[tuple[str, Any]]):
    """An object as a list, so that a key can stand twice."""


STRINGS = (
    "", " ", "a", "0", "-1", "1e9", "nan", "none", "null", "true", "auto", "host", "block.0", "block.999999999",
    "\x1b[31mred\x1b[0m", "two\nlines", "\u202etxt.exe", "\x00", "\x9b1m", "[bold]", "[/]", "%s%n", "{0}", "../../etc/passwd",
    "/dev/null", "/proc/none", "~", "*" * 30, "é", "𝔘", "\N{BYTE ORDER MARK}", "9" * 400, "x" * 5_000, "0x" + "f" * 64, "1:" * 60,
    "cpu0", "gpu0", "cuda", "float32", "int4", "q4", "1 GB/s", "1e400 GB/s", "-3 us", "٣", "\udcff",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 3, 7, 100, 255, 2**16, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**18, 10**30, -(2**63),
    0.5, -0.5, 1e-9, 1e-320, 1e9, 1e18, 1e308, -1e308, 3.0000000001,
)  # fmt: skip
JSON_LITERALS = (
    Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), Raw("-0"), Raw("9" * 5_000), Raw("-" + "1" * 5_000), Raw("9" * 400),
    Raw("[" * 3_000 + "]" * 3_000), Raw('{"a":' * 3_000 + "1" + "}" * 3_000), Raw("[" * 40 + "]" * 40),
    Raw('"\\ud800"'), Raw("'a'"), Raw("01"), Raw("tru"), Raw(""), Raw("1e-400"), Raw('"\\u0000"'),
)  # fmt: skip
_LAUGHS = "[&a [x,x,x,x,x,x,x,x,x]" + "".join(
    f", &{name} [{','.join([f'*{before}'] * 9)}]" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML_LITERALS = (
    *JSON_LITERALS[5:11], Raw(".nan"), Raw(".inf"), Raw("-.inf"), Raw("~"), Raw("yes"), Raw("2001-13-45"), Raw("2020-01-01"),
    Raw("0o777"), Raw("0x" + "f" * 5_000), Raw("1:" * 3_000 + "1"), Raw("&x [*x]"), Raw("*nowhere"), Raw("!!python/object:os.system a"),
    Raw("!!binary abc"), Raw("!!set {a, b}"), Raw("!!timestamp 9"), Raw("{<<: {a: 1}}"), Raw("{<<: 3}"), Raw("? [a]"), Raw("!!float x"),
    Raw(_LAUGHS + "]"), Raw("{? {a: 1} : 2}"), Raw("{1: 2, null: 3}"), Raw("!!omap [a: 1]"), Raw("|"), Raw("@"), Raw("`"), Raw("\t"),
)  # fmt: skip


def mutated(generator: Random, case: Case) -> Case:
    """Return a case with one of its files broken, seldom more."""
    names = sorted(case.files)
    for name in generator.sample(names, min(len(names), 1 + (generator.random() < 0.15))):
        changed = mutated_file(generator, name, case.files[name])
        case = replace(case, files={**case.files, name: changed})
    return case


def with_new_digest(generator: Random, case: Case) -> Case:
    """Return a broken case whose JSON files state the digest of what they hold, as if they had been written so."""
    broken = mutated(generator, case)
    return replace(broken, files={name: _checksummed(content) for name, content in broken.files.items()})


def _checksummed(content: bytes) -> bytes:
    try:
        data = json.loads(content)
        bare = {name: value for name, value in data.items() if name != "sha256"}
        return json.dumps(with_digest(bare)).encode()
    except (ValueError, AttributeError, RecursionError):
        return content


def mutated_file(generator: Random, name: str, content: bytes) -> bytes:
    """Return the content of a file, broken in a way that suits what it is."""
    if generator.random() < 0.12:
        return mutated_bytes(generator, content)
    try:
        for ending, change in _BY_ENDING.items():
            if name.endswith(ending):
                return change(generator, content.decode()).encode("utf-8", "surrogatepass")
    except (ValueError, yaml.YAMLError, ET.ParseError):
        pass  # not of its kind: broken on purpose, or by an earlier change
    return mutated_bytes(generator, content)


def mutated_bytes(generator: Random, content: bytes) -> bytes:
    """Return bytes with some flipped, cut, doubled or put in between."""
    data = bytearray(content)
    for _ in range(generator.choice((1, 1, 1, 2, 5))):
        at, end = sorted(generator.randrange(len(data) + 1) for _ in range(2)) if data else (0, 0)
        match generator.randrange(9):
            case 0:
                del data[at:]
            case 1:
                del data[at : min(end, at + 40)]
            case 2:
                data[at:at] = data[at : min(end, at + 200)]
            case 3 if at < len(data):
                data[at] ^= 1 << generator.randrange(8)
            case 4:
                data[at:at] = generator.randbytes(generator.choice((1, 2, 40)))
            case 5:
                data[at:at] = generator.choice(
                    (b"\xff", b"\x00", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xc0\x80")
                )
            case 6:
                data[at:at] = generator.choice(
                    (
                        b"{",
                        b"}",
                        b"[",
                        b"]",
                        b",",
                        b":",
                        b'"',
                        b"\n",
                        b" ",
                        b"\\",
                        b"<",
                        b">",
                        b"&",
                        b"- ",
                        b"NaN",
                    )
                )
            case 7:
                data = bytearray(
                    generator.choice(
                        (b"", b"null", b"[]", b"{}", b"0", b'""', b"\xff\xfe{}", b"\n", b"{", b"---")
                    )
                )
            case 8:
                data[at:at] = generator.choice((b"[", b'{"a":', b"(", b"<a>", b"- ")) * generator.choice(
                    (50, 5_000)
                )
    return bytes(data)


def mutated_json(generator: Random, text: str) -> str:
    """Return a JSON document, broken."""
    return written(mutated_tree(generator, json.loads(text), JSON_LITERALS))


def mutated_lines(generator: Random, text: str) -> str:
    """Return JSON lines of which one is broken, missing, doubled or elsewhere."""
    lines = text.splitlines()
    if not lines:
        return text
    at = generator.randrange(len(lines))
    match generator.randrange(8):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, lines[at])
        case 2:
            generator.shuffle(lines)
        case 3:
            lines.insert(at, "")
        case _:
            lines[at] = mutated_json(generator, lines[at])
    return "\n".join(lines) + generator.choice(("\n", "\n", "\n", ""))


def mutated_yaml(generator: Random, text: str) -> str:
    """Return a YAML document, broken as a tree or as text."""
    if generator.random() < 0.75:
        return written(mutated_tree(generator, yaml.safe_load(text), YAML_LITERALS))
    lines = text.splitlines()
    at = generator.randrange(len(lines))
    match generator.randrange(6):
        case 0:
            lines[at] = " " * generator.randrange(9) + lines[at].lstrip()
        case 1:
            lines[at : at + 1] = [lines[at]] * generator.choice((2, 50, 2_000))
        case 2:
            lines[at] = lines[at].partition(":")[0] + ": " + generator.choice(YAML_LITERALS)
        case 3:
            del lines[at : at + generator.randrange(1, 5)]
        case 4:
            lines[at] += generator.choice((" &a", " *a", " # x", ": x", "\\", " |", " >", " !!str", "{", "}"))
        case 5:
            lines.insert(at, generator.choice(("---", "...", "%YAML 9.9", "? x", "- x", "<<: *a", "\t- x")))
    return "\n".join(lines) + "\n"


def mutated_text(generator: Random, text: str) -> str:
    """Return text with a number, a word or a line of it broken."""
    lines = text.splitlines()
    at = generator.randrange(len(lines))
    line = lines[at]
    parts = [*re.finditer(generator.choice((r"\d+", r"\S+")), line)]
    match generator.randrange(6):
        case 0:
            del lines[at]
        case 1:
            lines[at : at + 1] = [line] * generator.choice((2, 50, 2_000))
        case 2:
            lines[at] = line * generator.choice((2, 50, 2_000))
        case _ if parts:
            part = generator.choice(parts)
            near = (*map(str, NUMBERS), "9" * 5_000, "0-" + "9" * 12, generator.choice(parts)[0])
            value = generator.choice((*near, *near, *STRINGS))
            lines[at] = line[: part.start()] + value + line[part.end() :]
    return "\n".join(lines) + "\n"


def mutated_csv(generator: Random, text: str) -> str:
    """Return comma-separated values with a cell, a row or a column broken."""
    rows = [line.split(",") for line in text.splitlines()]
    at = generator.randrange(len(rows))
    column = generator.randrange(len(rows[at]))
    match generator.randrange(6):
        case 0:
            del rows[at]
        case 1:
            rows.insert(at, rows[at])
        case 2:
            del rows[at][column]
        case 3:
            rows[at].insert(column, generator.choice(('"', "", "x")))
        case _:
            value = generator.choice((*STRINGS, *map(str, NUMBERS), "NaN", "inf", '"', "9" * 5_000))
            rows[at][column] = value
    return "\n".join(",".join(row) for row in rows) + "\n"


def mutated_xml(generator: Random, text: str) -> str:
    """Return an XML document with an element or an attribute broken."""
    if generator.random() < 0.15:
        head = generator.choice(
            (
                '<!DOCTYPE a [<!ENTITY b "c">]>',
                '<!DOCTYPE topology SYSTEM "hwloc.dtd">',
                '<?xml version="1.0" encoding="utf-16"?>',
                '<?xml version="9"?>',
                "<!-- -- -->",
            )
        )
        return head + text
    root = ET.fromstring(text)
    elements = list(root.iter())
    element, other = generator.choice(elements), generator.choice(elements)
    names = sorted(element.keys())
    match generator.randrange(8):
        case 0 if names:
            del element.attrib[generator.choice(names)]
        case 1 | 2 | 3 if names:
            values = (*map(str, NUMBERS), "NaN", "9" * 5_000, *filter(_is_xml, STRINGS))
            element.set(generator.choice(names), generator.choice(values))
        case 4:
            element.tag = generator.choice((other.tag, "x"))
        case 5 if len(element):
            element.remove(generator.choice(list(element)))
        case 6:
            copied = ET.tostring(other)  # once: the other may hold this one, which grows
            for _ in range(generator.choice((1, 3, 200))):
                element.append(ET.fromstring(copied))
        case 7:
            for _ in range(generator.choice((5, 2_000))):
                element = ET.SubElement(element, other.tag, other.attrib)
        case _:
            element.attrib.update(other.attrib)
    return _serialised(root)


def _is_xml(text: str) -> bool:
    return all(character.isprintable() for character in text) and "\udcff" not in text


def _serialised(root: ET.Element) -> str:
    try:
        return ET.tostring(root, encoding="unicode")
    except RecursionError:
        return "<system>" * 20_000


def mutated_tree(generator: Random, tree: Any, literals: tuple[Raw, ...]) -> Any:
    """Return a tree of JSON values with one to three places changed."""
    holder: dict[str, Any] = {"": tree}
    for _ in range(generator.choice((1, 1, 1, 1, 2, 3))):
        _change(generator, holder, literals)
    return holder[""]


def _change(generator: Random, holder: Any, literals: tuple[Raw, ...]) -> None:
    """Change one place of a tree, where it lies."""
    # Walk down at random: every level is as likely to be changed, however long a list below it is.
    parent, key = holder, ""
    while True:
        value = parent[key][1] if isinstance(parent, Pairs) else parent[key]
        below = _keys(value)
        if not below or (generator.random() < 0.25 and parent is not holder):
            break
        parent, key = value, generator.choice(below)
    changed = _changed(generator, value, holder, literals)
    match generator.randrange(12):
        case 0 if isinstance(parent, dict) and parent is not holder:
            del parent[key]
        case 1 if isinstance(parent, dict) and parent is not holder:
            others = [*parent, "x", str(key) + "_", str(key)[:-1], "version", "__class__"]
            parent[generator.choice(others)] = parent.pop(key)
        case 2 if isinstance(parent, dict):
            parent[key] = _doubled(value, changed)
        case 3 if isinstance(parent, dict) and parent is not holder:
            parent[generator.choice(STRINGS)] = changed
        case 4 if isinstance(parent, list) and not isinstance(parent, Pairs):
            parent[key : key + 1] = [value] * generator.choice((0, 2, 3, 50))
        case _ if isinstance(parent, Pairs):
            parent[key] = (parent[key][0], changed)
        case _:
            parent[key] = changed


def _keys(value: Any) -> list[Any]:
    if isinstance(value, Pairs | list):
        return list(range(len(value)))
    return list(value) if isinstance(value, dict) else []


def _doubled(value: Any, changed: Any) -> Any:
    """Return an object in which a key stands twice."""
    if not isinstance(value, dict) or not value:
        return changed
    pairs = Pairs(value.items())
    pairs.append((pairs[0][0], changed))
    return pairs


def _changed(generator: Random, value: Any, tree: Any, literals: tuple[Raw, ...]) -> Any:
    """Return another value in place of one."""
    if isinstance(value, int | float) and not isinstance(value, bool) and generator.random() < 0.5:
        near = (
            value + 1,
            value - 1,
            -value,
            value * 2,
            value * 1000,
            value / 3,
            value * 1e9,
            float(value),
            str(value),
        )
        return generator.choice(near)
    choices: tuple[Callable[[], Any], ...] = (
        lambda: generator.choice(NUMBERS),
        lambda: generator.choice(NUMBERS),
        lambda: generator.choice(STRINGS),
        lambda: generator.choice(STRINGS),
        lambda: generator.choice(literals),
        lambda: generator.choice((None, True, False)),
        lambda: generator.choice(([], {}, [[]], [None], {"a": {}}, [1, 2], {"": 0})),
        lambda: [value],
        lambda: {"x": value},
        lambda: _somewhere(generator, tree),
        lambda: (
            list(value.values())
            if isinstance(value, dict)
            else value[::-1]
            if isinstance(value, list | str)
            else 0
        ),
    )
    return generator.choice(choices)()


def _somewhere(generator: Random, value: Any) -> Any:
    """Return a value of another place of the tree."""
    while (below := _keys(value)) and generator.random() < 0.8:
        value = value[generator.choice(below)]
        if isinstance(value, tuple):
            value = value[1]
    return copy.deepcopy(value)


def written(value: Any) -> str:
    """Return a tree as JSON, raw literals as they are."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {written(item)}" for key, item in value) + "}"
    if isinstance(value, dict):
        return written(Pairs((key, item) for key, item in value.items()))
    if isinstance(value, tuple):
        return written(value[1])
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(str(value))
    return json.dumps(value, default=str)


_BY_ENDING: dict[str, Callable[[Random, str], str]] = {
    ".json": mutated_json,
    ".jsonl": mutated_lines,
    ".yaml": mutated_yaml,
    ".xml": mutated_xml,
    ".csv": mutated_csv,
    ".txt": mutated_text,
}
