"""What was found of an estimator or a quantizer: one finding for each property, with what could have been noticed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from scipy.stats import t as student
from torch import Tensor

from proofs_checks.outcomes import COARSEST, Estimate
from proofs_checks.statistics import LEVEL, MISSED, batch_means, threshold
from topology.errors import ZosimError

Verdict = Literal["holds", "fails", "not resolved", "not applicable"]


@dataclass(frozen=True)
class JudgedProperty:
    """One property.

    Attributes
    ----------
    name : str
        Name of the property.
    verdict : str
        ``holds``, ``fails``; ``not resolved`` where random samples would not show an error of :data:`~proofs_checks.outcomes.COARSEST`; ``not applicable``
        where nothing was stated that could be compared.
    tested : str
        What was compared with what, on which inputs.
    measured : str
        What came out, with numbers.
    resolution : float or None
        Relative error that is noticed 999 times in 1000: of the coarsest comparison. None where the comparison is exact.
    num_comparisons, num_samples : int
        Random comparisons, of which each may raise a false alarm; samples of each.
    """

    name: str
    verdict: Verdict
    tested: str
    measured: str
    resolution: float | None = None
    num_comparisons: int = 0
    num_samples: int = 0


@dataclass(frozen=True)
class Judgement:
    """All findings about one function.

    Attributes
    ----------
    judged : str
        Name of the function.
    findings : tuple of JudgedProperty
        What was found of each property.
    """

    judged: str
    findings: tuple[JudgedProperty, ...]

    @property
    def failed(self) -> tuple[JudgedProperty, ...]:
        """Findings that something stated is not so."""
        return tuple(finding for finding in self.findings if finding.verdict == "fails")

    @property
    def unresolved(self) -> tuple[JudgedProperty, ...]:
        """Findings that the samples could not tell."""
        return tuple(finding for finding in self.findings if finding.verdict == "not resolved")

    @property
    def false_alarms(self) -> float:
        """Probability, at most, that a function for which all holds is said to fail (Bonferroni's inequality)."""
        return LEVEL * sum(finding.num_comparisons for finding in self.findings)

    def to_data(self) -> dict[str, Any]:
        """Return what JSON holds."""
        return {
            "subject": self.judged,
            "findings": [asdict(finding) for finding in self.findings],
            "failed": [finding.name for finding in self.failed],
            "not_resolved": [finding.name for finding in self.unresolved],
            "false_alarms": self.false_alarms,
        }

    def lines(self) -> list[str]:
        """Return a report in text."""
        reported = [self.judged]
        for finding in self.findings:
            reported.append(f"  {finding.verdict.upper():15} {finding.name}: {finding.measured}")
            noticed = "" if finding.resolution is None else f"; notices {100 * finding.resolution:.2g} %"
            samples = "" if not finding.num_samples else f"; {finding.num_samples:,} samples"
            reported.append(f"  {'':15} {finding.tested}{noticed}{samples}")
        counts = [f"{len(self.failed)} of {len(self.findings)} fail", f"{len(self.unresolved)} not resolved"]
        reported.append(f"{', '.join(counts)}; a false alarm has a probability below {self.false_alarms:.1g}")
        return reported


def compared(name: str, tested: str, estimates: Sequence[Estimate], what: str = "") -> JudgedProperty:
    """Return the finding of means beside their theory: it fails where chance does not explain one of them (`what`: unit of what is measured)."""
    farthest = min(estimates, key=lambda each: -1.0 if math.isnan(each.p_value) else each.p_value)
    coarsest = max(estimate.resolution for estimate in estimates)
    verdict: Verdict = "holds" if coarsest <= COARSEST else "not resolved"
    if not farthest.p_value >= LEVEL:
        verdict = "fails"
    measured = f"{farthest.value:.5g}{what}, theory {farthest.theory:.5g}" + (
        f" (farthest of {len(estimates)})" if len(estimates) > 1 else ""
    )
    return JudgedProperty(name, verdict, tested, measured, coarsest, len(estimates), farthest.num_samples)


def at_most(name: str, tested: str, samples: Tensor, bound: float) -> JudgedProperty:
    """Return the finding that a mean is at most `bound`; samples have shape (n,)."""
    means = batch_means(samples[:, None])[:, 0]
    mean, error = float(means.mean()), float(means.std()) / math.sqrt(len(means))
    # Rounding of a mean that does not vary is no excess.
    excess = mean - bound - 1e-9 * abs(bound)
    resolution = (threshold(len(means)) + float(student.isf(MISSED, len(means) - 1))) * error / abs(bound)
    verdict: Verdict = "holds" if resolution <= COARSEST else "not resolved"
    if not excess <= threshold(len(means)) * error:
        verdict = "fails"
    return JudgedProperty(
        name, verdict, tested, f"{mean:.4g} of at most {bound:.4g}", resolution, 1, len(samples)
    )


def exactly(name: str, tested: str, *, holds: bool, measured: str) -> JudgedProperty:
    """Return the finding of a comparison without chance."""
    return JudgedProperty(name, "holds" if holds else "fails", tested, measured)


def not_applicable(name: str, reason: str) -> JudgedProperty:
    """Return the finding that nothing was stated which could be compared."""
    return JudgedProperty(name, "not applicable", reason, "not compared")


def answer_of(
    function: Callable[..., Any], *arguments: Any, name: str, like: Tensor, called: str, returned: str
) -> Tensor:
    """Return what somebody's function answers, as a tensor of its own.

    Raises ZosimError if the function raises, or returns another shape.

    - `name`: Of the function, for messages.
    - `like`: Has the shape that an answer must have.
    - `called`, `returned`: Hints: how the function is called, and what it is to return.
    """
    try:
        answer = torch.as_tensor(function(*arguments))
    except ZosimError:
        raise
    except Exception as error:
        raise ZosimError(f"{name} raised {type(error).__name__}: {error}", hint=called) from error
    if answer.shape != like.shape:
        raise ZosimError(
            f"{name} returned shape {tuple(answer.shape)}, but its input has shape {tuple(like.shape)}",
            hint=returned,
        )
    return answer.detach().clone()


def called_twice(ask: Callable[[int], Tensor], seed: int) -> tuple[list[Tensor], int, bool]:
    """Ask for eight seeds, and for them again in another order and with torch's own generator elsewhere.

    Returns
    -------
    answers : list of torch.Tensor
    num_equal : int
        Of them that came back to the bit.
    is_left_alone : bool
        Whether torch's own generator stood afterwards where it had stood.
    """
    seeds = range(seed, seed + 8)
    with torch.random.fork_rng(devices=[]):
        answers = [ask(each) for each in seeds]
        torch.manual_seed(1)
        before = torch.get_rng_state()
        again = [ask(each) for each in reversed(seeds)][::-1]
        is_left_alone = bool(torch.equal(before, torch.get_rng_state()))
    num_equal = sum(bool(torch.equal(one, other)) for one, other in zip(answers, again, strict=True))
    return answers, num_equal, is_left_alone
