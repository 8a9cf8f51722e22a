from __future__ import annotations

import torch

from executors.models.model import SegmentedModel
from executors.steps.interpreter import Hyperparameters, Interpreter
from executors.steps.streams import CpuBackend
from tests.support.distributed import OFFLOADED
from tests.support.tiny import batches, model_of, plan_of
from zosim.lowering import lower


def test_decay_goes_on_where_the_gradient_is_zero():
    model = model_of("opt")
    plan = plan_of(model, **OFFLOADED)
    interpreter = Interpreter(lower(plan), SegmentedModel(model), Hyperparameters(1e-3, 0.5), CpuBackend())
    batch = batches(1)[0] | {"labels": torch.full((3, 9), 5)}
    frame = interpreter.step(batch, [3], 0.1)
    frame.gradients[0] = 0.0
    before = model.model.decoder.layers[0].fc1.weight.detach().clone()
    interpreter.flush()
    interpreter.close()
    after = model.model.decoder.layers[0].fc1.weight
    assert torch.allclose(after, before * (1 - 0.1 * 0.5), atol=1e-6)
