"""The exercise of the seeds page: the right solution passes, the usual wrong ones are told what to look at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from studies.cli import STUDIES, study
from studies.exercises import function_in, tried
from studies.why_seeds_suffice.exercise import check

STUB = Path(__file__).parents[2] / "studies" / "why_seeds_suffice" / "stub.py"


def directions(base, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.normal(0.0, 1.0, size=t.shape, generator=generator) for name, t in base.items()}


def right(base, log, epsilon):
    theta = dict(base)
    for row in log:
        for name, z in directions(base, row.seed).items():
            for scale in (1, -2, 1):
                theta[name] = theta[name] + (scale * z) * epsilon
            theta[name] = theta[name] - row.learning_rate * (row.projected_gradient * z)
    return theta


def without_perturbing(base, log, epsilon):
    theta = dict(base)
    for row in log:
        z = directions(base, row.seed)
        theta = {n: t - row.learning_rate * (row.projected_gradient * z[n]) for n, t in theta.items()}
    return theta


def generator_reset_for_every_parameter(base, log, epsilon):
    theta = dict(base)
    for row in log:
        for name, tensor in theta.items():
            z = directions({name: tensor}, row.seed)[name]
            theta[name] = tensor - row.learning_rate * (row.projected_gradient * z)
    return theta


def one_rate_for_all_steps(base, log, epsilon):
    shifted = [type(row)(row.seed, row.projected_gradient, log[0].learning_rate) for row in log]
    return right(base, shifted, epsilon)


def test_the_reference_solution_passes():
    verdict = check(right)
    assert verdict.passed, verdict.message


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        (without_perturbing, "last bits"),
        (generator_reset_for_every_parameter, "which numbers"),
        (one_rate_for_all_steps, "learning rate"),
        (lambda base, log, epsilon: base, "nothing has changed"),
        (lambda base, log, epsilon: {}, "names of the base weights"),
        (lambda base, log, epsilon: {n: t.double() for n, t in base.items()}, "must be a tensor"),
        (lambda base, log, epsilon: {n: t * float("nan") for n, t in base.items()}, "off by up to nan"),
    ],
)
def test_a_wrong_solution_is_refused_with_advice(wrong, advice):
    verdict = check(wrong)
    assert not verdict.passed
    assert advice in verdict.message


def test_the_stub_does_not_pass_and_says_so():
    verdict = tried(check, function_in(STUB, "rebuild"))
    assert verdict.message == "it raised NotImplementedError: write it"


def invoke(*arguments):
    app = typer.Typer(add_completion=False)
    app.command()(study)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_tries_a_file(tmp_path):
    solution = tmp_path / "mine.py"
    solution.write_text("def rebuild(base, log, epsilon):\n    return base\n")
    result = invoke("why-seeds-suffice", "--check", str(solution))
    assert result.exit_code == 1
    assert result.stdout.startswith("not yet: a run of 1 steps: nothing has changed")


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("first_step",), "first_steps"),
        (("first_steps", "--check", "mine.py"), "why_seeds_suffice"),
        (("why_seeds_suffice", "--check", "no_such_file.py"), "stub.py"),
        (("why_seeds_suffice", "--check", __file__), "the name that the stub gives it"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_hint(arguments, advice):
    result = invoke(*arguments)
    assert advice in result.exception.hint


def test_every_study_is_a_module_that_runs_and_those_with_a_page_show_it():
    listed = json.loads(invoke("--list", "--json").stdout)
    assert [item["name"] for item in listed] == [item.name for item in STUDIES]
    for item in STUDIES:
        assert (STUB.parents[1] / item.name / "__main__.py").is_file()
        shown = invoke(item.name).stdout
        assert shown.startswith("# ") if item.page else item.script in shown
