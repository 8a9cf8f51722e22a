"""The papers whose statements are judged, and where in them a statement can stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from topology.errors import ZosimError
from topology.validation import did_you_mean


@dataclass(frozen=True)
class Paper:
    """A paper, or our own documentation."""

    key: str
    title: str
    reference: str  # authors, and where it appeared
    # Every place that a claim can name, as the paper numbers it: ``"Eq. 3"``, ``"Sec. 5.2"``, ``"App. C.1"``. Empty where
    # places are not numbered.
    places: frozenset[str]

    def check(self, place: str) -> None:
        """Check that the paper has this place. Raises ZosimError if it has not; the hint names the nearest."""
        if self.places and place not in self.places:
            raise ZosimError(
                f"paper {self.key} has no place {place!r}", hint=did_you_mean(place, sorted(self.places))
            )


def _places(*sections: str, **numbered: int) -> frozenset[str]:
    """Return sections and appendices by name, and so many equations, lemmas and so on, numbered from 1."""
    return frozenset(_every_place(sections, numbered))


_KINDS = {
    "equations": "Eq.",
    "algorithms": "Alg.",
    "lemmas": "Lemma",
    "theorems": "Thm.",
    "assumptions": "Asm.",
    "remarks": "Remark",
    "tables": "Table",
    "figures": "Fig.",
}


def _every_place(sections: tuple[str, ...], numbered: Mapping[str, int]) -> Iterator[str]:
    yield from ("Abstract", "Title")
    for section in sections:
        yield f"{'App.' if section[0].isalpha() else 'Sec.'} {section}"
    for kind, count in numbered.items():
        for number in range(1, count + 1):
            yield f"{_KINDS[kind]} {number}"


def _sections(**counts: int) -> tuple[str, ...]:
    """Return ``"3"``, ``"3.1"``, ... for ``s3=...`` subsections."""
    return tuple(
        name
        for key, count in counts.items()
        for name in (key.lstrip("s"), *(f"{key.lstrip('s')}.{number}" for number in range(1, count + 1)))
    )


PAPERS: Mapping[str, Paper] = {
    paper.key: paper
    for paper in (
        Paper(
            "zo2",
            "ZO2: Scalable Zeroth-Order Fine-Tuning for Extremely Large Language Models with Limited GPU Memory",
            "Wang et al.",
            _places(
                *_sections(s1=0, s2=0, s3=0, s4=2, s5=2, s6=3, s7=0, A=0, B=0, C=0, D=4, E=0, F=0, G=3),
                equations=5,
                algorithms=3,
                tables=8,
                figures=7,
            ),
        ),
        Paper(
            "distzo2",
            "DistZO2: High-Throughput and Memory-Efficient Zeroth-Order Fine-tuning LLMs with Distributed Parallel Computing",
            "Wang, Xie and Wang",
            _places(
                *_sections(s1=0, s2=0, s3=0, s4=2, s5=1, s6=2, s7=3, s8=0, A=0, B=3, C=0, D=4, E=8),
                equations=4,
                algorithms=3,
                tables=7,
                figures=6,
            ),
        ),
        Paper(
            "sparq",
            "SparQ: Breaking Memory and Communication Barriers in Model-Parallel Fine-Tuning of Large Language Models",
            "anonymous",
            _places(
                *_sections(s1=0, s2=4, s3=0, s4=0, s5=0, s6=0, s7=0, A=0, B=2, C=3, D=3),
                equations=43,
                algorithms=3,
                lemmas=5,
                theorems=2,
                assumptions=6,
                remarks=2,
                tables=2,
                figures=5,
            ),
        ),
        Paper(
            "quzo",
            "QuZO: Quantized Zeroth-Order Fine-Tuning for Large Language Models",
            "anonymous",
            _places(
                *_sections(s1=0, s2=0, s3=4, s4=3, s5=0, A=1, B=4, C=2, D=5),
                equations=16,
                algorithms=1,
                tables=21,
                figures=6,
            ),
        ),
        Paper(
            "zoinfer",
            "LLM Zeroth-Order Fine-Tuning is an Inference Workload",
            "Li and Ding",
            frozenset(
                {
                    *_places(
                        *_sections(s1=0, s2=0, s3=0, s4=0, s5=2, s6=0, s7=0, s8=0, s9=0, A=0),
                        equations=20,
                        tables=3,
                        figures=2,
                    ),
                    "Fig. A.1",
                    "Fig. A.2",
                }
            ),
        ),
        Paper("zosim", "What zosim itself promises", "the modules that a claim names", frozenset()),
    )
}
"""By key; the last holds claims about our own cost model, about baselines, and about compositions of several papers."""
