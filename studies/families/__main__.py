"""``python -m studies.families``: what can be done with each family of language models, tried on tiny models.

Each family is tried in a process of its own with a limit of processor time. ``--write`` makes docs/reference/families.md and the results
beside it, which takes ten minutes of one core, or tries some again with ``--only`` and ``--ways``; without it the table is printed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
from collections.abc import Mapping
from math import ceil
from pathlib import Path

import torch
import transformers

from studies.families.tiny import exception_of, families, tiny_model
from studies.families.trying import PEAK, WAYS, Verdict, tried
from zosim.console import emit, stderr
from zosim.report import Table

Found = Mapping[str, Mapping[str, Verdict]]
_WORDS = {"yes": "yes", "refused": "refused", "differs": "**differs**", "fails": "**fails**"}


def table(found: Found) -> Table:
    """Return one row a family: a word for each way, and the first reason that is no yes."""
    rows = []
    for family, ways in found.items():
        first = next((f"{way}: {own['why']}" for way, own in ways.items() if own["word"] != "yes"), "")
        rows.append((family, *(ways[way]["word"] if way in ways else "-" for way in ("model", *WAYS)), first))
    return Table(("family", "model", *WAYS, "why not"), rows)


def shares(found: Found) -> dict[str, tuple[int, int]]:
    """Return of each way how many families with a tiny model can be run so, and how many there are."""
    there = [ways for ways in found.values() if ways["model"]["word"] == "yes"]
    return {way: (sum(ways[way]["word"] == "yes" for ways in there), len(there)) for way in WAYS}


def peaks(found: Found) -> list[tuple[float, str, str]]:
    """Return predicted over measured peak memory of each run on one device, with family and way, the least first."""
    every = [(own["why"], family, way) for family, ways in found.items() for way, own in ways.items()]
    return sorted(
        (float(why.removeprefix(PEAK)), family, way)
        for why, family, way in every
        if way in ("resident", "offload") and why.startswith(PEAK)
    )


def page(found: Found, version: str) -> str:
    """Return the page of the documentation."""
    counts = ", ".join(f"{way} {num} of {every}" for way, (num, every) in shares(found).items())
    notes: dict[str, list[str]] = {}
    rows = []
    for family, ways in found.items():
        cells = []
        for way in ("model", *WAYS):
            verdict = ways.get(way)
            cells.append("" if verdict is None else _WORDS[verdict["word"]])
            if verdict is not None and verdict["word"] != "yes":
                notes.setdefault(f"{verdict['word']}: {verdict['why']}", []).append(f"{family} ({way})")
        rows.append((f"`{family}`", *cells))
    head = ("family", "tiny model", *WAYS)
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    why = [f"- {', '.join(cases)}: {_quoted(reason)}" for reason, cases in notes.items()]
    made = [
        f"- `{family}`: {exception_of(family)['reason']}" for family in families() if exception_of(family)
    ]
    memory = ""
    if ratios := peaks(found):
        over = [f"`{family}` {way} {ratio:.2f}" for ratio, family, way in ratios if not 1 <= ratio <= _FAR]
        middle, most = ratios[len(ratios) // 2][0], ratios[-1][0]
        memory = _MEMORY.format(runs=len(ratios), least=ratios[0][0], middle=middle, most=most)
        memory += f"Below 1 or above {_FAR}: {', '.join(over)}.\n" if over else ""
    return _PAGE.format(
        memory=memory,
        version=version,
        counts=counts,
        table="\n".join(lines),
        why="\n".join(why),
        made="\n".join(made),
    )


def _quoted(reason: str) -> str:
    word, _, why = reason.partition(": ")
    why = why.replace("`", "'")
    return f"{word}: `{why}`"


_FAR = 1.5
_MEMORY = """
Peak device memory of {runs} runs, resident or offloaded, predicted over measured: at least {least:.2f}, in the middle {middle:.2f},
at most {most:.2f}.
"""

_PAGE = """# Families of language models

What zosim does with each causal language model that transformers {version} knows. `python -m studies.families --write` made this
page: it tried a tiny model of each family. Re-run it after an update of transformers.

| column | what was tried |
| --- | --- |
| tiny model | a model with random weights and small sizes is built, and has a finite loss |
| plan | parameters are counted as the model has them |
| resident | 3 steps are the literal MeZO loop, bit for bit |
| offload | the same with blocks in host memory |
| stages | the same on two stages |
| packed | 3 steps with all evaluation points in one packed forward |
| quantized | 3 steps on int8 weights |
| adapters | as resident, tuning LoRA adapters on all linear layers of the blocks |

Of the families with a tiny model: {counts}.

A model that cannot be run block by block is tuned resident, as one segment. The other columns need blocks.
{memory}
{table}

## Why not

{why}

## How tiny models were made

Sizes of a family's default configuration become small. These families needed more:

{made}
"""


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"
_LIMIT_S = 120.0


def main() -> None:
    """Try the families, and print or write what came of it."""
    parser = argparse.ArgumentParser(prog="python -m studies.families", description=__doc__)
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="FAMILY", help="Families to try (default: all)."
    )
    parser.add_argument(
        "--ways", nargs="*", default=list(WAYS), choices=list(WAYS), help="Ways to try (default: all)."
    )
    parser.add_argument(
        "--write", action="store_true", help="Write the page of the documentation, and its results."
    )
    parser.add_argument("--json", action="store_true", help="Print the results as JSON.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    tried("llama", options.ways)  # what is imported here once, every process has
    tiny_model("mixtral"), tiny_model("mamba")
    found = {}
    for family in options.only or families():
        found[family] = _apart(family, options.ways)
        stderr.print(family, *(verdict["word"] for verdict in found[family].values()), markup=False)
    if options.write:
        results = PAGE.with_suffix(".json")
        is_all = not options.only and options.ways == list(WAYS)
        kept = {} if is_all else json.loads(results.read_text(encoding="utf-8"))
        known = {family: kept.get(family, {}) | found.get(family, {}) for family in families()}
        found = {family: ways for family, ways in known.items() if ways}
        PAGE.write_text(page(found, transformers.__version__), encoding="utf-8")
        results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    else:
        emit(found, json=options.json, text=table(found))


def _apart(family: str, ways: list[str]) -> dict[str, Verdict]:
    """Return what came of a family's ways, tried in a copy of this process."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def work() -> None:
        # Of the processor: on a busy machine a family that is right may take long.
        limit_s = ceil(_LIMIT_S)
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
        there.send(tried(family, ways))

    process = context.Process(target=work)
    process.start()
    there.close()
    try:
        if not here.poll(10 * _LIMIT_S):
            return {"model": {"word": "fails", "why": f"nothing within {10 * _LIMIT_S:.0f} s"}}
        found: dict[str, Verdict] = here.recv()
        return found
    except EOFError:
        process.join()
        return {"model": {"word": "fails", "why": f"the process ended with {process.exitcode}"}}
    finally:
        process.kill()
        process.join()


if __name__ == "__main__":
    main()
