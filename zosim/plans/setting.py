"""What all axes of a plan have in common, and what is known of a field beside its type: said once, where it is declared.

The options of ``zosim plan`` and ``zosim run``, what ``--resume`` lays over what was recorded, what two runs must have in
common to be the same run, and what the planner may choose are read from here.

>>> from zosim.plans.perturbations import Perturbations
>>> field = fields_of(Perturbations)["kept"]
>>> field.setting.flag, field.default, field.setting.changes
('--keep-perturbations', False, 'speed')
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, ConfigDict

from zosim.headings import Heading

if TYPE_CHECKING:
    from zosim.plans import Plan

Changes = Literal["numbers", "speed", "numbers where transfers round", "numbers where codecs round"]
"""What another value changes: losses and weights, or how fast they come about alone, or losses and weights where
offloaded blocks, or what crosses a boundary, are kept in a coarser format."""


@dataclass(frozen=True)
class Setting:
    """What is known of a field."""

    flag: str = ""
    help: str = ""
    changes: Changes = "speed"  # see `Changes`
    planned: bool = False  # whether the planner chooses it where it is left out
    # Values that it then tries, of a field whose type does not list them; of others it tries all.
    tried: tuple[Any, ...] = ()
    usual: str = ""  # what a field that is left out is, in words; by default the default
    # Name in a run's identity, where it is not the option's (the field's, of a field without one).
    recorded_as: str = ""
    # Synonyms of the option that help pages do not show. Earlier spellings stand in `zosim.renamed`.
    aliases: tuple[str, ...] = ()
    typed: Any = None  # what is typed, where it is not of the field's type
    parse: Callable[[Any], object] | None = None  # makes the field's value of what was typed
    heading: Heading | None = None  # under which a help page shows the option; None for that of its section
    expert: bool = False  # whether only `--help-all` shows it


Conflict = tuple[str, str]
"""What cannot stand together in a plan, and what to do about it."""


class Section(BaseModel):
    """Fields of the config tree that belong together; those that nobody set stay unset (``model_fields_set``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    heading: ClassVar[Heading] = "Run"
    """Of its options that name none."""

    def given(self, name: str) -> Any:
        """Return a field that somebody set; None where nobody did."""
        return getattr(self, name) if name in self.model_fields_set else None

    def set_fields(self) -> dict[str, Any]:
        """Return the fields that somebody set, in their order, sections as mappings."""
        fields = {
            name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set
        }
        return {
            name: value.set_fields() if isinstance(value, Section) else value
            for name, value in fields.items()
        }

    def complete(self) -> Self:
        """Return the section with its defaults, checked as a whole."""
        return self.model_validate(self.set_fields())


class Axis(Section):
    """Fields of a plan that are chosen together."""

    setting: ClassVar[Setting | None] = None
    """Of an axis that is named as a whole, with one option for all of its fields; its class method ``parse`` reads what was typed."""

    def summary(self, plan: Plan) -> Iterator[str]:
        """Yield what :meth:`~zosim.plans.Plan.describe` says of these values in `plan`, where they differ from MeZO's."""
        del plan
        return iter(())

    def conflicts(self, plan: Plan) -> Iterator[Conflict]:
        """Yield every reason why these values cannot stand in `plan`, with its remedy."""
        del plan
        return iter(())


@dataclass(frozen=True)
class SettingField:
    """A field with what is known of it."""

    name: str
    annotation: Any  # its type, constraints included, of which the setting is left out
    default: Any  # `...` where it has none
    setting: Setting

    @property
    def tried(self) -> tuple[Any, ...]:
        """Values that the planner tries: those that are declared, or else all of the type."""
        return self.setting.tried or ((False, True) if self.annotation is bool else get_args(self.annotation))

    @property
    def identity(self) -> str:
        """Name in a run's identity."""
        return self.setting.recorded_as or self.setting.flag.removeprefix("--").replace("-", "_") or self.name


@cache
def fields_of(section_type: type) -> Mapping[str, SettingField]:
    """Return the fields of an axis, or of another class of fields, that have a setting, by name."""
    if issubclass(section_type, BaseModel):
        declared = {
            name: field for name, field in section_type.model_fields.items() if not field.is_required()
        }
        defaults = {name: field.get_default(call_default_factory=True) for name, field in declared.items()}
    else:
        defaults = {field.name: field.default for field in dataclasses.fields(section_type)}  # type: ignore[arg-type]
        defaults = {name: value for name, value in defaults.items() if value is not dataclasses.MISSING}
    fields = {}
    for name, hint in get_type_hints(section_type, include_extras=True).items():
        if get_origin(hint) is not Annotated:
            continue
        annotation, *metadata = get_args(hint)
        for setting in (item for item in metadata if isinstance(item, Setting)):
            constraints = [item for item in metadata if item is not setting]
            typed = Annotated[(annotation, *constraints)] if constraints else annotation
            fields[name] = SettingField(name, typed, defaults.get(name, ...), setting)
    return fields


def is_decisive(field: SettingField, *, transfers_round: bool = False, codecs_round: bool = False) -> bool:
    """Whether another value of a field changes losses and weights, where formats round or do not."""
    return {
        "numbers": True,
        "speed": False,
        "numbers where transfers round": transfers_round,
        "numbers where codecs round": codecs_round,
    }[field.setting.changes]
