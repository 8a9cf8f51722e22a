"""Forward passes that generate tokens, with all weights on the device, or some of them in host memory or on drives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from math import ceil

from costmodel.estimate import estimate
from costmodel.formats import FORMATS
from costmodel.models.forward import forward_work
from costmodel.models.model_spec import EMBED, HEAD, ModelSpec
from costmodel.param_passes import copy_work
from costmodel.rates.profile import Bound, Profile
from costmodel.work import Work
from zosim.applications.first_order.recipes import hooks_s
from zosim.applications.validation.codes import code_of
from zosim.applications.validation.measured_machines import MeasuredMachine, bounded
from zosim.applications.validation.models import model_of
from zosim.applications.validation.rows import Forecast, MeasuredRow, Unpredictable
from zosim.applications.validation.steps import attention_of
from zosim.hardware.machine import Drives


def forward(row: MeasuredRow, measured_machine: MeasuredMachine) -> Forecast:
    """Return the seconds of one pass over the prompt, with the logits of its last token."""
    return bounded(lambda bound: pass_s(row, measured_machine, bound))


def pass_s(row: MeasuredRow, measured_machine: MeasuredMachine, bound: Bound) -> float:
    """Return the seconds of one pass over the prompt, all weights on the device."""
    profile, seq = code_of(row["code"]).profile(measured_machine.burst_profile), row.count("seq")
    works = _pass_works(row, measured_machine, model_of(row), num_rows=seq, length=seq)
    return _seconds(list(works), profile, bound)


def streamed_generation(row: MeasuredRow, measured_machine: MeasuredMachine) -> Forecast:
    """Return the seconds of a pass over the prompt and one more for each further token, weights uploaded in each."""
    model, profile = model_of(row), code_of(row["code"]).profile(measured_machine.burst_profile)
    blocks = [group for group in model.param_groups if group.segments[0].startswith("block")]
    size = FORMATS[row.dtype].element_bytes * sum(group.num_parameters for group in blocks)
    uploaded = copy_work(min(row.count_or("bytes", size), size))

    def upload_s(bound: Bound) -> float:
        return estimate(uploaded, profile, bound=bound).seconds

    return bounded(lambda bound: generation_s(row, measured_machine, upload_s, bound))


def generation_s(
    row: MeasuredRow, measured_machine: MeasuredMachine, moved_s: Callable[[Bound], float], bound: Bound
) -> float:
    """Return the seconds of a pass over the prompt and one more for each further token, each of which brings weights in `moved_s`."""
    model, seq = model_of(row), row.count("seq")
    profile = code_of(row["code"]).profile(measured_machine.burst_profile)
    passes = {0: list(_pass_works(row, measured_machine, model, num_rows=seq, length=seq))}
    num_more = row.count_or("generated_tokens", 1) - 1
    passes |= {
        number: list(_pass_works(row, measured_machine, model, num_rows=1, length=seq + number))
        for number in _sampled(num_more)
    }
    # Accelerate's hooks copy a layer's weights when it is called; the others copy ahead.
    overlaps = row["code"] != "hf-accelerate"
    # Stages run in turn, and so do their uploads.
    upload_s = moved_s(bound)
    passed_s = {
        number: max(upload_s, one) if overlaps else upload_s + one
        for number, one in ((number, _seconds(works, profile, bound)) for number, works in passes.items())
    }
    if code_of(row["code"]).has_hooks:
        # The host starts no copy while it runs them.
        batch = row.count("batch")
        passed_s = {
            number: one + hooks_s(model, batch * (1 if number else seq)) for number, one in passed_s.items()
        }
    return passed_s.pop(0) + _summed(passed_s)


def moe_forward(row: MeasuredRow, measured_machine: MeasuredMachine) -> Forecast:
    """Return the tokens a second of passes through a mixture of experts whose weights lie in host memory.

    Raises Unpredictable if its quantity is none that is predicted, or the host has no space for a single sequence.
    """
    batch = row.count("batch") if row["batch"] else _fitting_batch(row, measured_machine)
    filled = MeasuredRow({**row.fields, "batch": str(batch)}, row.where)
    tokens = batch * _counted_tokens(row)
    seconds = streamed_generation(filled, measured_machine)
    return Forecast.of_rate(row.count_or("accumulation", 1) * tokens, seconds, _STREAMED_SPREAD)


def _counted_tokens(row: MeasuredRow) -> int:
    """Return the tokens of a sequence that a rate counts: those of the prompt, or those that are generated."""
    match row["quantity"]:
        case "tokens_per_s":
            return row.count("seq")
        case "generated_tokens_per_s":
            return row.count_or("generated_tokens", 1)
    raise Unpredictable(f"quantity {row['quantity']!r} must be one of generated_tokens_per_s, tokens_per_s")


_STREAMED_SPREAD = (0.48, 1.3)
"""Engines move weights slower than one large copy, and published rates leave out what hides behind it."""


def _fitting_batch(row: MeasuredRow, measured_machine: MeasuredMachine) -> int:
    """Return how many sequences' keys and values the host holds beside the weights."""
    model, width = model_of(row), FORMATS[row.dtype].element_bytes
    topology = measured_machine.topology
    host = topology.host_of(measured_machine.devices[0]).id
    there = sum(memory.memory_bytes for memory in topology.of_type("memory") if memory.host == host)
    heads = model.num_key_value_heads * (model.head_dim + model.value_dim)
    each = model.latent.key_value_rank if model.latent else heads
    length = row.count("seq") + row.count_or("generated_tokens", 1)
    batch = (there - model.num_parameters * width) // (model.num_blocks * each * width * length)
    if batch < 1:
        raise Unpredictable("batch is empty, and the host has no space for a sequence beside the weights")
    return batch


