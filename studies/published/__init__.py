"""Predictions held against print: from a row of a published table to a plan, a program and a number beside it.

``conventions`` reads a row as a plan on a preset's hardware, ``habits`` says what the papers' code does differently
from ours, ``grid`` evaluates the closed form of many programs for many sets of constants, ``constants`` names what
may be fitted, ``fitting`` fits it, ``memory`` counts bytes, ``predicting`` writes the answers and ``audit`` looks for
cells that cannot be. ``dispatch`` answers by paper: SparQ's tables count bytes and no seconds, and have files of their own,
``sparq`` (rows and conventions), ``sparq_volumes``, ``sparq_memory`` and ``sparq_fit``; QuZO's are memory, and in ``quzo``.
"""
