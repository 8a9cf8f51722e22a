"""Adapters are served as PEFT computes them, or refused by the name of the field that says otherwise."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from executors.serving import peft as reading
from executors.serving.peft import linear_shapes, read_adapter
from executors.serving.runner import Request
from executors.serving.runtime import Runtime
from tests.support.tiny import model_of
from topology.errors import ModelError

peft = pytest.importorskip("peft")
TOKENS = (5, 4, 7, 9, 30, 44)
DEFAULT = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "fc2"], "task_type": "CAUSAL_LM"}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def base(family="opt"):
    return model_of(family, num_hidden_layers=2)


def written(folder, *, family="opt", dtype=torch.float32, **fields):
    """Write an adapter as PEFT does after some steps of training, and return its directory."""
    torch.manual_seed(0)
    model = peft.get_peft_model(base(family), peft.LoraConfig(**(DEFAULT | fields)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape))
                parameter.data = parameter.to(dtype)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def scored_by(model):
    logits = model(input_ids=torch.tensor([TOKENS])).logits[0].double().log_softmax(-1)
    return [logits[at - 1, token].item() for at, token in enumerate(TOKENS) if at]


def scored_by_peft(folder, family="opt"):
    return scored_by(peft.PeftModel.from_pretrained(base(family), folder).eval())


SERVED = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "ranks": {"rank_pattern": {"q_proj": 2, "fc2": 3}},
    "alphas": {"alpha_pattern": {"fc2": 9, r"^model.decoder.layers.1.self_attn.q_proj": 3}},
    "layers": {"layers_to_transform": [1]},
    "a layer": {"layers_to_transform": 0, "layers_pattern": "layers"},
    "but": {"exclude_modules": r".*\.0\..*"},
    "regex": {"target_modules": r".*\.1\.(fc1|fc2)"},
    "all": {"target_modules": "all-linear"},
    "gaussian": {"init_lora_weights": "gaussian"},
    "random": {"init_lora_weights": False},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "bfloat16": {"dtype": torch.bfloat16},
    "gpt2": {"family": "gpt2", "target_modules": ["c_attn"], "fan_in_fan_out": True},
}


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize("fields", SERVED.values(), ids=SERVED)
def test_what_is_served_is_what_peft_computes(tmp_path, fields):
    family = fields.get("family", "opt")
    if fields.get("init_lora_weights") == "mica" and "mica" not in str(peft.LoraConfig.__annotations__):
        pytest.skip("this PEFT has no MiCA")
    folder = written(tmp_path / "adapter", **fields)
    runtime = Runtime(base(family))
    runtime.load("one", folder)
    (scores,) = runtime.score([Request(TOKENS, 1, "one")])
    wanted = scored_by_peft(folder, family)
    # Rounding of float32 in another order; without the adapter the scores are a tenth and more away.
    assert scores == pytest.approx(wanted, abs=1e-5)
    assert scores != pytest.approx(scored_by(base(family)), abs=0.05)


@pytest.mark.parametrize("initial", ["pissa", "pissa_niter_4", "olora"])
def test_adapters_for_which_peft_changes_the_base_are_refused(tmp_path, initial):
    """The difference is no rounding; an adapter that is written as the hint says is served."""
    torch.manual_seed(0)
    model = peft.get_peft_model(base(), peft.LoraConfig(**DEFAULT, init_lora_weights=initial))
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "first")
    model.peft_config["default"].init_lora_weights = initial
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    wanted = scored_by(model.eval())
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelError, match=rf"was initialised as {initial} .*PEFT changes the base") as refusal:
        read_adapter(tmp_path / "adapter", linear_shapes(base()))
    assert "path_initial_model_for_weight_conversion" in refusal.value.hint
    model.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=tmp_path / "first")
    runtime = Runtime(base())
    runtime.load(
        "one",
        tmp_path / "plain" / "default" if (tmp_path / "plain" / "default").exists() else tmp_path / "plain",
    )
    (scores,) = runtime.score([Request(TOKENS, 1, "one")])
    assert scores == pytest.approx(wanted, abs=1e-4)


REFUSED = {
    "use_dora": True,
    "bias": "all",
    "modules_to_save": ["lm_head"],
    "lora_bias": True,
    "trainable_token_indices": [1, 2],
}


@pytest.mark.parametrize("field", REFUSED)
def test_other_kinds_are_refused_by_the_name_of_their_field(tmp_path, field):
    folder = written(tmp_path / "adapter", **{field: REFUSED[field]})
    with pytest.raises(ModelError, match=f"another kind: {field}="):
        read_adapter(folder, linear_shapes(base()))


def edited(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({field: {"x": 1} for field in [name]}, f"another kind: {name}=")
        for name in sorted(reading.REFUSED)
    ]
    + [
        ({"something_new": 3}, "something_new=3 is a field whose meaning is not known here"),
        ({"init_lora_weights": "something new"}, "has an unknown initialisation"),
        ({"init_lora_weights": "corda"}, "PEFT changes the base"),
        ({"init_lora_weights": "loftq"}, "PEFT changes the base"),
        ({"target_modules": ["fc2"]}, "factors for .*q_proj, which target_modules"),
        ({"layers_to_transform": [0]}, r"factors for .*layers\.1\..*, which target_modules"),
        ({"init_lora_weights": False, "target_modules": ["q_proj", "fc2", "k_proj"]}, "fills with random numbers"),
        ({"target_modules": "(.+)+x"}, "an unsupported regular expression"),
        ({"target_modules": ".*.*.*.*.*x"}, "an unsupported regular expression"),
        ({"rank_pattern": {"(": 4}}, "an unsupported regular expression"),
        ({"rank_pattern": {"q_proj": 3}}, "says r=3, the factors beside .*q_proj have rank 4"),
        ({"peft_type": "IA3"}, r"another kind \(peft_type=IA3\)"),
    ],
)  # fmt: skip
def test_what_peft_would_compute_in_another_way_is_refused(tmp_path, fields, complaint):
    folder = edited(written(tmp_path / "adapter"), **fields)
    with pytest.raises(ModelError, match=complaint):
        read_adapter(folder, linear_shapes(base()))


def test_every_field_of_peft_has_been_decided_on():
    """A field that a later PEFT adds must be looked at before adapters that have it are served."""
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    decided = reading.WITHOUT_EFFECT | reading.REFUSED.keys() | reading._Config.model_fields.keys()
    assert fields - decided == set()
    assert not reading.WITHOUT_EFFECT & reading.REFUSED.keys()


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.lm_head.weight",
        "base_model.model.model.decoder.layers.0.fc2.lora_magnitude_vector",
        "model.decoder.layers.0.fc2.lora_A.weight",
        "lora_A.weight",
    ],
)
def test_tensors_that_are_no_factors_are_named(tmp_path, name):
    folder = written(tmp_path / "adapter")
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path) | {name: torch.ones(3)}, path)
    with pytest.raises(ModelError, match=f"contains {name!r}, which is not a factor"):
        read_adapter(folder, linear_shapes(base()))


def test_factors_of_eight_bits_are_refused(tmp_path):
    folder = written(tmp_path / "adapter")
    path = folder / "adapter_model.safetensors"
    save_file({name: value.to(torch.float8_e4m3fn) for name, value in load_file(path).items()}, path)
    with pytest.raises(ModelError, match=r"of torch\.float8_e4m3fn"):
        read_adapter(folder, linear_shapes(base()))
