"""``python -m tests.kills``; see :mod:`tests.kills.suite`."""

from __future__ import annotations

import sys

from tests.kills.suite import main

if __name__ == "__main__":
    sys.exit(main())
