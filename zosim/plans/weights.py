"""The format of the weights, and how they come to an evaluation point."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator

from costmodel.formats import format_name
from zosim.plans.axis import Axis
from zosim.plans.setting import Setting

if TYPE_CHECKING:
    from zosim.plans import Plan


def in_full(name: object) -> object:
    """Return the name of a format without its abbreviation, such as ``float16`` for ``fp16``."""
    return format_name(name) if isinstance(name, str) else name


StorageDType = Annotated[Literal["float64", "float32", "float16", "bfloat16"], BeforeValidator(in_full)]


class Weights(Axis):
    """The weights that are perturbed and updated.

    Attributes
    ----------
    dtype : str
        Format that they are stored in. The products and the transfers have it, too, unless
        :class:`~zosim.plans.ForwardPass` and :class:`~zosim.plans.Residency` name one of their own.
    perturbation : str
        How weights come to an evaluation point. ``"serial"``: one state of them walks from point to point where it lies,
        and back by one more perturbation, whose rounding leaves a drift (the reference loop). ``"copies"``: each point is
        written beside the weights, ``θ + (s·z)·ε`` for its own sign, and read there; only updates change ``θ``. It takes one
        more buffer of the largest segment; under ``"sweep"`` one of all that is trainable for each sign, so that both come
        of one draw.
    """

    dtype: Annotated[
        StorageDType,
        Setting(
            "--dtype",
            "Format of the weights, and of products and transfers, if they have none of their own.",
            changes="numbers",
        ),
    ] = "float32"
    perturbation: Annotated[
        Literal["serial", "copies"],
        Setting(
            "--weights",
            "How weights come to a point: serial, in place and back, with MeZO's drift, or copies beside them; any: the faster.",
            changes="numbers",
            recorded_as="weights",
            may_be_any=True,
        ),
    ] = "serial"

    def words(self, plan: Plan) -> Iterator[str]:
        """Yield how weights come to a point, where it is not in place."""
        if self.perturbation == "copies":
            yield "copies written ahead" if plan.directions.drawn_ahead else "copies of weights"
