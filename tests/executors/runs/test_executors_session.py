from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from costmodel.models.configs import LoRA
from executors.models.loading import load_model
from executors.models.lora import attach_lora, merge_lora
from executors.models.weight_files import weights_digest
from executors.runs.runlog import HEADER_NAME, STEPS_NAME, RunLog
from executors.runs.session import Session
from executors.steps.memory import LiveTensors
from tests.support.distributed import OFFLOADED
from tests.support.reference_mezo import differing
from tests.support.tiny import CONFIGS, batches, model_of, plan_of
from topology.errors import ModelError, PlanError, RunError
from zosim.program.instructions import Space, Stream


def trained(placement, *, steps=4, model=None, **options):
    model = model or model_of("opt")
    plan = plan_of(model, **placement)
    with Session(plan, model, learning_rate=1e-3, weight_decay=0.1, seed=5, **options) as session:
        records = [session.step(batch) for batch in batches(steps)]
        session.flush()
    return records, model


def test_losses_and_logits_are_those_of_the_whole_model_at_the_present_weights():
    model = model_of("opt")
    with Session(plan_of(model, **OFFLOADED), model, learning_rate=1e-2) as session:
        batch = batches(1)[0]
        session.step(batch)
        loss, logits = session.loss(batch), session.logits(batch)
        with session.unsharded_model() as whole, torch.no_grad():
            output = whole(**batch)
        assert loss == output.loss.item()
        assert torch.equal(logits, output.logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_is_loaded_by_transformers_with_the_same_bits(tmp_path, dtype):
    model = model_of("opt", getattr(torch, dtype))
    with Session(plan_of(model, dtype=dtype, **OFFLOADED), model, learning_rate=1e-2) as session:
        session.step(batches(1)[0])
        session.save_pretrained(tmp_path)
        state = session.state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    assert differing(model, loaded) == []
    assert list(state) == [name for name, _ in model.named_parameters()]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    assert weights_digest(load_model(tmp_path, dtype=dtype)) == weights_digest(model)


def test_transfer_in_a_narrower_format_loses_bits_but_runs():
    exact, _ = trained(OFFLOADED)
    for transfer in ("bfloat16", "float16", "float8_e4m3"):
        lossy, _ = trained(OFFLOADED | {"residency": {"blocks": "offloaded", "transfer_dtype": transfer}})
        assert all(r.loss == pytest.approx(e.loss, rel=0.1) for r, e in zip(lossy, exact, strict=True))
        assert lossy[-1].loss != exact[-1].loss


def test_autocast_and_chunked_loss_stay_close():
    exact, _ = trained(OFFLOADED)
    cast, _ = trained(OFFLOADED | {"forward": {"compute_dtype": "bfloat16"}})
    chunked, _ = trained(
        {
            "residency": {"blocks": "offloaded"},
            "schedule": {"update": "delayed"},
            "forward": {"loss_chunk_tokens": 4},
        }
    )
    assert cast[0].loss == pytest.approx(exact[0].loss, rel=1e-2)
    assert cast[0].loss != exact[0].loss
    assert chunked[0].loss == pytest.approx(exact[0].loss, rel=1e-6)


def test_loss_in_float64_resolves_smaller_differences():
    model = model_of("opt", torch.float64)
    plan = plan_of(model, dtype="float64", estimator={"epsilon": 1e-6})
    with Session(plan, copy.deepcopy(model), loss_dtype="fp64") as session:
        fine = session.step(batches(1)[0])
    with Session(plan, model) as session:
        coarse = session.step(batches(1)[0])
    assert fine.losses_plus[0] == pytest.approx(coarse.losses_plus[0], rel=1e-6)
    assert fine.losses_plus[0] != torch.tensor(fine.losses_plus[0], dtype=torch.float32).item()


def test_tf32_is_refused_on_a_cpu():
    model = model_of("opt")
    with pytest.raises(PlanError, match="tf32"):
        Session(plan_of(model, forward={"compute_dtype": "tf32"}), model)


def test_a_loss_that_is_not_a_number_ends_the_run_with_advice():
    model = model_of("opt")
    with Session(plan_of(model), model) as session:
        batch = batches(1)[0]
        with pytest.raises(RunError, match="projected gradient is") as caught:
            session.step(batch | {"labels": torch.full_like(batch["labels"], -100)})
    assert "without labels" in caught.value.hint


def test_spans_bear_the_names_of_their_instructions():
    model = model_of("opt")
    with Session(plan_of(model, **OFFLOADED), model) as session:
        for batch in batches(4):
            session.step(batch)
        timeline = session.timeline()
    expected = [i.id for i in session.program.step]
    for step in range(4):
        assert sorted(
            s.instruction for s in timeline.spans if s.phase == "step" and s.step == step
        ) == sorted(expected)
    assert {span.stream for span in timeline.spans} == {Stream.COMPUTE, Stream.H2D, Stream.D2H}
    assert timeline.step_time_s > 0
    assert timeline.first_periodic_step == 2
    for before, after in zip(session.program.step, session.program.step[1:], strict=False):
        if before.stream == after.stream:
            spans = {s.instruction: s for s in timeline.spans if s.step == 3 and s.phase == "step"}
            assert spans[before.id].end_s <= spans[after.id].start_s


@pytest.mark.usefixtures("live_tensors")
def test_memory_has_an_arena_and_live_tensors():
    model = model_of("opt")
    with Session(plan_of(model, **OFFLOADED), model) as session:
        for batch in batches(3):
            session.step(batch)
        memory = session.memory()
        declared = {b.name: b.size_bytes for b in session.program.buffers}
    assert memory.arena_bytes[Space.DEVICE, "staging buffers"] == sum(
        v for k, v in declared.items() if k.startswith("staging")
    )
    assert memory.host_bytes == sum(v for k, v in declared.items() if k.startswith("host."))
    logits = 3 * 9 * 96 * 4
    assert logits < memory.live_bytes < 50 * logits
    assert memory.peak_rss_bytes >= memory.rss_bytes > 0


def test_tracker_counts_known_allocations():
    kept = torch.zeros(1000)
    with LiveTensors() as tracker:
        first = torch.zeros(1024)  # 4096 bytes
        view = first[10:]
        second = first + 1  # 4096 more
        assert tracker.live_bytes == 8192
        del first
        assert tracker.live_bytes == 8192  # the view keeps it
        del view
        assert tracker.live_bytes == 4096
        kept.add_(1)  # nothing new
        kept.view(10, 100).t()
        del second
    assert (tracker.live_bytes, tracker.peak_bytes) == (0, 8192)


def test_log_and_header(tmp_path):
    model = model_of("opt")
    plan = plan_of(model, estimator={"num_perturbations": 2, "difference": "forward"})
    with Session(plan, model, seed=3) as session, RunLog(tmp_path, session.header) as log:
        for batch in batches(2):
            log.append(session.step(batch).rows())
    rows = [json.loads(line) for line in (tmp_path / STEPS_NAME).read_text().splitlines()]
    assert [(row["step"], row["perturbation"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert rows[0]["loss_minus"] is None
    assert rows[0]["projected_grad"] == pytest.approx(
        (rows[0]["loss_plus"] - rows[0]["loss_base"]) / 1e-3, rel=1e-3
    )
    header = json.loads((tmp_path / HEADER_NAME).read_text())
    assert header["base_digest"] == weights_digest(model_of("opt"))
    assert header["seed"] == 3
    with pytest.raises(RunError, match="already"):
        RunLog(tmp_path, {})


def test_pickled_weights_are_refused_with_the_remedy(tmp_path):
    CONFIGS["opt"].save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    with pytest.raises(ModelError, match="pickle") as caught:
        load_model(tmp_path)
    assert "save_pretrained" in caught.value.hint


def test_missing_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no config"):
        load_model(tmp_path)
    with pytest.raises(ModelError, match="cannot load"):
        load_model("nobody/nothing-of-the-kind")


def test_random_weights_need_the_configuration_alone(tmp_path):
    CONFIGS["opt"].save_pretrained(tmp_path)
    first, second = (load_model(tmp_path, random_weights=True, seed=1) for _ in range(2))
    assert differing(first, second) == []


def test_merged_adapters_give_a_plain_model_with_the_same_outputs(tmp_path):
    model, plain = model_of("gpt2"), model_of("gpt2")
    attach_lora(model, LoRA(rank=2, target_modules=("c_attn",), seed=1))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    (batch,) = batches(1)
    with torch.no_grad():
        adapted = model(**batch).logits
        merge_lora(model)
        merged = model(**batch).logits
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert torch.allclose(adapted, merged, atol=1e-5)
    assert not torch.allclose(plain(**batch).logits, merged, atol=1e-2)


def test_adapters_on_a_linear_that_does_not_exist_are_refused():
    with pytest.raises(ModelError, match="nothing_proj"):
        attach_lora(model_of("opt"), LoRA(rank=2, target_modules=("nothing_proj",)))
