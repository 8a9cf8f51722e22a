"""Which perturbations are drawn, from which random numbers, and how long they are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from costmodel.formats.distributions import DISTRIBUTIONS, Distribution, DistributionName
from topology.limits import Rank
from zosim.plans.setting import Axis, Conflict, Setting

if TYPE_CHECKING:
    from zosim.plans import Plan


USUAL_RANK = 2
USUAL_LAZY_STEPS = 50
"""Rank and ν of LoZO's experiments on OPT-13B."""


class Perturbations(Axis):
    """The perturbations ``z`` of perturbations and updates.

    Attributes
    ----------
    distribution : str
        One of :data:`costmodel.formats.distributions.DISTRIBUTIONS`. Of some a matrix is a product ``U·Vᵀ``; others
        draw every element.
    rank : int or None
        Columns of ``U`` and ``V``; None for a distribution without factors.
    lazy_steps : int or None
        Steps that one ``V`` is kept for, while ``U`` is drawn in every step: the update of as many steps has that rank,
        too. LoZO's name for it is ν.
    rng : str
        ``"mezo"``: one torch generator for all parameters in turn, the reference loop's stream.
        ``"counter"``: every (seed, step, perturbation, parameter) keys its own stream, sliceable at any offset.
    order : str
        Order in which ``mezo`` draws for the parameters: ``"registration"`` (MeZO) or ``"execution"`` (ZO2).
    kept : bool
        Whether every perturbation is drawn once in a step and kept until its update, for as many more bytes on the device
        as the trainable weights take, for each perturbation. Off, a perturbation is drawn again whenever it is needed anew.
    sampled_ahead : bool
        Whether perturbations are drawn on a stream of their own, one block ahead of their use, for one more
        block-sized buffer. Where weights are copied, that stream writes the copies, too, and applies updates: what a
        forward finds is prepared while the one before runs.

    References
    ----------
    .. [1] S. Malladi et al., "Fine-Tuning Language Models with Just Forward Passes", 2023, arXiv:2305.17333,
       algorithm 1.
    .. [2] Y. Chen et al., "Enhancing Zeroth-order Fine-tuning for Language Models with Low-rank Structures", 2024,
       arXiv:2410.07698, algorithm 1.
    """

    heading = "Estimator and optimizer"

    distribution: Annotated[
        DistributionName,
        Setting("--distribution", "Distribution of the perturbations.", changes="numbers", expert=True),
    ] = "gaussian"
    rank: Annotated[
        Rank | None,
        Setting(
            "--perturbation-rank",
            "Rank of factorised and lozo perturbations.",
            changes="numbers",
            usual=f"{USUAL_RANK} for factorised and lozo",
            expert=True,
        ),
    ] = None
    lazy_steps: Annotated[
        int | None,
        Field(ge=1, le=10**9),
        Setting(
            "--lazy-steps",
            "Number of steps that the right factor of a factorised or lozo perturbation is kept for.",
            changes="numbers",
            usual=f"{USUAL_LAZY_STEPS} for lozo, 1 for factorised",
            expert=True,
        ),
    ] = None
    rng: Annotated[
        Literal["mezo", "counter"],
        Setting(
            "--rng",
            "Random numbers: one generator for all parameters (mezo), or a keyed stream for each (counter).",
            changes="numbers",
            expert=True,
            heading="Randomness",
        ),
    ] = "mezo"
    order: Annotated[
        Literal["registration", "execution"],
        Setting(
            "--order",
            "Order in which --rng mezo samples parameters: as registered (MeZO), or as executed (ZO2).",
            changes="numbers",
            expert=True,
            heading="Randomness",
        ),
    ] = "registration"
    kept: Annotated[
        bool,
        Setting(
            "--keep-perturbations",
            "Sample each perturbation once and keep it until its update; takes another copy of the "
            "trainable weights per perturbation.",
            planned=True,
            expert=True,
            heading="Placement",
        ),
    ] = False
    sampled_ahead: Annotated[
        bool,
        Setting(
            "--sample-ahead",
            "Sample perturbations, and write copies of weights, on a separate stream ahead of the forwards.",
            planned=True,
            expert=True,
            heading="Placement",
        ),
    ] = False

    @model_validator(mode="before")
    @classmethod
    def _with_usual_factors(cls, data: Any) -> Any:
        """Say what the rank and the laziness of factors are, where nobody did."""
        name = data.get("distribution", "gaussian") if isinstance(data, dict) else None
        declared = next((known for given, known in DISTRIBUTIONS.items() if given == name), None)
        if declared is None or not declared.is_factored:
            return data
        usual = {"rank": USUAL_RANK, "lazy_steps": 1 if declared.rank_power else USUAL_LAZY_STEPS}
        return data | {name: value for name, value in usual.items() if data.get(name) is None}

    def conflicts(self, plan: Plan) -> Iterator[Conflict]:
        """Yield what in `plan` has no factors, and what the released LoZO loop cannot run with."""
        distribution = self.family
        if distribution.is_factored and plan.low_bits.quantizes_weights:
            yield (
                f"{self.distribution} perturbations are products of factors, which are not rounded to a grid",
                "use perturbations.distribution=gaussian, or leave low_bits.weights out",
            )
        if not distribution.is_factored:
            for name in ("rank", "lazy_steps"):
                if (value := getattr(self, name)) is not None:
                    complaint = f"perturbations.{name}={value} applies to low-rank factors, which {self.distribution} perturbations do not have"
                    yield complaint, f"leave perturbations.{name} out, or use perturbations.distribution=lozo"
        elif distribution.is_resampled and (self.rng, self.kept) != ("mezo", False):
            declared = f"perturbations.rng={self.rng}" if self.rng != "mezo" else "perturbations.kept=True"
            complaint = f"{self.distribution} samples again for updates, from one sequential generator, which excludes {declared}"
            yield (
                complaint,
                "use perturbations.distribution=lozo, or perturbations.rng=mezo and perturbations.kept=False",
            )

    @property
    def family(self) -> Distribution:
        """What the distribution is."""
        return DISTRIBUTIONS[self.distribution]

    @property
    def is_keyed(self) -> bool:
        """Whether every parameter's stream is keyed by itself, so that any of them can be drawn without the others."""
        return self.rng == "counter"

    @property
    def samples_by_halves(self) -> bool:
        """Whether the order of draws depends on which blocks are split inside: one generator passes halves in turn."""
        return (self.rng, self.order) == ("mezo", "execution")

    def summary(self, plan: Plan) -> Iterator[str]:
        """Yield the rank of the perturbations of `plan`, and when they are sampled, where that is not the default."""
        if self.rank is not None:
            lazily = f", V kept {self.lazy_steps} steps" if self.lazy_steps != 1 else ""
            yield f"{self.distribution} perturbations of rank {self.rank}{lazily}"
        if self.sampled_ahead and plan.perturbs_in_place:
            yield "samples ahead"
        if self.kept:
            yield "perturbations kept"
