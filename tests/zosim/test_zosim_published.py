"""Predictions against print: conventions, the closed form against the simulator, fits, intervals, answers."""

import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from costmodel.estimate import combine_terms
from studies.published.audit import audit, set_apart
from studies.published.baselines import neighbours, regression
from studies.published.cells import cells_of
from studies.published.commands import predict
from studies.published.constants import MEMORY, SPEED
from studies.published.conventions import UnknownRow, case_of, method_of
from studies.published.fitted_profile import (
    PublishedProfile,
    calibrate_on,
    known_cells,
    load_published_profile,
)
from studies.published.fitting import conformal_half_width, fit, refitted
from studies.published.grid import compiled
from studies.published.memory import parts_of
from studies.published.predicting import answers
from studies.published.rows import PublishedRow, read_rows, shipped_rows, write_rows
from topology.errors import ProfileError
from zosim.applications.published_code import as_published
from zosim.hardware.machine import Machine
from zosim.lowering import lower
from zosim.program.instructions import Stream
from zosim.program.operations import Forward, Perturb, Update
from zosim.simulators.closed_form import step_time_bound
from zosim.simulators.simulate import simulate

ROWS = [row for row in shipped_rows() if row["paper"] in ("ZO2", "DistZO2", "SparQ")]
"""Of the papers whose steps are simulated; QuZO's and ZOinfer's rows have tests of their own."""
BASE = {
    "paper": "ZO2", "table": "1", "model": "OPT-1.3B", "method": "ZO2", "gpus": "1", "gpu_type": "A100-80GB", "nodes": "1",
    "batch_size": "1", "seq_len": "2048", "precision": "fp32", "quantity": "throughput", "unit": "tokens/s", "value": "",
    "note": "", "cell": "r1c1",
}  # fmt: skip
DIST = {"paper": "DistZO2", "gpu_type": "H20-96GB", "precision": "fp16", "batch_size": "4"}


def row(**fields):
    return PublishedRow({**BASE, **fields}, "a test")


def app():
    found = typer.Typer()
    found.command()(predict)
    return found


def cell(**fields):
    cells, _, reasons = cells_of([row(**fields)])
    assert not reasons
    return cells[0]


@pytest.fixture(scope="module")
def profile():
    return load_published_profile()


@pytest.mark.parametrize(
    ("text", "described"),
    [
        ("MeZO", "MeZO"),
        ("DistZO2(PertP)", "ZO2+PertP"),
        ("ZO2+DDP", "ZO2+DDP"),
        ("DistZO2(2D)", "ZO2+PertP+DDP"),
        ("DistZO2(DDP+PertP)", "ZO2+DDP+PertP"),
        ("ZO2(no scheduler overlap)", "ZO2 (no scheduler overlap)"),
        ("ZO2(compress=fp8)", "ZO2 (compress=fp8)"),
    ],
)
def test_spellings_of_a_method_are_one(text, described):
    assert method_of(row(method=text)).describe() == described


@pytest.mark.parametrize("text", ["AdamW", "ZO2(no brakes)", "ZO2(compress=int3)", ""])
def test_an_unknown_method_is_refused_by_name(text):
    with pytest.raises(UnknownRow, match=r"method"):
        method_of(row(method=text))


def test_every_shipped_row_that_can_be_predicted_has_a_case():
    _, _, reasons = cells_of(ROWS)
    assert all(not ROWS[index].is_predictable for index in reasons)


def test_axes_follow_the_method_and_the_number_of_gpus():
    mesh = case_of(row(**DIST, method="DistZO2(DDP+PertP)", gpus="4")).plan.mesh
    assert (mesh.data, mesh.perturb, mesh.inner) == (2, 2, "data")
    assert case_of(row(**DIST, method="MeZO+DDP")).plan.mesh.world_size == 1
    with pytest.raises(UnknownRow, match="names no axis"):
        case_of(row(**DIST, gpus="2"))


