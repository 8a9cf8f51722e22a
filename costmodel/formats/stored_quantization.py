"""Models that another tool has quantized: how their ``config.json`` describes the stored weights.

Four layouts are known: those of compressed-tensors (packed integers, integers and e4m3 numbers of a byte), GPTQ and AWQ, and
zosim's own. The last is for quantized values that none of the others can hold. What has no counterpart among a plan's low bits
is refused here, before a weight is read. The tensors are read by :mod:`executors.models.quantized`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator

from costmodel.formats import FORMATS, QuantFormat, ScaleScope
from topology.errors import ModelError, PlanError
from topology.renamed import with_present_names
from topology.validation import readable, without_removed

if TYPE_CHECKING:
    from costmodel.formats.low_bits import QuantConfig

Layout = Literal["packed", "bytes", "gptq", "gptq_v2", "awq", "zosim"]
"""How quantized values lie in files: packed along a row into 32-bit words, one in a byte, in words as GPTQ and AWQ order them,
or as zosim has them in memory."""

OWN_WEIGHTS_NAME, EARLIER_WEIGHTS_NAME = "quantized.safetensors", "codes.safetensors"
"""File of zosim's own layout. Under a name that no other tool looks for: one that ignores ``quantization_config`` finds no weights."""

_OWN_VERSION = 1

RENAMED: Mapping[str, str] = {}
"""Fields and values that were renamed (:mod:`topology.renamed`) of what directories of zosim's own were written with."""

_REMOVED_FIELDS: Mapping[str, object] = {"parts": "blocks", "outliers": 0.0}
_REMOVED_VALUES: Mapping[str, tuple[object, ...]] = {"weights": ("best8", "best4")}
"""What directories of zosim's own were once written with, and plans made from them."""

QUANTIZED_SUFFIXES = (
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight_zero",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
)
"""Suffixes of the names of quantized tensors and of those that belong to them."""


class StoredQuantization(BaseModel):
    """How the linear layers of a quantized model are kept in its files.

    - `weights`, `scales`, `group_elements`, `zero_point`, `activations`: As of :class:`zosim.plans.LowBits`, which has to
      have the same.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: Layout  # see `Layout`
    weights: QuantFormat
    scales: ScaleScope
    group_elements: PositiveInt = 128
    zero_point: bool = False
    # Whether symmetric integers use their lowest number, too, -8 of int4: other tools' do.
    full_range: bool = False
    activations: Literal["none", "int8-token", "int8-tensor", "float8-token", "float8-tensor"] = "none"

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_versions(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        present = with_present_names(data, RENAMED)
        return without_removed(
            present, "quantization_config", ModelError, names=_REMOVED_FIELDS, values=_REMOVED_VALUES
        )

    @property
    def fields(self) -> dict[str, Any]:
        """What they say of a plan's low bits; a size of groups only where there are groups."""
        left_out = {"layout", "full_range"} | (set() if self.scales == "group" else {"group_elements"})
        return self.model_dump(exclude=left_out)


def stored_quantization(config: Mapping[str, Any], source: str) -> StoredQuantization | None:
    """Return how the weights of a model are kept quantized; None where they are numbers.

    Raises ModelError if the quantization is not supported; the message says which part.
    """
    quantization = config.get("quantization_config")
    # MLX says it under a name of its own, and in newer files under the other one as well, without a method.
    if (
        isinstance(of_mlx := config.get("quantization"), Mapping)
        and "bits" in of_mlx
        and quantization in (None, of_mlx)
    ):
        _refuse(f"{source}: quantization", f"weights of MLX in {of_mlx['bits']!r:.20} bits are not read")
    if quantization is None:
        return None
    where = f"{source}: quantization_config"
    readers = {"compressed-tensors": _compressed_tensors, "gptq": _gptq, "awq": _awq, "zosim": _own}
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if not isinstance(method, str) or method not in readers:
        _refuse(
            where,
            f"quant_method {method!r:.40} is none that is read",
            "give a directory of compressed-tensors, gptq, awq or zosim; to plan the model in 16 bits, take quantization_config out of a copy "
            "of its config.json",
        )
    return readers[method](cast("Mapping[str, Any]", quantization), where)


