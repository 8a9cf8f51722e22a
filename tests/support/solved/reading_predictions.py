"""Solutions of the exercise of the page on reading predictions: a right one, and the usual wrong ones with what they are told."""

from __future__ import annotations

TERMS = ("matmul", "param_pass", "sampling", "elementwise", "dispatch")


def fit(rows, term):
    """Factor of one cause that explains the rows best, and what it leaves unexplained."""
    parts = [row.terms.get(term, 0.0) / row.predicted_s for row in rows]
    excess = [row.measured_s / row.predicted_s - 1 for row in rows]
    squares = sum(part * part for part in parts)
    slope = sum(p * e for p, e in zip(parts, excess, strict=True)) / squares if squares else 0.0
    left = sum((e - slope * p) ** 2 for p, e in zip(parts, excess, strict=True))
    return left, 1 + slope


def right(rows):
    best = min(TERMS, key=lambda term: fit(rows, term)[0])
    return best, fit(rows, best)[1]


def largest_term_of_the_worst_row(rows):
    row = max(rows, key=lambda row: abs(row.measured_s - row.predicted_s))
    term = max((t for t in row.terms if t in TERMS), key=lambda t: row.terms[t])
    return term, row.measured_s / row.predicted_s


def ratio_of_steps(rows):
    return right(rows)[0], sum(r.measured_s for r in rows) / sum(r.predicted_s for r in rows)


def upside_down(rows):
    term, factor = right(rows)
    return term, 1 / factor


WRONG = [
    (largest_term_of_the_worst_row, "take off what else"),
    (ratio_of_steps, "ratio of whole steps"),
    (upside_down, "upside down"),
    (lambda rows: ("matmul", 2.0), "it is not matmul"),
    (lambda rows: (right(rows)[0], 1.3), "take off what else"),
    (lambda rows: ("memory", 2.0), "is none of"),
    (lambda rows: "sampling", "a cause and a factor"),
]