def test_two_prints_of_one_measurement_are_one_cell():
    cells, of_row, _ = cells_of([row(value="10"), row(value="10", table="3"), row(value="12", table="6")])
    assert [item.values for item in cells] == [(10.0, 12.0)]
    assert [item["table"] for item in cells[0].rows] == ["1", "3", "6"]
    assert of_row[0] is of_row[2]


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize(
    "fields",
    [
        {"method": "MeZO"},
        {"method": "ZO2"},
        {"method": "ZO2", "precision": "fp16", "model": "OPT-2.7B"},
        {"method": "ZO2(no scheduler overlap)"},
        {"method": "ZO2(no efficient update)"},
        {"method": "ZO2(compress=fp8)", "precision": "amp-bf16"},
        {**DIST, "method": "ZO2"},
    ],
    ids=str,
)
def test_the_closed_form_is_the_recurrence_and_the_simulator(fields, profile):
    found = cell(**fields)
    machine = found.machine(profile.fit(found.row["paper"], "speed").values)
    seconds = float(found.compiled.step_s([machine])[0])
    assert seconds == pytest.approx(step_time_bound(found.program, machine), rel=1e-9)
    # Streams that meet share the device for instants; nothing else is shared by one rank.
    assert simulate(found.program, machine).step_time_s == pytest.approx(seconds, rel=0.005)


def test_allocations_stop_the_kernels_in_the_closed_form_too(profile):
    found = cell(method="ZO2(no reusable memory)")
    machine = found.machine(profile.fit("ZO2", "speed").values)
    seconds = float(found.compiled.step_s([machine])[0])
    assert seconds > step_time_bound(found.program, machine)
    # A lower bound: what waits for an allocation in turn waits longer.
    assert seconds <= simulate(found.program, machine).step_time_s * (1 + 1e-9) <= 1.15 * seconds


def test_sets_of_constants_beside_the_first_give_the_derivative(profile):
    found = cell(method="ZO2")
    values = profile.fit("ZO2", "speed").values
    for name in values:
        changed = {**values, name: values[name] * 1.001}
        beside = found.predictions([values, changed])[1]
        assert beside == pytest.approx(found.predictions([changed])[0], rel=1e-5), name


def test_a_rank_of_one_sign_makes_two_perturbations_and_a_rank_of_both_three():
    counts = {}
    for method, gpus in (("DistZO2(PertP)", "2"), ("DistZO2(DDP)", "2")):
        program = cell(**DIST, method=method, gpus=gpus).program
        mine = [item for item in program.step if item.segment == "block.1"]
        forwards = sum(isinstance(item.op, Forward) for item in mine)
        counts[forwards] = sum(isinstance(item.op, Perturb) and item.work.num_normals > 0 for item in mine)
    assert counts == {1: 2, 2: 3}


def test_updates_of_one_paper_have_weight_decay_and_of_the_other_one_temporary():
    """Passes over 16-bit parameters: z (drawn), then 12 with weight decay and 5 without; a perturbation has 7."""
    for fields, passes in (({"precision": "fp16"}, 12), (DIST, 5)):
        found = cell(**fields, method="MeZO")
        group = found.case.plan.model.param_group("block.1")
        works = {
            type(item.op): item.work
            for item in found.program.step
            if isinstance(item.op, Update | Perturb) and item.op.param_group == group.name
        }
        assert works[Update].param_pass_bytes == passes * 2 * group.num_parameters
        assert works[Perturb].param_pass_bytes == 7 * 2 * group.num_parameters
        assert works[Update].num_normals == works[Perturb].num_normals == group.num_parameters


@pytest.mark.slow
def test_the_widest_model_has_a_pace_of_its_own_whatever_bounds_it(profile):
    values = profile.fit("ZO2", "speed").values
    slower = {**values, "pace_widest": values["pace_widest"] / 1.25}
    for fields in (
        {"precision": "fp32"},  # products
        {"precision": "fp16"},  # copies
        {"precision": "amp-fp16", "method": "ZO2(compress=fp8)"},  # passes over parameters
        {"precision": "fp32", "method": "ZO2(no reusable memory)"},
    ):
        widest = cell(model="OPT-175B", **fields).predictions([values, slower])
        assert widest[0] / widest[1] == pytest.approx(1.25, rel=0.02), (
            fields
        )  # casts have the data sheet's rate
        other = cell(model="OPT-66B", **fields).predictions([values, slower])
        assert other[0] == other[1]


