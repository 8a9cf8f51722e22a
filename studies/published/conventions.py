"""What a row of the ZO2 and DistZO2 tables means: a plan, on the hardware that the papers name.

Conventions found in the numbers themselves (``studies/zo2`` and ``studies/distzo2`` show the arithmetic):

* the batch is that of the whole step, over all ranks;
* a token counts once per step, although it is forwarded at two points;
* "fp32" multiplies in float32, not in TF32;
* a megabyte is 2^20 bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from costmodel.formats import FORMATS, DType
from costmodel.models.configs import read_model_spec
from costmodel.models.model_spec import ModelSpec
from studies.published.rows import PublishedRow
from topology.documents import load_preset
from topology.errors import PlanError, ZosimError
from topology.graph import Topology
from zosim.plans import (
    ForwardPass,
    Mesh,
    Placement,
    Plan,
    Residency,
    Schedule,
    StorageDType,
    TransferDType,
    Weights,
)

MEBIBYTE = 2**20

PRESETS = {
    ("A100-80GB", 1): "a100-80gb-milan",
    ("A100-80GB", 3): "a100-80gb-3x4",
    ("H20-96GB", 1): "h20-4x-milan",
}
"""Hardware preset by the table's name of the GPU and the number of nodes."""

PRECISIONS: dict[str, tuple[StorageDType, DType]] = {
    "fp32": ("float32", "float32"),
    "fp16": ("float16", "float16"),
    "bf16": ("bfloat16", "bfloat16"),
    "amp-fp16": ("float32", "float16"),
    "amp-bf16": ("float32", "bfloat16"),
}

TRANSFERS: dict[str, TransferDType] = {
    "none": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3",
}

UNITS = {
    "throughput": ("tokens/s", "tokens/sec", "tok/s"),
    "memory": ("MB", "MiB"),
    "transfer": ("1e9 params/s",),
}
"""Spellings of the unit that the tables print a kind of cell in; none at all is read as that unit."""

ABLATIONS = ("no scheduler overlap", "no reusable memory", "no efficient update")


class UnknownRow(ZosimError):  # noqa: N818 - reads as the statement it makes
    """A row that cannot be read as a plan, with the reason."""


@dataclass(frozen=True)
class Method:
    """A method as the tables name it."""

    base: str  # {"MeZO", "ZO2"}
    parallel: tuple[str, ...] = ()  # ``"PertP"`` and ``"DDP"``, the inner axis first
    option: str = ""  # an ablation, ``"compress=<format>"``, or nothing

    @property
    def is_offloaded(self) -> bool:
        """Whether blocks live on the host."""
        return self.base == "ZO2"

    def describe(self) -> str:
        """Return one spelling for all the ways in which tables spell the method."""
        return "+".join((self.base, *self.parallel)) + (f" ({self.option})" if self.option else "")


def method_of(row: PublishedRow) -> Method:
    """Return the method of a row. Raises UnknownRow if its name is none that these tables use."""
    text = row["method"]
    match = re.fullmatch(r"(Dist)?(MeZO|ZO2)\s*(?:\(([^)]*)\))?((?:\+\w+)*)", text)
    if match is None:
        raise UnknownRow(f"method {text!r} is not one of these tables'")
    _, base, inside, behind = match.groups()
    words = [*(inside or "").split("+"), *behind.split("+")]
    parallel, option = [], ""
    for word in filter(None, (word.strip() for word in words)):
        name = {"pertp": "PertP", "perp": "PertP", "ddp": "DDP"}.get(word.lower())
        if name is not None:
            parallel.append(name)
        elif word == "2D":
            parallel += ["PertP", "DDP"]
        elif word in ABLATIONS or word.removeprefix("compress=") in TRANSFERS:
            option = word
        else:
            raise UnknownRow(f"method {text!r}: {word!r} is no axis, ablation or compression that is known")
    return Method(base, tuple(parallel), option)


@dataclass(frozen=True)
class PublishedCase:
    """A row's plan and where it runs."""

    plan: Plan
    preset: str  # name of the hardware preset
    paper: str
    method: Method

    @property
    def topology(self) -> Topology:
        """The preset's topology."""
        return _topology(self.preset)

    @property
    def device(self) -> str:
        """Node of the first rank."""
        return self.plan.placement.devices[0]

    @property
    def capacity_bytes(self) -> int:
        """Memory of one device."""
        return self.topology.device_spec(self.device).memory_bytes


def case_of(row: PublishedRow) -> PublishedCase:
    """Return the case that a throughput or memory row describes.

    Raises UnknownRow if it describes none, with the reason.
    """
    method = method_of(row)
    num_ranks, num_nodes = row.count("gpus"), row.count("nodes") if row["nodes"] else 1
    batch, seq = row.count("batch_size"), row.count("seq_len")
    preset = PRESETS.get((row["gpu_type"], num_nodes))
    if preset is None:
        raise UnknownRow(f"no hardware preset for {num_nodes} nodes of {row['gpu_type']!r}")
    stored, computed, transfer = _formats(row["precision"], method)
    mesh = _mesh(method, num_ranks)
    devices = tuple(device.id for device in _topology(preset).compute_devices if device.type == "gpu")[
        :num_ranks
    ]
    if len(devices) < num_ranks:
        raise UnknownRow(f"preset {preset} has {len(devices)} GPUs, the row wants {num_ranks}")
    try:
        plan = Plan(
            model=stretched(_model(row["model"]), seq),
            placement=Placement(topology=preset, devices=devices),
            batch=batch,
            seq=seq,
            mesh=mesh,
            weights=Weights(dtype=stored),
            residency=_residency(method, num_ranks, transfer),
            schedule=Schedule(
                traversal="blockwise" if method.is_offloaded else "full",
                update="delayed" if method.is_offloaded and method.option != ABLATIONS[2] else "immediate",
            ),
            forward=ForwardPass(compute_dtype=computed, attention=_attention(row["paper"], row["model"])),
        )
    except PlanError as error:
        raise UnknownRow(error.message) from error
    return PublishedCase(plan, preset, row["paper"], method)