_NUM_SAMPLED = 17


def _sampled(count: int) -> list[int]:
    """Return the numbers from 1 to `count`, or as many of them, evenly apart, as are computed."""
    if count <= _NUM_SAMPLED:
        return list(range(1, count + 1))
    return [1 + (count - 1) * step // (_NUM_SAMPLED - 1) for step in range(_NUM_SAMPLED)]


def _summed(sampled: Mapping[int, float]) -> float:
    """Return the sum over all numbers between the sampled ones, between neighbours of which values lie on a line."""
    numbers = list(sampled)
    between = (
        (after - before - 1) * (sampled[before] + sampled[after]) / 2 for before, after in pairwise(numbers)
    )
    return sum(sampled.values()) + sum(between)


def _pass_works(
    row: MeasuredRow, measured_machine: MeasuredMachine, model: ModelSpec, *, num_rows: int, length: int
) -> Iterator[Work]:
    """Yield the work of every segment for so many tokens of a sequence, the last of which is number `length`."""
    batch, dtype, attention = row.count("batch"), row.dtype, attention_of(row, measured_machine)
    for segment in model.segments:
        rows = 1 if segment == HEAD else num_rows
        work = forward_work(model, segment, batch=batch, seq=rows, dtype=dtype, attention=attention)
        fuses_passes = code_of(row["code"]).fuses_passes
        changed = {"key": length} if num_rows < length else {}
        if fuses_passes:
            changed["sharing"] = model.num_heads // model.num_key_value_heads
        seen = tuple(op.model_copy(update=changed) for op in work.attention)
        work = work.model_copy(update={"attention": seen})
        if fuses_passes and segment not in (EMBED, HEAD):
            work = _with_few_passes(work, model, batch * rows)
        yield work


def _with_few_passes(work: Work, model: ModelSpec, tokens: int) -> Work:
    """Return a block's work with each norm, rotation, activation and addition done in one pass, or with a product.

    Per token: two norms that add the residual read and write it and what they make (4 h each), attention reads queries, keys and
    values and writes what it mixes, and an activation reads its inputs and writes its output.
    """
    heads = 2 * model.num_heads * model.head_dim + 2 * model.num_key_value_heads * model.head_dim
    inner = (3 if model.mlp == "gated" else 2) * model.intermediate_size
    per_token = 8 * model.hidden_size + heads + inner
    few = {
        "elementwise_bytes": tokens * per_token * FORMATS[work.dtype].element_bytes,
        "num_exponentials": 0,
        "num_kernels": work.num_products + len(work.attention) + 4,
    }
    return work.model_copy(update=few)


def _seconds(works: list[Work], profile: Profile, bound: Bound) -> float:
    total = works[0]
    for work in works[1:]:
        total += work
    return estimate(total, profile, bound=bound).seconds


_SUSTAINED = 0.92
"""Assumed: part of what drives read in one large transfer that transfers of layers reach."""
_WRITE_SHARE = 0.45
"""Part of their reads that drives write at, where only these are stated: DeepNVMe writes 4 to 5 GB/s where it reads 10, and 11 where it reads 27."""
_SPREAD = (0.6, 1.35)
_MASTER_BYTES, _GRADIENT_BYTES = 12, 4
"""Of a parameter: its float32 copy with both moments, and its float32 gradient."""


def nvme_streamed(row: MeasuredRow, measured_machine: MeasuredMachine) -> Forecast:
    """Return the tokens a second of passes, or of training steps, that read weights from drives or from host memory.

    Raises Unpredictable if its recipe or quantity is none that is predicted, or nothing says how fast its drives are.
    """
    counted = _counted_tokens(row)
    recipes = {"weights-on-nvme": True, "weights-on-host": True, "zero-infinity-nvme": False}
    generates = row.choice("recipe", recipes)
    devices = row.count_or("devices", 1)
    # Of a pass the batch is that of all devices, which share the weights' way out.
    share = ceil(row.count("batch") / devices) if generates else row.count("batch")
    own = MeasuredRow({**row.fields, "batch": str(share)}, row.where)
    size = FORMATS[row.dtype].element_bytes * model_of(row).num_parameters
    profile = code_of(row["code"]).profile(measured_machine.burst_profile)
    from_drive_s = 0.0 if row["recipe"] == "weights-on-host" else size / _read_rate(row, measured_machine)

    def moved_s(bound: Bound) -> float:
        return max(from_drive_s, estimate(copy_work(size // devices), profile, bound=bound).seconds)

    times = row.count_or("accumulation", 1)
    if generates:
        tokens = row.count("batch") * counted
        seconds = bounded(lambda bound: generation_s(own, measured_machine, moved_s, bound))
    else:
        tokens = devices * share * row.count("seq")
        seconds = bounded(lambda bound: _step_s(own, measured_machine, times * moved_s(bound), bound))
    return Forecast.of_rate(times * tokens, seconds, _SPREAD)


def _step_s(row: MeasuredRow, measured_machine: MeasuredMachine, moved_s: float, bound: Bound) -> float:
    """Return the seconds of a step whose weights, gradients and moments lie on drives.

    Weights come forward and once more backward, while devices compute; then the optimizer reads and writes all states, part by part.
    """
    num_parameters = model_of(row).num_parameters
    reads = _read_rate(row, measured_machine)
    device = measured_machine.devices[0]
    drives, disks = Drives.of(measured_machine.topology, device), measured_machine.topology.disks_of(device)
    is_declared = drives is not None and any(disk.write_bandwidth is not None for disk in disks)
    writes = reads * (
        drives.write_bytes_per_s / drives.read_bytes_per_s if drives and is_declared else _WRITE_SHARE
    )
    forwards = 3.0 if row["checkpointing"].lower() == "none" else 4.0
    computed_s = row.count_or("accumulation", 1) * forwards * pass_s(row, measured_machine, bound)
    kept = _MASTER_BYTES + _GRADIENT_BYTES
    optimizer_s = num_parameters * (kept / reads + (kept + FORMATS[row.dtype].element_bytes) / writes)
    return max(2 * moved_s, computed_s) + optimizer_s


def _read_rate(row: MeasuredRow, measured_machine: MeasuredMachine) -> float:
    """Return the bytes a second that drives bring: as the row says, or else as the topology's data sheets do."""
    if row["storage_read"]:
        return _SUSTAINED * row.number("storage_read")
    drives = Drives.of(measured_machine.topology, measured_machine.devices[0])
    if drives is None:
        raise Unpredictable("storage_read is empty, and the hardware has no drive")
    return _SUSTAINED * drives.read_bytes_per_s
