"""Masked models: split, trained and evaluated as transformers' own forward has them."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from costmodel.models.configs import LoRA, Prefix, read_model_spec
from executors.datasets.data import open_dataset
from executors.datasets.prompts import PromptTemplate
from executors.models.blocks import fills_masks
from executors.models.loading import load_model
from executors.models.lora import attach_lora, save_adapters
from executors.models.model import SegmentedModel
from executors.models.prefix import attach_prefix
from executors.models.recording_blocks import StepCache
from executors.models.spec import spec_of_model
from executors.runs.evaluate import evaluate_choices
from tests.support.command import zosim
from tests.support.tiny import batches, model_of
from topology.errors import DataError, ModelError

MASK = 4


def masked_batches(count):
    """Random tokens, two masks a row, the last row padded."""
    made = []
    for batch in batches(count):
        ids, mask = batch["input_ids"].clone(), batch["attention_mask"]
        ids[ids < 5] = 5
        labels = torch.full_like(ids, -100)
        for row in range(len(ids)):
            for at in (1, 4):
                labels[row, at] = ids[row, at]
                ids[row, at] = MASK
        ids[mask == 0] = 1
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


def segments_run(segmented, batch):
    cache = StepCache()
    handed = segmented.embed(batch, cache)
    for segment in segmented.segments[1:-1]:
        handed = segmented.between(segment, handed, cache)
    return handed


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_are_the_models_own_forward_bit_for_bit(attention, dtype):
    model = model_of("roberta", dtype, attention)
    segmented, (batch,) = SegmentedModel(model), masked_batches(1)
    with torch.no_grad():
        whole = model(**batch)
        hidden = segments_run(segmented, batch)
        assert torch.equal(segmented.head(hidden, batch), whole.loss)
        assert torch.equal(segmented.logits(hidden)[:, :-1], whole.logits[:, 1:])


def test_a_loss_in_chunks_or_in_double_precision_is_that_at_the_masks():
    model, (batch,) = model_of("roberta"), masked_batches(1)
    with torch.no_grad():
        wanted = model(**batch).loss
        for how in ({"loss_chunk_tokens": 5}, {"loss_dtype": "fp64"}):
            segmented = SegmentedModel(model, **how)
            assert segmented.head(segments_run(segmented, batch), batch).item() == pytest.approx(
                wanted.item(), rel=1e-6
            )


def test_the_spec_of_a_model_at_hand_is_that_of_its_configuration():
    model = load_model("roberta-1m", random_weights=True)
    assert fills_masks(model)
    assert spec_of_model(model, name="roberta-1m") == read_model_spec("roberta-1m")


WORDS = [
    "<s>",
    "<pad>",
    "</s>",
    "<unk>",
    "<mask>",
    "good",
    "bad",
    "film",
    "plot",
    "It",
    "was",
    ".",
    "loud",
    "calm",
]


def tokenizer_of(**special):
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", **special
    )


LINES = [{"text": f"{word} film {word} plot", "label": int(word == "loud")} for word in ("loud", "calm") * 8]
TEMPLATE = PromptTemplate("{text} It was {label}.", {"0": "bad", "1": "good"})


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_label_words_are_asked_for_at_a_mask(lines):
    tokenizer = tokenizer_of(mask_token="<mask>")
    data = open_dataset(lines, template=TEMPLATE, tokenizer=tokenizer, fills_masks=True)
    (question, *_) = data.questions([0])
    assert [WORDS[token] for token in question.candidates[0].input_ids] == [
        "<s>", "loud", "film", "loud", "plot", "It", "was", "<mask>", ".", "</s>",
    ]  # fmt: skip
    assert [[WORDS[label] for label in c.labels if label >= 0] for c in question.candidates] == [
        ["bad"],
        ["good"],
    ]
    assert question.answer == 1


def test_choices_are_compared_at_the_mask(lines):
    tokenizer = tokenizer_of(mask_token="<mask>")
    model = model_of("roberta", vocab_size=len(WORDS))
    data = open_dataset(lines, template=TEMPLATE, tokenizer=tokenizer, fills_masks=True)
    segmented = SegmentedModel(model)

    class Aligned:
        def __call__(self, **batch):
            result = type("Result", (), {})()
            result.logits = segmented.logits(segments_run(segmented, batch))
            return result

    result = evaluate_choices(Aligned(), data)
    right, loss = 0, 0.0
    for line in LINES:
        text = f"{line['text']} It was <mask>."
        encoded = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            logits = model(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"]).logits[0]
        (at,) = (encoded["input_ids"][0] == MASK).nonzero()[0].tolist()
        log_probabilities = logits[at].double().log_softmax(-1)
        words = log_probabilities[WORDS.index("bad")], log_probabilities[WORDS.index("good")]
        right += int(words[1] > words[0]) == line["label"]
        loss -= float(words[line["label"]]) / len(LINES)
    assert result.num_correct == right
    assert result.loss == pytest.approx(loss, rel=1e-5)


def test_what_a_masked_model_cannot_be_asked_is_refused(lines, tmp_path):
    with pytest.raises(DataError, match="no mask token"):
        open_dataset(lines, template=TEMPLATE, tokenizer=tokenizer_of(), fills_masks=True)
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"text": "good film"}\n')
    with pytest.raises(DataError, match="places its mask"):
        open_dataset(plain, tokenizer=tokenizer_of(mask_token="<mask>"), fills_masks=True)
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text('{"input_ids": [0, 5, 6], "labels": [-100, 5, -100]}\n')
    with pytest.raises(DataError, match="reveals its labels"):
        open_dataset(tokens, fills_masks=True)
    model = model_of("roberta")
    with pytest.raises(ModelError, match="is a masked model"):
        attach_prefix(model, Prefix(num_tokens=2))
    with pytest.raises(ModelError, match="cannot be split inside"):
        read_model_spec("roberta-base", split_blocks=(1,))


def test_adapters_are_not_said_to_be_of_a_causal_model(tmp_path):
    """PEFT would look for what generates text."""
    for name, task in (("roberta", None), ("opt", "CAUSAL_LM")):
        model = model_of(name)
        attach_lora(model, LoRA(rank=2, target_modules=("query",) if name == "roberta" else ("q_proj",)))
        save_adapters(model, tmp_path / name)
        assert json.loads((tmp_path / name / "adapter_config.json").read_text())["task_type"] == task


@pytest.mark.crossed(quick=2)
@pytest.mark.parametrize(
    "form", [(), ("--weight-format", "int4", "--save-as", "compressed-tensors")], ids=["numbers", "int4"]
)
def test_a_run_of_the_command_learns_label_words(lines, tmp_path, form):
    directory, out = tmp_path / "model", tmp_path / "run"
    model_of("roberta", vocab_size=len(WORDS)).save_pretrained(directory)
    tokenizer_of(mask_token="<mask>").save_pretrained(directory)
    code = zosim(
        "run", "--model", str(directory), "--data", str(lines), "--template", TEMPLATE.text, "--label-words", "0=bad,1=good",
        "--eval-data", str(lines), "--batch", "4", "--seq", "16", "--steps", "3", "--lr", "1e-3", "--out", str(out), *form,
    )  # fmt: skip
    assert code == 0
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert any("accuracy" in row for row in metrics)
    if form:
        stored = read_model_spec(out).stored
        assert (stored.weights, stored.scales) == ("int4", "channel")
        plan = ("plan", "--model", str(out), "--hardware", "a100-80gb-milan", "--batch", "1", "--seq", "16")
        assert zosim(*plan) == 0
