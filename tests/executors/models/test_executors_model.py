from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AlbertConfig, AlbertForMaskedLM, T5Config, T5ForConditionalGeneration

from costmodel.models.configs import spec_of_config
from executors.models.blocks import UnsplitError
from executors.models.model import SegmentedModel
from executors.models.parameters import decays
from executors.models.recording_blocks import StepCache
from executors.models.spec import spec_of_model
from executors.runs.adapters import attach
from tests.support import matrix
from tests.support.tiny import CONFIGS, batches, model_of
from topology.errors import ModelError, UnknownFamily


def run(segmented, batch):
    cache = StepCache()
    with torch.no_grad():
        hidden = segmented.embed(batch, cache)
        for i in range(len(segmented.blocks)):
            hidden = segmented.block(i, hidden, cache)
        return segmented.head(hidden, batch), segmented.logits(hidden)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_segmented_model_equals_the_whole_bit_for_bit(name, attention, dtype):
    model = model_of(name, dtype, attention)
    segmented, (batch,) = SegmentedModel(model), batches(1)
    loss, logits = run(segmented, batch)
    with torch.no_grad():
        # Filling a cache of keys changes their layout, which eager attention may round differently.
        whole = model(**batch, use_cache=False)
    assert torch.equal(loss, whole.loss)
    # What a masked model says of a position stands one earlier.
    assert torch.equal(logits, whole.logits if segmented.is_causal else whole.logits.roll(-1, dims=1))


@pytest.mark.parametrize("name", ["opt", "gpt2", "llama"])
def test_loss_by_chunks_and_in_float64_agrees(name):
    model, (batch,) = model_of(name, torch.float64), batches(1)
    loss, logits = run(SegmentedModel(model), batch)
    for chunk in (1, 4, None):
        fine, _ = run(SegmentedModel(model, loss_dtype="fp64", loss_chunk_tokens=chunk), batch)
        targets = batch["labels"][:, 1:].reshape(-1)
        wanted = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 96), targets)
        assert fine.item() == pytest.approx(wanted.item(), rel=1e-12)  # float64 sums in another order
        assert fine.item() == pytest.approx(loss.item(), rel=1e-5)  # the model's own is in float32


TUNED = [
    case
    for case in (
        matrix.Case.of({"shape": name, "tuned": tuned}) for name in CONFIGS for tuned in matrix.TUNED
    )
    if matrix.is_possible(case.settings, most_ranks=1)
]
SPLIT_BLOCKS = [(matrix.Case.of({"shape": name}), (1,)) for name in CONFIGS if name != "roberta"]


@pytest.mark.parametrize(("case", "split_blocks"), [*((case, ()) for case in TUNED), *SPLIT_BLOCKS], ids=str)
def test_specification_agrees_with_the_one_read_from_the_configuration(case, split_blocks):
    """Of every family, whatever is tuned, and split within a block."""
    model, config = model_of(case["shape"]), CONFIGS[case["shape"]].to_dict()
    if case.tuned is not None:
        attach(model, case.tuned)
    known = spec_of_config(config, name="m", trainable=case.tuned or "all", split_blocks=split_blocks)
    assert spec_of_model(model, name="m", split_blocks=split_blocks) == known


def test_specification_of_an_unknown_family(monkeypatch):
    model = model_of("llama-tied")
    monkeypatch.setattr("executors.models.spec.spec_of_config", _unknown)
    known = spec_of_config(CONFIGS["llama-tied"].to_dict(), name="m")
    found = spec_of_model(model, name="m")
    # A family that nothing is known of has no linear layers whose names say where a block may be split, and its memory is watched.
    assert found.live_elements
    watched = {"splits_inside": False, "live_elements": found.live_elements}
    assert found == known.model_copy(update=watched)


def _unknown(*_args, **_kwargs):
    message = "unknown family"
    raise UnknownFamily(message)


def test_decay_leaves_out_biases_and_layer_norms():
    assert decays("model.layers.0.mlp.down_proj.weight")
    assert decays("model.norm.weight")
    assert not decays("model.layers.0.input_layernorm.weight")
    assert not decays("model.decoder.final_layer_norm.weight")
    assert not decays("model.decoder.layers.0.fc1.bias")


def test_models_that_cannot_be_split_are_refused_with_the_reason():
    small = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 16}
    with pytest.raises(ModelError, match="encoder-decoder"):
        SegmentedModel(T5ForConditionalGeneration(T5Config(**small)))
    albert = AlbertConfig(
        vocab_size=16, embedding_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=2
    )
    with pytest.raises(UnsplitError, match="blocks more than once"):
        SegmentedModel(AlbertForMaskedLM(albert))
    shared = model_of("opt")
    shared.model.decoder.layers[2] = shared.model.decoder.layers[0]
    with pytest.raises(UnsplitError, match=r"is read by block\.0, block\.2"):
        SegmentedModel(shared)
    rescaled = model_of("opt")
    rescaled.model.decoder.embed_tokens.max_norm = 1.0
    with pytest.raises(ModelError, match="max_norm=1"):
        SegmentedModel(rescaled)
    frozen = model_of("opt").requires_grad_(False)
    with pytest.raises(ModelError, match="no trainable parameter"):
        SegmentedModel(frozen)
    with pytest.raises(ModelError, match="not a transformers model"):
        SegmentedModel(nn.Linear(2, 2))