def test_uploads_that_are_not_prefetched_take_longer(profile):
    found = cell(**DIST, method="DistZO2(2D)", gpus="4", model="OPT-6.7B", seq_len="8192")
    plan = found.case.plan
    machine = found.machine(profile.fit("DistZO2", "speed").values)
    hidden = compiled(as_published(lower(plan), plan, prefetches=True)).step_s([machine])[0]
    uploads = sum(item.work.copy_bytes for item in found.program.step if item.label == "upload")
    waiting = found.compiled.step_s([machine])[0]
    assert waiting - hidden > 0.9 * uploads / machine.profile.values()["copy_h2d_bandwidth"]
    assert found.group.endswith("uploads not hidden")
    at_2048 = cell(**DIST, method="DistZO2(2D)", gpus="4", model="OPT-6.7B")
    assert at_2048.group.endswith("uploads hidden")


def test_an_upload_begins_behind_the_launches_of_the_block_before_it(profile):
    found = cell(method="ZO2", precision="fp16", model="OPT-13B")
    step = found.program.step
    upload = next(item for item in step if item.id == "block.2/upload")
    assert "block.0/restore[q0]" in {edge.instruction for edge in upload.after}
    computed = [item for item in step if item.segment == "block.1" and item.stream is Stream.COMPUTE]
    assert upload.work.num_kernels == sum(item.work.num_kernels for item in computed) > 200
    # The step is bound by copies: it takes what all of them take one by one, and the launches between them.
    values = profile.fit("ZO2", "speed").values
    copies = sum(item.work.copy_bytes for item in step if item.label == "upload")
    launches = sum(item.work.num_kernels for item in step if item.label == "upload")
    least = copies / values["copy_rate"] + launches * values["kernel_s"]
    assert least < found.amount / found.predictions([values])[0] < 1.05 * least


def test_launches_that_a_copy_waits_for_take_the_host_as_long_as_kernels_do():
    terms = {"copy": 3.0, "kernels": 1.0, "dispatch": 2.0}
    assert combine_terms(terms, "gpu") == 5.0
    assert combine_terms({**terms, "kernels": 4.0}, "gpu") == 7.0


def test_fused_attention_works_on_padded_heads():
    for model, width in (("OPT-1.3B", 64), ("OPT-2.7B", 96), ("OPT-6.7B", 128)):
        step = cell(**DIST, method="MeZO", model=model).program.step
        assert {part.head_dim for item in step for part in item.work.attention} == {width}
    stored = cell(method="MeZO", model="OPT-2.7B").program.step
    assert {part.head_dim for item in stored for part in item.work.attention} == {80}


def test_autocast_casts_weights_once_a_visit_and_no_table_that_is_looked_up():
    step = cell(method="ZO2(compress=none)", precision="amp-fp16").program.step
    pass_bytes = {item.id: item.work.param_pass_bytes for item in step if isinstance(item.op, Forward)}
    weights = cell().case.plan.model.param_group("block.1").num_parameters
    assert pass_bytes["block.1/forward[q0+]"] == 6 * weights
    assert pass_bytes["block.1/forward[q0-]"] == pass_bytes["embed/forward[q0+]"] == 0
    assert pass_bytes["head/forward[q0+]"] > 0


def test_transfers_alone_scale_with_the_lanes_less_the_exchange(profile):
    values = profile.fit("DistZO2", "speed").values
    fields = {
        **DIST,
        "gpus": "4",
        "batch_size": "",
        "seq_len": "",
        "quantity": "upload_rate",
        "unit": "1e9 params/s",
        "model": "OPT-30B",
    }
    plain, sliced = (
        cell(**fields, method=method).predictions([values])[0] for method in ("plain", "CommOpt")
    )
    assert 3 < sliced / plain < 4
    assert plain == pytest.approx(values["host_upload_rate"] / 4 / 2 / 1e9, rel=0.02)


def test_constants_are_few_and_within_their_bounds(profile):
    assert len(SPEED["ZO2"]) <= 12
    assert max(len(found) for found in (SPEED["DistZO2"], *MEMORY.values())) <= 8
    for found in profile.fits:
        fitted = {item.name: item for item in (SPEED if found.domain == "speed" else MEMORY)[found.paper]}
        for constant in found.constants:
            assert constant.low <= constant.value <= constant.high <= fitted[constant.name].high * (1 + 1e-9)
            assert constant.identified_by


