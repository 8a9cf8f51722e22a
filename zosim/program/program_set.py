"""The programs of all ranks: one per role, since ranks that do the same share one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from topology.errors import ProgramError
from topology.renamed import with_present_names
from zosim.documents import Document
from zosim.program import PROGRAM_FILE, PROGRAM_VERSION, Program


@dataclass(frozen=True)
class ProgramSet(Document):
    """What every rank does.

    Raises ProgramError if a role has no program, a group is no partition of the ranks, or a program counts its members otherwise.
    """

    programs: tuple[Program, ...]
    roles: tuple[int, ...] = (0,)  # role of each rank, an index into `programs`
    # Named groups: each a partition of all ranks, members in rank order.
    process_groups: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    document = PROGRAM_FILE

    def __post_init__(self) -> None:
        unknown = sorted(set(self.roles) - set(range(len(self.programs))))
        if unknown or not self.roles:
            message = f"ranks have the roles {list(self.roles)}, but there are {len(self.programs)} programs"
            raise ProgramError(message, hint="give every rank the index of a program as its role")
        for name, subgroups in self.process_groups.items():
            if sorted(rank for subgroup in subgroups for rank in subgroup) != list(range(self.world_size)):
                message = (
                    f"group {name} must list each of the {self.world_size} ranks once, but is "
                    f"{[list(subgroup) for subgroup in subgroups]}"
                )
                raise ProgramError(message, hint="list every rank once")
        for rank, role in enumerate(self.roles):
            for name, size in self.programs[role].process_groups.items():
                if len(self.members(name, rank)) != size:
                    message = (
                        f"program {self.programs[role].name} is for groups {name} of {size} ranks, but that of rank "
                        f"{rank} has {len(self.members(name, rank))}"
                    )
                    raise ProgramError(message, hint="lower the plan again for this mesh")

    @classmethod
    def of_one(cls, program: Program) -> ProgramSet:
        """Return the set of one rank."""
        return cls((program,), (0,), dict.fromkeys(program.process_groups, ((0,),)))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.roles)

    @property
    def name(self) -> str:
        """The programs' common name, for messages."""
        return self.programs[0].name

    def program_of(self, rank: int) -> Program:
        """Return what `rank` runs."""
        return self.programs[self.roles[rank]]

    def members(self, group: str, rank: int) -> tuple[int, ...]:
        """Return the ranks of `group` that `rank` is among.

        Raises ProgramError if there is no such group.
        """
        try:
            return self._members[group][rank]
        except KeyError:
            message = f"program {self.name} uses group {group!r}, which the ranks do not have"
            raise ProgramError(message, hint=f"groups: {', '.join(self.process_groups) or 'none'}") from None

    @cached_property
    def _members(self) -> dict[str, dict[int, tuple[int, ...]]]:
        return {
            name: {rank: subgroup for subgroup in subgroups for rank in subgroup}
            for name, subgroups in self.process_groups.items()
        }

    def to_json(self) -> str:
        """Return the set as JSON; that of one rank as the program that it is."""
        if self.world_size == 1:
            return self.programs[0].to_json()
        data: dict[str, Any] = {
            "version": PROGRAM_VERSION,
            "roles": list(self.roles),
            "process_groups": {
                name: [list(subgroup) for subgroup in subgroups]
                for name, subgroups in self.process_groups.items()
            },
        }
        head = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in data.items())
        programs = ",\n".join(program.to_json() for program in self.programs)
        return "{\n" + head + ',\n  "programs": [\n' + programs + "]\n}\n"

    @classmethod
    def from_data(cls, data: Mapping[str, Any], where: str) -> ProgramSet:
        """Return the set that the object of :meth:`to_json` describes, or a single program."""
        if "programs" not in data:
            return cls.of_one(Program.from_data(data, where))
        data = with_present_names(data, {"groups": "process_groups"})
        try:
            programs = tuple(
                Program.from_data(item, f"{where}, role {role}") for role, item in enumerate(data["programs"])
            )
            roles = tuple(int(role) for role in data["roles"])
            process_groups = {
                str(name): tuple(tuple(int(rank) for rank in subgroup) for subgroup in subgroups)
                for name, subgroups in data["process_groups"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            message = f"{where} is not a program set: {type(error).__name__}: {error}"
            raise ProgramError(message, hint="it needs `programs`, `roles` and `process_groups`") from None
        return cls(programs, roles, process_groups)
