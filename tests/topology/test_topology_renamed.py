"""Names of files that earlier versions wrote."""

from __future__ import annotations

import re

import pytest

from topology import documents
from topology.documents import dump, load_preset, loads
from topology.errors import TopologyError
from topology.renamed import with_present_names


@pytest.mark.parametrize(
    ("row", "old", "present"),
    [
        ({"a": "b"}, {"a": 1, "c": 2}, {"b": 1, "c": 2}),
        ({"a.b": "c"}, {"a": {"b": 1}, "b": 2}, {"a": {"c": 1}, "b": 2}),
        ({"a.b": "c"}, {"a": [{"b": 1}, {"b": 2}, 3]}, {"a": [{"c": 1}, {"c": 2}, 3]}),
        ({"*.b": "c"}, {"x": {"b": 1}, "y": {"b": 2}, "b": 3}, {"x": {"c": 1}, "y": {"c": 2}, "b": 3}),
        ({"**.b": "c"}, {"b": {"b": [{"b": 1}]}}, {"c": {"c": [{"c": 1}]}}),
        ({"a=old": "new"}, {"a": "old", "b": "old"}, {"a": "new", "b": "old"}),
        ({"a=old": "new"}, {"a": "older"}, {"a": "older"}),
        ({"a=old": "new"}, {"a": ["old"]}, {"a": ["old"]}),
        (
            {"a.*=old.*": "new.*"},
            {"a": [["old.x", 1], "old.y"], "b": ["old.z"]},
            {"a": [["new.x", 1], "new.y"], "b": ["old.z"]},
        ),
        ({"a=old.*": "new.*"}, {"a": "old.x"}, {"a": "new.x"}),
        ({"a": "b", "b.c": "d"}, {"a": {"c": 1}}, {"b": {"d": 1}}),
        ({"a": "b", "b.c": "d"}, {"b": {"c": 1}}, {"b": {"d": 1}}),
        ({"a": "b"}, {"a": 1, "b": 2}, {"a": 1, "b": 2}),
        ({"a.b": "c"}, {"a": "text"}, {"a": "text"}),
        ({"a": "b"}, "text", "text"),
    ],
)
def test_rows_rename_keys_and_values_where_they_stand(row, old, present):
    before = repr(old)
    assert with_present_names(old, row) == present
    assert repr(old) == before


def test_keys_keep_their_order():
    assert list(with_present_names({"x": 1, "a": 2, "y": 3}, {"a": "b"})) == ["x", "b", "y"]


def test_a_topology_file_may_have_earlier_names_but_not_both(monkeypatch):
    text = dump(load_preset("cpu-laptop"))
    old = text.replace("name:", "called:", 1)
    with pytest.raises(TopologyError, match="name: missing"):
        loads(old)
    monkeypatch.setattr(documents, "RENAMED", {"called": "name"})
    assert loads(old) == loads(text)
    with pytest.raises(TopologyError, match="called: unknown key"):
        loads(text + "called: pc\n")


def test_files_that_call_types_kinds_are_read() -> None:
    present = dump(load_preset("rtx4090-2x"))
    types = r"\btype: (?=host|numa|cpu|memory|pcie_|gpu|nvswitch|nic|network|disk)"
    old = re.sub(types, "kind: ", present).replace("technology: ", "kind: ")
    assert "kind: gpu" in old
    assert "kind: pcie" in old
    assert loads(old) == loads(present)
