"""A server of a runtime, on a thread of its own."""

from __future__ import annotations

import threading
from contextlib import contextmanager

from executors.serving.server import ScoringServer


@contextmanager
def serving(runtime, model="base", **options):
    """Serve until the block ends."""
    with ScoringServer(runtime, model, **options) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
