"""A tokenizer tried in a process of its own: ``python -P tokenizer_trial.py FILE TEXT`` exits with 1, and says why, where it cannot be used.

What ``tokenizer.json`` holds is a program of a kind: patterns and replacements, one after the other. One that multiplies without
end takes this process's time and memory. Nothing of zosim is imported: the process has to begin quickly.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

MOST_GROWTH = 4096.0
"""More than the replacements of any tokenizer come to, one after the other."""

_LOADING_CPU_S, _LOADING_BYTES = 8, 4 << 30
_TEXT_CPU_S, _TEXT_BYTES = 3, 256 << 20
"""Loading one may take long; a few words take next to nothing."""


def growth(part: Any) -> float:
    """Return by how many times a part of a tokenizer can lengthen a text, as far as its replacements go."""
    if not isinstance(part, dict):
        return 1.0
    if part.get("type") == "ByteLevel":
        return 2.0
    if part.get("type") == "Replace":
        pattern, content = part.get("pattern"), str(part.get("content", ""))
        plain = pattern.get("String") if isinstance(pattern, dict) else None
        # An expression may match between any two characters.
        return max(1.0, len(content) / max(1, len(plain)) if isinstance(plain, str) else len(content) + 1.0)
    product = 1.0
    for inner in [each for parts in part.values() if isinstance(parts, list) for each in parts]:
        product = min(product * growth(inner), 1e300)
    return product


def try_out(path: Path, text: str) -> str | None:
    """Return why a tokenizer cannot be used; None where it can."""
    parsed = json.loads(path.read_bytes())
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if isinstance(parsed, dict) and (times := growth(parsed.get(part))) > MOST_GROWTH:
            return f"its {part} makes texts up to {times:.0e} times as long"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + _TEXT_CPU_S)
    held = Path("/proc/self/status")
    if held.exists():
        (kib,) = (line.split()[1] for line in held.read_text().splitlines() if line.startswith("VmData"))
        _limit(resource.RLIMIT_DATA, (int(kib) << 10) + _TEXT_BYTES)
    tokenizer.decode(tokenizer.encode(text).ids)
    return None


def _limit(what: int, amount: int) -> None:
    resource.setrlimit(what, (amount, resource.getrlimit(what)[1]))


if __name__ == "__main__":
    _limit(resource.RLIMIT_CPU, _LOADING_CPU_S)
    _limit(resource.RLIMIT_DATA, _LOADING_BYTES)
    try:
        reason = try_out(Path(sys.argv[1]), sys.argv[2])
    except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception
        reason = str(error) or type(error).__name__
    if reason is not None:
        print(" ".join(reason.split())[:300])
        sys.exit(1)
