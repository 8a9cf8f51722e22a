"""The :class:`~costmodel.models.model_spec.ModelSpec` of a model that is at hand, whatever its family."""

from __future__ import annotations

from typing import Any

from torch import nn

from costmodel.models.configs import spec_of_config
from costmodel.models.model_spec import ModelSpec
from executors.formats import format_of
from executors.models.model import SegmentedModel, in_segments
from topology.errors import UnknownFamily
from zosim.plans import ForwardPass, Placement, Plan, Weights


def spec_of_model(
    model: nn.Module | SegmentedModel, name: str | None = None, *, split_blocks: tuple[int, ...] = ()
) -> ModelSpec:
    """Return the specification of a language model.

    Parameters
    ----------
    name : str, optional
        By default the directory or name that it was loaded from.
    split_blocks : tuple of int
        Blocks of a model that become two segments; those of a SegmentedModel are its own.

    Returns
    -------
    ModelSpec
        Its groups are counted on the model itself; its shape is read from the configuration, by family where the
        family is known and by the usual field names elsewhere.

    Raises
    ------
    ModelError
        If the model cannot be run.
    """
    segmented = model if isinstance(model, SegmentedModel) else in_segments(model, split_blocks=split_blocks)
    config = segmented.model.config.get_text_config()  # type: ignore[operator, union-attr]
    name = name or getattr(config, "_name_or_path", "") or type(segmented.model).__name__
    try:
        shape = spec_of_config(config.to_dict(), name=name).model_dump(exclude={"param_groups"})
    except UnknownFamily:
        shape = _usual_fields(segmented, config)
    rank, adapters = _adapters(segmented)
    shape |= {
        "name": name,
        "num_blocks": len(segmented.blocks),
        "adapter_rank": rank,
        "adapter_shapes": adapters,
    }
    lazy_steps = (getattr(module, "lora_lazy_steps", 0) for module in segmented.blocks[0].modules())
    shape |= {"adapter_lazy_steps": max(lazy_steps)}
    prefixes = (
        p.shape[0] for name, p in segmented.blocks[0].named_parameters() if name.endswith("prefix_keys")
    )
    shape |= {"num_prefix_tokens": next(prefixes, 0), "split_blocks": segmented.split_blocks}
    return ModelSpec(**shape, param_groups=segmented.param_groups)


def plan_of_model(model: nn.Module, *, batch: int, seq: int, **axes: Any) -> Plan:
    """Return the plan of a model that is at hand, for a loop of one's own on one device.

    Parameters
    ----------
    model : torch.nn.Module
        A language model; the plan has its format and its attention.
    batch, seq : int
        Sequences per step, and most tokens of one.
    **axes : object
        Other axes of :class:`~zosim.plans.Plan`, such as ``residency=Residency(blocks="offloaded")``.

    Raises
    ------
    ModelError
        As :func:`spec_of_model`.

    Examples
    --------
    ::

        model = load_model("path/to/model")
        with Session(plan_of_model(model, batch=4, seq=128), model, learning_rate=1e-6) as session:
            for batch in batches:
                print(session.step(batch).loss)
    """
    spec = spec_of_model(model)
    dtype = format_of(next(model.parameters()).dtype)
    is_eager = getattr(model.config, "_attn_implementation", "") == "eager"
    chosen = {
        "placement": Placement(topology="host", devices=("cpu0",)),
        "weights": Weights.model_validate({"dtype": dtype}),
        "forward": ForwardPass(attention="eager" if is_eager else "sdpa"),
    }
    return Plan(model=spec, batch=batch, seq=seq, **(chosen | axes))


ANY_LENGTH = 1 << 20
"""Longest sequence of a model that has no table of positions, such as one whose attention has slopes, or none."""


def _usual_fields(segmented: SegmentedModel, config: Any) -> dict[str, Any]:
    """Return the shape of a model of an unknown family: what its configuration states, else what the model shows."""
    fields, spelt = config.to_dict(), getattr(config, "attribute_map", {})

    def stated(*names: str) -> int | None:
        values = (fields.get(spelt.get(name, name)) for name in names)
        return next((value for value in values if type(value) is int and value > 0), None)

    modules = dict(segmented.blocks[0].named_modules())
    hidden = segmented.hidden_size or segmented.embedding.embedding_dim
    heads = stated("num_attention_heads", "num_heads") or 1
    activation = fields.get("hidden_act") or fields.get("hidden_activation")
    return {
        "family": config.model_type,
        "hidden_size": hidden,
        "intermediate_size": stated("intermediate_size", "ffn_dim") or 4 * hidden,
        "num_heads": heads,
        "num_key_value_heads": stated("num_key_value_heads") or heads,
        "head_dim": stated("head_dim") or max(1, hidden // heads),
        "vocab_size": segmented.embedding.num_embeddings,
        "max_positions": stated("max_position_embeddings", "max_target_positions") or ANY_LENGTH,
        # What its blocks' modules are called says what they do.
        "mlp": "gated" if any("gate" in name for name in modules) else "plain",
        "norm": "rmsnorm"
        if any("rmsnorm" in type(module).__name__.lower() for module in modules.values())
        else "layernorm",
        "embed_dim": segmented.embedding.embedding_dim,
        "tied_head": any(group.is_tied for group in segmented.param_groups),
        "activation": activation if isinstance(activation, str) else "gelu",
        "is_causal": segmented.is_causal,
        "positions": "rotary" if fields.get("rope_parameters") else "learned",
    }


def _adapters(segmented: SegmentedModel) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the rank of the adapters in the first block, and the widths of the linears that carry one."""
    pairs: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, parameter in segmented.blocks[0].named_parameters():
        path, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind in ("lora_A", "lora_B", "lora_closed_A"):
            pairs.setdefault(path, {})[kind] = tuple(parameter.shape)
    shapes = [(pair["lora_A"][1], pair["lora_B"][0]) for pair in pairs.values()]
    ranks = [pair["lora_A"][0] + pair.get("lora_closed_A", (0,))[0] for pair in pairs.values()]
    return next(iter(ranks), 0), tuple(shapes)
