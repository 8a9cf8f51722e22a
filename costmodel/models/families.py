"""The families of language models, causal and masked, that can be read from a configuration alone.

For each family: which fields of a ``config.json`` decide its shape, what they mean, and which tensors the model
registers, in the order in which transformers 5 registers them. The order matters: the reference MeZO loop draws
perturbations in it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from costmodel.formats import StorageFormat
from costmodel.models.groups import ParameterEntry
from costmodel.models.model_spec import EMBED, HEAD, block_segment
from topology.limits import MAX_ELEMENTS, Blocks, Extent
from topology.validation import RuleError, did_you_mean


@dataclass(frozen=True)
class Architecture:
    """A configuration in one vocabulary, whatever its family calls things."""

    num_blocks: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    embed_dim: int
    tied_head: bool
    activation: str
    mlp: Literal["plain", "gated"]
    norm: Literal["layernorm", "rmsnorm"]
    positions: Literal["learned", "rotary"]
    qk_norm: bool = False
    fused_qkv: bool = False
    final_norm: bool = True
    attention_bias: tuple[bool, bool] = (False, False)
    """Biases of q, k, v and of the output projection."""
    mlp_bias: bool = False
    norm_affine: bool = True
    norm_after_mlp: bool = False
    """Whether a block's last norm follows its MLP."""
    is_causal: bool = True
    """Whether a token sees those before it alone, and predicts the next; else it sees all, and masks are filled in."""
    num_token_types: int = 0
    num_unused_positions: int = 0
    """Rows at the head of RoBERTa's position table, up to that of padding."""


def _token_table(name: str, arch: Architecture) -> ParameterEntry:
    segments = (EMBED, HEAD) if arch.tied_head else (EMBED,)
    return ParameterEntry(name, segments, (arch.vocab_size, arch.embed_dim))


def _linear(
    name: str, inputs: int, outputs: int, segment: str, *, bias: bool, transposed: bool = False
) -> Iterator[ParameterEntry]:
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    yield ParameterEntry(f"{name}.weight", (segment,), shape, linear=(outputs, inputs))
    if bias:
        yield ParameterEntry(f"{name}.bias", (segment,), (outputs,))


def _layer_norm(name: str, width: int, segment: str, *, affine: bool = True) -> Iterator[ParameterEntry]:
    if affine:
        yield ParameterEntry(f"{name}.weight", (segment,), (width,))
        yield ParameterEntry(f"{name}.bias", (segment,), (width,))


_OPT_POSITION_OFFSET = 2
"""Rows at the head of OPT's position table that no position uses."""


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
TokenId = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class FamilyConfig(BaseModel):
    """What zosim reads of a ``config.json``, checked before anything is built from it. Fields are transformers' own.

    A field has the type that transformers demands and a range that some machine could hold. Defaults are those of
    transformers' configuration classes, which leave them out of files. Other fields are passed over.

    Attributes
    ----------
    family : str
        The ``model_type``.
    is_causal : bool
        Whether its models predict the next token; else they fill in masks.
    """

    # A run reads one family: the validators of the others, which take 40 ms to make, are never made.
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False, defer_build=True)

    family: ClassVar[str]
    is_causal: ClassVar[bool] = True

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
        stated = self.dtype or self.torch_dtype
        return None if stated == "auto" else stated

    @abstractmethod
    def architecture(self) -> Architecture:
        """Return what the fields mean."""

    @staticmethod
    @abstractmethod
    def tensors(arch: Architecture) -> Iterator[ParameterEntry]:
        """Yield the tensors of an architecture in registration order."""

    @model_validator(mode="after")
    def _is_a_plain_decoder(self) -> FamilyConfig:
        if self.is_encoder_decoder:
            raise RuleError("is_encoder_decoder=True: zosim runs causal decoders and masked encoders")
        if self.add_cross_attention:
            raise RuleError(
                "add_cross_attention=True: cross-attention has no place in a language model of one stack of blocks"
            )
        if self.per_layer_config:
            raise RuleError("per_layer_config: zosim runs models whose blocks are all alike")
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            raise RuleError(
                f"pad_token_id={self.pad_token_id} is none of the vocab_size={self.vocab_size} tokens"
            )
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> FamilyConfig:
        arch = self.architecture()
        hidden, heads, shared = arch.hidden_size, arch.num_heads, arch.num_key_value_heads
        if hidden % heads and getattr(self, "head_dim", None) is None:
            raise RuleError(
                f"hidden_size={hidden} is not a multiple of num_heads={heads}", hint=_divisor(hidden, heads)
            )
        if heads % shared:
            raise RuleError(
                f"num_key_value_heads={shared} does not divide num_heads={heads}",
                hint=_divisor(heads, shared),
            )
        if arch.positions == "rotary" and arch.head_dim % 2:
            raise RuleError(f"head_dim={arch.head_dim} is odd, and rotary positions turn pairs of numbers")
        num_elements = sum(tensor.num_elements for tensor in self.tensors(arch))
        if num_elements > MAX_ELEMENTS:
            raise RuleError(
                f"these sizes make a model of {num_elements:.1e} parameters, more than any machine stores"
            )
        return self


