"""The families of language models, causal and masked, that can be read from a configuration alone.

A family is a row of ``costmodel/data/families.yaml``: which fields of a ``config.json`` decide its shape, what they mean, and
which tensors the model registers, in the order in which transformers 5 registers them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from importlib import resources
from types import CodeType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    create_model,
    field_validator,
    model_validator,
)

from costmodel.formats import StorageFormat
from costmodel.models.experts import Experts
from costmodel.models.groups import ParameterEntry
from costmodel.models.model_spec import EMBED, HEAD, Latents, ModelSpec, block_segment
from topology.limits import MAX_ELEMENTS, Blocks, Extent
from topology.reading import shipped_yaml
from topology.validation import RuleError, did_you_mean

Activation = Literal[
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "gelu_pytorch_tanh",
    "hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu",
    "sqrtsoftplus", "swish", "tanh",
]  # fmt: skip
"""Names of transformers' activations, but for those that bring parameters of their own (prelu, xielu)."""

RopeType = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
WeightFormat = StorageFormat | Literal["auto"]
Epsilon = Annotated[float, Field(gt=0, le=1)]
Spread = Annotated[float, Field(ge=0, le=1)]
"""Standard deviation of weights that are drawn at random."""
Probability = Annotated[float, Field(ge=0, le=1)]
Factor = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=0, le=2**31)]
TokenId = Annotated[int, Field(ge=-(2**31), lt=2**31)]


SIZES = {
    "vocab_size", "hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer", "n_layers", "num_layers",
    "num_attention_heads", "n_head", "n_heads", "num_heads", "intermediate_size", "ffn_dim", "num_experts",
    "num_local_experts", "n_routed_experts", "moe_intermediate_size",
}  # fmt: skip
"""Fields without which a configuration says little of a model."""


