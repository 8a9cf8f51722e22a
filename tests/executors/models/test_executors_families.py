"""Families of models that call their blocks in their own ways, each against the literal loop."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AlbertConfig, AlbertForMaskedLM

from costmodel.formats.low_bits import QuantConfig
from costmodel.models.forward import activation_bytes
from executors.low_bits.linear import QuantizedLinear, is_linear, make_quantizable
from executors.models.blocks import UnsplitError
from executors.models.model import SegmentedModel, SuspendedModel, UnsplitModel, in_segments
from executors.models.recording_blocks import StepCache
from executors.models.spec import plan_of_model, spec_of_model
from executors.runs.session import Session
from executors.steps.memory import LiveTensors
from studies.families.tiny import families, tiny_model
from studies.families.trying import tried
from tests.support.reference_mezo import LiteralMezo, differing
from tests.support.tiny import batches
from topology.errors import CodecError, ModelError

STEPS, RATE, EPSILON = 2, 1e-2, 1e-3

HARD = {
    "gemma2": "sliding and full attention in turn, soft caps",
    "gpt_oss": "sinks, experts in one tensor",
    "bloom": "ALiBi, blocks return tuples",
    "falcon": "parallel blocks, multi-query",
    "gpt_bigcode": "a head that takes its shape from the tokens",
    "bamba": "recurrent and attention blocks in turn",
    "rwkv": "blocks hand on their recurrent state",
    "deepseek_v4": "several streams of hidden states",
    "gemma4_text": "blocks take keys and values of blocks before",
    "mllama": "blocks that text alone leaves out",
    "prophetnet": "a state of other shape than the tokens",
}
"""Families whose offloaded runs need something of their own."""


def compared(model, **axes):
    """Train, and return what differs from the literal loop."""
    literal = copy.deepcopy(model)
    plan = plan_of_model(model, batch=2, seq=9, estimator={"epsilon": EPSILON}, **axes)
    loop = LiteralMezo(literal, epsilon=EPSILON, loss=lambda batch: literal(**batch, use_cache=False).loss)
    with Session(plan, model, learning_rate=RATE) as session:
        for step, batch in enumerate(batches(STEPS, size=2)):
            record = session.step(batch, seeds=(step,))
            ((plus, minus, g),) = loop.step(batch, (step,), RATE)
            assert (record.losses_plus, record.losses_minus) == ((plus,), (minus,))
            assert record.projected_gradients == (g,)
        session.flush()
    return differing(model, literal)


@pytest.mark.parametrize("family", HARD)
def test_a_hard_family_offloaded_is_the_literal_loop(family):
    assert compared(tiny_model(family), residency={"blocks": "offloaded"}) == []


@pytest.mark.slow
@pytest.mark.crossed(slow=8)
@pytest.mark.parametrize("family", families())
def test_a_family_resident_is_the_literal_loop(family):
    try:
        model = tiny_model(family)
        model(**batches(1, size=2)[0], use_cache=False)
    except Exception as error:  # noqa: BLE001 - the table of families says so
        pytest.skip(f"no tiny model: {error}")
    assert compared(model) == []


def test_a_model_that_cannot_be_split_is_tuned_whole_and_not_offloaded():
    config = AlbertConfig(
        vocab_size=96, embedding_size=16, hidden_size=16, intermediate_size=24, num_attention_heads=2,
        num_hidden_layers=3, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AlbertForMaskedLM(config).eval()
    assert isinstance(in_segments(model), UnsplitModel)
    assert compared(copy.deepcopy(model)) == []
    with pytest.raises(UnsplitError, match="runs blocks more than once"):
        compared(model, residency={"blocks": "offloaded"})


# -- what a forward may do around its blocks ------------------------------------------------------------------------------


class ToyBlock(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.does = model.does

    def forward(self, hidden, other=None, shared=None):
        if shared is not None:
            shared.append(hidden)
            hidden = hidden + shared[0]
        if other is not None:
            hidden = hidden + other
        hidden = hidden + torch.tanh(self.linear(hidden))
        if self.does == "two states":
            return hidden, hidden * 2
        return (hidden, None) if self.does == "tuples" else hidden


class Toy(nn.Module):
    """A language model whose forward does one unusual thing around its blocks."""

    def __init__(self, does):
        super().__init__()
        torch.manual_seed(0)
        self.does = does
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=3))
        self.embed = nn.Embedding(96, 8)
        self.layers = nn.ModuleList(ToyBlock(self) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 96)
        self.unread = nn.Parameter(torch.ones(3))

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, attention_mask=None, labels=None, use_cache=False):
        embedded = hidden = self.embed(input_ids)
        other, shared, first = None, [], None
        for _ in range(2 if self.does == "twice" else 1):
            for layer in self.layers[: 2 if self.does == "left out" else 3]:
                if self.does == "side":
                    other = embedded * 3
                elif self.does == "older states":
                    other = None if first is None else first * 2
                hidden = layer(
                    hidden, other=other, **({"shared": shared} if self.does == "shared list" else {})
                )
                if self.does == "two states":
                    hidden, other = hidden
                elif self.does == "tuples":
                    hidden = hidden[0]
                elif self.does == "between":
                    hidden = hidden * 0.5
                elif self.does == "weights between":
                    hidden = self.norm(hidden)
                first = hidden if first is None else first
        if self.does == "skip":
            hidden = hidden + embedded
        logits = self.head(hidden)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(logits=logits, loss=loss)


RUNNERS = {
    "nothing": (SegmentedModel, ""),
    "tuples": (SegmentedModel, ""),
    "two states": (SuspendedModel, "more than one tensor"),
    "side": (SuspendedModel, "depends on weights"),
    "between": (SuspendedModel, "more between blocks than to hand on"),
    "shared list": (SuspendedModel, "share a list"),
    "older states": (SuspendedModel, "takes more from the blocks before"),
    "skip": (SuspendedModel, "head reads more"),
    "left out": (SuspendedModel, "runs 2 of its 3 blocks"),
    "weights between": (UnsplitModel, "reads weights between blocks"),
    "twice": (UnsplitModel, "blocks more than once"),
}
"""What runs a toy, and what it says of one whose blocks are not run alone."""


@pytest.mark.parametrize("does", RUNNERS)
def test_segments_of_a_toy_are_its_forward(does):
    (kind, reason), model, (batch,) = RUNNERS[does], Toy(does), batches(1)
    segmented = in_segments(model)
    assert type(segmented) is kind
    if reason:
        assert reason in str(segmented.reason)
    with torch.no_grad():
        cache = StepCache()
        for change in (0.0, 0.5):  # what depends on weights is not taken from the point before
            model.embed.weight.data += change
            # Two forwards at once, as the two signs of a step are.
            forwards = [segmented.embed(batch, cache) for _ in range(2)]
            for i in range(len(segmented.blocks)):
                forwards = [segmented.block(i, handed, cache) for handed in forwards]
            for handed in forwards:
                assert torch.equal(segmented.head(handed, batch), model(**batch).loss)
    blocks = {group.segments for group in segmented.param_groups} - {("embed",), ("head",)}
    assert blocks == (set() if kind is UnsplitModel else {(f"block.{i}",) for i in range(3)})


@pytest.mark.parametrize("does", [does for does, (runner, _) in RUNNERS.items() if runner is SuspendedModel])
def test_a_suspended_forward_goes_on_in_another_stage(does):
    model, (batch,) = Toy(does), batches(1)
    segmented = in_segments(model)
    ends = (0, 1)  # of two stages; the second passes on what it was given
    segmented.end_stages_at(ends)
    with torch.no_grad():
        handed = segmented.embed(batch, StepCache())
        for block in range(3):
            handed = segmented.block(block, handed, StepCache())
            if block in ends:
                (handed,) = segmented.resumed(block, [(batch, StepCache())], handed.message(block))
        assert torch.equal(segmented.head(handed, batch), model(**batch).loss)


@pytest.mark.parametrize("family", ["gemma4_text", "prophetnet"])
def test_what_a_family_hands_on_takes_what_its_specification_says(family):
    model = tiny_model(family)
    segmented, spec = in_segments(model), spec_of_model(model)
    segmented.end_stages_at([1])
    tokens = torch.arange(66).view(3, 22) % 90 + 3
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    with torch.no_grad():
        handed = segmented.embed(batch, StepCache())
        for block in (0, 1):
            handed = segmented.block(block, handed, StepCache())
    predicted = activation_bytes(spec, batch=3, seq=22, segment="block.1")
    assert predicted / 2 <= handed.message(1).nbytes <= predicted


def test_a_message_of_another_plan_is_refused():
    segmented, (batch,) = in_segments(Toy("side")), batches(1)
    segmented.end_stages_at([0])
    message = segmented.block(0, segmented.embed(batch, StepCache()), StepCache()).message(0)
    for other, why in (
        (message[:64], "shorter than its header"),
        (message[:-256], "no tensor of shape"),
        (message.repeat(2), "more than its tensors"),
    ):
        with pytest.raises(CodecError, match=why):
            list(segmented.resumed(0, [(batch, StepCache())], other))


def test_a_stage_that_needs_more_than_what_calls_return_is_refused():
    model = Toy("two states")
    memory = {}
    model.register_forward_pre_hook(lambda *_: memory.clear())
    for block in model.layers:  # of what the first was given, the others take a part without being handed it
        block.register_forward_pre_hook(lambda _, given: (given[0] + memory.setdefault("first", given[0]),))
    segmented = in_segments(model)
    with pytest.raises(UnsplitError, match="a later stage needs a tensor that no block"):
        segmented.end_stages_at([0])


def test_memory_that_a_suspended_forward_takes_is_observed():
    model, (batch,) = Toy("skip"), batches(1)
    handed = []
    with torch.no_grad(), LiveTensors() as observed:
        handed.append(in_segments(model).embed(batch, StepCache()))
        before = observed.live_bytes
        del handed[:]
    assert (
        before >= batch["input_ids"].numel() * 8 * 4
    )  # the hidden state, which the forward's own thread has made


def test_a_forward_that_is_dropped_halfway_ends():
    model, (batch,) = Toy("between"), batches(1)
    segmented, before = in_segments(model), set(threading.enumerate())
    handed = segmented.block(0, segmented.embed(batch, StepCache()), StepCache())
    (thread,) = set(threading.enumerate()) - before
    del handed
    thread.join(30)
    assert not thread.is_alive()


def test_a_model_whose_own_forward_fails_is_refused_in_its_words():
    model = Toy("nothing")
    model.head = nn.Linear(5, 96)
    with pytest.raises(
        ModelError, match=r"cannot be run on a few tokens: mat1 and mat2(?s:.*)own forward fails"
    ):
        in_segments(model)


@pytest.mark.parametrize(
    ("family", "path", "is_one"),
    [
        ("falcon", "transformer.h.0.mlp.dense_h_to_4h", True),
        ("llama4_text", "model.layers.0.feed_forward.router", False),
        ("deepseek_v4", "model.layers.0.self_attn.o_a_proj", False),
    ],
)
def test_what_derives_from_a_linear_layer_is_one_if_it_computes_one(family, path, is_one):
    model = tiny_model(family)
    module = model.get_submodule(path)
    assert is_linear(module) == is_one
    before = module.weight.detach().clone()
    make_quantizable(model.get_submodule(path.partition(".0.")[0]), QuantConfig("int8", "channel", "float32"))
    assert isinstance(module, QuantizedLinear) == is_one
    assert torch.equal(module.weight, before)


def test_a_suspended_model_in_two_stages_is_the_literal_loop():
    assert tried("gemma4_text", ["stages"])["stages"]["word"] == "yes"


def test_a_forward_that_other_stages_begin_embeds_once():
    model, (batch,) = Toy("side"), batches(1)
    segmented, cache, calls = in_segments(model), StepCache(), []
    model.embed.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        handed = None
        for segment in segmented.segments:
            handed = segmented.run(segment, batch, cache, handed)
    assert len(calls) == 1
