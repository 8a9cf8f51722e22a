"""What a study measured or trained, a record a line, in a CSV file beside its page: written, gone on with, read back."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Record = TypeVar("Record", bound=DataclassInstance)


def records_in(path: Path, kind: type[Record]) -> list[Record]:
    """Return the records of a file, none if there is no file; fields of `kind` are texts and numbers."""
    if not path.is_file():
        return []
    types = get_type_hints(kind)
    with path.open(newline="") as file:
        return [
            kind(**{field.name: types[field.name](line[field.name]) for field in fields(kind)})
            for line in csv.DictReader(file)
        ]


def write_records(path: Path, records: Iterable[DataclassInstance | Mapping[str, Any]]) -> None:
    """Write records of one kind in the place of what a file holds; its folder is made where it is missing."""
    path.unlink(missing_ok=True)
    append_records(path, records)


def append_records(path: Path, records: Iterable[DataclassInstance | Mapping[str, Any]]) -> None:
    """Write records behind those of a file, under a line of their names where it is new."""
    lines: Sequence[dict[str, Any]] = [
        dict(record) if isinstance(record, Mapping) else asdict(record) for record in records
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]) if lines else [], lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(lines)
