"""Where to cut a model into stages: from the work of its segments and what would cross, before anything is lowered.

A stage computes its segments and codes what crosses its ends; a link carries one message for each point. The slowest of
all of these bounds the step from below, whatever overlaps. Cuts are ranked by that bound, then by what one point's way
through all of them takes, which is what fills the pipeline. Only the first few are lowered and simulated.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from costmodel.codec_time import coding_terms, decode_work, encode_work, fastest_crossing, load_codec_profile
from costmodel.codecs import ENCODINGS, CodecSpec, codec_spec, message_bytes, statistics_of_density
from costmodel.model_spec import BACK, FRONT, ModelSpec, block_index, block_segment
from costmodel.work import DTYPE_BYTES
from topology.errors import PlanError
from zosim.lowering.step import StepWriter
from zosim.machine import Hop, Machine
from zosim.plan import Estimator, Mesh, Placement, Plan, Precision, Split
from zosim.program import Program, Stream

INSIDE = ".mlp"
# Cuts of each kind (inside blocks, between them) that are worth a simulation.
_NUM_TRIED = 2
CutModel = Callable[[tuple[int, ...]], ModelSpec]
"""Returns the model with these blocks cut inside."""


@dataclass(frozen=True)
class Cutting:
    """What is asked of cuts.

    Attributes
    ----------
    cuts : tuple of str
        The only ones to plan for; by default any.
    codec, residual_codec : str
        That may be used; plain numbers are tried beside them.
    densities : mapping of str to float
        Of what crosses each cut, where they were measured; 1 for the others.
    cut_model : callable or None
        How to cut inside blocks; unless given, a model is cut where it is cut already, and between blocks.
    """

    cuts: tuple[str, ...] = ()
    codec: str = "none"
    residual_codec: str = "none"
    densities: Mapping[str, float] = field(default_factory=dict)
    cut_model: CutModel | None = None

    def __post_init__(self) -> None:
        for name in (self.codec, self.residual_codec):
            codec_spec(name)
        wrong = {cut: value for cut, value in self.densities.items() if not 0 <= value <= 1}
        if wrong:
            raise PlanError(f"densities must be from 0 to 1, not {wrong}", hint="the part that is not zero")

    @property
    def is_lossy(self) -> bool:
        """Whether a codec that is asked for changes numbers."""
        return Split(codec=self.codec, residual_codec=self.residual_codec).is_lossy

    def cut(self, model: ModelSpec, cuts: Sequence[str]) -> ModelSpec:
        """Return `model` with the blocks cut that these cuts are inside.

        Raises
        ------
        PlanError
            If it cannot be cut there.
        """
        blocks = tuple(sorted(block_index(cut) for cut in cuts if cut.endswith(INSIDE)))
        if blocks == model.cut_blocks:
            return model
        if self.cut_model is None:
            raise PlanError(
                f"the model {model.name} was saved with the blocks {list(model.cut_blocks)} cut inside, not "
                f"{list(blocks)}",
                hint="name a model, its directory or its config.json",
            )
        return self.cut_model(blocks)


def read_densities(path: Path) -> dict[str, float]:
    """Return the density of what crosses each cut: an object of them, or a report of ``zosim probe --json``.

    Raises
    ------
    PlanError
        If the file is neither.
    """
    try:
        data = json.loads(path.read_text())
        if "tensors" not in data:
            return {str(cut): float(value) for cut, value in data.items()}
        found: dict[str, float] = {}
        for entry in data["tensors"]:
            is_activation = entry["crossing"] != "residual"
            if is_activation or entry["cut"] not in found:
                found[entry["cut"]] = float(entry["kept"])
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(
            f"{path} holds no densities: {error}",
            hint='write one with `zosim probe --json`, or {"block.5.mlp": 0.1}',
        ) from None


@dataclass(frozen=True)
class Site:
    """What cuts are ranked for: one pipeline of a mesh on its devices."""

    model: ModelSpec
    mesh: Mesh
    placement: Placement
    machines: tuple[Machine, ...]
    batch: int
    seq: int
    estimator: Estimator
    precision: Precision


def splits(site: Site, cutting: Cutting, *, allow_lossy: bool) -> Iterator[tuple[ModelSpec, Split]]:
    """Yield cut models with their splits that are worth a simulation, each cut with each codec that is worth one.

    Raises
    ------
    PlanError
        If a codec loses precision without leave, or the model cannot be cut so.
    """
    if cutting.is_lossy and not allow_lossy:
        raise PlanError(
            f"codecs {cutting.codec} and {cutting.residual_codec} change what arrives at the next stage",
            hint="add --allow-lossy if that is meant",
        )
    ranking = Ranking(site, cutting)
    seen: set[tuple[object, ...]] = set()
    for codecs in ranking.codecs:
        listed = [cutting.cuts] if cutting.cuts else ranking.best(codecs)
        for cuts in listed:
            named = tuple(ranking.codec_for(codec, cuts).name for codec in codecs)
            if (cuts, *named) not in seen:
                seen.add((cuts, *named))
                densities = (
                    tuple(cutting.densities.get(cut, 1.0) for cut in cuts) if cutting.densities else ()
                )
                split = Split(cuts=cuts, codec=named[0], residual_codec=named[1], densities=densities)
                yield cutting.cut(site.model, cuts), split


def sparsest_near_the_middle(
    names: Sequence[str], densities: Mapping[str, float], num_stages: int
) -> tuple[str, ...]:
    """Return SparQ's own choice: of the cuts inside blocks near each even share, the one with the least density.

    Near is within a sixth of the model to either side.
    """
    inside = [name for name in names if name.endswith(INSIDE)]
    reach = max(1, len(inside) // 6)
    chosen: list[str] = []
    for stage in range(1, num_stages):
        middle = stage * len(inside) // num_stages
        near = [name for name in inside[max(0, middle - reach) : middle + reach + 1] if name not in chosen]
        known = [name for name in near if name in densities]
        if not known:
            return ()
        chosen.append(min(known, key=lambda name: densities[name]))
    return tuple(sorted(chosen, key=inside.index))


class Ranking:
    """Cuts of one model on one site, best first."""

    def __init__(self, site: Site, cutting: Cutting) -> None:
        self._site = site
        self._cutting = cutting

    @property
    def codecs(self) -> list[tuple[str, str]]:
        """Pairs of codecs to try: plain numbers, and what was asked for."""
        asked = (self._cutting.codec, self._cutting.residual_codec)
        return list(dict.fromkeys([("none", "none"), asked]))

    @cached_property
    def names(self) -> list[str]:
        """All cuts of the model, in its order."""
        cutting, model = self._cutting, self._site.model
        can_cut = cutting.cut_model is not None
        names = []
        for index in range(model.num_blocks):
            if can_cut or index in model.cut_blocks:
                names.append(block_segment(index) + INSIDE)
            names.append(block_segment(index))
        return names

    def best(self, codecs: tuple[str, str]) -> list[tuple[str, ...]]:
        """Return the cuts worth a simulation: the best inside blocks, the best between them, and SparQ's own choice."""
        num_cuts = self._site.mesh.stage - 1
        inside = [name for name in self.names if name.endswith(INSIDE)]
        between = [name for name in self.names if not name.endswith(INSIDE)]
        found = [cuts for names in (between, inside) for cuts in self._best_of(names, num_cuts, codecs)]
        if num_cuts > 1:
            found += self._best_of(self.names, num_cuts, codecs)
        found.append(sparsest_near_the_middle(self.names, self._cutting.densities, num_cuts + 1))
        return [cuts for cuts in dict.fromkeys(found) if len(cuts) == num_cuts]

    def _best_of(self, names: Sequence[str], num_cuts: int, codecs: tuple[str, str]) -> list[tuple[str, ...]]:
        if len(names) < num_cuts:
            return []
        if num_cuts == 1:
            alone: list[tuple[str, ...]] = [(name,) for name in names]
            return sorted(alone, key=lambda cuts: self.bound_s(cuts, codecs))[:_NUM_TRIED]
        return [self._spread(names, num_cuts, codecs)]

    def _spread(self, names: Sequence[str], num_cuts: int, codecs: tuple[str, str]) -> tuple[str, ...]:
        """Return the cuts of least bound, one after the other: the best way to each of them is known from those before."""
        ways: dict[str, tuple[tuple[float, float], tuple[str, ...]]] = {}
        for name in names:
            ways[name] = self.bound_s((name,), codecs, closed=False), (name,)
        for _ in range(num_cuts - 1):
            longer: dict[str, tuple[tuple[float, float], tuple[str, ...]]] = {}
            for before, name in itertools.combinations(names, 2):
                if before in ways:
                    cuts = (*ways[before][1], name)
                    bound = self.bound_s(cuts, codecs, closed=False)
                    if name not in longer or bound < longer[name][0]:
                        longer[name] = bound, cuts
            ways = longer
        return min((cuts for _, cuts in ways.values()), key=lambda cuts: self.bound_s(cuts, codecs))

    def bound_s(
        self, cuts: Sequence[str], codecs: tuple[str, str], *, closed: bool = True
    ) -> tuple[float, float]:
        """Return the seconds per step of the slowest stage or link, and what all crossings of one point take.

        Parameters
        ----------
        cuts : sequence of str
        codecs : tuple of str
        closed : bool
            Whether the last stage counts, too.
        """
        points = self._num_points
        crossings = [self._crossing(cut, codecs) for cut in cuts]
        ends = [0, *(self._end(cut) for cut in cuts), *([len(self._seconds)] if closed else [])]
        coding = [0.0] * len(cuts) + [0.0]
        for place, (encode_s, _, decode_s) in enumerate(crossings):
            coding[place] += points * encode_s
            coding[place + 1] += points * decode_s
        stages = [
            sum(self._seconds[begin:end]) + coding[place]
            for place, (begin, end) in enumerate(itertools.pairwise(ends))
        ]
        links = [points * transfer_s for _, transfer_s, _ in crossings]
        return max(*stages, *links), sum(sum(way) for way in crossings)

    def codec_for(self, name: str, cuts: Sequence[str]) -> CodecSpec:
        """Return the codec of a name; one that leaves the encoding open with what is fastest over the link."""
        spec = codec_spec(name)
        if spec.bits is None or set(name.split(":")) & {*ENCODINGS, "smallest"}:
            return spec
        density = max(self._cutting.densities.get(cut, 1.0) for cut in cuts)
        shape, width = self._shape(cuts[0]), self._element_bytes
        stats = statistics_of_density(shape, bits=spec.bits, density=density)
        return fastest_crossing(
            spec,
            shape,
            width,
            stats,
            bandwidth_bytes_per_s=self._hop.bandwidth_bytes_per_s,
            latency_s=self._hop.latency_s,
            profile=load_codec_profile(),
        ).spec

    def _crossing(self, cut: str, codecs: tuple[str, str]) -> tuple[float, float, float]:
        """Return the seconds in which one message is encoded, sent and decoded."""
        crossing = [(codecs[1], self._site.model.hidden_size)]
        if cut.endswith(INSIDE):
            crossing.append((codecs[0], self._site.model.intermediate_size))
        profile = self._site.machines[0].profile
        encode_s = decode_s = size = 0.0
        for name, width in crossing:
            spec, shape = self.codec_for(name, (cut,)), (*self._shape(cut)[:2], width)
            density = self._cutting.densities.get(cut, 1.0)
            stats = statistics_of_density(shape, bits=spec.bits or 1, density=density)
            size += message_bytes(spec, shape, self._element_bytes, stats)
            values, kind = profile.values(), profile.device_kind
            encode, decode = (
                of(spec, shape, self._element_bytes, stats) for of in (encode_work, decode_work)
            )
            encode_s += sum(coding_terms(encode, values, kind).values())
            decode_s += sum(coding_terms(decode, values, kind).values())
        return encode_s, self._hop.latency_s + size / self._hop.bandwidth_bytes_per_s, decode_s

    @cached_property
    def _hop(self) -> Hop:
        """The slowest way between neighbouring stages."""
        ways = [hop for machine in self._site.machines for hop in machine.channels.values()]
        return min(ways, key=lambda hop: hop.bandwidth_bytes_per_s)

    @property
    def _element_bytes(self) -> int:
        precision = self._site.precision
        return max(DTYPE_BYTES[precision.compute], DTYPE_BYTES[precision.storage])

    def _shape(self, cut: str) -> tuple[int, int, int]:
        model, num_sequences = self._site.model, -(-self._site.batch // self._site.mesh.data)
        width = model.intermediate_size if cut.endswith(INSIDE) else model.hidden_size
        return num_sequences, self._site.seq, width

    @property
    def _num_points(self) -> int:
        queries, mesh = self._site.estimator.num_queries, self._site.mesh
        points = 2 * queries if self._site.estimator.difference == "central" else queries + 1
        return -(-points // mesh.perturb)

    def _end(self, cut: str) -> int:
        """Return how many of the segments are before a cut."""
        segments = self._whole.segments
        behind = cut.removesuffix(INSIDE) + FRONT if cut.endswith(INSIDE) else cut
        return segments.index(behind + BACK if behind + BACK in segments else behind) + 1

    @cached_property
    def _whole(self) -> ModelSpec:
        """The model with every block cut that can be."""
        cut_model, model = self._cutting.cut_model, self._site.model
        return model if cut_model is None else cut_model(tuple(range(model.num_blocks)))

    @cached_property
    def _seconds(self) -> list[float]:
        """Compute seconds of every segment in a step, on the first device."""
        site, machine = self._site, self._site.machines[0]
        plan = Plan(
            model=self._whole,
            placement=Placement(topology=site.placement.topology, devices=site.placement.devices[:1]),
            batch=self._shape("")[0],
            seq=site.seq,
            estimator=site.estimator,
            precision=site.precision,
        )
        writer = StepWriter(plan)
        writer.write_step()
        program = Program("segments", writer.layout.buffers(), (), (), tuple(writer.instructions))
        found: dict[str, float] = defaultdict(float)
        known: dict[object, float] = {}
        for item in program.step:
            if item.stream == Stream.COMPUTE:
                if item.work not in known:
                    known[item.work] = machine.activity(program, item).seconds
                # Of the forwards, a rank runs those of its share of the points.
                part = 1 / site.mesh.perturb if item.label == "forward" else 1.0
                found[item.segment] += known[item.work] * part
        return [found[segment] for segment in self._whole.segments]
