"""Untrusted bytes: refused in words, whatever they are; and shown as what they are."""

from __future__ import annotations

import os
import tracemalloc

import pytest

from topology.errors import PlanError
from topology.printable import one_line, printable
from topology.reading import MAX_DEPTH, parse_json, parse_yaml, read_bytes, read_json_object, read_text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1, "a": 2}', "the key 'a' stands twice"),
        ("9" * 5_000, "an integer of 5000 digits"),
        ("-" + "9" * 41, "an integer of 41 digits"),
        ("[" * 5_000 + "]" * 5_000, f"nests more than {MAX_DEPTH} levels"),
        ("[" * 65 + "]" * 65, f"nests more than {MAX_DEPTH} levels"),
        ('{"a": NaN}', "it holds NaN"),
        ("[-Infinity]", "it holds -Infinity"),
        ("1e999", "1e999 is too large for a number"),
        ('"\\ud800"', "half a character"),
        ('{"a": 1,}', "at column [89]"),
        ("", "it is empty"),
    ],
)
def test_json_that_no_document_holds_is_refused(text, says):
    with pytest.raises(PlanError, match=says.replace("(", r"\(")) as raised:
        parse_json(text, "that is not a plan", PlanError, hint="make one")
    assert raised.value.message.startswith("that is not a plan: ")
    assert raised.value.hint == "make one"


def test_json_that_is_unusual_and_fine_is_read():
    assert parse_json("[" * 64 + "]" * 64, "", PlanError) != 0
    assert parse_json('{"a": ' + "9" * 40 + "}", "", PlanError) == {"a": int("9" * 40)}
    # A file name that is not UTF-8, as the command line passes it on.
    assert parse_json('"\\udcff"', "", PlanError) == "\udcff"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: 2\na: 3", "the key 'a' appears twice in the mapping of line 1"),
        ("a: &x [*x]", "the anchor in line 1 refers to something that contains itself"),
        ("[" * 100 + "]" * 100, "levels deep"),
        ("a: &a [1, 2, 3, 4]\n" + "".join(f"x{i}: &x{i} [*{p}, *{p}, *{p}, *{p}]\n" for i, p in enumerate(["a", *(f"x{i}" for i in range(30))])), "with its aliases"),
        ("a: !!bool x", "its tag does not allow"),
        ("a: !!timestamp 9", "its tag does not allow"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
        ("a: !!set {b, c}", "could not determine a constructor.*:set"),
        ("a: !!binary YQ==", "could not determine a constructor.*:binary"),
        ("a: 2001-13-45", "month must be in 1..12"),
        ("a: 0x" + "f" * 5_000, "an integer of more than 40 digits"),
        ("a: [", "is not YAML, line"),
    ],
)  # fmt: skip
def test_yaml_that_no_document_holds_is_refused(text, says):
    with pytest.raises(PlanError, match=says):
        parse_yaml(text, "prices.yaml", PlanError)


def test_yaml_keys_are_told_apart_by_their_types_and_aliases_within_reason_are_read():
    assert parse_yaml('1: a\n"1": b', "", PlanError)[0] == {1: "a", "1": "b"}
    assert parse_yaml("a: &x [1]\nb: *x", "", PlanError)[0] == {"a": [1], "b": [1]}
    assert parse_yaml("", "", PlanError) == (None, None)


def test_files_that_cannot_be_read_are_named(tmp_path):
    def refusal(path, read=read_json_object, **more):
        with pytest.raises(PlanError) as raised:
            read(path, "plan", PlanError, **more)
        return raised.value.message

    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "large").write_bytes(b"x" * 11)
    assert refusal(tmp_path / "none") == f"no plan at {tmp_path}/none"
    assert "Is a directory" in refusal(tmp_path)
    assert "null byte" in refusal("a\0b")
    assert "it is not UTF-8 text, invalid continuation byte at byte 7" in refusal(tmp_path / "latin.json")
    assert "it holds no JSON object" in refusal(tmp_path / "list.json")
    assert "it has more than" in refusal(tmp_path / "large", read_text, max_bytes=10)
    assert read_bytes(tmp_path / "large", "plan", PlanError, max_bytes=11) == b"x" * 11


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 2**40)
    tracemalloc.start()
    with pytest.raises(PlanError, match="more than 64 MiB"):
        read_bytes(tmp_path / "sparse", "plan", PlanError, max_bytes=2**26)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 2**24


def test_control_characters_are_shown_as_what_they_are():
    assert printable("\x1b[31m\u202etxt\x9b\udcff\n\té ν") == "\\x1b[31m\\u202etxt\\x9b\\udcff\n\té ν"
    assert one_line("a\nb\tc\u2028d") == "a\\nb\\tc\\u2028d"
