"""The embedded default: a small byte-level OPT, kept in the user's cache as an ordinary Hugging Face model directory.

The default recipe's weights come with the package, since pretraining takes a minute on an idle machine and a quarter of an
hour on a busy one. ``python -m executors.models.pretrain`` makes them again. Other recipes are pretrained on the spot.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from executors.formats import WEIGHTS_NAME
from executors.models import corpus as text
from topology.errors import ModelError, ZosimError
from topology.reading import read_json_object
from zosim.cache import CACHE_VARIABLE, cache_directory

if TYPE_CHECKING:
    from transformers import OPTForCausalLM

_FORMAT = 3
"""Raised when what a recipe makes changes, so that older caches are not taken for it."""

_MANIFEST = "manifest.json"
_SHIPPED = Path(__file__).parent / "data" / "opt-bytes.safetensors"
_SHIPPED_FACTS = _SHIPPED.with_suffix(".json")

OnStep = Callable[[int, float], None]
"""Called with the number of steps done and the last loss in bits per byte."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the pretrained weights, given the Python installation.

    Raises ModelError if a size is out of range.
    """

    # num_blocks, hidden_size, max_positions: shape; heads are 32 wide, the MLP four times as wide as the model, embeddings tied.
    num_blocks: int = 4
    hidden_size: int = 128
    max_positions: int = 256
    # num_steps, batch, seq: AdamW steps, sequences per step and bytes per sequence; half of them prose, half code.
    num_steps: int = 600
    batch: int = 16
    seq: int = 128
    learning_rate: float = 3e-3  # largest rate, after `warmup_steps` and before a linear decay to zero
    warmup_steps: int = 50
    weight_decay: float = 0.01
    seed: int = 0
    # `"float32"`, or `"bfloat16"` for autocast, which pays from about 256 wide on. Weights are float32.
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        for name in ("num_blocks", "hidden_size", "max_positions", "num_steps", "batch"):
            if getattr(self, name) < 1:
                raise ModelError(f"pretraining {name}={getattr(self, name)} must be at least 1")
        if self.hidden_size % _HEAD_WIDTH:
            raise ModelError(
                f"pretraining hidden_size={self.hidden_size} must be a multiple of {_HEAD_WIDTH}",
                hint="use 64, 128 or 256",
            )
        least = text.WINDOW_BYTES + len(text.QUESTION) + 1
        if not least <= self.seq <= self.max_positions:
            raise ModelError(
                f"pretraining seq={self.seq} must be from {least} (the task's length) "
                f"to max_positions={self.max_positions}"
            )

    @property
    def name(self) -> str:
        """Shape and digest, the name of its directory in the cache."""
        basis = json.dumps([_FORMAT, platform.python_version(), asdict(self)])
        digest = hashlib.sha256(basis.encode()).hexdigest()[:12]
        return f"opt-bytes-{self.num_blocks}x{self.hidden_size}-{digest}"


_HEAD_WIDTH = 32


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """Settings of a MeZO run that moves the default recipe's model on the task, chosen on its tuning split."""

    learning_rate: float = 5e-5
    epsilon: float = 1e-3
    # batch, num_steps: 800 steps of the literal loop took 80 s with one thread of a shared two-core machine.
    batch: int = 16
    num_steps: int = 800


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A pretrained model and the task that goes with it."""

    model: Path  # Hugging Face directory: `config.json`, `model.safetensors`, the tokenizer's files
    # train, tuning, validation: JSON lines of the task "documentation or code?". Settings are chosen on `tuning` alone.
    train: Path
    tuning: Path
    validation: Path
    bits_per_byte: float  # loss on held-out text, prose and code in equal parts
    seconds: float  # what pretraining took when it was done


def pretrained_model(
    recipe: Recipe = Recipe(), *, cache: Path | None = None, on_step: OnStep | None = None
) -> Pretrained:
    """Return the model of `recipe`: from the cache if it is intact, else from the package, else pretrained now.

    - `cache`: where models are kept; by default ``$ZOSIM_CACHE_DIR`` or the user's cache directory.
    - `on_step`: called with the progress, only while pretraining. :func:`progress_bar` makes one that draws.

    Raises DataError if this Python has not the text to learn from.
    Raises ModelError if the cache cannot be written.

    Several processes may ask at once: one pretrains, the others wait for it. A model is moved into place when
    all its files are written, and every file is checked against its digest before it is used; a damaged one
    is made again.
    """
    models = (cache or cache_directory()) / "models"
    target = models / recipe.name
    ready = _intact(target)
    if ready is not None:
        return ready
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f"{recipe.name}.lock"):
            return _intact(target) or _make(recipe, target, on_step)
    except OSError as error:
        raise ModelError(
            f"cannot cache the pretrained model in {models}: {error.strerror or error}",
            hint=f"set {CACHE_VARIABLE} to a writable directory",
        ) from error


@contextmanager
def progress_bar(recipe: Recipe) -> Iterator[OnStep]:
    """Draw pretraining's progress on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    loss = TextColumn("{task.fields[loss]}")
    with Progress(*columns, loss, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("pretraining the embedded model", total=recipe.num_steps, loss="")

        def on_step(done: int, bits_per_byte: float) -> None:
            progress.update(task, completed=done, loss=f"{bits_per_byte:.2f} bits per byte")

        yield on_step


def build_model(recipe: Recipe) -> OPTForCausalLM:
    """Return the untrained model of `recipe`. torch's global generator is left as it was."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=text.VOCAB_SIZE,
        hidden_size=recipe.hidden_size,
        word_embed_proj_dim=recipe.hidden_size,
        ffn_dim=4 * recipe.hidden_size,
        num_hidden_layers=recipe.num_blocks,
        num_attention_heads=recipe.hidden_size // _HEAD_WIDTH,
        max_position_embeddings=recipe.max_positions,
        dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=text.PAD,
        bos_token_id=text.END,
        eos_token_id=text.END,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return OPTForCausalLM(config)


def pretrain(recipe: Recipe, data: text.Corpus, *, on_step: OnStep | None = None) -> OPTForCausalLM:
    """Return the model of `recipe`, trained on `data`. torch's global generator is left as it was.

    The weights are a function of the recipe and the text, for one torch build and thread count.
    """
    model = build_model(recipe)
    optimiser = torch.optim.AdamW(
        model.parameters(),
        recipe.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    rng = np.random.Generator(np.random.PCG64([recipe.seed, 1]))
    model.train()
    # OPT draws for the layers that it might drop, whether or not it drops any.
    with torch.random.fork_rng(devices=[]):
        for step in range(recipe.num_steps):
            warmed = (step + 1) / recipe.warmup_steps if recipe.warmup_steps else 1.0
            optimiser.param_groups[0]["lr"] = recipe.learning_rate * min(warmed, 1 - step / recipe.num_steps)
            optimiser.zero_grad()
            loss = _loss(model, recipe, _windows(data.training, recipe, rng))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            if on_step is not None:
                on_step(step + 1, loss.item() / math.log(2))
    model.eval()
    return model


def bits_per_byte(model: OPTForCausalLM, recipe: Recipe, data: text.Corpus, *, num_batches: int = 8) -> float:
    """Return the loss on held-out text, prose and code in equal parts."""
    # Stream 1 draws the windows of training, 2 these.
    rng = np.random.Generator(np.random.PCG64([recipe.seed, 2]))
    with torch.inference_mode():
        losses = [
            _loss(model, recipe, _windows(data.held_out, recipe, rng)).item() for _ in range(num_batches)
        ]
    return float(np.mean(losses)) / math.log(2)


def _loss(model: OPTForCausalLM, recipe: Recipe, tokens: torch.Tensor) -> torch.Tensor:
    half = torch.autocast("cpu", dtype=torch.bfloat16) if recipe.dtype == "bfloat16" else nullcontext()
    with half:
        logits = model(input_ids=tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _windows(
    kinds: tuple[npt.NDArray[np.uint8], ...], recipe: Recipe, rng: np.random.Generator
) -> torch.Tensor:
    rows = []
    for row in range(recipe.batch):
        source = kinds[row % len(kinds)]
        start = rng.integers(len(source) - recipe.seq + 1)
        rows.append(source[start : start + recipe.seq])
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def _make(recipe: Recipe, target: Path, on_step: OnStep | None) -> Pretrained:
    """Pretrain into a directory of its own, then move it into place. The caller holds the lock."""
    # What processes left that were killed.
    for left in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _fill(recipe, scratch, on_step)
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    made = _intact(target)
    assert made is not None, "a model just written is whole"
    return made


def _fill(recipe: Recipe, folder: Path, on_step: OnStep | None) -> None:
    from safetensors.torch import save_file

    data = text.installed_corpus()
    shipped = _shipped_facts(recipe)
    started = time.perf_counter()
    model = pretrain(recipe, data, on_step=on_step) if shipped is None else _shipped_model(recipe)
    seconds = time.perf_counter() - started if shipped is None else shipped["seconds"]
    save_file(_own_weights(model), folder / WEIGHTS_NAME, metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    text.byte_tokenizer().save_pretrained(folder)
    text.write_task(data, folder, seed=recipe.seed)
    facts = {
        "recipe": asdict(recipe),
        "python": platform.python_version(),
        "torch": torch.__version__ if shipped is None else shipped["torch"],
        "bits_per_byte": bits_per_byte(model, recipe, data),
        "seconds": seconds,
        "sha256": {path.name: _sha256(path) for path in sorted(folder.iterdir())},
    }
    (folder / _MANIFEST).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _own_weights(model: OPTForCausalLM) -> dict[str, torch.Tensor]:
    """Return a model's tensors, a tied one once."""
    tied = set(model.all_tied_weights_keys) if hasattr(model, "all_tied_weights_keys") else {"lm_head.weight"}
    return {name: value.contiguous() for name, value in model.state_dict().items() if name not in tied}


def _shipped_facts(recipe: Recipe) -> dict[str, Any] | None:
    """Return the facts of the weights that come with the package; None if they are another recipe's or damaged."""
    if not _SHIPPED_FACTS.is_file():
        return None
    facts = read_json_object(_SHIPPED_FACTS, "description of the weights that come with zosim", ModelError)
    return facts if facts["recipe"] == asdict(recipe) and facts["sha256"] == _sha256(_SHIPPED) else None


def _shipped_model(recipe: Recipe) -> OPTForCausalLM:
    from safetensors.torch import load_file

    model = build_model(recipe)
    missing, unknown = model.load_state_dict(load_file(_SHIPPED), strict=False)
    assert not unknown, unknown
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the table
    model.eval()
    return model


def ship(recipe: Recipe = Recipe()) -> None:
    """Pretrain, and write the weights that come with the package, and how they were made."""
    from safetensors.torch import save_file

    data = text.installed_corpus()
    started = time.perf_counter()
    with progress_bar(recipe) as on_step:
        model = pretrain(recipe, data, on_step=on_step)
    seconds = time.perf_counter() - started
    _SHIPPED.parent.mkdir(exist_ok=True)
    save_file(_own_weights(model), _SHIPPED, metadata={"format": "pt"})
    facts = {
        "command": "python -m executors.models.pretrain",
        "recipe": asdict(recipe),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "bits_per_byte": bits_per_byte(model, recipe, data),
        "seconds": seconds,
        "sha256": _sha256(_SHIPPED),
    }
    _SHIPPED_FACTS.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _intact(target: Path) -> Pretrained | None:
    """Return the model in `target`; None unless every file is as it was written."""
    try:
        facts = read_json_object(target / _MANIFEST, "manifest", ZosimError)
        if any(_sha256(target / name) != digest for name, digest in facts["sha256"].items()):
            return None
        return Pretrained(
            model=target,
            train=target / "train.jsonl",
            tuning=target / "tuning.jsonl",
            validation=target / "validation.jsonl",
            bits_per_byte=float(facts["bits_per_byte"]),
            seconds=float(facts["seconds"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZosimError):
        return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that other processes respect, where the system has such locks."""
    try:
        import fcntl
    except ImportError:  # Windows: two processes may both pretrain, the second to finish replaces the first.
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    ship()
