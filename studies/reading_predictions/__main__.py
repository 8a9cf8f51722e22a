"""``python -m studies.reading_predictions``: one prediction, taken apart."""

from __future__ import annotations

from costmodel.devices.datasheet import datasheet_profile
from costmodel.rates.profile import Constant, Profile
from studies.reading_predictions.cases import changed, offloaded, on_cpu, run_on
from zosim.analysis.compare import compare
from zosim.analysis.levers import levers
from zosim.planning.predict import PlannedRun

_ALONE = ("sampling_rate.normal.float32", "matmul_rate.float32", "param_pass_bandwidth.float32")


def with_profile(planned: PlannedRun, profile: Profile) -> PlannedRun:
    """Return the same plan where operations cost something else."""
    return PlannedRun(planned.plan, planned.topology, profile, planned.programs)


def at_worst(planned: PlannedRun, constant: Constant) -> float:
    """Return the step with this constant alone at the end of its interval that makes things slowest."""
    worst = constant.model_copy(update={"value": constant.at("high")})
    profile = planned.profile.with_constants(worst, origin=planned.profile.origin)
    return with_profile(planned, profile).timeline.step_time_s


def interval() -> None:
    """Show what an interval consists of."""
    planned = on_cpu()
    prediction = planned.prediction
    print(f"step {prediction.step_time_s:.3f} s, between {prediction.low_s:.3f} and {prediction.high_s:.3f}")
    constants = [planned.profile.constant(name) for name in _ALONE]
    for constant in constants:
        slower = at_worst(planned, constant) / prediction.step_time_s - 1
        print(f"  {constant.name} alone at its worst: {slower:+.0%}")
    print(f"  all constants at their worst together: {prediction.high_s / prediction.step_time_s - 1:+.0%}")


def extrapolation() -> None:
    """Show a line through two short sequences, and where it ends up."""
    short, longer, requested = 64, 128, 2048
    seconds = {seq: on_cpu("opt-1.3b", seq=seq).timeline.step_time_s for seq in (short, longer, requested)}
    slope = (seconds[longer] - seconds[short]) / (longer - short)
    line = seconds[short] + slope * (requested - short)
    print(
        f"a line through {short} and {longer} tokens, at {requested}: {line / seconds[requested] - 1:+.0%} of the model's step"
    )


def limits() -> None:
    """Show which figures decide a step, and which do not."""
    planned = offloaded()
    prediction = planned.prediction
    print(
        f"step {prediction.step_time_s:.2f} s, {prediction.bottleneck.share:.0%} {prediction.bottleneck.description}; "
        f"forward is busy for {dict(prediction.seconds_by_label)['forward'] / prediction.step_time_s:.0%} of it"
    )
    for lever in levers(planned.topology, planned.plan.placement.devices):
        if lever.type in ("link", "compute"):
            topology = lever.apply(planned.topology, 2.0)
            profile = datasheet_profile(topology, planned.plan.placement.devices[0])
            then = PlannedRun(planned.plan, topology, profile, planned.programs).timeline.step_time_s
            print(f"  {lever.name} doubled: {then / prediction.step_time_s - 1:+.0%}")


def wrong_constant() -> None:
    """Show a run on a machine that draws three times as slowly as its profile says."""
    planned = on_cpu()
    measured = run_on(planned, "sampling", 3.0)
    comparison = compare(planned.timeline, measured, planned.program)
    print(
        f"predicted {comparison.predicted_step_s:.3f} s, measured {comparison.measured_step_s:.3f} s: {comparison.step_error:+.0%}"
    )
    for line in comparison.labels[:4]:
        print(
            f"  {line.name}: {line.error or 0:+.0%}, {line.contribution_s / comparison.measured_step_s:+.0%} of the step"
        )
    mended = with_profile(planned, changed(planned.profile, ("sampling_rate",), 3.0))
    error = mended.timeline.step_time_s / comparison.measured_step_s - 1
    print(f"with sampling_rate divided by 3: {abs(error):.0%}")


def main() -> None:
    """Print all of it."""
    for title, part in (
        ("an interval", interval),
        ("an extrapolation", extrapolation),
        ("what limits", limits),
        ("a wrong constant", wrong_constant),
    ):
        print(f"-- {title}")
        part()


if __name__ == "__main__":
    main()
