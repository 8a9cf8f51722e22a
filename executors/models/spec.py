"""The :class:`~costmodel.models.model_spec.ModelSpec` of a model that is at hand, whatever its family."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from costmodel.models.configs import spec_of_config
from costmodel.models.experts import Experts
from costmodel.models.model_spec import ModelSpec
from executors.formats import format_of
from executors.models.blocks import fills_masks
from executors.models.host_mirrors import HostMirrors
from executors.models.loading import load_config, model_class, naming_nulls, quietly_loading
from executors.models.model import SegmentedModel, in_segments
from executors.models.transformers_interface import attention_by, register_attention
from topology.errors import UnknownFamily, ZosimError
from zosim.plans import ForwardPass, Placement, Plan, Weights


def spec_of_model(
    model: nn.Module | SegmentedModel, name: str | None = None, *, split_blocks: tuple[int, ...] = ()
) -> ModelSpec:
    """Return the specification of a language model.

    Parameters
    ----------
    model : torch.nn.Module or SegmentedModel
        A model of transformers, with or without weights.
    name : str, optional
        By default the directory or name that it was loaded from.
    split_blocks : tuple of int
        Index of each block of a model that becomes two segments; those of a SegmentedModel are its own.

    Returns
    -------
    ModelSpec
        Its groups are counted on the model itself, which may be on the meta device; its shape is read from the configuration, by
        family where the family is known and by the usual field names elsewhere.

    Raises
    ------
    ModelError
        If the model cannot be run.
    """
    with _without_values(model.model if isinstance(model, SegmentedModel) else model):
        segmented = (
            model if isinstance(model, SegmentedModel) else in_segments(model, split_blocks=split_blocks)
        )
        boundary_elements = segmented.boundary_elements()
    config = segmented.model.config.get_text_config()  # type: ignore[operator, union-attr]
    name = name or getattr(config, "_name_or_path", "") or type(segmented.model).__name__
    try:
        shape = spec_of_config(config.to_dict(), name=name).model_dump(exclude={"param_groups"})
    except UnknownFamily:
        shape = _usual_fields(segmented, config)
        with _without_values(segmented.model):
            # Without values experts run in another way, which takes more.
            is_apart = segmented.device.type == "meta" and shape["experts"] is not None
            shape["live_elements"] = () if is_apart else segmented.live_elements()
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
    shape |= {"boundary_elements": boundary_elements}
    return ModelSpec(**shape, param_groups=segmented.param_groups)


@contextmanager
def _without_values(model: nn.Module) -> Iterator[None]:
    """Let a model without memory run for the length of the block: on the meta device nothing may depend on numbers.

    Fused attention looks at its mask, and products of groups of experts are made in bfloat16 alone.
    """
    config = getattr(model, "config", None)
    if config is None or not any(parameter.is_meta for parameter in model.parameters()):
        yield
        return
    text = config.get_text_config()
    usual = getattr(text, "_experts_implementation", None)
    register_attention(_SHAPES_ALONE, _shapes_alone)
    text._experts_implementation = "batched_mm"
    try:
        # For a name that it does not know transformers makes no mask, whose numbers a masked model asks for.
        with attention_by(model, _SHAPES_ALONE if fills_masks(model) else "eager"), HostMirrors():
            yield
    finally:
        text._experts_implementation = usual


_SHAPES_ALONE = "zosim-shapes-alone"


def _shapes_alone(_module: nn.Module, query: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, None]:
    return query.transpose(1, 2), None


def without_weights(source: str) -> nn.Module:
    """Return a model of which only the configuration is read, without memory.

    `source`: a ``config.json``, a directory that holds one, or a name that transformers knows.

    Raises ModelError if there is no such configuration.
    """
    config = load_config(source, shipped=True)
    with quietly_loading(source), torch.device("meta"), naming_nulls(config):
        model: nn.Module = model_class(config)._from_config(config, attn_implementation="eager")
        model.tie_weights()  # type: ignore[operator]
    return model


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

    def declared(*names: str) -> int | None:
        values = (fields.get(spelt.get(name, name)) for name in names)
        return next((value for value in values if type(value) is int and value > 0), None)

    modules = dict(segmented.blocks[0].named_modules())
    hidden = segmented.hidden_size or segmented.embedding.embedding_dim
    heads = declared("num_attention_heads", "num_heads") or 1
    activation = fields.get("hidden_act") or fields.get("hidden_activation")
    return {
        "family": config.model_type,
        "hidden_size": hidden,
        "intermediate_size": declared("intermediate_size", "ffn_dim") or 4 * hidden,
        "num_heads": heads,
        "num_key_value_heads": declared("num_key_value_heads") or heads,
        "head_dim": declared("head_dim") or max(1, hidden // heads),
        "vocab_size": segmented.embedding.num_embeddings,
        "max_positions": declared("max_position_embeddings", "max_target_positions") or ANY_LENGTH,
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
        "experts": _experts(segmented, hidden, declared(*_EXPERTS_PER_TOKEN)),
        "splits_inside": False,
    }


_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k", "moe_k",
)  # fmt: skip
"""What families call the number of experts that a token visits."""


def experts_of(block: nn.Module) -> list[nn.Module]:
    """Return a block's modules of experts that lie in one tensor, as transformers keeps them."""
    return [
        module for module in block.modules() if getattr(getattr(module, "down_proj", None), "ndim", 0) == 3
    ]


def _experts(segmented: SegmentedModel, hidden: int, num_per_token: int | None) -> Experts | None:
    """Return the experts of a model's blocks; None where it has none that lie in one tensor, as transformers keeps them."""
    expert_modules = list(map(experts_of, segmented.blocks))
    first = next((number for number, modules in enumerate(expert_modules) if modules), None)
    if first is None:
        return None
    weight: Any = expert_modules[first][0].down_proj
    shared = [
        module.in_features
        for path, module in segmented.blocks[first].named_modules()
        if "shared" in path and isinstance(module, nn.Linear) and module.out_features == hidden
    ]
    return Experts(
        num_experts=weight.shape[0],
        # Where nothing says how many are visited, all are.
        num_per_token=num_per_token or weight.shape[0],
        intermediate_size=weight[0].numel() // hidden,
        shared_size=sum(shared),
        dense_blocks=tuple(number for number, modules in enumerate(expert_modules) if not modules),
    )


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


def _main(arguments: list[str]) -> int:
    """Save what is known of a model, for a machine that plans without torch."""
    if len(arguments) != 2:
        print("usage: python -m executors.models.spec MODEL spec.json", file=sys.stderr)
        return 2
    source, target = arguments
    try:
        spec = spec_of_model(without_weights(source), Path(source).name)
    except ZosimError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Path(target).write_text(spec.model_dump_json(indent=1), encoding="utf-8")
    print(f"{target}: {spec.num_blocks} blocks, {spec.num_parameters:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