def test_memory_of_a_resident_plan_holds_its_weights_and_of_an_offloaded_one_three_blocks():
    resident, offloaded = (parts_of(cell(method=method).case) for method in ("MeZO", "ZO2"))
    weights = cell().case.plan.model.num_parameters * 4
    assert weights <= resident.kept < 1.001 * weights
    assert offloaded.kept < 0.25 * weights


def test_what_is_printed_as_out_of_memory_is_predicted_so_and_nothing_else_is(profile):
    rows = [item for item in ROWS if item.kind in ("memory", "throughput")]
    rows = [item for item in rows if item.is_out_of_memory or item.kind == "memory"]
    for item, answer in zip(rows, answers(rows, profile), strict=True):
        assert answer.note.startswith("out of memory") == item.is_out_of_memory, item.place
        assert (answer.predicted is None) == (item.kind == "throughput"), item.place


def test_rows_that_cannot_be_predicted_say_why(profile):
    reported = answers(
        [row(quantity="accuracy"), row(model="OPT-1T"), row(gpus="x"), row(paper="Elsewhere")], profile
    )
    assert all(answer.predicted is None and answer.note for answer in reported)
    assert reported[0].columns()["predicted"] == ""


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"nodes": "two"}, "nodes"),
        ({"batch_size": "1.5"}, "batch_size"),
        ({"batch_size": "9" * 5000}, "batch_size"),
        ({"seq_len": ""}, "seq_len"),
        ({"unit": "tokens/h"}, "unit"),
        ({"quantity": "memory", "unit": "GB"}, "unit"),
        ({"precision": "fp4"}, "precision"),
        ({"gpu_type": "B200"}, "preset"),
        ({"model": ""}, "model"),
        ({"quantity": ""}, "not predicted"),
    ],
)
def test_an_odd_string_leaves_its_row_alone_and_is_named(fields, word, profile):
    reported = answers([row(**fields), row()], profile)
    assert reported[0].predicted is None
    assert word in reported[0].note
    assert reported[1].predicted is not None


def test_what_a_row_prints_does_not_change_its_prediction(profile):
    reported = answers([row(), row(value="n/a"), row(value="1")], profile)
    assert reported[0] == reported[1] == reported[2]


def test_intervals_enclose_their_prediction(profile):
    answer = answers([row()], profile)[0]
    assert 0 < answer.low < answer.predicted < answer.high
    assert answer.bottleneck == "matrix products"


def test_an_interval_holds_what_no_row_decides(profile):
    values = profile.fit("ZO2", "speed").values
    names = ("product_rate_fp32", "product_rate_fp32_wide")
    found = answers([row(model="OPT-30B")], profile)[0]
    for name in names:
        ends = {**values, **dict.fromkeys(names, values[name])}
        assert found.low < cell(model="OPT-30B").predictions([ends])[0] < found.high
    decided = answers([row(model="OPT-6.7B")], profile)[0]
    assert decided.high / decided.low < found.high / found.low


def test_a_fit_recovers_constants_from_its_own_predictions(profile):
    known = [item for item in known_cells(cells_of(ROWS)[0], "DistZO2", "memory") if item.value is not None]
    values = profile.fit("DistZO2", "memory").values
    rows = [
        PublishedRow({**item.row.fields, "value": f"{parts_of(item.case).device_bytes(values) / 2**20:.6f}"})
        for item in known
    ]
    solution = fit(cells_of(rows)[0], "DistZO2", "memory")
    # The prior pulls by what its interval says against data that agree to NOISE.
    assert np.abs(solution.residuals).max() < 0.01
    for name, value in values.items():
        assert solution.values[name] == pytest.approx(value, rel=0.1), name


def test_leaving_a_setting_out_never_flatters():
    known = [item for item in known_cells(cells_of(ROWS)[0], "DistZO2", "memory") if item.value is not None]
    solution = fit(known, "DistZO2", "memory")
    assert np.abs(solution.held_out()).sum() > np.abs(solution.residuals).sum()


