"""Evidence: made of a run, checked anew, refused when changed; nothing private; what a calibration learns from it."""

from __future__ import annotations

import json
import platform
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from costmodel.devices.datasheet import datasheet_profile
from costmodel.models.configs import spec_of_config
from costmodel.rates.calibration import fit_profile
from topology import load_preset
from topology.checksummed import with_digest
from zosim.applications.evidence.anonymous import MACHINE, refuse_private
from zosim.applications.evidence.command import app
from zosim.applications.evidence.file import Evidence, EvidenceError, MeasuredRun, check, evidence_of
from zosim.applications.evidence.learning import learned, measurements_of
from zosim.planning.predict import PlannedRun
from zosim.plans import Placement, Plan, Residency, Schedule
from zosim.timeline import Timeline

CONFIG = {
    "model_type": "opt",
    "hidden_size": 64,
    "ffn_dim": 256,
    "word_embed_proj_dim": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 64,
}
SLOWER = 1.25
"""How much longer everything takes than the profile says, in the runs made up here."""


def plan_of(topology="cpu-laptop", device="cpu0", **fields):
    return Plan(
        model=spec_of_config(CONFIG, name="/home/somebody/secret-project"),
        placement=Placement(topology=topology, devices=(device,)),
        batch=2,
        seq=32,
        **fields,
    )


def planned_run_of(topology=None, **fields):
    topology = topology or load_preset("cpu-laptop")
    return PlannedRun(plan_of(topology.name, **fields), topology, datasheet_profile(topology, "cpu0"))


def run_of(planned, folder, *, times=SLOWER, num_steps=6, num_threads=8):
    """Write the directory of a run in which everything takes `times` as long as predicted."""
    folder.mkdir()
    simulated = planned.simulated(num_steps=num_steps).expanded()
    data = json.loads(simulated.to_json()) | {"source": "measured", "tokens_per_step": 20.5}
    for span in data["spans"]:
        span |= {"start_s": span["start_s"] * times, "end_s": span["end_s"] * times, "limiter": ""}
    (folder / "timeline.json").write_text(json.dumps(data))
    planned.plan.save(folder / "plan.json")
    planned.programs.save(folder / "program.json")
    header = {"version": 1, "num_threads": num_threads, "torch": "2.13.0", "trainable": ["secret.weight"]}
    (folder / "run.json").write_text(json.dumps(header))
    return folder


@pytest.fixture
def made(tmp_path):
    planned = planned_run_of()
    return evidence_of(run_of(planned, tmp_path / "run"), planned)


@pytest.fixture
def file(made, tmp_path):
    made.save(tmp_path / "evidence.json")
    return tmp_path / "evidence.json"


def test_evidence_is_read_back_and_holds(made, file):
    found = Evidence.load(file)
    assert found == made
    findings = check(found)
    assert all(finding.holds for finding in findings), findings
    assert len(findings) == 13
    assert found.measurement.step_time_s == pytest.approx(SLOWER * found.prediction.step_time_s)
    assert found.comparison().step_error == pytest.approx(1 / SLOWER - 1)


def test_nothing_private_is_in_it(file):
    text = file.read_text()
    for word in ("somebody", "secret", str(file.parent)):
        assert word not in text
    assert "opt-" in text


def test_any_other_machine_loses_its_names_and_still_predicts_the_same(tmp_path):
    preset = load_preset("cpu-laptop")
    renamed = {node.id: f"acme-{node.id}" for node in preset.nodes}
    private = preset.model_copy(
        update={
            "name": "rack-7.acme.example",
            "description": "bought with a grant",
            "nodes": tuple(
                node.model_copy(
                    update={
                        "id": renamed[node.id],
                        "label": "in the basement",
                        "host": renamed.get(node.host or ""),
                    }
                )
                for node in preset.nodes
            ),
            "links": tuple(
                link.model_copy(
                    update={
                        "id": f"acme-{link.id}",
                        "source": renamed[link.source],
                        "target": renamed[link.target],
                    }
                )
                for link in preset.links
            ),
        }
    )
    topology = private
    plan = plan_of("rack-7.acme.example", "acme-cpu0")
    planned = PlannedRun(plan, topology, datasheet_profile(topology, "acme-cpu0"))
    evidence = evidence_of(run_of(planned, tmp_path / "run"), planned)
    evidence.save(tmp_path / "evidence.json")
    text = (tmp_path / "evidence.json").read_text()
    for word in ("acme", "basement", "grant", "rack-7"):
        assert word not in text
    assert evidence.topology.name == MACHINE
    assert evidence.prediction.step_time_s == pytest.approx(planned.prediction.step_time_s)
    assert all(finding.holds for finding in check(Evidence.load(tmp_path / "evidence.json")))