class FamilyConfig(BaseModel):
    """What zosim reads of a ``config.json``, checked before anything is built from it. Fields are transformers' own.

    A field has the type that transformers demands and a range that some machine could hold. Defaults are those of
    transformers' configuration classes, which leave them out of files. Other fields are passed over.
    """

    # A run reads one family: the validators of the others, which take 40 ms to make, are never made.
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False, defer_build=True)

    family: ClassVar[str]  # the `model_type`
    is_causal: ClassVar[bool] = True  # whether its models predict the next token; else they fill in masks
    row: ClassVar[_Row]

    vocab_size: Extent
    tie_word_embeddings: bool
    pad_token_id: TokenId | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    dtype: WeightFormat | None = None
    torch_dtype: WeightFormat | None = None
    is_encoder_decoder: bool = False
    add_cross_attention: bool = False
    per_layer_config: Any = None

    @property
    def checkpoint_dtype(self) -> StorageFormat | None:
        """Format of the weights in the model's files, where the configuration states one."""
        declared = self.dtype or self.torch_dtype
        return None if declared == "auto" else declared

    @property
    def default_sizes(self) -> tuple[tuple[str, int], ...]:
        """Name and value of each size that the configuration leaves to the family's default."""
        given = self.model_fields_set
        return tuple((name, value) for name, value in self if name in SIZES - given and value)

    @cached_property
    def sizes(self) -> _Names:
        """What the fields mean: traits and sizes of the row, by name."""
        known = _Names(_KNOWN | self.row.traits | dict(self))
        known.update({name: getattr(known, name) for name in _FUNCTIONS})
        for name, code in self.row.sizes.items():
            known[name] = _value(code, known)
        return known

    @property
    def shape(self) -> dict[str, Any]:
        """The fields of a :class:`~costmodel.models.model_spec.ModelSpec` that the configuration decides."""
        shape = {name: self.sizes[name] for name in ModelSpec.model_fields if name in self.sizes}
        return shape | {"is_causal": self.is_causal}

    def tensors(self) -> Iterator[ParameterEntry]:
        """Yield the tensors of a model in registration order."""
        for path, modules in self.row.tensors:
            if path in (EMBED, HEAD):
                yield from self._tensors_of(path, "", modules)
                continue
            for i in range(self.sizes["num_blocks"]):
                yield from self._tensors_of(block_segment(i), f"{path}.{i}.", modules, i)

    def _tensors_of(
        self, segment: str, prefix: str, modules: Mapping[str, CodeType], i: int = 0
    ) -> Iterator[ParameterEntry]:
        names = {**self.sizes, "i": i, "norm": self.sizes.make_norm}  # `norm` is the kind of norm, too
        for name, code in modules.items():
            for tensor in _value(code, names) or ():
                segments = (EMBED, HEAD) if tensor.is_table and self.sizes["tied_head"] else (segment,)
                yield ParameterEntry(
                    prefix + name + tensor.name, segments, tensor.shape, linear=tensor.linear
                )

    @field_validator("rope_parameters", "rope_scaling", check_fields=False)
    @classmethod
    def _rope_has_numbers(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name, item in (value or {}).items():
            if isinstance(item, dict):  # by type of layer
                cls._rope_has_numbers(item)
            elif name in ("rope_type", "type"):
                if item not in get_args(RopeType):
                    raise RuleError(
                        f"{name}={item!r:.60} must be one of {', '.join(get_args(RopeType))}",
                        hint=did_you_mean(str(item), get_args(RopeType)),
                    )
            else:
                numbers = item if isinstance(item, list) else [item]
                if not all(
                    isinstance(x, bool | None) or (isinstance(x, int | float) and 0 < x < 1e30)
                    for x in numbers
                ):
                    raise RuleError(f"{name}={item!r:.60} must be a number above 0, or a list of them")
        return value

    @model_validator(mode="after")
    def _is_a_plain_decoder(self) -> FamilyConfig:
        if self.is_encoder_decoder:
            raise RuleError(
                "is_encoder_decoder=True is not supported: zosim supports causal decoders and masked encoders"
            )
        if self.add_cross_attention:
            raise RuleError("add_cross_attention=True is not supported: a model must be one stack of blocks")
        if self.per_layer_config:
            raise RuleError("per_layer_config is not supported: all blocks must be alike")
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            raise RuleError(f"pad_token_id={self.pad_token_id} must be below vocab_size={self.vocab_size}")
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> FamilyConfig:
        for condition, message in self.row.refuses:
            if _value(condition, self.sizes):
                raise RuleError(message.format(family=self.family, **dict(self)))
        hidden, heads, shared = (
            self.sizes[name] for name in ("hidden_size", "num_heads", "num_key_value_heads")
        )
        if hidden % heads and getattr(self, "head_dim", None) is None and "latent" not in self.sizes:
            raise RuleError(
                f"hidden_size={hidden} must be a multiple of num_heads={heads}", hint=_divisor(hidden, heads)
            )
        if heads % shared:
            raise RuleError(
                f"num_key_value_heads={shared} must divide num_heads={heads}",
                hint=_divisor(heads, shared),
            )
        width, is_partial = self.sizes["head_dim"], "rotary_dim" in self.sizes
        if self.sizes["positions"] == "rotary" and width % 2 and not is_partial:
            raise RuleError(f"head_dim={width} must be even for rotary positions")
        for name in ("layer_types", "windows"):
            listed, num_blocks = self.sizes.get(name) or (), self.sizes["num_blocks"]
            if 0 < len(listed) < num_blocks:
                raise RuleError(f"{name} lists {len(listed)} layers, but the model has {num_blocks}")
            if listed:  # transformers ignores those beyond the last layer
                self.sizes[name] = listed[:num_blocks]
        num_elements = sum(tensor.num_elements for tensor in self.tensors())
        if num_elements > MAX_ELEMENTS:
            raise RuleError(f"these sizes give {num_elements:.1e} parameters, more than any machine stores")
        return self


def _divisor(whole: int, part: int) -> str | None:
    near = [number for number in range(max(1, part - 64), part + 65) if whole % number == 0]
    return f"{min(near, key=lambda number: abs(number - part))} divides it" if near else None


# -- what expressions of rows know ----------------------------------------------------------------------------------


class _Tensor(NamedTuple):
    """A tensor that an expression names: what it adds to the module's name, and its shape."""

    name: str
    shape: tuple[int, ...]
    linear: tuple[int, int] | None = None
    is_table: bool = False


def _weight(*shape: int) -> list[_Tensor]:
    return [_Tensor(".weight", shape)]


def _param(*shape: int) -> list[_Tensor]:
    return [_Tensor("", shape)]


def _linear(inputs: int, outputs: int, bias: bool = False) -> list[_Tensor]:
    return [_Tensor(".weight", (outputs, inputs), (outputs, inputs)), *bias * [_Tensor(".bias", (outputs,))]]


def _transposed(inputs: int, outputs: int) -> list[_Tensor]:
    return [_Tensor(".weight", (inputs, outputs), (outputs, inputs)), _Tensor(".bias", (outputs,))]


def _router(inputs: int, outputs: int) -> list[_Tensor]:
    return [_Tensor(".weight", (outputs, inputs)), _Tensor(".bias", (outputs,))]


def _each(count: int, width: int) -> list[_Tensor]:
    return [_Tensor(f".norms.{number}.weight", (width,)) for number in range(count)]


class _Names(dict[str, Any]):
    """Fields, traits and sizes of one configuration by name, and functions of them."""

    def make_norm(self, width: int, bias: bool | None = None) -> list[_Tensor]:
        has_bias = self["norm"] == "layernorm" if bias is None else bias
        return [_Tensor(".weight", (width,)), *has_bias * [_Tensor(".bias", (width,))]]

    def table(self, width: int) -> list[_Tensor]:
        return [_Tensor(".weight", (self["vocab_size"], width), is_table=True)]

    def head(self, bias: bool = False) -> list[_Tensor]:
        return _linear(self["embed_dim"], self["vocab_size"], bias)[self["tied_head"] :]

    def has_experts(self, i: int) -> bool:
        return i not in self["experts"].dense_blocks

    def rotated(self, share: float) -> int:
        """Return how many numbers of a head rotary positions turn: a share of it, unless the configuration says another."""
        declared = self["partial_rotary_factor"] or (self["rope_parameters"] or {}).get(
            "partial_rotary_factor"
        )
        return int(self["head_dim"] * (declared or share))

    def seen_by(self, of_blocks: list[int]) -> tuple[int, ...]:
        return tuple(of_blocks) if any(of_blocks) else ()

    def sliding_in(self, layer_types: list[str]) -> tuple[int, ...]:
        window = self["sliding_window"] or 0
        return self.seen_by([window if kind == _SLIDING else 0 for kind in layer_types])

    def all_sliding(self) -> tuple[int, ...]:
        return self.seen_by(self["num_blocks"] * [self["sliding_window"] or 0])


_SLIDING = "sliding_attention"
_FUNCTIONS = ("table", "head", "has_experts", "rotated", "seen_by", "sliding_in", "all_sliding")
_KNOWN: dict[str, Any] = {
    "weight": _weight,
    "param": _param,
    "linear": _linear,
    "transposed": _transposed,
    "router": _router,
    "each": _each,
    "mixture": Experts,
    "latents": Latents,
    "sliding": _SLIDING,
    "full": "full_attention",
    "__builtins__": {"max": max, "bool": bool, "range": range, "int": int},
}


def _value(code: CodeType, names: dict[str, Any]) -> Any:
    """Return what an expression of the package's own data file is; a configuration gives values, never text to evaluate."""
    return eval(code, names)


# -- rows -----------------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """A row of the data file, with its expressions compiled."""

    traits: dict[str, Any]
    sizes: dict[str, CodeType]
    tensors: list[tuple[str, dict[str, CodeType]]]
    refuses: list[tuple[CodeType, str]]


@cache
def _rows() -> dict[str, dict[str, Any]]:
    text = (resources.files("costmodel") / "data" / "families.yaml").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = shipped_yaml(text)["families"]
    for row in rows.values():
        base = rows.get(row.get("like", ""), {})  # which stands before it
        for part in ("traits", "sizes"):
            row[part] = base.get(part, {}) | row.get(part, {})
        row["tensors"] = row.get("tensors") or base["tensors"]
    return rows


def _compiled(family: str) -> _Row:
    def expressions(texts: Mapping[str, str]) -> dict[str, CodeType]:
        return {name: compile(text, f"{family}: {name}", "eval") for name, text in texts.items()}

    row = _rows()[family]
    tensors = [
        (path, expressions({name: text for part in _listed(parts) for name, text in part.items()}))
        for entry in row["tensors"]
        for path, parts in entry.items()
    ]
    refuses = [(compile(condition, family, "eval"), message) for condition, message in row.get("refuses", [])]
    return _Row(row["traits"], expressions(row["sizes"]), tensors, refuses)


def _listed(parts: Any) -> list[dict[str, str]]:
    return parts if isinstance(parts, list) else [parts]


_TYPES: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), Blocks),
    **dict.fromkeys(("hidden_act", "activation_function", "hidden_activation", "activation"), Activation),
    **dict.fromkeys(("initializer_range", "init_std"), Spread),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), dict[str, Any]),
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "rotary_pct", "clip_qkv"), Factor),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), Factor),
    "first_k_dense_replace": Count,
    "num_ln_in_parallel_attn": Count,
    "sliding_window": Count,
    "max_window_layers": Count,
    "pad_token_id": TokenId,
    "layer_types": list[str],
    "mlp_only_layers": list[int],
    "attention_types": list[Annotated[tuple[list[Literal["global", "local"]], Blocks], Field(strict=False)]],
}
"""Of fields whose name or default does not tell their type."""


