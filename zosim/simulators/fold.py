"""One rank for all that behave alike.

Ranks are sorted into classes, and so are the resources that can limit them, until the members of a class see the same
of every other class: an *equitable partition*, found by colour refinement. Then all members of a class do the same at
the same time, whatever is shared, and one of them stands for all: what it takes of a resource counts once for every
member that takes from that one resource.

Equal times of all members follow because rates are a function of what is running that does not depend on names, and
because members start alike. A resource that serves one at a time does depend on names (equal arrivals are served in
rank order), so ranks that share such a resource are each a class of their own. Ranks at different places of a group
along which messages go are told apart, too: equals then send to equals.

.. [1] C. Berkholz, P. Bonsma, M. Grohe, "Tight lower and upper bounds for the complexity of canonical colour
   refinement", Theory of Computing Systems 60(4), 2017: colour refinement computes the coarsest equitable partition.

Two ranks that do the same on one CPU, whose cores and memory they share, are one that stands for both:

>>> from costmodel import read_model_spec
>>> from costmodel.devices.datasheet import datasheet_profile
>>> from topology import load_preset
>>> from zosim.hardware.machines import machines_for
>>> from zosim.lowering import lower_all
>>> from zosim.plans import Mesh, Placement, Plan
>>> placement = Placement(topology="cpu-laptop", devices=("cpu0", "cpu0"))
>>> plan = Plan(model=read_model_spec("opt-125m"), batch=2, seq=16, mesh=Mesh(data=2), placement=placement)
>>> topology, programs = load_preset("cpu-laptop"), lower_all(plan)
>>> profile = datasheet_profile(topology, "cpu0")
>>> world = World.of(programs, machines_for(topology, placement.devices, profile, programs.process_groups))
>>> world.size, sorted(world.capacities)
(2, ['dram0', 'host0:cores'])
>>> fold(world).size, fold(world).counts
(1, (2,))
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from zosim.program.step_graph import channel_of
from zosim.simulators.assembly import without_garbage_collection
from zosim.simulators.world import ProcessGroup, Template, World


@without_garbage_collection()
def fold(world: World) -> World:
    """Return a world of one rank for each class of those that behave alike, the first of each."""
    plain = _RankClasses(world)
    partition = _refined(world, plain)
    # The first rank of each colour stands for all of it.
    first = {colour: rank for rank, colour in reversed(list(enumerate(partition.ranks)))}
    chosen = sorted(first.values())
    position = {partition.ranks[rank]: number for number, rank in enumerate(chosen)}
    templates = tuple(_multiplied(world, plain, partition, rank) for rank in chosen)
    counts = Counter(partition.ranks)
    names = {name for template in templates for name in template.resources}
    return World(
        templates=templates,
        template_of=tuple(range(len(chosen))),
        resources=tuple(template.resources for template in templates),
        capacities=MappingProxyType({n: c for n, c in world.capacities.items() if n in names}),
        fifo=world.fifo & names,
        process_groups=MappingProxyType(
            {
                name: _folded_group(group, partition.ranks, position)
                for name, group in world.process_groups.items()
            }
        ),
        numbers=tuple(world.numbers[rank] for rank in chosen),
        counts=tuple(counts[partition.ranks[rank]] for rank in chosen),
    )


@dataclass(frozen=True)
class _Partition:
    """Colours of ranks, by position, and of resources, by name."""

    ranks: tuple[int, ...]
    resources: dict[str, int]


class _RankClasses:
    """What of each rank matters: its activities' numbers, and the resources that can limit them.

    - `rank_class`: Equal for ranks that differ in the names of their resources alone.
    - `resources`: Of each rank, in an order that is the same for ranks of equal classes.
    """

    def __init__(self, world: World) -> None:
        self._numbers: dict[Hashable, int] = {}
        known: dict[Hashable, tuple[int, tuple[int, ...]]] = {}
        self.rank_class: list[int] = []
        self.resources: list[tuple[str, ...]] = []
        for rank in range(world.size):
            listed = world.resources[rank]
            # Resources of which there is always enough tell nobody apart.
            limiting = tuple(number for number, name in enumerate(listed) if name in world.capacities)
            key = world.template_of[rank], limiting
            if key not in known:
                known[key] = self._rank_class(world.template(rank), limiting)
            rank_class, indices = known[key]
            self.rank_class.append(rank_class)
            self.resources.append(tuple(listed[index] for index in indices))

    def _rank_class(self, template: Template, limiting: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Return the number of a class, and the positions of the resources that it uses."""
        by_name = {template.resources[number]: number for number in limiting}
        order: dict[str, int] = {}
        known: dict[int, Hashable] = {}
        for activity in template.activities.values():
            # Templates share activities, so each is described once.
            if id(activity) not in known:
                uses = [(name, use) for name, use in activity.uses if name in by_name]
                numbered = tuple((order.setdefault(name, len(order)), use) for name, use in uses)
                known[id(activity)] = (
                    activity.seconds,
                    numbered and (activity.bound, activity.weight),
                    numbered,
                )
        described = [known[id(activity)] for activity in template.activities.values()]
        # Names are left out: classes differ in work, not in what their links are called.
        key = id(template.program), template.step_s, tuple(described)
        number = self._numbers.setdefault(key, len(self._numbers))
        return number, tuple(by_name[name] for name in order)


