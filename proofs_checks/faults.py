"""Planted faults that more than one claim's check must notice."""

from __future__ import annotations

from proofs_checks.mutation import Mutant

SHORT_GRID = Mutant(
    "a symmetric grid that ends before the largest value",
    "executors.codecs.grids:_symmetric_step",
    "largest / codes",
    "largest / (codes + 1)",
)
ROUNDING_UP = Mutant(
    "rounding up", "executors.codecs.quantising:quantise", "scaled.round_()", "scaled.ceil_()"
)
WIDE_NORMALS = Mutant(
    "normals 3 % too wide",
    "executors.randomness.directions:Gaussian.fill",
    "out.normal_(0.0, 1.0,",
    "out.normal_(0.0, 1.03,",
)
ONE_ROUNDING = Mutant(
    "one rounding where two are due",
    "executors.randomness.families:QuantisedGaussian.fill_pair",
    "second.copy_(self.rounding.rounded(first, generator))\n    first.copy_(self.rounding.rounded(first, generator))",
    "first.copy_(self.rounding.rounded(first, generator))\n    second.copy_(first)",
)
CLAMPED_TOO_FAR = Mutant(
    "codes clamped one too far",
    "executors.randomness.quantisers:StochasticRounding.codes",
    "clamp_(-self.highest, self.highest)",
    "clamp_(-self.highest - 1, self.highest)",
)
NO_ZERO_POINT = Mutant(
    "a zero point that is forgotten",
    "executors.randomness.quantisers:StochasticRounding.values",
    "(codes - self.zero_point)",
    "codes",
)
NEAREST = Mutant(
    "rounding to the nearest",
    "executors.randomness.quantisers:rounded_at_random",
    "chance < numbers - below",
    "0.5 < numbers - below",
)
SECOND_BY_EPSILON = Mutant(
    "second perturbation by -ε, not -2ε",
    "executors.steps.arithmetic:Sweeper.perturb",
    "scale * epsilon",
    "(1 if scale > 0 else -1) * epsilon",
)
CLIMBING = Mutant(
    "an update that climbs",
    "executors.steps.arithmetic:Sweeper.update",
    "piece.sub_(product)",
    "piece.add_(product)",
)
CENTRAL_BY_EPSILON = Mutant(
    "a central difference divided by ε",
    "executors.steps.arithmetic:projected_gradient",
    "(2 * epsilon if central else epsilon)",
    "epsilon",
)
FORWARD_BY_TWO_EPSILON = Mutant(
    "a forward difference divided by 2ε",
    "executors.steps.arithmetic:projected_gradient",
    "(2 * epsilon if central else epsilon)",
    "(2 * epsilon)",
)
EMPTY_FLUSH = Mutant(
    "a flush that applies nothing",
    "executors.steps.interpreter:Interpreter.flush",
    'self._run("flush", StepFrame(self._next_step, previous=self._frame))',
    'self._run("flush", StepFrame(self._next_step))',
)
LOSSES_ADDED = Mutant(
    "shards' losses added, not averaged",
    "executors.steps.micro_batches:accumulated",
    "total / sum(counts)",
    "total",
)
GROUPS_FROM_THE_SEED = Mutant(
    "every group starts from the seed",
    "executors.steps.ops.draw:Draws._walked",
    "generator.set_state(values[source[0]][0])",
    "generator.manual_seed(seeded.seeds[op.query])",
)
PRESENT_RATE = Mutant(
    "the present step's learning rate",
    "executors.steps.ops.sweep:Sweeps.update",
    "rate = source.learning_rate",
    "rate = frame.learning_rate or source.learning_rate",
)
QUERIES_SUMMED = Mutant(
    "queries summed, not averaged", "executors.steps.ops.sweep:Sweeps.update", "/ self.num_queries", "/ 1"
)
UPDATES_THAT_DO_NOT_WAIT = Mutant(
    "updates that do not wait for their block's turn",
    "zosim.lowering.rank:Rank.is_delayed",
    'self.plan.schedule.update == "delayed" and',
    "False and",
)
ALL_SLICES = Mutant(
    "every rank uploads all slices",
    "zosim.lowering.residency:Homes._upload_sliced",
    "copy_work(share_bytes)",
    "copy_work(total)",
)
SENT_TO_ITSELF = Mutant(
    "a share sent to itself as well",
    "zosim.lowering.residency:Homes._upload_sliced",
    "link_bytes=total - share_bytes",
    "link_bytes=total",
)
