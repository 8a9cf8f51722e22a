"""Stages are one device: the same losses, projected gradients and weights, bit for bit."""

from __future__ import annotations

import pytest

from tests.support.staged import STEPS, Case, assert_equal, on_one_device, on_stages

INSIDE, BETWEEN = ("block.1.mlp",), ("block.0",)
THREE, FOUR = ("block.0", "block.1.mlp"), ("block.0.mlp", "block.1", "block.2.mlp")


def axes(**given):
    return tuple((name, tuple(fields.items())) for name, fields in given.items())


CASES = {
    "inside": Case(INSIDE),
    "between": Case(BETWEEN),
    "before-the-head": Case(("block.2",)),
    "three": Case(THREE),
    "four": Case(FOUR),
    "block-between-its-halves": Case(("block.1.mlp", "block.1")),
    "untied-counter": Case(THREE, "opt-untied", axes=axes(directions={"rng": "counter"})),
    "norm-behind": Case(FOUR, "opt-projected", axes=axes(directions={"rng": "counter"})),
    "gpt2-sweep": Case(THREE, "gpt2", axes=axes(schedule={"traversal": "sweep"})),
    "llama-queries": Case(THREE, "llama", axes=axes(estimator={"num_queries": 2})),
    "llama-tied-forward": Case(
        FOUR, "llama-tied", axes=axes(estimator={"difference": "forward", "num_queries": 2})
    ),
    "sweep-forward-counter": Case(
        INSIDE,
        axes=axes(
            estimator={"difference": "forward"},
            directions={"rng": "counter"},
            schedule={"traversal": "sweep"},
        ),
    ),
    "two-queries-delayed": Case(
        THREE, axes=axes(estimator={"num_queries": 2}, schedule={"update": "delayed"})
    ),
    "rademacher": Case(THREE, axes=axes(directions={"distribution": "rademacher"})),
    "lozo": Case(
        INSIDE,
        axes=axes(directions={"distribution": "lozo", "lazy_steps": 2}, schedule={"update": "delayed"}),
    ),
    "int8": Case(INSIDE, axes=axes(low_bits={"weights": "int8", "estimator": "q-rge2"})),
    "sparse int4": Case(THREE, axes=axes(low_bits={"weights": "int4", "sparsity": 0.5})),
    "copies": Case(THREE, axes=axes(weights={"perturbation": "copies"})),
    "copies-ahead-offloaded": Case(
        THREE,
        axes=axes(
            residency={"blocks": "offloaded"},
            directions={"drawn_ahead": True},
            weights={"perturbation": "copies"},
            schedule={"update": "delayed"},
            estimator={"num_queries": 2},
        ),
    ),
    "copies-swept-ahead": Case(
        INSIDE,
        axes=axes(
            directions={"drawn_ahead": True},
            weights={"perturbation": "copies"},
            schedule={"traversal": "sweep"},
            estimator={"num_queries": 3},
        ),
    ),
    "copies-queries-tied-bfloat16": Case(
        INSIDE,
        dtype="bfloat16",
        axes=axes(estimator={"num_queries": 3}, weights={"perturbation": "copies"}),
    ),
    "copies-counter-forward": Case(
        THREE,
        "llama-tied",
        axes=axes(
            estimator={"difference": "forward", "num_queries": 2},
            directions={"rng": "counter", "drawn_ahead": True},
            weights={"perturbation": "copies"},
        ),
    ),
    "copies-lora": Case(THREE, lora=True, axes=axes(weights={"perturbation": "copies"})),
    "copies-perturb": Case(
        INSIDE,
        mesh=(("perturb", 2),),
        axes=axes(weights={"perturbation": "copies"}, estimator={"num_queries": 2}),
    ),
    "copies-perturb-delayed-uneven": Case(
        INSIDE,
        mesh=(("perturb", 3),),
        axes=axes(
            estimator={"num_queries": 4, "difference": "forward"},
            directions={"drawn_ahead": True},
            weights={"perturbation": "copies"},
            schedule={"update": "delayed"},
        ),
    ),
    "copies-perturb-kept": Case(
        INSIDE,
        mesh=(("perturb", 2),),
        axes=axes(
            estimator={"num_queries": 2},
            directions={"kept": True},
            weights={"perturbation": "copies"},
            schedule={"traversal": "sweep"},
        ),
    ),
    "copies-data": Case(THREE, mesh=(("data", 2),), axes=axes(weights={"perturbation": "copies"})),
    "offloaded": Case(THREE, axes=axes(residency={"blocks": "offloaded"}, schedule={"update": "delayed"})),
    "drawn-ahead": Case(THREE, axes=axes(directions={"drawn_ahead": True})),
    "kept": Case(THREE, axes=axes(directions={"kept": True})),
    "kept-delayed-queries": Case(
        FOUR,
        axes=axes(directions={"kept": True}, schedule={"update": "delayed"}, estimator={"num_queries": 2}),
    ),
    "bfloat16": Case(THREE, dtype="bfloat16"),
    "float64": Case(INSIDE, dtype="float64"),
    # What each query's rounding leaves of a table is seen here; float32 hides it, but for a codec behind.
    "queries-tied-bfloat16": Case(INSIDE, dtype="bfloat16", axes=axes(estimator={"num_queries": 3})),
    "lora": Case(THREE, lora=True),
    "windows": Case(THREE, lazy=True),
    "windows-offloaded-delayed": Case(
        INSIDE, lazy=True, axes=axes(residency={"blocks": "offloaded"}, schedule={"update": "delayed"})
    ),
    "windows-int8-counter": Case(
        BETWEEN, lazy=True, axes=axes(low_bits={"weights": "int8"}, directions={"rng": "counter"})
    ),
    "windows-copies-data": Case(
        BETWEEN, lazy=True, mesh=(("data", 2),), axes=axes(weights={"perturbation": "copies"})
    ),
    "accumulated": Case(THREE, accumulate=2),
    "data": Case(THREE, mesh=(("data", 2),)),
    "perturb": Case(THREE, mesh=(("perturb", 2),)),
    "data-and-perturb": Case(INSIDE, mesh=(("data", 2), ("perturb", 2))),
    "data-accumulated": Case(INSIDE, mesh=(("data", 2),), accumulate=2),
}

