"""Plans of several stages, the ranks that train them in one process, and one device that does the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from costmodel.models.configs import LoRA
from executors.models.lora import attach_lora
from executors.models.spec import spec_of_model
from executors.ranks.mesh import on_one_rank
from executors.runs.adapters import attach
from executors.runs.session import Session
from proofs_checks.setups.ranks import on_all_ranks
from tests.support.tiny import batches, model_of, plan_of
from zosim.plans import Plan, Split

STEPS, SIZE = 3, 4
SETTINGS = {
    "checksums": True,
    "learning_rate": lambda step: 1e-2 / (step + 1),
    "weight_decay": 0.1,
    "seed": 5,
}


@dataclass(frozen=True)
class Case:
    """What is trained, and where it is split."""

    split_points: tuple[str, ...]
    model: str = "opt"
    mesh: tuple[tuple[str, int], ...] = ()
    codec: str = "none"
    residual_codec: str = "none"
    dtype: str = "float32"
    lora: bool = False
    lazy: bool = False
    accumulate: int = 1
    size: int = SIZE
    axes: tuple[tuple[str, tuple[tuple[str, object], ...]], ...] = ()

    def made(self):
        model = model_of(self.model, getattr(torch, self.dtype))
        if self.lazy:  # a window a step: the second that is closed is compacted with the first
            attach(model, LoRA(rank=2, target_modules=("q_proj", "fc2"), lazy_steps=1, max_rank=4))
        if self.lora:
            attach_lora(model, LoRA(rank=2, target_modules=("q_proj", "fc2")))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.normal_(generator=torch.Generator().manual_seed(3))
        return model

    def plan(self) -> Plan:
        split = Split(split_points=self.split_points, codec=self.codec, residual_codec=self.residual_codec)
        axes = {name: dict(fields) for name, fields in self.axes}
        data = plan_of(self.made(), size=self.size, dtype=self.dtype, **axes).model_dump(mode="json")
        spec = spec_of_model(self.made(), "tiny", split_blocks=split.split_blocks)
        mesh = {**dict(self.mesh), "stage": len(self.split_points) + 1}
        num_ranks = mesh["stage"] * mesh.get("data", 1) * mesh.get("perturb", 1)
        data |= {"model": spec.model_dump(mode="json"), "split": split.model_dump(), "mesh": mesh}
        data["placement"]["devices"] = ["cpu0"] * num_ranks
        return Plan.model_validate(data)

    def in_place(self) -> Plan:
        """Return the plan of one device that encodes and decodes what crosses its boundaries."""
        plan = self.plan().model_dump(mode="json")
        plan["placement"]["devices"] = plan["placement"]["devices"][:1]
        return Plan.model_validate(plan | {"mesh": {}})

    @property
    def num_shards(self) -> int:
        return dict(self.mesh).get("data", 1) * self.accumulate


def outcome(session, lines):
    """Train, and return losses, projected gradients and weights."""
    records = [session.step(batch) for batch in lines]
    session.verify()
    found = [(r.losses_plus, r.losses_minus, r.loss_base, r.projected_gradients) for r in records]
    return found, session.digest(), session.loss(lines[0]), session.state_dict()


def on_stages(case, *, steps=STEPS, work=outcome):
    """Return what every rank finds."""
    plan = case.plan()
    models = [case.made() for _ in range(plan.placement.world_size)]

    def rank(number, communicator):
        options = {"num_micro_batches": case.accumulate, "communicator": communicator, **SETTINGS}
        with Session(plan, models[number], **options) as session:
            return work(session, batches(steps, size=case.size))

    return on_all_ranks(plan, rank)


def on_one_device(case, *, steps=STEPS, work=outcome):
    """Return what one device finds; codecs are applied where the model is split."""
    lossless = case.codec == case.residual_codec == "none"
    plan = on_one_rank(case.plan()) if lossless else case.in_place()
    with Session(plan, case.made(), num_micro_batches=case.num_shards, **SETTINGS) as session:
        return work(session, batches(steps, size=case.size))


def assert_equal(case, **options):
    """Compare every rank with one device, bit for bit."""
    found = on_stages(case, **options)
    wanted = on_one_device(case, **options)
    for rank in found:
        assert rank[0] == wanted[0]
        assert all(torch.equal(rank[3][name], tensor) for name, tensor in wanted[3].items())
        assert rank[1:3] == wanted[1:3]


def run_staged(cases):
    """Train cases one after the other in this rank, and return what all ranks found."""
    from executors.ranks.communicator import Communicator
    from executors.ranks.launch import process_group

    torch.set_num_threads(1)
    with process_group("cpu"):
        found = {}
        for name, case in cases.items():
            plan = case.plan()
            communicator = Communicator(plan.process_groups)
            options = {"num_micro_batches": case.accumulate, "communicator": communicator, **SETTINGS}
            with Session(plan, case.made(), **options) as session:
                steps, digest, loss, _ = outcome(session, batches(STEPS, size=case.size))
                messages = session.messages_per_step()
            found[name] = communicator.all_gather_json([steps, digest, loss, messages], name)
        return found


def die_while_sending():
    """Send the length of a message, and then die."""
    import os
    import signal

    import torch.distributed as dist

    from executors.ranks.launch import process_group
    from executors.ranks.rank_info import RankInfo

    case = Case(("block.1.mlp",))
    with process_group("cpu", timeout_s=60):
        send, calls = dist.send, []

        def dying(*arguments, **options):
            calls.append(arguments)
            if len(calls) == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            send(*arguments, **options)

        if RankInfo.here().rank == 0:
            dist.send = dying
        with Session(case.plan(), case.made(), **SETTINGS) as session:
            outcome(session, batches(STEPS, size=case.size))