@pytest.mark.parametrize(
    "text", ['{"source": "/home/ann/rates.json"}', '"see C:\\\\Users\\\\ann"', '"~/x/y"']
)
def test_a_path_is_refused(text):
    with pytest.raises(EvidenceError, match="path"):
        refuse_private(text, EvidenceError)


def test_the_machines_own_name_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "anns-laptop")
    with pytest.raises(EvidenceError, match="anns-laptop"):
        refuse_private('"measured on anns-laptop"', EvidenceError)
    refuse_private('"measured on anns-laptop-2"', EvidenceError)
    monkeypatch.setattr(platform, "node", lambda: "host0")
    refuse_private('{"id": "host0"}', EvidenceError)


def changed(file, change, *, resign=True):
    content = json.loads(file.read_text())
    content.pop("sha256")
    change(content)
    declared = with_digest(content)["sha256"] if resign else "0" * 64
    file.write_text(json.dumps(content | {"sha256": declared}))
    return file


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(format="zosim-profile"), "is not an evidence file"),
        (lambda c: c.update(version=2), "of version 2, but this zosim reads version 1"),
        (lambda c: c.update(plan=None), "plan"),
        (lambda c: c.pop("profile"), "profile: missing"),
        (lambda c: c["timeline"].update(source="simulated"), "simulated, not measured"),
        (lambda c: c["timeline"]["spans"][0].update(end_s=-1.0), "starts at 0.0 s and ends at -1.0 s"),
        (lambda c: c["prediction"].update(step_time_s=-1.0), "step_time_s"),
    ],
)
def test_what_is_no_evidence_is_refused_readably(file, change, words):
    with pytest.raises(EvidenceError) as caught:
        Evidence.load(changed(file, change))
    assert words in caught.value.message


def test_a_newer_file_names_the_version_to_install(file):
    with pytest.raises(EvidenceError) as caught:
        Evidence.load(changed(file, lambda c: c.update(version=9, versions={"zosim": "3.0"})))
    assert caught.value.hint == "install zosim 3.0 or later"


def test_an_edit_is_seen_even_where_it_would_be_valid(file):
    changed(file, lambda c: c["prediction"].update(step_time_s=1.0), resign=False)
    with pytest.raises(EvidenceError, match="digest"):
        Evidence.load(file)


@pytest.mark.parametrize("text", ["", "[]", "{", '"text"'])
def test_what_is_no_json_object_is_refused(text, tmp_path):
    path = tmp_path / "evidence.json"
    path.write_text(text)
    with pytest.raises(EvidenceError) as caught:
        Evidence.load(path)
    assert "evidence make" in caught.value.hint


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize(
    ("change", "broken"),
    [
        (lambda c: c["prediction"].update(step_time_s=1.0), {"predicted step_time_s"}),
        (lambda c: c["prediction"].update(bottleneck="the moon"), {"predicted bottleneck"}),
        (lambda c: c["measurement"].update(step_time_s=1e-9), {"measured step_time_s"}),
        (lambda c: c["timeline"]["spans"][3].update(instruction="dance"), {"spans of no instruction"}),
        (lambda c: c["plan"].update(batch=4), {"programs"}),
    ],
)
def test_a_statement_that_does_not_follow_is_found_whoever_checksummed_it(file, change, broken):
    findings = check(Evidence.load(changed(file, change)))
    assert broken <= {finding.what for finding in findings if not finding.holds}


def test_a_run_learns_what_its_spans_say(made):
    measurements = measurements_of(made)
    assert measurements
    assert not any(
        measurement.contended for measurement in measurements
    )  # one stream: nothing runs beside it
    values = made.profile.values()
    fitted, report = fit_profile(measurements, made.profile)
    assert report.median_error < 0.02
    for constant in fitted.constants:
        if constant.name in report.identified and constant.is_rate:
            assert constant.value < values[constant.name]  # everything took longer
    again = PlannedRun(made.plan, made.topology, fitted, made.program_set).timeline.step_time_s
    before = abs(made.prediction.step_time_s - made.measurement.step_time_s)
    assert abs(again - made.measurement.step_time_s) < before / 2


