"""What an instruction of a program can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from costmodel.devices.collectives import CollectiveName
from costmodel.formats.distributions import DistributionName
from zosim.eval_points import WrittenEvalPoint


@dataclass(frozen=True, slots=True)
class Load:
    """The batch of this step, put where the forwards read it by the host loop."""

    type: Literal["load"] = "load"


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes moved between memories, as they are."""

    type: Literal["copy"] = "copy"


@dataclass(frozen=True, slots=True)
class Cast:
    """The first read, converted to the dtype of the buffer written."""

    type: Literal["cast"] = "cast"


@dataclass(frozen=True, slots=True)
class Allocate:
    """A buffer's memory, taken from the device's allocator (not from a cache)."""

    buffer: str
    type: Literal["allocate"] = "allocate"


@dataclass(frozen=True, slots=True)
class Free:
    """A buffer's memory, given back."""

    buffer: str
    type: Literal["free"] = "free"


@dataclass(frozen=True, slots=True)
class Sample:
    """The perturbation ``z`` of one index for one parameter group."""

    param_group: str
    step: int = 0  # step whose seed is used, relative to this one (-1 for a delayed update)
    perturbation: int = 0
    # `"all"`; `"rows"` keeps only the rows of a token table that the batch names; `"factors"` keeps `U` and `V` without their product;
    # `"none"` skips the group's numbers.
    keep: Literal["all", "rows", "factors", "none"] = "all"
    # `"mezo"`: one sequence for all groups in turn. The state before the group is read (that of the group itself, or that after the
    # previous group in turn; none: the step's seed starts the sequence). Such a sampling writes the state before the group, for
    # sampling again, and the state after it (`GeneratorState`). `"counter"`: keyed by (seed, step, perturbation, parameter), no state.
    generator: Literal["mezo", "counter"] = "mezo"
    distribution: DistributionName = "gaussian"
    # Width of the quantized values that the perturbation is rounded to at random (`costmodel.formats.roundings`); 0 where it is not.
    bits: int = 0
    rounding: int = 0  # which of two independent roundings of one perturbation
    # Probability that a row of such quantized values is 0, of a matrix whose weights are quantized.
    sparsity: float = 0.0
    rank: int = 0  # columns of the factors `U` and `V` of a distribution that has any, else 0
    # Steps that `V` is kept for: it is that of the last step whose number is a multiple of this.
    lazy_steps: int = 1
    # Whether an update uses it alone, for a distribution that samples again for that.
    for_update: bool = False
    type: Literal["sample"] = "sample"


@dataclass(frozen=True, slots=True)
class Perturb:
    """``θ + (s·z)·ε``, rounded in exactly that order, in the storage dtype, where ``θ`` lies or in another place.

    ``s = -2`` is one operation with its own rounding, not ``-ε`` twice.
    """

    param_group: str
    scale: int
    perturbation: int = 0
    type: Literal["perturb"] = "perturb"


@dataclass(frozen=True, slots=True)
class Update:
    """``θ - η·(g·z + wd·θ)``, rounded in that order, with the ``η`` and ``g`` of step ``step``.

    Weights that are quantized are rounded to their grid at random, once; or what they change by is added to that by the perturbations before,
    and rounded with the last.
    """

    param_group: str
    step: int = 0
    perturbation: int = 0
    divisor: float = 1.0  # what `g` is divided by before
    type: Literal["update"] = "update"


@dataclass(frozen=True, slots=True)
class Forward:
    """One segment, at one evaluation point."""

    segment: str
    eval_point: WrittenEvalPoint  # files have it as `"q0+"`, `"q0-"` ... or `"base"`
    # Token tables that are read through gathered rows, perturbed out of place with the rows of their perturbation, because another
    # segment needs the table itself unperturbed until its turn.
    gather: tuple[str, ...] = ()
    # Parameter groups that are read unperturbed, and whose perturbation is added in the products that they are in.
    side_paths: tuple[str, ...] = ()
    # All points that it is at, side by side in one batch, `eval_point` the first of them; empty where it is at one.
    batched_eval_points: tuple[WrittenEvalPoint, ...] = ()
    microbatch: int = 0  # in a first-order step, which part of the batch
    # Of the head: tokens that sequences are continued by, for a reward. All but the first take forwards of the whole model, which this
    # one has in it.
    num_new_tokens: int = 0
    type: Literal["forward"] = "forward"


@dataclass(frozen=True, slots=True)
class Backward:
    """The gradients of one segment for one microbatch, from what its forward kept. Simulated only."""

    segment: str
    microbatch: int = 0
    type: Literal["backward"] = "backward"


@dataclass(frozen=True, slots=True)
class Optimize:
    """A first-order optimizer's update of one parameter group. Simulated only."""

    param_group: str
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    type: Literal["optimize"] = "optimize"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A few numbers made from a few numbers."""

    # `"projected_gradient"` turns losses into the `g` of `perturbation`. `"pack_losses"` puts this rank's losses, with the labels that
    # each is the mean over, side by side. `"mean_loss"` turns the packed losses of all ranks into one loss per point: the mean over all
    # labels, `Σ lᵢ·nᵢ / Σ nᵢ` in float64 and in rank order; the loss of a point that one rank alone forwarded stays what it is.
    function: Literal["projected_gradient", "pack_losses", "mean_loss"]
    perturbation: int = 0
    type: Literal["scalar"] = "scalar"


@dataclass(frozen=True, slots=True)
class Collective:
    """Bytes exchanged by all members of a process group; it starts when the last of them is there."""

    # `"all_gather"`: the n-th write holds every member's n-th read, in rank order. A read of a share is gathered into the whole range;
    # any other is gathered into a range as many times as long. `"all_reduce"`: the n-th write holds the sum of all members' n-th reads
    # (first-order gradients; simulated only). `"reduce_scatter"`: the first write holds this member's share of the sum of all first
    # reads (simulated only).
    function: CollectiveName
    process_group: str
    type: Literal["collective"] = "collective"


@dataclass(frozen=True, slots=True)
class Encode:
    """What crosses a boundary, as one message; it may be shorter than the range that it is written to."""

    codec: str = "none"  # of the MLP's activation, where it crosses
    residual_codec: str = "none"  # of the residual stream
    type: Literal["encode"] = "encode"


@dataclass(frozen=True, slots=True)
class Decode:
    """The tensors that such a message holds."""

    type: Literal["decode"] = "decode"


@dataclass(frozen=True, slots=True)
class Send:
    """A message to another member of a process group; both are there before it moves.

    Messages between two ranks are taken in the order in which they are sent.
    """

    process_group: str
    offset: int  # position of the other member in the group, less this one's
    type: Literal["send"] = "send"


@dataclass(frozen=True, slots=True)
class Recv:
    """A message from another member of a process group."""

    process_group: str
    offset: int
    type: Literal["recv"] = "recv"


Operation = Annotated[
    Load
    | Copy
    | Cast
    | Allocate
    | Free
    | Sample
    | Perturb
    | Update
    | Forward
    | Backward
    | Optimize
    | Scalar
    | Collective
    | Encode
    | Decode
    | Send
    | Recv,
    Field(discriminator="type"),
]
