"""What published code does beside the method: its attention, how it shards and recomputes, and what its host takes.

A prediction is of a method on a machine. A measurement of another implementation is of what that one does besides, too: it
stands here, by the name in a row's `code`, and nowhere in the cost model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from costmodel.models.recipes import TrainingRecipe
from costmodel.models.training import CodeQuirks, Sharding
from costmodel.rates.profile import Constant, Profile
from costmodel.work import AttentionKernel


@dataclass(frozen=True)
class SystemCode:
    """What one implementation does beside the method."""

    attention: Literal["eager", "sdpa"] = "sdpa"  # what it does where a row does not say
    latent_attention: Literal["eager", "sdpa"] | None = None  # the same of models with latent keys and values
    has_hooks: bool = False  # whether ZeRO's third stage brings the weights, module by module
    kernel: AttentionKernel | None = None  # its fused kernel, where that is not what torch takes
    sharding: Literal["none", "full"] = "none"
    # Format that weights are kept in, that of the products if None.
    stored: Literal["float32"] | None = None
    dropout: bool = False
    fuses_softmax: bool = False  # whether scaling, mask and softmax of stored scores are one kernel
    widens_half: bool = False  # whether it multiplies float16 in float32 on a CPU, converting as it reads
    cpu_rate: float = 1.0  # rate of these products beside that of a library's
    # Whether norms, rotations, activations and additions are a kernel each, or part of a product.
    fuses_passes: bool = False
    # Constants of the host that are its own, with their sources in this module's comments.
    host_s: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    quirks: CodeQuirks = field(default_factory=CodeQuirks)  # what it keeps in first-order runs by recipe
    # Whether its scripts run DeepSpeed for quantized weights and for master weights, on one device, too.
    uses_deepspeed: bool = False
    begin_s: float = 0.0  # of a run's beginning, for each of its few steps, where the speeds that it prints are of whole runs

    def training(self, recipe: TrainingRecipe, sharding: Sharding) -> CodeQuirks:
        """Return what this code keeps in a first-order run of a recipe."""
        by_choice = self.uses_deepspeed and (recipe.is_quantized or recipe.master_bytes > 0)
        if not by_choice and not sharding.startswith("zero"):
            return self.quirks
        # DeepSpeed's wrapper leaves out autocast, so that the loss has the format of the model.
        narrow = recipe.is_quantized or sharding == "zero-3"
        return replace(self.quirks, widens_gradients=True, narrow_loss=narrow)

    def profile(self, profile: Profile) -> Profile:
        """Return a device's profile with the host's constants of this code."""
        changed: list[Constant] = []
        for name, seconds in self.host_s.items():
            before = profile.constant(name)
            spread = {"value": seconds, "low": 0.7 * seconds, "high": 1.5 * seconds}
            changed.append(before.model_copy(update={**spread, "source": "the code that was measured"}))
        if self.widens_half and profile.device_type == "cpu":
            wide = profile.constant("matmul_rate.float32")
            ends = {end: getattr(wide, end) * self.cpu_rate for end in ("value", "low", "high")}
            changed.append(wide.model_copy(update={"name": "matmul_rate.float16", **ends}))
        return profile.with_constants(*changed, origin=profile.origin) if changed else profile


CODES: Mapping[str, SystemCode] = MappingProxyType(
    {
        "": SystemCode(),
        # Hugging Face models and the papers' scripts; what their kernels do is in zosim.applications.published_code.
        "published": SystemCode(attention="eager", host_s={"instruction_s": 0.0}),
        # FSDP and ZeRO's third stage with mixed precision: weights and gradients in shards of float32, gathered in half precision; FlashAttention in
        # Triton, which knows ALiBi, at the time of its A100 tables. No dropout.
        "llm-foundry": SystemCode(
            kernel="fa1", sharding="full", stored="float32", host_s={"instruction_s": 0.0}
        ),
        **dict.fromkeys(
            ("fsdp", "zero3", "zero-3", "deepspeed-zero3", "deepspeed-zero-3"),
            SystemCode(sharding="full", stored="float32"),
        ),
        # Megatron's transformer layer stores scores and drops out. Of its host: checkpointed layers save and restore the
        # states of random number generators around every forward, which is most of what a small layer takes. Fitted to the
        # steps of one sequence of 1,024 tokens in vTrain's table: 3.4 ms a block for forward, forward again and backward.
        "megatron-deepspeed": SystemCode(
            attention="eager",
            dropout=True,
            host_s={"call_s.block": 0.92e-3, "instruction_s": 0.0},
            fuses_softmax=True,
        ),
        # Trainers of first-order recipes. ms-swift computes the accuracy of tokens from logits, so that these and their shifted
        # copy stay. litgpt accumulates under FSDP's no_sync, and drops out adapters' inputs. torchtune compiles its norms.
        "ms-swift": SystemCode(quirks=CodeQuirks(num_loss_tensors=5)),
        "litgpt": SystemCode(quirks=CodeQuirks(whole_gradients=True, fuses_adapters=True)),
        **dict.fromkeys(("torchtune", "torchtune+compile"), SystemCode(quirks=CodeQuirks(fuses_norms=True))),
        # Speeds of transformers' Trainer are of whole runs (`include_tokens_per_second`), here of 20 steps (`max_steps` in
        # scripts/benchmarks/defaults.yaml of https://github.com/foundation-model-stack/fms-acceleration), whose beginning counts. Fitted to
        # batches of 4 and 8 on one device, of 7B and of 47B parameters: 0.59 and 0.55 s for each step beyond what grows with the batch.
        "fms-acceleration": SystemCode(begin_s=0.57),
        **dict.fromkeys(
            ("peft", "lora_lab", "colossalai-gemini"),
            SystemCode(),
        ),
        **dict.fromkeys(("qwen-finetune", "deepspeed"), SystemCode(uses_deepspeed=True)),
        "deepspeed-zero-inference": SystemCode(has_hooks=True),
        # FlashAttention for Mixtral, stored scores for DeepSeek (`_attn_implementation` in moe_gen/models of
        # https://github.com/EfficientMoE/MoE-Gen).
        "moe-gen": SystemCode(latent_attention="eager"),
        # Frameworks with kernels of their own.
        "tensorrt-llm": SystemCode(fuses_passes=True),
        **dict.fromkeys(("ik_llama.cpp", "llamafile"), SystemCode(widens_half=True, fuses_passes=True)),
        # Rows times columns, one by one: llamafile's tiles read prompts 1.3 to 6 times as fast on CPUs (https://justine.lol/matmul/).
        "llama.cpp": SystemCode(widens_half=True, fuses_passes=True, cpu_rate=0.5),
    }
)
"""By what rows call them, in small letters; others do what torch does by default."""

KERNEL_NAMES: Mapping[str, Literal["eager", "sdpa"] | None] = MappingProxyType(
    {
        "": None,
        **dict.fromkeys(("eager", "math"), "eager"),
        **dict.fromkeys(("fused", "sdpa", "flash", "flash_attention_2", "flash_attention_3"), "sdpa"),
    }
)
"""Implementations of attention by what rows call them; None where they do not say."""


def code_of(name: str) -> SystemCode:
    """Return the quirks of an implementation."""
    return CODES.get(name.lower(), CODES[""])
