#!/usr/bin/env python3
"""The project's tasks, for people and CI alike: ``python3 .ci/tasks.py TASK``.

Needs Python 3.11 and a package index, nothing else: a task first makes the environment that it runs in.
This file keeps to what Python 3.6 can read, so that an old interpreter can say what is wrong.
"""

import os
import shutil
import subprocess
import sys

OLDEST = (3, 11)


def ensure_python() -> None:
    """Continue under a Python that is new enough, or say which one is needed."""
    if sys.version_info >= OLDEST:
        return
    for minor in (13, 12, 11, 14):
        newer = shutil.which(f"python3.{minor}")
        if newer and subprocess.call([newer, "-c", "import venv, ensurepip"], stderr=subprocess.DEVNULL) == 0:
            os.execv(newer, [newer, *sys.argv])
    sys.exit(
        f"error: zosim needs Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}\n\n"
        "hint: install a newer one (apt install python3.11-venv, or from python.org) and run"
        f" python3.11 {' '.join(sys.argv)}"
    )


if __name__ == "__main__":
    ensure_python()
    import task_list

    sys.exit(task_list.main(sys.argv[1:]))
