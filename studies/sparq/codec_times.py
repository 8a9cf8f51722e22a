"""``python -m studies.sparq.codec_times``: what codecs take on this machine, and which encoding is fastest over which link.

Half a minute, on one thread; nothing else should run meanwhile. Links are weighed with the constants that come with zosim.
"""

from __future__ import annotations

import argparse

from costmodel.formats.codec_time import (
    BoundaryLink,
    BoundaryTransfer,
    CodecWork,
    boundary_transfer,
    fastest_transfer,
    load_codec_profile,
)
from costmodel.formats.codecs import CodecSpec, codec_spec
from costmodel.formats.symbols import statistics_of_density
from executors.calibration.codec_probes import NUM_COLUMNS, NUM_ROWS, measure_codecs, whole_probes
from zosim.console import stdout
from zosim.report import Table

CODECS = (
    "none",
    "q4:dense",
    "q4:bitmap",
    "q4:run-length",
    "q4:entropy",
    "q4:smallest",
    "q4:stochastic:dense",
)
DENSITY = 0.1
LINK_SHAPE, LINK_DENSITY, LINKS = (4, 512, 1024), 0.05, (1e5, 1e6, 1e7, 1e8, 1e9, 1e10)
_BUDGET_S = 20.0


def measured() -> list[tuple[str, CodecWork, float, CodecWork, float]]:
    """Return for each codec the work and the seconds of making a message and of reading it."""
    pairs = [whole_probes(codec_spec(name), DENSITY) for name in CODECS]
    seconds = measure_codecs(budget_s=_BUDGET_S, probes=[probe for pair in pairs for probe in pair])
    return [(name, *seconds[2 * i], *seconds[2 * i + 1]) for i, name in enumerate(CODECS)]


def over(bandwidth_bytes_per_s: float) -> tuple[BoundaryTransfer, BoundaryTransfer]:
    """Return how a tensor crosses a link fastest in 4 bits, and as plain numbers of 16 bits."""
    stats = statistics_of_density(LINK_SHAPE, bits=4, density=LINK_DENSITY)
    link = BoundaryLink(bandwidth_bytes_per_s, load_codec_profile())
    return (
        fastest_transfer(codec_spec("q4"), LINK_SHAPE, 2, stats, link),
        boundary_transfer(CodecSpec(), LINK_SHAPE, 2, stats, link),
    )


def _times() -> object:
    profile, rows = load_codec_profile(), []
    for name, encode, encode_s, decode, decode_s in measured():
        rows.append(
            (
                name,
                f"{encode['byte_s']}",
                f"{1e3 * encode_s:.1f}",
                f"{profile.duration_s(encode) / encode_s:.2f}",
                f"{1e3 * decode_s:.1f}",
                f"{profile.duration_s(decode) / decode_s:.2f}",
            )
        )
    columns = ("codec", "bytes", "encode, ms", "predicted/measured", "decode, ms", "predicted/measured")
    title = f"{NUM_ROWS} × {NUM_COLUMNS} float32 numbers, {DENSITY:.0%} of them not 0"
    return Table(columns, rows, title=title, numeric=columns[1:])


def _links() -> object:
    rows = []
    for bandwidth in LINKS:
        best, plain = over(bandwidth)
        rows.append(
            (
                f"{bandwidth / 1e6:g}",
                str(best.spec.encoding),
                f"{1e3 * best.seconds:.4g}",
                f"{1e3 * plain.seconds:.4g}",
            )
        )
    columns = ("link, MB/s", "fastest encoding of 4 bits", "takes, ms", "plain 16 bits, ms")
    title = f"{' × '.join(map(str, LINK_SHAPE))} numbers, {LINK_DENSITY:.0%} kept, shipped constants"
    return Table(columns, rows, title=title, numeric=columns[2:])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", action="store_true", help="only the links, which take no measurement")
    if not parser.parse_args().links:
        stdout.print(_times())
    stdout.print(_links())


if __name__ == "__main__":
    main()
