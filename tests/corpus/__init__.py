"""What zosim answers and computes, frozen: a refactoring is compared with it before and after.

``python3 .ci/tasks.py freeze FILE`` writes the corpus of the sources as they are, ``... compare FILE`` makes it again and
prints every difference. It has hashes of the weights and logs of a few hundred tiny runs (each value of each setting once, then random
combinations; fresh, resumed, replayed; one to four ranks), plans, programs and predictions of a few hundred requests, and the verdicts and
caught faults of all claims. A refusal is an outcome like any other: its message is kept.

What is frozen belongs to one machine and one torch: bits depend on both.
"""