CODED = {
    "q4": Case(INSIDE, codec="q4"),
    "q8-residual-q8": Case(FOUR, codec="q8", residual_codec="q8:affine:token"),
    "between-q8": Case(BETWEEN, residual_codec="q8"),
    "at-random": Case(THREE, codec="q2:stochastic", residual_codec="q8:stochastic"),
    "bfloat16": Case(INSIDE, codec="q4:affine-zero:channel", dtype="bfloat16", model="llama"),
    "shards": Case(INSIDE, codec="q4", mesh=(("data", 2),)),
    "perturb-accumulated": Case(INSIDE, codec="q4", mesh=(("perturb", 2),), accumulate=2),
    "queries-tied": Case(
        INSIDE,
        "llama-tied",
        codec="q4",
        residual_codec="q8:affine:token",
        axes=axes(estimator={"num_queries": 3}),
    ),
    "copies": Case(
        THREE,
        codec="q4",
        residual_codec="q4",
        axes=axes(
            estimator={"num_queries": 2},
            directions={"drawn_ahead": True},
            weights={"perturbation": "copies"},
        ),
    ),
    "queries": Case(INSIDE, codec="q3", axes=axes(estimator={"num_queries": 2})),
}


QUICK = (
    "three",
    "four",
    "untied-counter",
    "norm-behind",
    "llama-queries",
    "queries-tied-bfloat16",
    "lora",
    "lozo",
    "int8",
    "accumulated",
    "data",
    "copies-ahead-offloaded",
    "copies-swept-ahead",
    "copies-queries-tied-bfloat16",
    "copies-perturb",
    "copies-perturb-kept",
)
QUICK_CODED = ("q4", "at-random", "copies")


def marked(cases, quick):
    """Return the cases as parameters, those slow that need not run every time."""
    return [
        pytest.param(case, id=name, marks=() if name in quick else pytest.mark.slow)
        for name, case in cases.items()
    ]


@pytest.mark.crossed(quick=4)
@pytest.mark.parametrize("case", marked(CASES, QUICK))
def test_stages_are_one_device(case):
    assert_equal(case)


@pytest.mark.parametrize("case", marked(CODED, QUICK_CODED))
def test_stages_with_codecs_are_one_device_with_the_same_codecs_at_the_same_cuts(case):
    assert_equal(case)


def test_updates_of_codes_are_counted_on_all_stages():
    def counts(session, lines):
        for batch in lines[:STEPS]:
            session.step(batch)
        return session.moved_codes()

    (whole,) = {str(found) for found in on_stages(CASES["int8"], work=counts)}
    assert whole == str(on_one_device(CASES["int8"], work=counts))
