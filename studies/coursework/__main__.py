"""The lessons of all units, one after the other."""

from __future__ import annotations

import runpy

from studies.coursework import UNITS

for unit in UNITS:
    runpy.run_module(f"studies.coursework.{unit.name}", run_name="__main__")