def _refuse(
    where: str, what: str, hint: str = "give the model in 16 bits, and a --weight-format"
) -> NoReturn:
    raise ModelError(f"{where}: {what}", hint=hint)


# -- compressed-tensors ------------------------------------------------------------------------------------------


class _Arguments(BaseModel):
    """How one kind of tensor is quantized, in compressed-tensors' words."""

    num_bits: PositiveInt = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    dynamic: bool | str = False
    actorder: str | bool | None = None


class _Scheme(BaseModel):
    weights: _Arguments | None = None
    input_activations: _Arguments | None = None
    output_activations: _Arguments | None = None
    format: str | None = None


class _Compressed(BaseModel):
    config_groups: dict[str, _Scheme]
    format: str | None = None
    quantization_status: str | None = None
    kv_cache_scheme: dict[str, Any] | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


_COMPRESSED_LAYOUTS: Mapping[str, Layout] = {
    "pack-quantized": "packed",
    "int-quantized": "bytes",
    "naive-quantized": "bytes",
    "float-quantized": "bytes",
}


def _compressed_tensors(quantization: Mapping[str, Any], where: str) -> StoredQuantization:
    with readable(where, ModelError, model=_Compressed):
        read = _Compressed.model_validate(quantization)
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if any((getattr(read, name) or {}).values()):
            _refuse(where, f"{name} has no counterpart here")
    if read.quantization_status not in (None, "compressed"):
        _refuse(where, f"quantization_status is {read.quantization_status!r:.40}, not compressed")
    schemes = list({scheme.model_dump_json(): scheme for scheme in read.config_groups.values()}.values())
    if len(schemes) != 1 or schemes[0].weights is None:
        _refuse(where, f"config_groups names {len(schemes)} schemes for weights; all linear layers need one")
    scheme, weights = schemes[0], schemes[0].weights
    layout = _COMPRESSED_LAYOUTS.get(scheme.format or read.format or "")
    if layout is None:
        known = ", ".join(_COMPRESSED_LAYOUTS)
        _refuse(
            where, f"format {scheme.format or read.format!r:.40} is none that is read", f"known are {known}"
        )
    if weights.dynamic or weights.actorder in ("group", "dynamic", True):
        _refuse(where, "inputs are grouped in another order than they come in (actorder)")
    if scheme.output_activations is not None:
        _refuse(where, "outputs are quantized, too")
    scales = {"tensor": "tensor", "channel": "channel", "group": "group"}.get(weights.strategy or "")
    if scales is None:
        _refuse(where, f"strategy {weights.strategy!r:.40} of scales has no counterpart here")
    return _stored_quantization(
        where,
        layout,
        _quant_format(where, weights.type, weights.num_bits),
        cast("ScaleScope", scales),
        weights.group_size if scales == "group" else None,
        zero_point=not weights.symmetric,
        activations=_activations(where, scheme.input_activations),
    )


def _activations(where: str, inputs: _Arguments | None) -> str:
    if inputs is None:
        return "none"
    is_byte = inputs.num_bits == 8 and inputs.symmetric and inputs.dynamic is True
    if not is_byte or inputs.strategy not in ("token", "tensor") or inputs.type not in ("int", "float"):
        _refuse(
            where, "inputs are quantized otherwise than to a byte with scales of their own for each product"
        )
    return f"{inputs.type}8-{inputs.strategy}"


def _quant_format(where: str, kind: str, num_bits: int) -> QuantFormat:
    if kind == "float" and num_bits == 8:
        return "float8_e4m3"
    if kind != "int" or not 2 <= num_bits <= 8:
        _refuse(where, f"weights of {num_bits} bits of type {kind!r:.20} have no counterpart here")
    return cast("QuantFormat", f"int{num_bits}")


