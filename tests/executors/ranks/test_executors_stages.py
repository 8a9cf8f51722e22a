"""Three and more stages, and meshes of pipelines, are one device, bit for bit; two stages are in the matrix."""

from __future__ import annotations

import pytest

from executors.runs.session import Session
from tests.support.staged import (
    SETTINGS,
    SIZE,
    STEPS,
    Case,
    assert_equal,
    on_one_device,
    on_stages,
    outcome,
)
from tests.support.tiny import batches

INSIDE = ("block.1.mlp",)
THREE, FOUR = ("block.0", "block.1.mlp"), ("block.0.mlp", "block.1", "block.2.mlp")


def axes(**given):
    return tuple((name, tuple(fields.items())) for name, fields in given.items())


CASES = {
    "three": Case(THREE),
    "four": Case(FOUR, "opt-projected", axes=axes(perturbations={"rng": "counter"})),
    "block-between-its-halves": Case(("block.1.mlp", "block.1")),
    "four-llama-tied-forward": Case(
        FOUR, "llama-tied", axes=axes(estimator={"difference": "forward", "num_perturbations": 2})
    ),
    "three-int4": Case(THREE, axes=axes(low_bits={"weights": "int4", "sparsity": 0.5})),
    "int8": Case(INSIDE, axes=axes(low_bits={"weights": "int8", "estimator": "q-rge2"})),
    "three-copies-ahead-offloaded": Case(
        THREE,
        axes=axes(
            residency={"blocks": "offloaded"},
            perturbations={"sampled_ahead": True},
            weights={"perturbation": "copies"},
            schedule={"update": "delayed"},
            estimator={"num_perturbations": 2},
        ),
    ),
    "copies-perturb-delayed-uneven": Case(
        INSIDE,
        mesh=(("perturb", 3),),
        axes=axes(
            estimator={"num_perturbations": 4, "difference": "forward"},
            perturbations={"sampled_ahead": True},
            weights={"perturbation": "copies"},
            schedule={"update": "delayed"},
        ),
    ),
    # What each perturbation's rounding leaves of a table is seen here; float32 hides it, but for a codec behind.
    "queries-tied-bfloat16": Case(INSIDE, dtype="bfloat16", axes=axes(estimator={"num_perturbations": 3})),
    "three-windows": Case(THREE, lazy=True),
    "data-and-perturb": Case(INSIDE, mesh=(("data", 2), ("perturb", 2))),
    "data-accumulated": Case(INSIDE, mesh=(("data", 2),), accumulate=2),
}

ENCODED = {
    "q8-residual-q8": Case(FOUR, codec="q8", residual_codec="q8:affine:token"),
    "at-random": Case(THREE, codec="q2:stochastic", residual_codec="q8:stochastic"),
    "bfloat16": Case(INSIDE, codec="q4:affine-zero:channel", dtype="bfloat16", model="llama"),
    "perturb-accumulated": Case(INSIDE, codec="q4", mesh=(("perturb", 2),), accumulate=2),
    "queries-tied": Case(
        INSIDE,
        "llama-tied",
        codec="q4",
        residual_codec="q8:affine:token",
        axes=axes(estimator={"num_perturbations": 3}),
    ),
}


@pytest.mark.crossed(quick=9, slow=2)
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in (CASES | ENCODED).items()])
def test_stages_are_one_device(case):
    """With codecs: one device that encodes and decodes at the same split points."""
    assert_equal(case)


def test_updates_of_qvalues_are_counted_on_all_stages():
    def counts(session, lines):
        for batch in lines[:STEPS]:
            session.step(batch)
        return session.quantized_updates()

    (whole,) = {str(found) for found in on_stages(CASES["int8"], work=counts)}
    assert whole == str(on_one_device(CASES["int8"], work=counts))


def test_an_evaluation_fetches_each_parameter_group_in_one_message():
    def messages(session, lines):
        sent, broadcast = [], session.communicator.broadcast_host

        def recorded(group, owner, tensor, what):
            sent.append(what)
            broadcast(group, owner, tensor, what)

        session.communicator.broadcast_host = recorded
        loss = session.loss(lines[0])
        return loss, sent

    case = Case(("block.0", "block.1"))
    found = on_stages(case, work=messages)
    assert len({loss for loss, _ in found}) == 1
    for _, sent in found:
        sent.remove("fetching embed.tokens")  # tied: once with the embedding, once with the head
        assert len(sent) > 4
        assert len(set(sent)) == len(sent)


def test_one_device_updates_the_halves_of_a_block_late():
    """The generator passes the back half before that half's update of the step before has drawn."""
    case = Case(INSIDE, axes=axes(residency={"blocks": "offloaded"}, schedule={"update": "delayed"}))
    with Session(case.in_place(), case.made(), **SETTINGS) as session:
        found = outcome(session, batches(STEPS, size=SIZE))
    assert found[:3] == on_one_device(case)[:3]