def _attention(paper: str, model: str) -> Literal["eager", "sdpa"]:
    """Return the attention implementation that the numbers show.

    Four times the sequence costs ZO2's OPT rows what stored scores cost: a fused kernel would need a fraction of the
    time, and none of the memory. DistZO2's rows hardly mind: the masked half must have been skipped, or the products
    would run above the peak of an H20. Qwen3 needs a transformers that no longer stores scores by default.
    """
    return "eager" if paper == "ZO2" and _model(model).family == "opt" else "sdpa"


def transfer_case_of(row: PublishedRow) -> PublishedCase:
    """Return the case of a transfer-rate row: the copies of a step on all GPUs of the host, and nothing else.

    Raises UnknownRow if it describes none, with the reason.
    """
    kinds: dict[str, Literal["private", "sliced"]] = {"plain": "private", "CommOpt": "sliced"}
    transfers = kinds.get(row["method"])
    if transfers is None:
        raise UnknownRow(f"transfer method {row['method']!r} is neither plain nor CommOpt")
    fields = {**row.fields, "method": "DistZO2(DDP)", "batch_size": row["gpus"], "seq_len": "1"}
    case = case_of(replace(row, fields=fields))
    residency = case.plan.residency.model_copy(update={"transfers": transfers})
    return replace(case, plan=case.plan.model_copy(update={"residency": residency}))


def prefetches(case: PublishedCase) -> bool:
    """Whether the code that made a cell uploads a block while the one before it computes.

    Algorithms 2 of both papers do. But DistZO2's rows on four GPUs at other sequences than 2048, all of Table 7, take
    longer than those at 2048 by about the same seconds per parameter whatever the sequence, those of Table 2's upload:
    there, uploads were not hidden. OPT-1.3B's do not show it, or only at 8192; nothing says why.
    """
    plan = case.plan
    return not (case.paper == "DistZO2" and plan.placement.world_size == 4 and plan.seq != 2048)


def decays(paper: str) -> bool:
    """Return whether a paper's updates have weight decay: ZO2's public code does, DistZO2's Algorithm 1 does not."""
    return paper == "ZO2"


def stretched(model: ModelSpec, seq: int) -> ModelSpec:
    """Return `model` with position tables long enough for `seq`, as authors must make them who run longer sequences."""
    if seq <= model.max_positions:
        return model
    return model.model_copy(update={"max_positions": seq})


def _formats(name: str, method: Method) -> tuple[StorageDType, DType, TransferDType | None]:
    """Return the formats of weights, products and transfers; None where transfers have that of the weights."""
    formats = PRECISIONS.get(name)
    if formats is None:
        raise UnknownRow(f"precision {name!r} is none of {', '.join(PRECISIONS)}")
    stored, computed = formats
    transfer = TRANSFERS.get(method.option.removeprefix("compress="))
    if transfer is not None and FORMATS[transfer].element_bytes > FORMATS[stored].element_bytes:
        raise UnknownRow(f"{method.option} would widen weights stored as {stored}")
    return stored, computed, transfer


def _mesh(method: Method, num_ranks: int) -> Mesh:
    if not method.parallel:
        if num_ranks != 1:
            raise UnknownRow(f"{method.describe()} names no axis for its {num_ranks} GPUs")
        return Mesh()
    if num_ranks == 1:
        return Mesh()  # a mesh of one rank is no mesh, whatever its axis is called
    perturb = 2 if "PertP" in method.parallel else 1
    if num_ranks % perturb or ("DDP" not in method.parallel and num_ranks != perturb):
        raise UnknownRow(f"{method.describe()} cannot be laid out on {num_ranks} GPUs")
    inner: Literal["perturb", "data"] = "data" if method.parallel[0] == "DDP" and perturb > 1 else "perturb"
    return Mesh(data=num_ranks // perturb, perturb=perturb, inner=inner)


def _residency(method: Method, num_ranks: int, transfer: TransferDType | None) -> Residency:
    if not method.is_offloaded:
        return Residency(transfer_dtype=transfer)
    return Residency(
        blocks="offloaded",
        overlap=method.option != ABLATIONS[0],
        reuse_staging_buffers=method.option != ABLATIONS[1],
        transfers="sliced" if num_ranks > 1 else "private",
        transfer_dtype=transfer,
    )


@cache
def _topology(preset: str) -> Topology:
    return load_preset(preset)


@cache
def _model(name: str) -> ModelSpec:
    return read_model_spec(name)