def _stored_quantization(
    where: str,
    layout: Layout,
    weights: QuantFormat,
    scales: ScaleScope,
    group_size: int | None,
    *,
    zero_point: bool,
    activations: str = "none",
) -> StoredQuantization:
    is_integer = weights.startswith("int")
    if zero_point and not is_integer:
        _refuse(where, f"weights in {weights} have no zero point")
    if scales == "group":
        _refuse_group(where, group_size)
    with readable(where, ModelError, model=StoredQuantization):
        return StoredQuantization.model_validate(
            {
                "layout": layout,
                "weights": weights,
                "scales": scales,
                "zero_point": zero_point,
                "full_range": is_integer and not zero_point,
                "activations": activations,
                **({"group_elements": group_size} if scales == "group" else {}),
            }
        )


def _refuse_group(where: str, size: int | None) -> None:
    if size is None or size < 8 or size % 8:
        _refuse(where, f"groups of {size} inputs share a scale; zosim has groups of multiples of 8")


# -- GPTQ and AWQ ------------------------------------------------------------------------------------------------


class _Gptq(BaseModel):
    bits: int
    group_size: int
    desc_act: bool = False
    static_groups: bool = False
    sym: bool = True
    checkpoint_format: str = "gptq"


def _gptq(quantization: Mapping[str, Any], where: str) -> StoredQuantization:
    with readable(where, ModelError, model=_Gptq):
        read = _Gptq.model_validate(quantization)
    if read.bits not in (2, 4, 8):
        _refuse(where, f"GPTQ weights of {read.bits} bits are not read, those of 2, 4 and 8 are")
    if read.desc_act and read.group_size != -1 and not read.static_groups:
        _refuse(where, "inputs are grouped in another order than they come in (desc_act)")
    if read.checkpoint_format not in ("gptq", "gptq_v2"):
        _refuse(where, f"checkpoint_format {read.checkpoint_format!r:.40} is none that is read")
    scales: ScaleScope = "channel" if read.group_size == -1 else "group"
    layout = cast("Layout", read.checkpoint_format)
    weights = cast("QuantFormat", f"int{read.bits}")
    return _stored_quantization(where, layout, weights, scales, read.group_size, zero_point=not read.sym)


class _Awq(BaseModel):
    bits: int
    group_size: int
    zero_point: bool = True
    version: str = "gemm"


def _awq(quantization: Mapping[str, Any], where: str) -> StoredQuantization:
    with readable(where, ModelError, model=_Awq):
        read = _Awq.model_validate(quantization)
    if read.bits != 4 or not read.zero_point or read.version.lower() != "gemm":
        _refuse(where, "of AWQ's layouts, that of 4 bits with zero points in version gemm is read")
    scales: ScaleScope = "channel" if read.group_size == -1 else "group"
    return _stored_quantization(where, "awq", "int4", scales, read.group_size, zero_point=True)


# -- zosim's own -------------------------------------------------------------------------------------------------


def own_quantization_config(quant_config: QuantConfig) -> dict[str, Any]:
    """Return the ``quantization_config`` of zosim's own layout, in which files hold what memory does."""
    stored = StoredQuantization(
        layout="zosim",
        weights=quant_config.format,
        scales=quant_config.scales,
        group_elements=quant_config.group_elements,
        zero_point=quant_config.has_zero_point,
        full_range=quant_config.is_full_range,
    )
    kept = stored.model_dump(exclude={"layout", "activations"})
    return {"quant_method": "zosim", "version": _OWN_VERSION, **kept}


def _own(quantization: Mapping[str, Any], where: str) -> StoredQuantization:
    fields = {name: value for name, value in quantization.items() if name not in ("quant_method", "version")}
    if quantization.get("version") != _OWN_VERSION:
        _refuse(
            where, f"version {quantization.get('version')!r:.20} is none that is read", "use a later zosim"
        )
    with readable(where, ModelError, model=StoredQuantization):
        stored = StoredQuantization.model_validate(fields | {"layout": "zosim"})
    if stored.scales == "group":
        _refuse_group(where, stored.group_elements)
    return stored


def refuse_unwritable(quant_config: QuantConfig) -> None:
    """Raise if compressed-tensors has no format for these weights.

    Raises
    ------
    PlanError
    """
    if FORMATS[quant_config.format].is_float and quant_config.format != "float8_e4m3":
        raise PlanError(
            f"compressed-tensors has no format for weights in {quant_config.format}",
            hint="write it in zosim's own layout (--save-as zosim), or as numbers (--save-as numbers)",
        )
