"""Formats of numbers, and what memory they take."""

from __future__ import annotations

import pytest

from costmodel.formats import COMPUTE_FORMATS, FORMATS, format_name
from topology.errors import PlanError


@pytest.mark.parametrize(
    ("name", "num_elements", "size_bytes"),
    [
        ("float32", 3, 12),
        ("bfloat16", 3, 6),
        ("float8_e4m3", 3, 3),
        ("int8", 256, 256),
        ("int4", 128, 64),
        ("int4", 129, 65),  # a half byte is rounded up
        ("float4_e2m1", 32, 16),
        ("int4", 0, 0),
    ],
)
def test_elements_take_bytes(name: str, num_elements: int, size_bytes: int) -> None:
    assert FORMATS[name].bytes(num_elements) == size_bytes


@pytest.mark.parametrize("name", COMPUTE_FORMATS)
def test_elements_of_formats_that_are_computed_in_stand_by_themselves(name: str) -> None:
    declared = FORMATS[name]
    assert declared.bytes(1000) == 1000 * declared.element_bytes
    assert declared.num_elements(declared.bytes(1000)) == 1000


@pytest.mark.parametrize("name", ["int4", "int2", "float4_e2m1"])
def test_elements_narrower_than_a_byte_have_no_width_of_their_own(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name} is a storage format"):
        FORMATS[name].element_bytes  # noqa: B018 - it is what raises


def test_a_user_may_write_aliases() -> None:
    assert [format_name(text) for text in ("BF16", "half", "float32", "fp8", "octal")] == [
        "bfloat16",
        "float16",
        "float32",
        "float8_e4m3",
        "octal",
    ]
    names = [alias for declared in FORMATS.values() for alias in (declared.name, *declared.aliases)]
    assert len(names) == len(set(names))
