"""Solutions of the exercise of the page on probes: a right one, and the usual wrong ones with what they are told."""

from __future__ import annotations

import torch


def increments_of(rows):
    """Each V once, with the sum of what was learnt along it."""
    increments = {}
    for row in rows:
        left, right = increments.get(id(row.right), (torch.zeros_like(row.left), row.right))
        increments[id(row.right)] = left - row.learning_rate * row.projected_gradient * row.left, right
    return increments


def right(rows, probe, epsilon, sign):
    increments = increments_of(rows)
    left, _ = increments.get(id(probe.right), (torch.zeros_like(probe.left), None))
    increments[id(probe.right)] = left + sign * epsilon * probe.left, probe.right
    return tuple(torch.cat(factors, 1) for factors in zip(*increments.values(), strict=True))


def an_increment_for_every_step(rows, probe, epsilon, sign):
    lefts = [-row.learning_rate * row.projected_gradient * row.left for row in rows]
    return (
        torch.cat([*lefts, sign * epsilon * probe.left], 1),
        torch.cat([*(row.right for row in rows), probe.right], 1),
    )


def along_the_present_v(rows, probe, epsilon, sign):
    lefts = [-row.learning_rate * row.projected_gradient * row.left for row in rows]
    return sum(lefts, sign * epsilon * probe.left), probe.right


def up_the_hill(rows, probe, epsilon, sign):
    left, inner = right(rows, probe, epsilon, -sign)
    return -left, inner


WRONG = [
    (an_increment_for_every_step, "columns where"),
    (along_the_present_v, "close an increment before V is drawn anew"),
    (up_the_hill, "sign of an update"),
    (lambda rows, probe, epsilon, sign: right(rows, probe, epsilon, -sign), "probe's sign"),
    (lambda rows, probe, epsilon, sign: right(rows, probe, 0.0, sign), "the probe is missing"),
    (
        lambda rows, probe, epsilon, sign: (sign * epsilon * probe.left, probe.right),
        "what was learnt before is missing",
    ),
    (lambda rows, probe, epsilon, sign: probe.left @ probe.right.T, "two tensors"),
    (lambda rows, probe, epsilon, sign: (probe.left.T, probe.right.T), "not (outputs, columns)"),
    (lambda rows, probe, epsilon, sign: right(rows, probe, 2 * epsilon, sign), "off by up to"),
]
