"""XML from files that nobody vouches for."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from topology.errors import TopologyError
from topology.reading import MAX_DEPTH, read_text

MAX_BYTES = 8 * 2**20
"""Of a machine's description; the largest known has a few hundred KiB."""
# hwloc writes a DOCTYPE that names its DTD; it is dropped, and with it every way to declare an entity.
_HWLOC_DOCTYPE = re.compile(r'<!DOCTYPE\s+topology\s+SYSTEM\s+"hwloc2?\.dtd"\s*>')


def parse_xml(path: str | Path, root_tag: str, tool: str) -> ET.Element:
    """Root element of a small XML file without DTD or entities.

    Raises TopologyError if it cannot be read, is too large, declares a document type, is no XML, or is another document.
    """
    text = read_text(path, f"file of {tool}", TopologyError, max_bytes=MAX_BYTES)
    text = _HWLOC_DOCTYPE.sub("", text, count=1)
    if re.search(r"<!\s*(DOCTYPE|ENTITY)", text, re.IGNORECASE):
        message = f"{str(path)!r} declares a document type or entities, which are not read"
        raise TopologyError(message, hint=f"{tool} writes none; remove the declaration")
    try:
        root = ET.fromstring(text)
    except ET.ParseError as error:
        message = f"{str(path)!r} is not XML: {error}"
        raise TopologyError(message, hint=f"write it again with {tool}") from error
    level = [root]
    for _ in range(MAX_DEPTH):
        level = [child for element in level for child in element]
    if level:
        message = f"{str(path)!r} nests more than {MAX_DEPTH} levels of elements"
        raise TopologyError(message, hint=f"write it again with {tool}")
    if root.tag != root_tag:
        message = f"{str(path)!r} starts with <{root.tag}>, not <{root_tag}> as the XML of {tool} does"
        raise TopologyError(message, hint="--from says which tool wrote the file: nccl, hwloc or smi")
    return root


def attribute(element: ET.Element, name: str, path: str | Path) -> str:
    """An attribute that must be there.

    Raises TopologyError if it is not.
    """
    value = element.get(name)
    if value is None:
        message = f"{str(path)!r}: <{element.tag}> has no attribute {name!r}"
        raise TopologyError(message, hint=f"it has: {', '.join(element.keys()) or 'none'}")
    return value


def integer(element: ET.Element, name: str, path: str | Path, default: int | None = None) -> int:
    """An attribute that must be a whole number.

    Raises TopologyError if it is not, or is missing and there is no default.
    """
    if default is not None and element.get(name) is None:
        return default
    text = attribute(element, name, path)
    try:
        number = int(text, 0)
    except ValueError as error:
        message = f"{str(path)!r}: {name}={text!r} of <{element.tag}> is no whole number"
        raise TopologyError(message) from error
    if abs(number) >= 2**64:
        raise TopologyError(f"{str(path)!r}: {name} of <{element.tag}> has more than 64 bits")
    return number
