"""The subcommands: data on stdout, JSON on request, errors as exceptions that the main program prints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from topology import (
    Link,
    TopologyError,
    catalogue,
    draw,
    dump,
    from_nvidia_smi_topo,
    load,
    load_preset,
    loads,
    preset_names,
    render_text,
)
from topology.cli import app
from topology.clusters import cluster
from topology.instances import instance_names

FIXTURES = Path(__file__).parent / "fixtures"


def invoke(*arguments, text=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)


def run(*arguments, text=None):
    result = invoke(*arguments, text=text)
    assert result.exit_code == 0, result.exception
    return result.stdout


def refused(*arguments, text=None):
    error = invoke(*arguments, text=text).exception
    assert isinstance(error, TopologyError), error
    return error


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_show_draws_its_tree_with_what_the_stream_can_write(encoding, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(dump(load_preset("t4-1x").model_copy(update={"name": "Größe…"})), encoding="utf-8")
    shown = subprocess.run(
        [sys.executable, "-c", "from topology.cli import app; app()", "show", str(file)],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=True,
    ).stdout.decode(encoding)
    assert "`-- numa0\n    +-- cpu0" in shown
    assert shown.startswith({"ascii": "Gr\\xf6\\xdfe\\u2026", "latin-1": "Größe\\u2026"}[encoding])
    assert "└── numa0\n    ├── cpu0" in render_text(load_preset("t4-1x"))


def test_assumed_memory_is_shown_as_such():
    machine = from_nvidia_smi_topo("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\tX\t0-7\t0\n", gpu="rtx4090")
    assert "dram0  256 GiB (assumed) at 100 GB/s (assumed)" in render_text(machine)
    assert "assumed" not in render_text(load_preset("dgx-h100")).partition("host0")[2]


@pytest.mark.parametrize("name", ["dgx-1v", "rtx4090-2x", "mesh"])
def test_the_legend_of_a_picture_lies_below_its_links(name, tmp_path, monkeypatch):
    pictures = []
    monkeypatch.setattr("topology.drawing._save", lambda picture, _: pictures.append(picture))
    matrix = (FIXTURES / "dgx1v_topo.txt").read_text(encoding="utf-8")
    machine = from_nvidia_smi_topo(matrix) if name == "mesh" else load_preset(name)
    draw(machine, tmp_path / "machine.png")
    (axes,) = pictures[0].axes
    legend = axes.get_legend().get_window_extent()
    lowest = min(axes.transData.transform((0, min(line.get_ydata())))[1] for line in axes.lines)
    assert legend.y1 < lowest
    assert legend.y0 >= 0


def test_import_tells_rocm_smi_s_output_by_itself_and_from_a_pipe():
    matrix = "=== ROCm System Management Interface ===\n=== Link Type between two GPUs ===\n  GPU0 GPU1\nGPU0 0 XGMI\nGPU1 XGMI 0\n"
    data = json.loads(run("import", "-", "--gpu", "mi300x", "--json", text=matrix))
    assert [node["id"] for node in data["nodes"] if node["type"] == "gpu"] == ["gpu0", "gpu1"]
    assert "read from a file" in str(refused("import", "-", text="<system/>"))


def test_a_comment_before_an_xml_does_not_hide_what_it_is(tmp_path):
    file = tmp_path / "cloud.xml"
    file.write_text(
        '<!-- not a <topology> -->\n<system version="1"><cpu numaid="0"/></system>', encoding="utf-8"
    )
    assert "has no GPU" in str(refused("import", file))


def test_list_names_every_preset():
    printed = run("list")
    assert all(name in printed for name in preset_names())
    listed = json.loads(run("list", "--json"))
    names = [item["name"] for item in listed]
    assert names == [*preset_names(), *dict.fromkeys(instance_names().values())]
    assert {item["name"]: len(item["compute_devices"]) for item in listed}["dgx-1v"] == 8


@pytest.mark.parametrize("name", preset_names())
def test_show_as_a_tree_and_as_json(name):
    machine = load_preset(name)
    printed = run("show", name)
    assert all(node.id in printed for node in machine.nodes)
    data = json.loads(run("show", name, "--json"))
    assert data["resources"].keys() == machine.resources.keys()
    assert data["host_to_device"].keys() == {node.id for node in machine.compute_devices}


@pytest.mark.crossed(quick=5)
@pytest.mark.parametrize("name", preset_names())
def test_a_preset_can_be_written_and_changed(name, tmp_path):
    path = tmp_path / "mine.yaml"
    assert run("show", name, "-o", path) == run("show", name)
    assert run("show", path, "--json") == run("show", name, "--json")


def test_what_an_empty_file_should_hold_can_be_written(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert "show NAME -o FILE" in refused("show", path).hint


def test_the_tree_shows_every_link_once():
    text = render_text(load_preset("dgx-1v"))
    assert text.count("40 GB/s") == 8  # pairs of GPUs with two NVLinks
    assert "6 GB/s" in text
    assert "\x1b" not in text
    assert "\x1b" in render_text(load_preset("dgx-1v"), color=True)


def test_validate_accepts_presets_and_refuses_what_contradicts_physics(tmp_path):
    assert "dgx-h100 is valid" in run("validate", "dgx-h100")
    file = tmp_path / "fast.yaml"
    file.write_text(dump(load_preset("a100-80gb-milan")).replace("31.508", "64"), encoding="utf-8")
    error = refused("validate", file)
    assert "faster than PCIe 4.0 x16" in error.message
    assert "both directions" in error.hint
    printed = json.loads(invoke("validate", file, "--json").stdout)
    assert printed["findings"][0]["rule"] == "pcie-speed"


def test_validate_shows_warnings_and_accepts(tmp_path):
    file = tmp_path / "half.yaml"
    text = dump(load_preset("h200-1x")).replace("technology: pcie\n", "technology: pcie\n    duplex: half\n")
    file.write_text(text, encoding="utf-8")
    printed = run("validate", file)
    assert "warning: root0--gpu0: half duplex" in printed
    assert "1 warnings" in printed


def test_detect_writes_a_file_that_loads(tmp_path):
    file = tmp_path / "host.yaml"
    result = invoke("detect", "-o", file, "--json")
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout)["name"] == load(file).name
    assert f"wrote {file}" in result.stderr


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_draw_writes_pictures(tmp_path, suffix):
    file = tmp_path / f"machine.{suffix}"
    assert json.loads(run("draw", "cpu-laptop", "-o", file, "--json")) == {"path": str(file)}
    assert file.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[suffix])


def test_a_picture_names_every_node_and_bandwidth(tmp_path):
    text = draw(load_preset("dgx-1v"), tmp_path / "dgx.svg").read_text(encoding="utf-8")
    # Matplotlib draws letters as shapes and leaves the text in comments.
    for expected in ("gpu7", "numa1", "network0", "40 GB/s", "20 GB/s", "12 GB/s", "6 GB/s"):
        assert f"<!-- {expected} -->" in text


def test_gpus_of_two_hosts_that_nvlink_joins_are_drawn(tmp_path):
    two = cluster(load_preset("dgx-1v"), 2)
    nvlink = Link(source="host0/gpu0", target="host1/gpu0", type=catalogue().link_types["nvlink4"])
    rack = two.model_copy(update={"links": (*two.links, nvlink)})
    assert draw(rack, tmp_path / "rack.png").is_file()


def test_draw_refuses_unknown_formats_and_places(tmp_path):
    assert ".png, .svg" in refused("draw", "cpu-laptop", "-o", tmp_path / "x.gif").hint
    assert "cannot write" in refused("draw", "cpu-laptop", "-o", tmp_path / "none" / "x.png").message


@pytest.mark.parametrize(
    ("name", "options", "devices"),
    [
        ("nccl_a100x4.xml", [], 4),
        ("hwloc_workstation.xml", [], 1),
        ("dgx1v_topo.txt", ["--cpu", "xeon-e5-2698v4"], 8),
        ("vm_topo.txt", ["--from", "smi", "--gpu", "h200-141gb-sxm"], 2),
    ],
)
def test_import_tells_the_tool_from_the_content(tmp_path, name, options, devices):
    file = tmp_path / "imported.yaml"
    data = json.loads(run("import", FIXTURES / name, *options, "-o", file, "--json"))
    assert len(data["host_to_device"]) == devices
    assert load(file) == loads(dump(load(file)))


def test_import_reads_the_matrix_from_stdin():
    text = (FIXTURES / "dgx1v_topo.txt").read_text(encoding="utf-8")
    assert json.loads(run("import", "-", "--json", text=text))["name"] == "stdin"


def test_import_refuses_what_it_does_not_know(tmp_path):
    file = tmp_path / "other.xml"
    file.write_text("<html/>", encoding="utf-8")
    assert "neither NCCL nor hwloc" in refused("import", file).message
    assert "no matrix or XML file at" in refused("import", tmp_path / "none").message


def test_errors_leave_the_commands_as_they_are():
    error = refused("show", "dgx1v")
    assert "not host, a preset, a file or GPUs" in error.message
    assert error.hint == "did you mean 'dgx-1v'? `zosim topology list` shows the presets"