def _divisor(whole: int, part: int) -> str | None:
    near = [number for number in range(max(1, part - 64), part + 65) if whole % number == 0]
    return f"{min(near, key=lambda number: abs(number - part))} divides it" if near else None


class OptConfig(FamilyConfig):
    """OPT."""

    family = "opt"

    vocab_size: Extent = 50272
    hidden_size: Extent = 768
    num_hidden_layers: Blocks = 12
    ffn_dim: Extent = 3072
    max_position_embeddings: Extent = 2048
    do_layer_norm_before: bool = True
    remove_final_layer_norm: bool = Field(False, alias="_remove_final_layer_norm")
    word_embed_proj_dim: Extent | None = None
    num_attention_heads: Extent = 12
    activation_function: Activation = "relu"
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    tie_word_embeddings: bool = True
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.0
    layerdrop: Probability = 0.0
    init_std: Spread = 0.02

    def architecture(self) -> Architecture:
        """Return what the fields mean."""
        hidden, heads = self.hidden_size, self.num_attention_heads
        return Architecture(
            num_blocks=self.num_hidden_layers,
            hidden_size=hidden,
            intermediate_size=self.ffn_dim,
            num_heads=heads,
            num_key_value_heads=heads,
            head_dim=max(1, hidden // heads),
            vocab_size=self.vocab_size,
            max_positions=self.max_position_embeddings,
            embed_dim=self.word_embed_proj_dim or hidden,
            tied_head=self.tie_word_embeddings,
            activation=self.activation_function,
            mlp="plain",
            norm="layernorm",
            positions="learned",
            final_norm=self.do_layer_norm_before and not self.remove_final_layer_norm,
            attention_bias=(self.enable_bias, self.enable_bias),
            mlp_bias=self.enable_bias,
            norm_affine=self.layer_norm_elementwise_affine,
            norm_after_mlp=not self.do_layer_norm_before,
        )

    @staticmethod
    def tensors(arch: Architecture) -> Iterator[ParameterEntry]:
        """Yield the tensors of an architecture in registration order."""
        root, hidden, inner = "model.decoder", arch.hidden_size, arch.intermediate_size
        affine = arch.norm_affine
        yield _token_table(f"{root}.embed_tokens.weight", arch)
        rows = arch.max_positions + _OPT_POSITION_OFFSET
        yield ParameterEntry(f"{root}.embed_positions.weight", (EMBED,), (rows, hidden))
        if arch.embed_dim != hidden:
            yield from _linear(f"{root}.project_out", hidden, arch.embed_dim, HEAD, bias=False)
            yield from _linear(f"{root}.project_in", arch.embed_dim, hidden, EMBED, bias=False)
        if arch.final_norm:
            yield from _layer_norm(f"{root}.final_layer_norm", hidden, HEAD, affine=affine)
        for i in range(arch.num_blocks):
            block, segment = f"{root}.layers.{i}", block_segment(i)
            for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
                bias = arch.attention_bias[0]
                yield from _linear(f"{block}.self_attn.{name}", hidden, hidden, segment, bias=bias)
            yield from _layer_norm(f"{block}.self_attn_layer_norm", hidden, segment, affine=affine)
            yield from _linear(f"{block}.fc1", hidden, inner, segment, bias=arch.mlp_bias)
            yield from _linear(f"{block}.fc2", inner, hidden, segment, bias=arch.mlp_bias)
            yield from _layer_norm(f"{block}.final_layer_norm", hidden, segment, affine=affine)
        if not arch.tied_head:
            yield from _linear("lm_head", arch.embed_dim, arch.vocab_size, HEAD, bias=False)


class Gpt2Config(FamilyConfig):
    """GPT-2, whose sizes transformers also takes under their usual names."""

    family = "gpt2"

    vocab_size: Extent = 50257
    n_positions: Extent = Field(1024, validation_alias=AliasChoices("n_positions", "max_position_embeddings"))
    n_embd: Extent = Field(768, validation_alias=AliasChoices("n_embd", "hidden_size"))
    n_layer: Blocks = Field(12, validation_alias=AliasChoices("n_layer", "num_hidden_layers"))
    n_head: Extent = Field(12, validation_alias=AliasChoices("n_head", "num_attention_heads"))
    n_inner: Extent | None = None
    activation_function: Activation = "gelu_new"
    tie_word_embeddings: bool = True
    resid_pdrop: Probability = 0.1
    embd_pdrop: Probability = 0.1
    attn_pdrop: Probability = 0.1
    layer_norm_epsilon: Epsilon = 1e-5
    initializer_range: Spread = 0.02

    def architecture(self) -> Architecture:
        """Return what the fields mean."""
        hidden, heads = self.n_embd, self.n_head
        return Architecture(
            num_blocks=self.n_layer,
            hidden_size=hidden,
            intermediate_size=self.n_inner or 4 * hidden,
            num_heads=heads,
            num_key_value_heads=heads,
            head_dim=max(1, hidden // heads),
            vocab_size=self.vocab_size,
            max_positions=self.n_positions,
            embed_dim=hidden,
            tied_head=self.tie_word_embeddings,
            activation=self.activation_function,
            mlp="plain",
            norm="layernorm",
            positions="learned",
            fused_qkv=True,
            attention_bias=(True, True),
            mlp_bias=True,
        )

    @staticmethod
    def tensors(arch: Architecture) -> Iterator[ParameterEntry]:
        """Yield the tensors of an architecture in registration order."""
        root, hidden, inner = "transformer", arch.hidden_size, arch.intermediate_size
        yield _token_table(f"{root}.wte.weight", arch)
        yield ParameterEntry(f"{root}.wpe.weight", (EMBED,), (arch.max_positions, hidden))
        for i in range(arch.num_blocks):
            block, segment = f"{root}.h.{i}", block_segment(i)
            # Its linears are transformers' Conv1D, which keeps inputs by outputs.
            yield from _layer_norm(f"{block}.ln_1", hidden, segment)
            for name, outputs in (("attn.c_attn", 3 * hidden), ("attn.c_proj", hidden)):
                yield from _linear(f"{block}.{name}", hidden, outputs, segment, bias=True, transposed=True)
            yield from _layer_norm(f"{block}.ln_2", hidden, segment)
            for name, inputs, outputs in (("mlp.c_fc", hidden, inner), ("mlp.c_proj", inner, hidden)):
                yield from _linear(f"{block}.{name}", inputs, outputs, segment, bias=True, transposed=True)
        yield from _layer_norm(f"{root}.ln_f", hidden, HEAD)
        if not arch.tied_head:
            yield from _linear("lm_head", hidden, arch.vocab_size, HEAD, bias=False)


class LlamaConfig(FamilyConfig):
    """Llama, and what is built like it."""

    family = "llama"

    vocab_size: Extent = 32000
    hidden_size: Extent = 4096
    intermediate_size: Extent = 11008
    num_hidden_layers: Blocks = 32
    num_attention_heads: Extent = 32
    num_key_value_heads: Extent | None = None
    head_dim: Extent | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: Extent = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: Probability | None = 0.0
    rms_norm_eps: Epsilon = 1e-6
    initializer_range: Spread = 0.02
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None

    @field_validator("rope_parameters", "rope_scaling")
    @classmethod
    def _rope_has_numbers(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name, item in (value or {}).items():
            if name in ("rope_type", "type"):
                if item not in get_args(RopeType):
                    raise RuleError(
                        f"{name}={item!r:.60} is none of {', '.join(get_args(RopeType))}",
                        hint=did_you_mean(str(item), get_args(RopeType)),
                    )
                continue
            numbers = item if isinstance(item, list) else [item]
            if not all(
                isinstance(x, bool | None) or (isinstance(x, int | float) and 0 < x < 1e30) for x in numbers
            ):
                raise RuleError(f"{name}={item!r:.60} must be a number above 0, or a list of such")
        return value

    def architecture(self) -> Architecture:
        """Return what the fields mean."""
        return self._like_llama()

    def _like_llama(self, **particular: Any) -> Architecture:
        hidden, heads = self.hidden_size, self.num_attention_heads
        fields: dict[str, Any] = {
            "num_blocks": self.num_hidden_layers,
            "hidden_size": hidden,
            "intermediate_size": self.intermediate_size,
            "num_heads": heads,
            "num_key_value_heads": self.num_key_value_heads or heads,
            "head_dim": self.head_dim or max(1, hidden // heads),
            "vocab_size": self.vocab_size,
            "max_positions": self.max_position_embeddings,
            "embed_dim": hidden,
            "tied_head": self.tie_word_embeddings,
            "activation": self.hidden_act,
            "mlp": "gated",
            "norm": "rmsnorm",
            "positions": "rotary",
            "attention_bias": (self.attention_bias, self.attention_bias),
            "mlp_bias": self.mlp_bias,
        }
        return Architecture(**(fields | particular))

    @staticmethod
    def tensors(arch: Architecture) -> Iterator[ParameterEntry]:
        """Yield the tensors of an architecture in registration order."""
        root, hidden, inner = "model", arch.hidden_size, arch.intermediate_size
        queries, keys = arch.num_heads * arch.head_dim, arch.num_key_value_heads * arch.head_dim
        in_bias, out_bias = arch.attention_bias
        yield _token_table(f"{root}.embed_tokens.weight", arch)
        for i in range(arch.num_blocks):
            block, segment = f"{root}.layers.{i}", block_segment(i)
            for name, outputs in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
                yield from _linear(f"{block}.self_attn.{name}", hidden, outputs, segment, bias=in_bias)
            yield from _linear(f"{block}.self_attn.o_proj", queries, hidden, segment, bias=out_bias)
            if arch.qk_norm:
                for name in ("q_norm", "k_norm"):
                    yield ParameterEntry(f"{block}.self_attn.{name}.weight", (segment,), (arch.head_dim,))
            for name, inputs, outputs in (
                ("gate", hidden, inner),
                ("up", hidden, inner),
                ("down", inner, hidden),
            ):
                yield from _linear(f"{block}.mlp.{name}_proj", inputs, outputs, segment, bias=arch.mlp_bias)
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield ParameterEntry(f"{block}.{name}.weight", (segment,), (hidden,))
        yield ParameterEntry(f"{root}.norm.weight", (HEAD,), (hidden,))
        if not arch.tied_head:
            yield from _linear("lm_head", hidden, arch.vocab_size, HEAD, bias=False)


class Qwen2Config(LlamaConfig):
    """Qwen 2 and 2.5: biases at q, k and v alone."""

    family = "qwen2"

    vocab_size: Extent = 151936
    intermediate_size: Extent = 22016
    num_key_value_heads: Extent | None = 32
    max_position_embeddings: Extent = 32768

    def architecture(self) -> Architecture:
        """Return what the fields mean."""
        return self._like_llama(attention_bias=(True, False))


class Qwen3Config(Qwen2Config):
    """Qwen 3: heads of q and k are normalised, and their width stands for itself."""

    family = "qwen3"

    head_dim: Extent = 128

    def architecture(self) -> Architecture:
        """Return what the fields mean."""
        return self._like_llama(qk_norm=True)


class RobertaConfig(FamilyConfig):
    """RoBERTa, a masked language model: every token sees all others, and labels are words at masks."""

    family = "roberta"
    is_causal = False

    vocab_size: Extent = 50265
    hidden_size: Extent = 768
    num_hidden_layers: Blocks = 12
    num_attention_heads: Extent = 12
    intermediate_size: Extent = 3072
    hidden_act: Activation = "gelu"
    max_position_embeddings: Extent = 512
    type_vocab_size: Extent = 2
    is_decoder: bool = False
    tie_word_embeddings: bool = True
    hidden_dropout_prob: Probability = 0.1
    attention_probs_dropout_prob: Probability = 0.1
    initializer_range: Spread = 0.02
    layer_norm_eps: Epsilon = 1e-12

    @model_validator(mode="after")
    def _is_an_encoder(self) -> RobertaConfig:
        if self.is_decoder:
            raise RuleError("is_decoder=True: zosim runs RoBERTa as a masked language model")
        return self

    def architecture(self) -> Architecture:
        """Return what the fields mean."""
        hidden, heads = self.hidden_size, self.num_attention_heads
        # Positions count from behind padding's number.
        unused = 2 if self.pad_token_id is None else max(self.pad_token_id, 0) + 1
        if unused >= self.max_position_embeddings:
            raise RuleError(
                f"max_position_embeddings={self.max_position_embeddings}: no position is left behind padding's, "
                f"pad_token_id={unused - 1}"
            )
        return Architecture(
            num_blocks=self.num_hidden_layers,
            hidden_size=hidden,
            intermediate_size=self.intermediate_size,
            num_heads=heads,
            num_key_value_heads=heads,
            head_dim=max(1, hidden // heads),
            vocab_size=self.vocab_size,
            max_positions=self.max_position_embeddings - unused,
            embed_dim=hidden,
            tied_head=self.tie_word_embeddings,
            activation=self.hidden_act,
            mlp="plain",
            norm="layernorm",
            positions="learned",
            final_norm=False,
            attention_bias=(True, True),
            mlp_bias=True,
            norm_after_mlp=True,
            is_causal=self.is_causal,
            num_token_types=self.type_vocab_size,
            num_unused_positions=unused,
        )

    @staticmethod
    def tensors(arch: Architecture) -> Iterator[ParameterEntry]:
        """Yield the tensors of an architecture in registration order."""
        root, hidden, inner = "roberta.embeddings", arch.hidden_size, arch.intermediate_size
        yield _token_table(f"{root}.word_embeddings.weight", arch)
        yield ParameterEntry(f"{root}.token_type_embeddings.weight", (EMBED,), (arch.num_token_types, hidden))
        yield from _layer_norm(f"{root}.LayerNorm", hidden, EMBED)
        rows = arch.max_positions + arch.num_unused_positions
        yield ParameterEntry(f"{root}.position_embeddings.weight", (EMBED,), (rows, hidden))
        for i in range(arch.num_blocks):
            block, segment = f"roberta.encoder.layer.{i}", block_segment(i)
            for name in ("self.query", "self.key", "self.value", "output.dense"):
                yield from _linear(f"{block}.attention.{name}", hidden, hidden, segment, bias=True)
            yield from _layer_norm(f"{block}.attention.output.LayerNorm", hidden, segment)
            yield from _linear(f"{block}.intermediate.dense", hidden, inner, segment, bias=True)
            yield from _linear(f"{block}.output.dense", inner, hidden, segment, bias=True)
            yield from _layer_norm(f"{block}.output.LayerNorm", hidden, segment)
        yield ParameterEntry("lm_head.bias", (HEAD,), (arch.vocab_size,))
        yield from _linear("lm_head.dense", hidden, hidden, HEAD, bias=True)
        yield from _layer_norm("lm_head.layer_norm", hidden, HEAD)
        if not arch.tied_head:
            yield from _linear("lm_head.decoder", hidden, arch.vocab_size, HEAD, bias=True)


class MistralConfig(LlamaConfig):
    """Mistral: a Llama with other defaults."""

    family = "mistral"

    intermediate_size: Extent = 14336
    num_key_value_heads: Extent | None = 8
    max_position_embeddings: Extent = 131072


FAMILIES: dict[str, type[FamilyConfig]] = {
    config.family: config
    for config in (OptConfig, Gpt2Config, LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig, RobertaConfig)
}
"""By ``model_type``."""
