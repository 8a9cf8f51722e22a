"""Print what SparQ's communication volumes are consistent with: ``python -m studies.sparq``."""

from __future__ import annotations

from studies.sparq.volumes import BASELINES, CENTRAL, FORWARD, WIDTHS, find, findings, read_volumes, tokens
from zosim.console import stdout, table


def main() -> None:
    """Print bits per element under each supposition, AQ-SGD against FO-SGD, and tokens."""
    volumes = read_volumes()
    found = list(findings(volumes))
    for name, crossings, width in BASELINES:
        rows = [
            (
                finding.volume.model,
                finding.volume.dataset,
                finding.volume.bits,
                finding.bits,
                "yes" if finding.is_dense else "no",
                *finding.density.values(),
            )
            for finding in found
            if finding.baseline == name
        ]
        columns = (
            "model",
            "data",
            "b",
            "bits per element",
            "dense?",
            "ρ, index log2 W",
            "ρ, 16 bits",
            "ρ, 32 bits",
        )
        title = f"If ZO-SGD sent {crossings} activations a step of {width} bits each"
        stdout.print(table(columns, rows, title=title))
    compared = []
    for model in WIDTHS:
        for data in ("SST-2", "RTE"):
            runs = {method: find(volumes, model, data, method) for method in ("FO-SGD", "AQ-SGD", "ZO-SGD")}
            sparq = find(volumes, model, data, "SparQ", 4)
            first, quantised, plain = runs["FO-SGD"], runs["AQ-SGD"], runs["ZO-SGD"]
            if first is None or quantised is None or plain is None or sparq is None:
                continue
            ratio = first.gigabytes.over(quantised.gigabytes)
            compared.append(
                (
                    model,
                    data,
                    ratio,
                    tokens(first, activations=2, bits=16),
                    tokens(plain, activations=CENTRAL, bits=16),
                    tokens(sparq, activations=FORWARD, bits=4),
                )
            )
    headings = (
        "model",
        "data",
        "FO/AQ (32/12 = 2.67)",
        "tokens, FO-SGD",
        "tokens, ZO-SGD (central, 16 bits)",
        "tokens, SparQ (forward, dense 4 bits)",
    )
    stdout.print(table(headings, compared, title="Tokens that the volumes are, at the MLP's width"))


if __name__ == "__main__":
    main()