def test_several_files_of_one_device_are_learned_from_together(file, made, tmp_path):
    planned = planned_run_of()
    longer = evidence_of(run_of(planned, tmp_path / "longer", num_steps=9), planned)
    longer.save(tmp_path / "longer.json")
    profile, report = learned([file, tmp_path / "longer.json"])
    assert len(report.residuals) == len(measurements_of(made)) + len(measurements_of(longer))
    assert profile.origin == "calibrated"


def test_what_does_not_hold_or_is_of_another_device_teaches_nothing(file, tmp_path):
    planned = planned_run_of()
    other = PlannedRun(
        planned.plan, planned.topology, datasheet_profile(planned.topology, "cpu0", num_threads=2)
    )
    evidence_of(run_of(other, tmp_path / "other", num_threads=2), other).save(tmp_path / "other.json")
    with pytest.raises(EvidenceError, match="with 2 threads"):
        learned([file, tmp_path / "other.json"])
    with pytest.raises(EvidenceError, match="failed its checks: predicted step_time_s"):
        learned([changed(file, lambda c: c["prediction"].update(step_time_s=1.0))])


def test_spans_that_met_others_are_marked_and_not_learned_from(tmp_path):
    offloaded = {"residency": Residency(blocks="offloaded"), "schedule": Schedule(update="delayed")}
    planned = planned_run_of(**offloaded)
    evidence = evidence_of(run_of(planned, tmp_path / "run"), planned)
    found = {measurement.name.split()[0]: measurement for measurement in measurements_of(evidence)}
    assert found["forward"].num_samples > 1
    spans = list(evidence.timeline.periodic_spans())
    shifted = [s.shifted(-0.9 * s.duration_s) if s.label == "forward" else s for s in spans]
    crowded = Timeline(evidence.timeline.program, "measured", evidence.timeline.num_steps, tuple(shifted))
    with_company = evidence.model_copy(update={"timeline": crowded})
    alone = sum(not measurement.contended for measurement in measurements_of(with_company))
    assert alone <= sum(not measurement.contended for measurement in measurements_of(evidence))


def test_measured_numbers_follow_from_the_spans(made):
    assert made.measurement == MeasuredRun.of(made.timeline)
    assert made.measurement.num_periodic_steps == len(made.timeline.periodic_steps)
    assert made.measurement.tokens_per_s == pytest.approx(20.5 / made.timeline.step_time_s)
    assert made.comparison().measured_tokens == 20.5
    assert MeasuredRun.of(replace(made.timeline, tokens_per_step=None)).tokens_per_s is None


def invoke(*arguments):
    group = typer.Typer(add_completion=False)
    group.add_typer(app, name="evidence")
    return CliRunner().invoke(group, ["evidence", *map(str, arguments)])


def test_the_commands_make_and_check(tmp_path):
    run, out = run_of(planned_run_of(), tmp_path / "run"), tmp_path / "evidence.json"
    result = invoke("make", run, "-o", out)
    assert result.exit_code == 0, result.exception
    assert "step time" in result.stdout
    result = invoke("check", out, "--json")
    assert result.exit_code == 0, result.exception
    data = json.loads(result.stdout)
    assert data["holds"]
    assert data["measured_inside_interval"]
    changed(out, lambda c: c["prediction"].update(step_time_s=1.0))
    result = invoke("check", out)
    assert result.exit_code == 1
    assert "DOES NOT HOLD" in result.stdout


def test_a_run_on_other_threads_than_predicted_is_refused(tmp_path):
    planned = planned_run_of()
    with pytest.raises(EvidenceError, match="used 4 threads, but the profile is for 8") as caught:
        evidence_of(run_of(planned, tmp_path / "run", num_threads=4), planned)
    assert "--threads 4" in caught.value.hint


def test_a_directory_without_a_run_is_refused(tmp_path):
    planned = planned_run_of()
    with pytest.raises(EvidenceError, match="no run's header at"):
        evidence_of(tmp_path, planned)
