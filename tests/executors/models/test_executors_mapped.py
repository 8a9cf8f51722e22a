"""Base weights are mapped from their files by all ranks of a host, and converted as they move into its one copy."""

from __future__ import annotations

import sys

import pytest
import torch
from safetensors.torch import save_file

from executors.models.mapped import own_format
from executors.models.weight_files import weights_digest
from executors.ranks.launch import launch
from tests.support import launched
from tests.support.command import saved_lines, saved_model, zosim
from tests.support.tiny import plan_of
from zosim.plans import Plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of 12 blocks of 12 MB, and the plan of two ranks that share it in bfloat16."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 512, "word_embed_proj_dim": 512, "ffn_dim": 2048, "num_hidden_layers": 12}
    model = OPTForCausalLM(
        OPTConfig(**sizes, vocab_size=100, num_attention_heads=8, max_position_embeddings=64)
    )
    folder = tmp_path_factory.mktemp("mapped")
    model.save_pretrained(folder)
    plan = plan_of(model, dtype="bfloat16", residency={"blocks": "offloaded"}, schedule={"update": "delayed"})
    data = plan.model_dump(mode="json")
    data["residency"]["transfers"] = "sliced"
    data["mesh"] = {"perturb": 2}
    data["placement"] |= {"devices": ["cpu0"] * 2, "hosts": []}
    Plan.model_validate(data).save(folder / "plan.json")
    return folder, weights_digest(model, "bfloat16")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("fresh_ranks")  # a copy has memory to spare, and what it takes of that does not show
def test_a_host_holds_about_one_copy_while_two_ranks_load(folder):
    """A copy of each rank's own, converted from the file's format, would be all of the shared bytes in either."""
    rows, digest = launch(launched.memory_of_loading, str(folder[0]), world_size=2)
    for grown, own_buffers, shared in rows:
        assert shared > 70e6
        assert grown < own_buffers + shared / 3
    assert digest == folder[1]


def test_the_format_of_files_is_read_from_them(folder, tmp_path):
    assert own_format(folder[0]) == "float32"
    assert own_format(tmp_path) is None
    save_file({"a": torch.zeros(1, dtype=torch.bfloat16)}, tmp_path / "one.safetensors")
    assert own_format(tmp_path) == "bfloat16"
    save_file({"b": torch.zeros(1)}, tmp_path / "two.safetensors")
    assert own_format(tmp_path) is None
    (tmp_path / "two.safetensors").write_bytes(b"no such file")
    assert own_format(tmp_path) is None


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_in_another_format_than_its_files_ends_as_one_that_converts_first(tmp_path):
    model = saved_model("opt", tmp_path)
    saved_lines(tmp_path / "data.jsonl")
    words = [
        "run", "--model", model, "--data", tmp_path / "data.jsonl", "--steps", 3, "--batch", 4, "--lr", "1e-3",
        "--threads", 1, "--dtype", "bfloat16", "--no-tensorboard", "--method", "pertp", "--residency", "offloaded",
    ]  # fmt: skip
    assert own_format(model) == "float32"
    for transfers in ("private", "sliced"):
        assert zosim(*words, "--transfers", transfers, "--out", tmp_path / transfers) == 0
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "private" / name).read_bytes() == (tmp_path / "sliced" / name).read_bytes()
