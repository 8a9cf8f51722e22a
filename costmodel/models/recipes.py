"""Recipes of first-order fine-tuning: what is trained, what is kept for it, in which format, and where.

"Full fine-tuning" is 2 to 25 bytes a parameter, by recipe. A recipe here is data: bytes for each parameter, and what an update needs
beside them. What does not depend on the model's size, such as activations, is counted in :mod:`costmodel.models.training`.

.. [1] S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 3.1.
.. [2] T. Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, section 3: blocks of 64 weights, constants of
   256 blocks quantized again.
.. [3] K. Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (LOMO), 2023.
.. [4] J. Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", 2024, table 1.
.. [5] Q. Luo et al., "BAdam: A Memory Efficient Full Parameter Optimization Method for Large Language Models", 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from topology.errors import PlanError
from topology.validation import did_you_mean

Trained = Literal["all", "block", "adapters", "adapters and embeddings", "nothing"]

_NF4_BITS = 4 + 32 / 64
_NF4_DOUBLE_BITS = 4 + 8 / 64 + 32 / (64 * 256)
_GPTQ_GROUP = 128


@dataclass(frozen=True)
class TrainingRecipe:
    """What one recipe trains and keeps."""

    name: str
    description: str
    trained: Trained = "all"  # `"block"` trains one block at a time
    weight_bits: float = 16  # of a matrix inside the blocks, scales included. Other weights have 16 bits
    # gradient_bytes, master_bytes, state_bytes: for each trained parameter. Those of adapters depend on their own format.
    gradient_bytes: float = 2
    master_bytes: float = 0
    state_bytes: float = 4
    update_bytes: float = 2  # temporaries of an update, for each trained parameter
    # Whether a parameter is updated as soon as its gradient is known, which is then freed.
    in_backward: bool = False
    # Rank that gradients of matrices are projected to before the optimizer sees them; 0 for none.
    subspace_rank: int = 0
    has_backward: bool = True  # whether there is a backward pass; zeroth order has forwards alone
    # Whether the state is managed memory, which torch's allocator does not count and the host takes where the device is full.
    is_paged: bool = False
    # Whether frozen linears keep what they read, which no gradient needs: bitsandbytes' products in 4 bits do.
    keeps_inputs: bool = False
    # What lies in host memory: of `"weights"`, `"gradients"`, `"state"`.
    on_host: tuple[Literal["weights", "gradients", "state"], ...] = ()

    @property
    def is_quantized(self) -> bool:
        """Whether the weights inside blocks have fewer than 16 bits."""
        return self.weight_bits < 16

    @property
    def has_adapters(self) -> bool:
        """Whether it trains adapters on a frozen base."""
        return self.trained in ("adapters", "adapters and embeddings")

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes that a trained parameter takes between backward and update: weight, gradient, master copy and state."""
        return self.weight_bits / 8 + self.gradient_bytes + self.master_bytes + self.state_bytes


_LOW_RANK = 128
_FULL = (
    TrainingRecipe(
        "adamw-fp32-master",
        "AdamW, float32 master weights",
        master_bytes=4,
        state_bytes=8,
        update_bytes=0,
    ),
    TrainingRecipe("adamw-bf16", "AdamW, all in 16 bits"),
    TrainingRecipe(
        "adamw-8bit-paged", "paged AdamW, 8-bit moments", state_bytes=2.03, update_bytes=0, is_paged=True
    ),
    TrainingRecipe("adamw-bf16-in-backward", "AdamW in the backward pass", in_backward=True),
    TrainingRecipe(
        "adamw-8bit-in-backward",
        "8-bit AdamW in the backward pass",
        state_bytes=2.03,
        update_bytes=0,
        in_backward=True,
    ),
    TrainingRecipe("lomo", "LOMO", state_bytes=0, in_backward=True),
    TrainingRecipe("adalomo", "AdaLOMO, factored moments", state_bytes=0, in_backward=True),
    TrainingRecipe("galore", "GaLore of rank 128", subspace_rank=_LOW_RANK, update_bytes=0),
    TrainingRecipe(
        "q-galore",
        "GaLore of rank 128, quantized state",
        state_bytes=2.03,
        subspace_rank=_LOW_RANK,
        update_bytes=0,
    ),
    TrainingRecipe(
        "badam", "BAdam, a block at a time", "block", master_bytes=4, state_bytes=8, update_bytes=2
    ),
    TrainingRecipe(
        "fsdp-offload",
        "FSDP with CPU offload",
        on_host=("weights", "gradients", "state"),
        update_bytes=0,
    ),
    TrainingRecipe(
        "zero-offload",
        "ZeRO-Offload, float32 master weights and gradients",
        gradient_bytes=4,
        master_bytes=4,
        state_bytes=8,
        update_bytes=0,
        on_host=("gradients", "state"),
    ),
    TrainingRecipe("mezo", "MeZO", gradient_bytes=0, state_bytes=0, update_bytes=0, has_backward=False),
)
_ADAPTERS = (
    TrainingRecipe("lora", "LoRA", "adapters"),
    TrainingRecipe("lora+embeddings", "LoRA, embedding and head trained", "adapters and embeddings"),
    TrainingRecipe("qlora-nf4", "QLoRA, NF4", "adapters", _NF4_BITS, keeps_inputs=True),
    TrainingRecipe(
        "qlora-nf4-dq",
        "QLoRA, NF4, double quantization",
        "adapters",
        _NF4_DOUBLE_BITS,
        keeps_inputs=True,
    ),
    TrainingRecipe("qlora-int4", "LoRA on GPTQ, 4 bits", "adapters", 4 + 20 / _GPTQ_GROUP),
    TrainingRecipe("qlora-int8", "LoRA on GPTQ, 8 bits", "adapters", 8 + 24 / _GPTQ_GROUP),
)

RECIPES: Mapping[str, TrainingRecipe] = MappingProxyType(
    {recipe.name: recipe for recipe in (*_FULL, *_ADAPTERS)}
)
"""By name. Bytes of state are those of torch's AdamW, which keeps moments in the format of the weights; 8-bit moments have a
float32 constant for 256 of them."""


def recipe_of(name: str) -> TrainingRecipe:
    """Return the recipe of that name.

    Raises PlanError if there is none.
    """
    recipe = RECIPES.get(name.lower())
    if recipe is None:
        raise PlanError(f"recipe {name!r} is unknown", hint=did_you_mean(name, RECIPES))
    return recipe
