"""What a job takes on a machine at least: by its arithmetic, its copies and the size of its weights alone.

A floor costs a hundredth of a search among plans. With it a search among machines looks at few of them: no plan of a
machine is faster than the machine's floor, and none fits where the weights alone do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from costmodel.estimate import estimate
from costmodel.param_passes import perturb_work, update_work
from topology.units import format_bytes
from zosim.hardware.machine import Machine
from zosim.planning.disks import may_mix
from zosim.planning.request import Request
from zosim.planning.space import is_quantization_open, pipeline_of
from zosim.planning.split_search import Costs, PlacedPipeline
from zosim.plans import Estimator, Mesh, Placement, Plan


@dataclass(frozen=True)
class Floor:
    """The least that any plan takes."""

    step_s: float
    missing_bytes: float = 0.0  # memory that lacks for the weights alone; 0 where they fit
    missing: str = ""


def floor(request: Request) -> Floor:
    """Return the least that any plan of a request takes.

    With ``d`` shards of the batch, ``p`` of the ``K`` evaluation points and ``s`` stages on ``n`` devices, a pipeline forwards
    ``k = ceil(K/p)`` points of ``ceil(B/d)`` sequences: the first through all stages, each other one a stage later, which takes
    ``F (1 + (k - 1) / s)`` or more; and the fullest stage computes for ``(k F + P) / s`` or more, where ``P`` are passes over all
    weights: from point to point in place, whoever forwards them, and the updates. Weights stay on devices if an ``s``-th of them fits.
    Otherwise every block that no device has space for is read from host memory and written back once a step, and a device uploads
    an ``n``-th of them or more.
    Where weights may lose bits nothing is said, since they may then be of any size.
    """
    search = request.config.search
    if search.allow_lossy or is_quantization_open(request):
        return Floor(0.0)
    costs = Costs(request.config.spec, request.split_options)
    topology, hosts = request.hardware.topology, request.hardware.device_choice.by_host
    devices = [device for listed in hosts.values() for device in listed]
    num_devices = min(request.max_ranks, len(devices))
    firsts = {topology.device_spec(device).id: device for device in reversed(devices)}.values()
    pipelines = [_alone(request, device, costs) for device in firsts]
    total_bytes, block_bytes = _weight_bytes(pipelines[0].plan)
    on_cpus = request.hardware.is_on_cpus
    device_bytes = inf if on_cpus else max(request.device_limit_bytes(device) for device in firsts)
    host_bytes = sum(
        request.host_limit_bytes(tuple(listed)) + _disk_bytes(request, tuple(listed))
        for listed in hosts.values()
    )
    # Some blocks may stay on the device where others move.
    moved_bytes = max(0.0, block_bytes - device_bytes) if may_mix(request) else block_bytes
    may_offload = "offloaded" in request.blocks and moved_bytes <= host_bytes
    memories = {topology.host_memory(device).id for device in devices}
    moved_s = max(
        min(moved_bytes / num_devices / _upload_rate(each.machines[0]) for each in pipelines),
        2 * moved_bytes / sum(topology.node(memory).bandwidth_bytes_per_s for memory in memories),
    )
    passes_s = [_passes_s(each) for each in pipelines]
    least_s, stages = inf, 1
    for mesh in _meshes(request, num_devices):
        stages = max(stages, _num_stages(mesh))
        stays = total_bytes <= _num_stages(mesh) * device_bytes
        if stays or may_offload:
            seconds = min(
                _step_s(replace(each, mesh=mesh), costs, own_s)
                for each, own_s in zip(pipelines, passes_s, strict=True)
            )
            least_s = min(least_s, seconds if stays else max(seconds, moved_s))
    if least_s < inf:
        return Floor(least_s)
    lacking = {"devices": total_bytes - stages * device_bytes}
    if "offloaded" in request.blocks:
        lacking["host memory and drives"] = moved_bytes - host_bytes
    where, missing_bytes = min(lacking.items(), key=lambda item: item[1])
    return Floor(
        inf,
        missing_bytes,
        f"weights take {format_bytes(total_bytes)}, {format_bytes(round(missing_bytes))} more than {where} hold",
    )


def _alone(request: Request, device: str, costs: Costs) -> PlacedPipeline:
    return pipeline_of(request, Mesh(), Placement(topology=request.hardware.name, devices=(device,)), costs)


def _weight_bytes(plan: Plan) -> tuple[int, int]:
    """Return the bytes of all weights, and of those in blocks."""
    sizes = [(group.segments[0], plan.storage.nbytes(group)) for group in plan.model.param_groups]
    in_blocks = sum(size for segment, size in sizes if segment.startswith("block."))
    return sum(size for _, size in sizes), in_blocks


def _disk_bytes(request: Request, devices: tuple[str, ...]) -> float:
    has_disks = "nvme" in request.blocks and request.hardware.topology.disks_of(devices[0])
    return request.disk_limit_bytes(devices) if has_disks else 0.0


def _upload_rate(machine: Machine) -> float:
    return min((machine.capacities[name] for name in machine.routes.get("h2d", ())), default=inf)


def _meshes(request: Request, num_devices: int) -> Iterator[Mesh]:
    """Yield the meshes that no other one with as many devices divides further."""
    points, batch = request.axis(Estimator).num_eval_points, request.config.batch
    named = request.config.given("mesh")
    if named is not None:
        yield named
        return
    for data in range(1, min(batch, num_devices) + 1):
        for perturb in range(1, min(points, num_devices // data) + 1):
            most = min(num_devices // (data * perturb), request.config.spec.num_blocks)
            yield Mesh(data=data, perturb=perturb, stage=most if request.seeks_stages else 1)


def _step_s(pipeline: PlacedPipeline, costs: Costs, passes_s: float) -> float:
    """Return the seconds of a step through stages of an equal part of the model each."""
    points, stages = pipeline.num_eval_points, _num_stages(pipeline.mesh)
    forward_s = float(costs.seconds(pipeline).forward.sum())
    return max(forward_s * (1 + (points - 1) / stages), (points * forward_s + passes_s) / stages)


def _passes_s(pipeline: PlacedPipeline) -> float:
    """Return the seconds of the passes over all weights that go from point to point in place, and of the updates."""
    plan, profile = pipeline.plan, pipeline.machines[0].profile
    # A CPU's caches spare passes over memory, points as copies or adapters the computing stream.
    if profile.device_type != "gpu" or not plan.perturbs_in_place:
        return 0.0
    estimator = plan.estimator
    is_fused = plan.storage.keeps_signs or plan.storage.keeps_scaled(estimator.epsilon)
    how: dict[str, Any] = {"dtype": plan.weights.dtype, "perturbation_dtype": plan.storage.row_format}
    sizes = Counter(group.num_trainable for group in plan.model.param_groups)
    each_s = 0.0
    for num, count in sizes.items():
        move = perturb_work(num, arithmetic="fused" if is_fused else "chunked", **how)
        update = update_work(num, arithmetic="fused" if plan.storage.keeps_signs else "chunked", **how)
        seconds = (estimate(work, profile).seconds for work in (move, update))
        each_s += count * sum(times * s for times, s in zip((estimator.num_moves, 1), seconds, strict=True))
    return estimator.num_perturbations * each_s


def _num_stages(mesh: Mesh) -> int:
    return len(mesh.pipelines[0])
