"""Grids of configurations against the closed form of each of them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import read_model_spec
from studies.scale.grid import LINKS, scaled, step_time_bounds
from tests.support.builders import make_profile
from topology.documents import load_preset
from topology.errors import PlanError
from zosim.hardware.machine import Machine
from zosim.hardware.profiles import profile_for
from zosim.lowering import lower
from zosim.plans import Estimator, Perturbations, Placement, Plan, Residency, Schedule, Weights
from zosim.simulators.closed_form import step_time_bound

TOPOLOGY = load_preset("dgx-1v")
MACHINE = Machine.from_topology(
    TOPOLOGY, "gpu0", profile_for(TOPOLOGY, "gpu0", path=None, num_threads=None, is_host=False)
)


def plan(model="opt-125m", **axes):
    return Plan(
        model=read_model_spec(model),
        placement=Placement(topology="dgx-1v", devices=("gpu0",)),
        batch=2,
        seq=64,
        weights=Weights(dtype="float16"),
        **axes,
    )


OFFLOADED = {
    "residency": Residency(blocks="offloaded"),
    "schedule": Schedule(update="delayed", traversal="blockwise"),
}


def assert_equal_everywhere(whole, machine, batches, seqs, factors):
    found = step_time_bounds(whole, machine, batches=batches, seqs=seqs, factors=factors)
    assert found.shape == (len(batches), len(seqs), *(len(values) for values in factors.values()))
    for (i, batch), (j, seq) in itertools.product(enumerate(batches), enumerate(seqs)):
        program = lower(Plan(**{**dict(whole), "batch": batch, "seq": seq}))
        for place in np.ndindex(*found.shape[2:]):
            point = {name: values[k] for (name, values), k in zip(factors.items(), place, strict=True)}
            expected = step_time_bound(program, scaled(machine, point))
            assert found[(i, j, *place)] == pytest.approx(expected, rel=1e-9), (batch, seq, point)


@pytest.mark.crossed(quick=3)
@pytest.mark.parametrize(
    "axes",
    [
        {},
        OFFLOADED,
        OFFLOADED | {"residency": Residency(blocks="offloaded", num_staging_buffers=1)},
        OFFLOADED | {"residency": Residency(blocks="offloaded", overlap=False)},
        OFFLOADED
        | {"estimator": Estimator(num_perturbations=2), "perturbations": Perturbations(rng="counter")},
    ],
)
def test_every_point_equals_its_closed_form(axes):
    factors = {"copy_h2d_bandwidth": [0.01, 1.0], "matmul_rate": [0.1, 1.0, 50.0], LINKS: [0.3, 2.0]}
    assert_equal_everywhere(plan(**axes), MACHINE, [1, 3], [16], factors)


@pytest.mark.slow
@settings(max_examples=15)
@given(
    st.lists(
        st.sampled_from(
            [
                "copy_d2h_bandwidth",
                "sampling_rate",
                "param_pass_bandwidth",
                "step_s",
                "dispatch_s",
                "memory_bandwidth",
            ]
        ),
        min_size=1,
        max_size=2,
        unique=True,
    ),
    st.lists(st.floats(1e-2, 1e2), min_size=2, max_size=2),
    st.integers(1, 64),
)
def test_any_constants_may_vary(names, values, seq):
    assert_equal_everywhere(plan(**OFFLOADED), MACHINE, [2], [seq], dict.fromkeys(names, values))


def test_a_cpu_and_its_host_time_between_steps():
    machine = Machine(make_profile("cpu", step_s=0.25))
    assert_equal_everywhere(
        Plan(**{**dict(plan(**OFFLOADED)), "weights": Weights()}),
        machine,
        [1, 2],
        [8, 9],
        {"step_s": [0.0001, 4.0], "sampling_rate": [0.5, 2.0]},
    )


def test_unknown_axes_and_factors_out_of_range_are_refused():
    with pytest.raises(PlanError, match="unknown constant 'matmul'"):
        step_time_bounds(plan(), MACHINE, factors={"matmul": [1.0]})
    with pytest.raises(PlanError, match=r"factor 0\.0 of links"):
        step_time_bounds(plan(), MACHINE, factors={LINKS: [1.0, 0.0]})


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize("num", [2049, 5000])
def test_chunks_are_put_together_in_order(num):
    values = np.geomspace(0.01, 100, num)
    found = step_time_bounds(plan(**OFFLOADED), MACHINE, factors={LINKS: values.tolist()})[0, 0]
    for place in (0, 2047, 2048, num - 1):
        alone = step_time_bounds(plan(**OFFLOADED), MACHINE, factors={LINKS: [float(values[place])]})
        assert found[place] == pytest.approx(alone[0, 0, 0], rel=1e-12)
    assert (np.diff(found) <= 1e-12).all()
