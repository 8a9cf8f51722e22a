"""Plans, programs and timelines as files: read once, refused readably."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from topology.errors import MachineError, ZosimError
from topology.reading import read_json_object


@dataclass(frozen=True)
class DocumentType:
    """What is known of a kind of file."""

    name: str
    # version, oldest: the newest and the oldest that can be read.
    version: int
    oldest: int
    error: type[ZosimError]
    make: str  # how to make such a file, for a path that is empty


class Document(ABC):
    """What is kept as a JSON file, perhaps edited there, and read again."""

    document: ClassVar[DocumentType]

    @abstractmethod
    def to_json(self) -> str:
        """Return it as JSON."""

    @classmethod
    @abstractmethod
    def from_data(cls, data: dict[str, Any], where: str) -> Self:
        """Return what an object of JSON holds; `where` is for messages.

        Raises ZosimError of the kind's own type, if it holds something else.
        """

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what :meth:`save` wrote, perhaps edited since.

        Raises ZosimError: of the kind's own type, if the file is missing, is no JSON object, is of a version that is not read, or holds something else.
        """
        document_type = cls.document
        data = read_json_object(path, document_type.name, document_type.error, hint=document_type.make)
        if "version" not in data:
            raise document_type.error(
                f"{path} is not a {document_type.name}: it has no version", hint=document_type.make
            )
        if data["version"] not in range(document_type.oldest, document_type.version + 1):
            raise document_type.error(
                f"{path} is a {document_type.name} of version {data['version']!r}, but this zosim reads version "
                f"{document_type.version}",
                hint=document_type.make,
            )
        return cls.from_data(data, str(path))


def check_writable(path: Path | None) -> None:
    """Refuse a file that cannot be written, before the minutes that it takes to have something to write.

    Raises MachineError if a directory has that name, or the directory that it is in is missing or may not be written to.
    """
    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        raise MachineError(f"{path} is a directory", hint="give the name of a file")
    if not folder.is_dir():
        raise MachineError(
            f"{path}: the directory {folder} does not exist", hint=f"create it: mkdir -p {folder}"
        )
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise MachineError(f"{path} is not writable", hint="choose another path")


def json_by_lines(data: Mapping[str, Any]) -> str:
    """Return an object as JSON, every element of its lists on a line of its own, so that it can be edited by hand."""
    lines = [f"  {json.dumps(key)}: {_list_by_lines(value)}" for key, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _list_by_lines(value: object) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n    " + ",\n    ".join(json.dumps(item) for item in value) + "\n  ]"