def _refined(world: World, plain: _RankClasses) -> _Partition:
    """Return the coarsest partition in which equals see equals."""
    users: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for rank, names in enumerate(plain.resources):
        for index, name in enumerate(names):
            users[name].append((rank, index))
    # Equal arrivals at a queue are served in the order of ranks, so those who share one are not alike.
    queues = [{rank for rank, _ in users[name]} for name in users if name in world.fifo]
    apart = set().union(*(ranks for ranks in queues if len(ranks) > 1))
    indices = _positions(world)
    partition = _Partition(
        _numbered(
            [
                (rank_class, rank if rank in apart else -1, tuple(map(names.index, names)), indices[rank])
                for rank, (rank_class, names) in enumerate(
                    zip(plain.rank_class, plain.resources, strict=True)
                )
            ]
        ),
        dict(
            zip(
                users,
                _numbered([(world.capacities[name], name in world.fifo) for name in users]),
                strict=True,
            )
        ),
    )
    # Colours are numbered as they first appear, so what is not refined keeps its numbers.
    while (finer := _finer(world, plain, users, partition)) != partition:
        partition = finer
    return partition


def _positions(world: World) -> list[tuple[int, ...]]:
    """Return each rank's position in the groups along which messages go: whom it sends to depends on it."""
    channels = {
        channel_of(item) for template in world.templates for _, item in template.program.instructions()
    }
    names = sorted({channel.process_group for channel in channels if channel is not None and channel.offset})
    process_groups = [world.process_groups[name] for name in names]
    index: list[dict[int, int]] = [
        {rank: number for subgroup in group.subgroups for number, rank in enumerate(subgroup)}
        for group in process_groups
    ]
    return [tuple(of[rank] for of in index) for rank in range(world.size)]


def _finer(
    world: World, plain: _RankClasses, users: dict[str, list[tuple[int, int]]], partition: _Partition
) -> _Partition:
    # A resource sees the colours of those who use it, and as which of their resources.
    seen_by_resource = [
        (partition.resources[name], tuple(sorted((partition.ranks[rank], index) for rank, index in using)))
        for name, using in users.items()
    ]
    resources = dict(zip(users, _numbered(seen_by_resource), strict=True))
    subgroups = [
        (
            group.subgroup_of,
            _numbered(
                [tuple(sorted(partition.ranks[rank] for rank in subgroup)) for subgroup in group.subgroups]
            ),
        )
        for group in world.process_groups.values()
    ]
    # A rank sees the colours of its resources, and of all members of its groups.
    seen_by_rank = [
        (
            colour,
            tuple(resources[name] for name in plain.resources[rank]),
            tuple(seen[subgroup_of[rank]] for subgroup_of, seen in subgroups),
        )
        for rank, colour in enumerate(partition.ranks)
    ]
    return _Partition(_numbered(seen_by_rank), resources)


def _numbered(keys: Sequence[Hashable]) -> tuple[int, ...]:
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


def _multiplied(world: World, plain: _RankClasses, partition: _Partition, rank: int) -> Template:
    """Return a rank's template in which it takes what all of its class take of each resource."""
    template, names = world.template(rank), plain.resources[rank]
    own = dict(zip(template.resources, world.resources[rank], strict=True))
    representative: dict[int, str] = {}
    for name, colour in partition.resources.items():
        representative.setdefault(colour, name)
    sharers: Counter[tuple[int, str]] = Counter(
        (index, name)
        for other, colour in enumerate(partition.ranks)
        if colour == partition.ranks[rank]
        for index, name in enumerate(plain.resources[other])
    )
    # What the representative takes of a resource counts for all of its class that take from it.
    times = {name: sharers[index, name] for index, name in enumerate(names)}
    activities = template.taking(
        lambda activity: tuple(
            (representative[partition.resources[own[name]]], use * times[own[name]])
            for name, use in activity.uses
            if own[name] in times
        )
    )
    listed = tuple(dict.fromkeys(representative[partition.resources[name]] for name in names))
    return Template(template.program, MappingProxyType(activities), listed, template.step_s)


def _folded_group(group: ProcessGroup, colours: tuple[int, ...], position: dict[int, int]) -> ProcessGroup:
    subgroups: dict[tuple[int, ...], None] = {}
    doubled = set()
    for subgroup in group.subgroups:
        counts = Counter(colours[rank] for rank in subgroup)
        subgroups[tuple(sorted(position[colour] for colour in counts))] = None
        # Of a class that has several members in one subgroup, the one that stands for them waits for the others: for itself.
        doubled |= {position[colour] for colour, count in counts.items() if count > 1}
    return ProcessGroup(tuple(subgroups), frozenset(doubled))
