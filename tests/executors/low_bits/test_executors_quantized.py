"""Model directories that another tool has quantized, read quantized; and quantized directories, written for other tools."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from safetensors.torch import load_file, save_file

from costmodel.formats.stored_quantization import EARLIER_WEIGHTS_NAME
from costmodel.formats.stored_quantization import OWN_WEIGHTS_NAME as OWN
from costmodel.models.configs import LoRA, read_model_spec, stored_quantization_in
from executors.low_bits.linear import quantized_layers
from executors.models.loading import load_model
from executors.models.quantized import _packed, _unpacked
from executors.models.weight_files import weights_digest
from executors.runs.replay import load_base
from executors.runs.runlog import read_header
from executors.runs.session import Session
from tests.support.command import loaded, rows_of, saved_lines, saved_model, zosim
from tests.support.quantized import amend, compressed, transposed_layout
from tests.support.recorded import options, same, truncate
from tests.support.tiny import batches, model_of
from topology.errors import ModelError, PlanError
from zosim.plans import LowBits, Placement, Plan

GROUPED = {"strategy": "group", "group_size": 16}
INT4 = {"num_bits": 4, "symmetric": True, **GROUPED}
DYNAMIC = QuantizationArgs(num_bits=8, symmetric=True, strategy="token", dynamic=True)


def plan_of(folder, dtype="float16", **changed):
    spec = read_model_spec(folder)
    low_bits = LowBits(**{**spec.stored.fields, **changed})
    place = Placement(topology="test", devices=("cpu0",))
    return Plan(model=spec, placement=place, batch=3, seq=9, weights={"dtype": dtype}, low_bits=low_bits)


def run_on(model, folder, out, *more):
    lines = folder / "data.jsonl"
    if not lines.exists():
        saved_lines(lines, mask=4 if "roberta" in str(model) else None)
    command = f"run --model {model} --data {lines} --steps 3 --batch 3 --no-launch --no-tensorboard".split()
    return zosim(*command, "--residency", "resident", "--lr", 1e-2, "--out", out, *more)


def edited(folder, **tensors):
    """Put tensors into a directory, or take those out that are None."""
    held = load_file(folder / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in held.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


# -- in --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layout", "weights"),
    [
        ("llama-tied", "pack-quantized", INT4),
        ("opt-untied", "pack-quantized", {"num_bits": 4, "symmetric": False, **GROUPED}),
        ("opt", "pack-quantized", {"num_bits": 3, "symmetric": True, "strategy": "channel"}),
        ("llama", "pack-quantized", {"num_bits": 8, "symmetric": False, "strategy": "channel"}),
        ("opt", "int-quantized", {"num_bits": 8, "symmetric": True, "strategy": "channel"}),
        ("llama", "naive-quantized", {"num_bits": 8, "symmetric": False, "strategy": "tensor"}),
        (
            "opt",
            "float-quantized",
            {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
        ),
    ],
)
def test_qvalues_of_compressed_tensors_are_read_to_the_last_bit(tmp_path, name, layout, weights):
    numbers = dict(compressed(name, tmp_path, layout, **weights).named_parameters())
    model = load_base(str(tmp_path), plan_of(tmp_path))
    layers = dict(quantized_layers(model))
    assert len(layers) == 3 * (7 if "llama" in name else 6)
    for key, parameter in model.named_parameters():
        kept = layers[key].quantized.values(torch.float16) if key in layers else parameter
        assert torch.equal(kept, numbers[key]), key
    # No parameter is a matrix of floating-point numbers.
    assert all(dict(model.named_parameters())[key].data.untyped_storage().nbytes() == 2 for key in layers)


@pytest.mark.parametrize(
    ("tool", "group", "symmetric"),
    [("gptq", 16, False), ("gptq", 16, True), ("gptq", -1, True), ("awq", 16, False), ("awq", -1, False)],
)
def test_qvalues_of_gptq_and_awq_are_read(tmp_path, tool, group, symmetric):
    weights = transposed_layout("opt-untied", tmp_path, tool, group=group, symmetric=symmetric)
    layers = dict(quantized_layers(load_base(str(tmp_path), plan_of(tmp_path, "float32"))))
    assert len(layers) == len(weights) == 18
    for name, wanted in weights.items():
        # A quantized value times a scale of 11 bits has a place in float32.
        assert torch.equal(
            layers[f"{name}.weight"].quantized.values(torch.float64), torch.from_numpy(wanted)
        ), name


@pytest.mark.parametrize("bits", range(2, 9))
def test_words_of_qvalues_are_what_was_put_in(bits):
    symbols = torch.randint(
        0, 2**bits, (5, 45), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits)
    )
    for shift in (False, True):
        assert torch.equal(_unpacked(_packed(symbols, bits, shift=shift), bits, 45, shift=shift), symbols)


def test_a_quantized_directory_is_planned_trained_resumed_and_replayed(tmp_path, capsys):
    folder = tmp_path / "model"
    compressed("opt-untied", folder, "pack-quantized", **INT4)
    assert zosim("plan", "--model", folder, "--hardware", "a100-80gb-milan", "--batch", 1, "--seq", 16) == 0
    assert "int4 linears (a scale per group of 16)" in capsys.readouterr().out
    out = tmp_path / "run"
    assert run_on(folder, tmp_path, out, "--save-as", "compressed-tensors", "--dtype", "float16") == 0
    assert zosim("replay", out, "--model", folder, "-o", tmp_path / "again") == 0
    once, again = (load_file(place / "model.safetensors") for place in (out, tmp_path / "again"))
    assert once.keys() == again.keys()
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert any(
        not torch.equal(once[name], tensor)
        for name, tensor in load_file(folder / "model.safetensors").items()
    )


def test_a_plan_for_other_qvalues_is_refused_and_nothing_is_written(tmp_path, capsys):
    folder, plan = tmp_path / "model", tmp_path / "plan.json"
    compressed("opt-untied", folder, "pack-quantized", **INT4)
    assert run_on(folder, tmp_path, tmp_path / "out", "--weight-format", "int8") == 2
    assert "is quantized with --weight-format int4, but the plan has --weight-format int8" in " ".join(
        capsys.readouterr().err.split()
    )
    assert run_on(folder, tmp_path, tmp_path / "out", "--weight-format", "none") == 2
    made = plan_of(folder)
    other = made.model_copy(update={"model": made.model.model_copy(update={"stored": None})})
    other = Plan.model_validate(other.model_dump() | {"low_bits": {"weights": "int8"}})
    with pytest.raises(ModelError, match=r"quantized to int4 with group scales, but the plan wants int8"):
        load_base(str(folder), other)
    other.save(plan)
    assert (
        zosim(
            *f"run {plan} --model {folder} --data {tmp_path}/data.jsonl --steps 1 --out {tmp_path}/out".split(),
        )
        == 2
    )
    assert not (tmp_path / "out").exists()
    with pytest.raises(ModelError, match="is quantized"):
        load_model(folder)


LAYER = "model.decoder.layers.1.fc1"


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("weight_scale", 0.0, "a scale of .*fc1 is zero"),
        ("weight_scale", float("nan"), "a scale of .*fc1 is zero, negative, infinite or NaN"),
        ("weight_scale", None, "lacks .*fc1.weight_scale"),
        ("weight_packed", None, "lacks .*fc1.weight_packed"),
        (
            "weight_g_idx",
            torch.arange(32, dtype=torch.int32).flip(0) // 16,
            "reorders its inputs",
        ),
        ("weight_scale", torch.ones(48, 3, dtype=torch.float16), r"weight_scale has shape \(48, 3\)"),
        (
            "weight_packed",
            torch.zeros(48, 4, dtype=torch.int64),
            r"int64, not shape \(48, 4\) and format int32",
        ),
    ],
    ids=["zero", "nan", "missing", "not quantized", "act-order", "groups", "width of words"],
)
def test_damaged_qvalues_are_refused_by_name(tmp_path, part, value, reason):
    compressed("opt-untied", tmp_path, "pack-quantized", **INT4)
    name = f"{LAYER}.{part}"
    if isinstance(value, float):
        scales = load_file(tmp_path / "model.safetensors")[name].clone()
        scales[7, 1] = value
        value = scales
    edited(tmp_path, **{name: value})
    with pytest.raises(ModelError, match=reason):
        weights_digest(load_base(str(tmp_path), plan_of(tmp_path)))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is none that is read"),
        ({"format": "marlin-24", "config_groups__group_0__format": None}, "format 'marlin-24' is none"),
        ({"config_groups__group_0__weights__actorder": "group"}, "another order"),
        ({"config_groups__group_0__weights__strategy": "block"}, "strategy 'block'"),
        ({"config_groups__group_0__weights__group_size": 4}, "groups of 4 inputs"),
        ({"config_groups__group_0__weights__num_bits": 1}, "weights of 1 bits"),
        ({"config_groups__group_0__weights__num_bits": "four"}, "num_bits"),
        ({"config_groups__group_0__input_activations": {"dynamic": False}}, "inputs are quantized otherwise"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme has no counterpart"),
    ],
    ids=lambda value: next(iter(value)).rpartition("__")[2] if isinstance(value, dict) else "",
)
def test_schemes_without_a_counterpart_are_refused_before_weights_are_read(tmp_path, fields, reason):
    config = {
        "group_0": {
            "weights": {"num_bits": 4, "strategy": "group", "group_size": 16},
            "format": "pack-quantized",
        }
    }
    output = {
        "quant_method": "compressed-tensors",
        "config_groups": config,
        "quantization_status": "compressed",
    }
    tiny = {"model_type": "opt", "hidden_size": 32, "num_attention_heads": 2, "quantization_config": output}
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    assert stored_quantization_in(tmp_path).weights == "int4"
    amend(tmp_path, **{f"quantization_config__{name}": value for name, value in fields.items()})
    with pytest.raises(ModelError, match=reason):
        stored_quantization_in(tmp_path)


def test_groups_that_do_not_divide_are_refused_by_the_plan(tmp_path):
    compressed("opt-untied", tmp_path, "pack-quantized", **INT4)
    amend(tmp_path, quantization_config__config_groups__group_0__weights__group_size=40)
    with pytest.raises((PlanError, ValueError), match="groups of 40 do not divide the 32 inputs"):
        plan_of(tmp_path)


def test_scales_are_not_rounded_silently_and_inputs_in_int8_are_the_plans(tmp_path):
    compressed(
        "opt-untied",
        tmp_path,
        "int-quantized",
        num_bits=8,
        symmetric=True,
        strategy="channel",
        inputs=DYNAMIC,
    )
    assert read_model_spec(tmp_path).stored.activations == "int8-token"
    assert plan_of(tmp_path).low_bits.product == "int_mm"
    model = load_base(str(tmp_path), plan_of(tmp_path, "bfloat16"))
    with pytest.raises(ModelError, match=r"scales of .* are in float16, and would be rounded to bfloat16"):
        next(quantized_layers(model))[1].quantized  # noqa: B018 - is read there


# -- out -------------------------------------------------------------------------------------------------------------


@pytest.mark.crossed(slow=2)
@pytest.mark.parametrize(
    "form",
    [
        ("int4", "--weight-scales", "group", "--weight-group", 16),
        *(
            pytest.param(form, marks=pytest.mark.slow)
            for form in (
                ("int4", "--weight-scales", "group", "--weight-group", 16, "--zero-point"),
                ("int8", "--zero-point"),
                ("int8", "--weight-scales", "tensor"),
                ("int3",),
                ("float8_e4m3",),
            )
        ),
    ],
    ids=lambda form: " ".join(map(str, form)),
)
def test_qvalues_that_were_tuned_are_written_as_transformers_and_zosim_read_them(tmp_path, form):
    base = saved_model("opt-untied", tmp_path)
    for out, more in (("quantized", ("--save-as", "compressed-tensors")), ("numbers", ())):
        assert run_on(base, tmp_path, tmp_path / out, "--weight-format", *form, *more) == 0
    gradients = [
        [row["projected_grad"] for row in rows_of(tmp_path / out)] for out in ("quantized", "numbers")
    ]
    assert gradients[0] == gradients[1]
    (batch,) = batches(1)
    theirs, ours = loaded(tmp_path / "quantized"), loaded(tmp_path / "numbers")
    with torch.no_grad():
        # transformers, with compressed-tensors, multiplies by the same float32 numbers.
        logits = [model(input_ids=batch["input_ids"]).logits for model in (theirs, ours)]
    assert torch.equal(*logits)
    numbers, stored = dict(ours.named_parameters()), read_model_spec(tmp_path / "quantized").stored
    assert stored.weights == form[0]
    assert stored.full_range == (form[0].startswith("int") and "--zero-point" not in form)
    for name, layer in quantized_layers(
        load_base(str(tmp_path / "quantized"), plan_of(tmp_path / "quantized", "float32"))
    ):
        assert torch.equal(layer.quantized.values(torch.float32), numbers[name]), name


def test_a_kernel_that_takes_the_place_of_another_is_told_of(tmp_path, capsys):
    base = saved_model("opt-untied", tmp_path)
    declared = (
        "--weight-format",
        "float8_e4m3",
        "--activation-format",
        "float8-token",
        "--perturbation-bits",
        5,
    )
    assert run_on(base, tmp_path, tmp_path / "out", *declared) == 2
    assert "cpu has no product of e4m3 matrices (torch._scaled_mm)" in " ".join(
        capsys.readouterr().err.split()
    )
    assert run_on(base, tmp_path, tmp_path / "again", *declared, "--kernel-fallback") == 0
    assert "warning: cpu has no scaled_mm, which the plan counts on" in capsys.readouterr().err


def test_what_has_no_layout_is_refused_before_a_step(tmp_path, capsys):
    base = saved_model("opt-untied", tmp_path)
    for more, reason in (
        (("--weight-format", "float4_e2m1"), "compressed-tensors has no format for weights in float4_e2m1"),
        ((), "a plan without them has none"),
        (
            ("--weight-format", "int4", "--lora-rank", 2, "--lora-targets", "q_proj"),
            "what is tuned here lies beside them",
        ),
    ):
        assert run_on(base, tmp_path, tmp_path / "out", "--save-as", "compressed-tensors", *more) == 2
        assert reason in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_gpt2_is_resumed_from_a_checkpoint_of_its_transposed_layers(tmp_path, capsys):
    inputs = saved_model("gpt2", tmp_path), tmp_path / "data.jsonl"
    saved_lines(inputs[1])
    declared = ("--weight-format", "int4", "--checkpoint-every", 5)
    whole, run = tmp_path / "whole", tmp_path / "run"
    for out in (whole, run):
        assert zosim(*options(inputs, out, *declared)) == 0
    truncate(run, 7)
    capsys.readouterr()
    assert zosim("run", "--out", run, "--resume", "--no-launch", "--no-tensorboard") == 0
    assert "from the checkpoint of 5" in capsys.readouterr().err
    assert same(run, whole)
    assert (
        run_on(
            inputs[0],
            tmp_path,
            tmp_path / "out",
            "--weight-format",
            "int4",
            "--save-as",
            "compressed-tensors",
        )
        == 2
    )


@pytest.mark.crossed(quick=3, slow=5)
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("opt-untied", ("int8",)),
        ("gpt2", ("float4_e2m1", "--weight-scales", "group", "--weight-group", 16)),
        ("opt", ("int4", "--zero-point")),
        *(
            pytest.param(name, form, marks=pytest.mark.slow)
            for name, form in (
                ("opt", ("float4_e2m1",)),
                ("llama", ("float8_e5m2", "--weight-scales", "tensor")),
                ("roberta", ("int8",)),
                ("gpt2", ("int3", "--zero-point")),
            )
        ),
    ],
)
def test_qvalues_of_any_format_are_written_as_zosim_alone_reads_them(tmp_path, name, form, capsys):
    base, out = saved_model(name, tmp_path), tmp_path / "out"
    for folder, how in ((out, "zosim"), (tmp_path / "numbers", "numbers")):
        assert run_on(base, tmp_path, folder, "--weight-format", *form, "--save-as", how) == 0
    with pytest.raises(OSError, match="no file named"):  # not with weights of its own making
        loaded(out)
    numbers = dict(loaded(tmp_path / "numbers").named_parameters())
    model = load_base(str(out), plan_of(out, "float32"))
    assert weights_digest(model) == read_header(out)["finished"]["digest"]
    for key, layer in quantized_layers(model):
        assert torch.equal(layer.numbers(torch.float32), numbers[key]), key
    more = tmp_path / "more"
    (out / OWN).rename(out / EARLIER_WEIGHTS_NAME)
    assert run_on(out, tmp_path, more, "--save-as", "zosim-codes") == 0  # its earlier name, as the file's
    assert "--save-as zosim-codes is now --save-as zosim" in capsys.readouterr().err
    (out / EARLIER_WEIGHTS_NAME).rename(out / OWN)
    assert zosim("replay", more, "--model", out, "-o", tmp_path / "again") == 0
    assert (tmp_path / "again" / OWN).read_bytes() == (more / OWN).read_bytes() != (out / OWN).read_bytes()
    capsys.readouterr()


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize(
    ("form", "part", "damage"),
    [
        (("float8_e5m2",), "weight", lambda qvalues: qvalues[3].fill_(0x7D)),
        (("int4",), "weight", lambda qvalues: qvalues[0].fill_(0x88)),
    ],
    ids=["not a number", "beyond the grid"],
)
def test_qvalues_that_stand_for_nothing_are_refused(tmp_path, form, part, damage):
    base, out = saved_model("opt-untied", tmp_path), tmp_path / "out"
    assert run_on(base, tmp_path, out, "--weight-format", *form, "--save-as", "zosim") == 0
    tensors = load_file(out / OWN)
    damage(tensors[f"{LAYER}.{part}"])
    save_file(tensors, out / OWN)
    with pytest.raises(ModelError, match=f"a value of {LAYER} is not valid in {form[0]}"):
        weights_digest(load_base(str(out), plan_of(out, "float32")))


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_that_slice_a_quantized_directory_are_one_that_accumulates(tmp_path):
    base, lines = tmp_path / "model", tmp_path / "data.jsonl"
    compressed("opt-untied", base, "pack-quantized", dtype=torch.float32, **INT4)
    saved_lines(lines)
    command = f"run --model {base} --data {lines} --steps 4 --batch 4 --threads 1 --no-tensorboard".split()
    command += ("--lr", 1e-2, "--save-as", "compressed-tensors")
    two, one = tmp_path / "two", tmp_path / "one"
    assert (
        zosim(*command, "--method", "ddp", "--residency", "offloaded", "--transfers", "sliced", "--out", two)
        == 0
    )
    assert zosim(*command, "--accumulate", 2, "--no-launch", "--residency", "resident", "--out", one) == 0
    drop = [[{k: v for k, v in row.items() if k != "seconds"} for row in rows_of(out)] for out in (one, two)]
    assert drop[0] == drop[1]
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_in_another_format_than_its_files_is_resumed_and_replayed(tmp_path):
    inputs = tmp_path / "model", tmp_path / "data.jsonl"
    model_of("opt", torch.float16).save_pretrained(inputs[0])
    saved_lines(inputs[1])
    declared = ("--weight-format", "int8", "--dtype", "float32", "--checkpoint-every", 5)
    declared += ("--lora-rank", 2, "--lora-targets", "q_proj,fc2")
    whole, run = tmp_path / "whole", tmp_path / "run"
    for out in (whole, run):
        assert zosim(*options(inputs, out, *declared)) == 0
    truncate(run, 7)
    assert zosim("run", "--out", run, "--resume", "--no-launch", "--no-tensorboard") == 0
    assert same(run, whole)
    assert zosim("replay", run, "--model", inputs[0], "-o", tmp_path / "again") == 0
    name = Path("adapter") / "adapter_model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (whole / name).read_bytes()


# -- memory ----------------------------------------------------------------------------------------------------------


def own_bytes():
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index("RssAnon:") + 1]) * 1024


@pytest.mark.crossed(quick=4, slow=2)
@pytest.mark.parametrize("files", ["16 bits", "quantized", "another format", "another format, not quantized"])
def test_weights_become_qvalues_layer_by_layer_and_are_never_there_twice(tmp_path, files):
    """What the process takes beyond the program's buffers is a layer's, not the model's."""
    adapters = LoRA(rank=2, target_modules=("q_proj",)) if "another" in files else None
    qvalues = {} if "not quantized" in files else {"weights": "int4", "scales": "group", "group_elements": 16}
    sizes = {"hidden_size": 512, "ffn_dim": 2048, "word_embed_proj_dim": 512, "num_hidden_layers": 6}
    if files == "quantized":
        compressed("opt", tmp_path, "pack-quantized", changed=sizes, **INT4)
        plan = plan_of(tmp_path)
    else:
        model_of("opt", torch.float16, **sizes).save_pretrained(tmp_path)
        plan = Plan(
            model=read_model_spec(tmp_path, trainable=adapters or "all"),
            placement=Placement(topology="test", devices=("cpu0",)),
            batch=3,
            seq=9,
            weights={"dtype": "float16" if adapters is None else "float32"},
            low_bits=qvalues,
        )

    def session():
        # Adapters go on with what a run left.
        run = None if adapters is None else tmp_path / "run"
        return Session(plan, load_base(str(tmp_path), plan, adapters=adapters, run=run))

    if qvalues:
        session().close()  # what libraries take when they are first used
    before, seen, ended = own_bytes(), [], threading.Event()

    def watch():
        while not ended.wait(0.001):
            seen.append(own_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with session() as opened:
        ended.set()
        watcher.join()
        buffers = sum(buffer.size_bytes for buffer in opened.program.buffers)
    largest = 512 * 2048
    # One layer's quantized values and levels, and pieces of it in float32; 16-bit weights of the model are eighteen layers as large.
    assert max(seen) - before < buffers + 8 * largest
    copied = 2 if qvalues else 2 * 4
    assert copied * plan.model.num_parameters > buffers + 8 * largest + 4 * largest