@pytest.mark.slow
def test_a_refit_without_a_group_is_a_fit_to_the_others():
    known = [item for item in known_cells(cells_of(ROWS)[0], "DistZO2", "memory") if item.value is not None]
    solution = fit(known, "DistZO2", "memory")
    found = refitted(solution, "memory", lambda item: item.row["model"])
    for name in ("OPT-2.7B", "OPT-30B"):
        rest = fit([item for item in known if item.row["model"] != name], "DistZO2", "memory")
        for place, item in enumerate(solution.cells):
            if item.row["model"] == name:
                predicted = parts_of(item.case).device_bytes(rest.values) / 2**20
                # Derivatives are those of the optimum with all rows; the fit stops at 1e-4 itself.
                assert found[place] == pytest.approx(np.log(predicted / item.printed), abs=0.004)
    assert np.abs(found).sum() > np.abs(solution.residuals).sum()


def test_a_conformal_half_width_covers_new_draws():
    generator = np.random.default_rng(7)
    covered = [
        abs(generator.normal()) <= conformal_half_width(generator.normal(size=30).tolist())
        for _ in range(2000)
    ]
    # Exactly 0.903 in expectation; four standard errors of 2000 draws.
    assert abs(np.mean(covered) - 0.903) < 4 * np.sqrt(0.9 * 0.1 / 2000)


def test_a_profile_comes_back_and_an_edited_one_is_refused(tmp_path, profile):
    path = tmp_path / "profile.json"
    profile.save(path)
    assert load_published_profile(path) == profile
    content = json.loads(path.read_text())
    content["fits"][0]["num_cells"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match="damaged"):
        load_published_profile(path)


def test_rows_without_values_cannot_be_fitted():
    with pytest.raises(ProfileError, match="no row can be fitted"):
        calibrate_on([row()])


def test_a_domain_without_rows_is_said_to_be_missing():
    reported = answers([row()], PublishedProfile(fits=()))
    assert "fitted without rows" in reported[0].note


def test_baselines_find_a_power_law():
    law = {"OPT-1.3B": "1000", "OPT-2.7B": "500", "OPT-13B": "100"}
    cells, _, _ = cells_of([row(model=name, value=value) for name, value in law.items()])
    requested = [cell(model="OPT-6.7B")]
    assert 100 < neighbours(cells, requested)[0] < 500
    assert 150 < regression(cells, requested)[0] < 250


def test_the_audit_finds_planted_impossibilities_and_leaves_a_plain_table_alone():
    plain = [row(method="MeZO", value="1998"), row(method="ZO2", value="1955")]
    assert audit(plain) == []
    fast = row(method="MeZO", precision="fp16", value="90000")
    assert [item.rule for item in audit([fast])] == ["a rate above the GPU's peak"]
    alone = {**DIST, "quantity": "upload_rate", "unit": "1e9 params/s", "gpus": "4"}
    pair = [
        row(**alone, method="plain", value="4.00"),
        row(**alone, method="CommOpt", value="17.00", cell="r9c9"),
    ]
    found = audit(pair)
    assert [item.rule for item in found] == ["more speed-up than lanes"]
    assert set_apart(found) == {"DistZO2 Table 1, r9c9"}


def test_a_machine_of_fitted_constants_is_a_machine(profile):
    assert isinstance(cell().machine(profile.fit("ZO2", "speed").values), Machine)


def test_the_command_appends_its_columns_to_the_rows_it_was_given(tmp_path):
    given = [
        item
        for item in ROWS
        if item["model"] == "OPT-1.3B" and item["table"] == "1" and item["paper"] == "ZO2"
    ]
    write_rows(tmp_path / "cases.csv", given, [{} for _ in given])
    done = CliRunner().invoke(app(), [str(tmp_path / "cases.csv"), "-o", str(tmp_path / "out.csv"), "--json"])
    assert done.exit_code == 0, done.output
    found = read_rows(tmp_path / "out.csv")
    assert [item["cell"] for item in found] == [item["cell"] for item in given]
    assert list(found[0].fields)[-5:] == ["predicted", "low", "high", "bottleneck", "prediction_note"]
    for item in found:
        is_ratio = item["quantity"].endswith("_ratio")
        assert (bool(item["predicted"]), bool(item["prediction_note"])) == (not is_ratio, is_ratio)
