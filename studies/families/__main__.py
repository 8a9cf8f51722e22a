"""``python -m studies.families``: what can be done with each family of language models, tried on tiny models.

Each family is tried in a process of its own with a time limit. ``--write`` makes docs/reference/families.md and the results
beside it, which takes ten minutes of one core, or tries some again with ``--only`` and ``--ways``; without it the table is printed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from pathlib import Path

import torch
import transformers

from studies.families.report import page, table
from studies.families.tiny import families, tiny_model
from studies.families.trying import WAYS, Verdict, tried
from zosim.console import emit, stderr

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
    process = context.Process(target=lambda: there.send(tried(family, ways)))
    process.start()
    there.close()
    try:
        if not here.poll(_LIMIT_S):
            return {"model": {"word": "fails", "why": f"nothing within {_LIMIT_S:.0f} s"}}
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