def _type_of(name: str, default: Any) -> Any:
    if name in _TYPES:
        return _TYPES[name]
    if "eps" in name:
        return Epsilon
    if any(word in name for word in ("drop", "_prob")):
        return Probability
    return {bool: bool, float: Factor}.get(type(default), Extent)


_MAY_BE_NULL = ("attention_dropout", "pad_token_id", "num_key_value_heads", "sliding_window")


@cache
def _family(name: str) -> type[FamilyConfig]:
    row = _rows()[name]
    nullable, aliases = {*_MAY_BE_NULL, *row.get("nullable", ())}, row.get("aliases", {})
    fields: dict[str, Any] = {}
    for field, default in row["fields"].items():
        of_field = _type_of(field, default)
        own = field.lstrip("_")  # pydantic takes no name that begins so
        names = AliasChoices(field, aliases[field]) if field in aliases else field if own != field else None
        is_open = default is None or field in nullable
        fields[own] = (of_field | None if is_open else of_field, Field(default, validation_alias=names))
    made = create_model(f"{name}-configuration", __base__=FamilyConfig, __module__=__name__, **fields)
    made.family, made.is_causal, made.row = name, row.get("is_causal", True), _compiled(name)
    return made


class _Families(Mapping[str, type[FamilyConfig]]):
    """The rows as classes, each made when it is asked for."""

    def __getitem__(self, name: str) -> type[FamilyConfig]:
        if name not in _rows():
            raise KeyError(name)
        return _family(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_rows())

    def __len__(self) -> int:
        return len(_rows())


FAMILIES: Mapping[str, type[FamilyConfig]] = _Families()
"""By ``model_type``."""
