"""The course: eight units in the order to read them. Each is a question, predictions made with a pencil, a text and an exercise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Unit:
    """One hour of the course, in the folder of its name."""

    name: str
    question: str
    minutes: int
    needs: tuple[str, ...]  # units and pages to read before
    able: str  # what a student can do afterwards
    stub: str  # folder under ``studies`` whose stub the student fills in

    @property
    def lesson(self) -> str:
        """The percent script of its text and figures."""
        return (Path(__file__).parent / self.name / "__main__.py").read_text(encoding="utf-8")


def _unit(
    name: str, question: str, minutes: int, needs: tuple[str, ...], able: str, stub: str | None = None
) -> Unit:
    return Unit(name, question, minutes, needs, able, stub or f"coursework/{name}")


UNITS = (
    _unit(
        "estimates",
        "what does a zeroth-order step estimate?",
        50,
        ("first_steps",),
        "compute a projected gradient, and say how noisy it is",
    ),
    _unit(
        "seeds",
        "why do seeds suffice?",
        60,
        ("estimates",),
        "rebuild a run from its log, bit for bit",
        "why_seeds_suffice",
    ),
    _unit(
        "memory",
        "what does a step keep in memory?",
        45,
        ("estimates",),
        "predict the memory of first-order, in-place and offloaded steps",
    ),
    _unit(
        "overlap",
        "what does offloading cost?",
        60,
        ("memory",),
        "predict an offloaded step, and say what limits it",
    ),
    _unit(
        "ranks",
        "what do two ranks exchange?",
        60,
        ("seeds", "distzo2_ranks"),
        "share a step out by examples or by perturbations",
    ),
    _unit(
        "codec",
        "what do bits at a split save?",
        50,
        ("ranks",),
        "count the bytes that cross a split point",
        "where_to_split",
    ),
    _unit(
        "unbiased",
        "how does one round without bias?",
        45,
        ("estimates",),
        "round at random, and predict mean and variance",
        "quzo",
    ),
    _unit(
        "buy",
        "what do 500 USD buy?",
        60,
        ("memory", "overlap"),
        "turn a predicted step into money, and find a wrong constant",
        "reading_predictions",
    ),
)
