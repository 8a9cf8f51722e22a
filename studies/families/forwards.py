"""``python -m studies.families.forwards``: forwards of families that no profile was calibrated on, predicted and measured.

All models are timed in turns, a forward with its loss of each in every round. The fastest counts, in seconds of the core, from which other processes
take least. Run it on an idle machine that `zosim calibrate --threads 1` has measured. The second table takes a slow machine out: it holds each
family's ratio of measured to predicted against the median of all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import transformers
from torch import nn

from costmodel import spec_of_config
from costmodel.estimate import estimate
from costmodel.models.forward import forward_work
from costmodel.rates.profile import Bound, Profile
from costmodel.scoring import Row, scores
from costmodel.work import Work
from executors.runs.planning import host_node
from executors.turns import in_turns
from zosim.analysis.scoreboard import rows_table, score_table
from zosim.console import emit
from zosim.hardware.profiles import profile_for
from zosim.report import Report, Table

_SIZES: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 8192, "max_position_embeddings": 512,
}  # fmt: skip
_GPT: dict[str, Any] = {"n_embd": 512, "n_layer": 4, "n_head": 8, "vocab_size": 8192, "n_positions": 512}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 704}
MODELS: dict[str, dict[str, Any]] = {
    "gemma": {**_SIZES, "head_dim": 64},
    "phi": _SIZES,
    "phi3": _SIZES,
    "gpt_neox": _SIZES,
    "gpt_bigcode": _GPT,
    "stablelm": _SIZES,
    "olmo2": _SIZES,
    "mixtral": {**_SIZES, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {**_SIZES, **_EXPERTS, "num_experts": 16, "shared_expert_intermediate_size": 704},
    "qwen3_moe": {**_SIZES, **_EXPERTS, "num_experts": 16, "head_dim": 64},
}
"""Ten families, mixtures among them; profiles are fitted to steps of OPT, GPT-2 and Llama."""


def main() -> None:
    """Time the models, and print what was predicted."""
    parser = argparse.ArgumentParser(prog="python -m studies.families.forwards", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="Timed rounds (default: 15).")
    parser.add_argument(
        "--batch", type=int, default=4, metavar="N", help="Sequences per forward (default: 4)."
    )
    parser.add_argument(
        "--seq", type=int, default=256, metavar="N", help="Tokens per sequence (default: 256)."
    )
    parser.add_argument("--json", action="store_true", help="Print the results as JSON.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    rows = measured_rows(options.rounds, options.batch, options.seq)
    found = Report(
        "Forwards", rows_table(rows), _beside_others(rows), score_table(scores(rows, lambda _: "all"))
    )
    emit(rows, json=options.json, text=found)


def measured_rows(num_rounds: int, batch: int, seq: int) -> list[Row]:
    """Return the seconds of every model's forward, predicted and measured."""
    topology, node = host_node("cpu")
    profile = profile_for(topology, node, num_threads=1, is_host=True)
    models = {family: _model(family) for family in MODELS}
    tokens = torch.randint(2, 8192, (batch, seq), generator=torch.Generator().manual_seed(0))
    ways = {family: partial(_forward, model, tokens) for family, model in models.items()}
    times = in_turns(ways, num_rounds, num_untimed=1, clock=time.process_time)
    return [
        Row(family, "forward_s", taken.fastest_s, *_predicted(family, profile, batch, seq))
        for family, taken in times.items()
    ]


def _beside_others(rows: Sequence[Row]) -> Table:
    ratios = {row.case: row.measured / row.predicted for row in rows if row.measured and row.predicted}
    usual = median(ratios.values())
    lines = [(case, f"{ratio:.2f}", f"{ratio / usual - 1:+.1%}") for case, ratio in ratios.items()]
    columns = ("case", "measured / predicted", "against the median")
    return Table(columns, sorted(lines, key=lambda line: -ratios[line[0]]), numeric=columns[1:])


def _model(family: str) -> nn.Module:
    config = transformers.AutoConfig.for_model(family, pad_token_id=0, **MODELS[family])
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model.eval()


@torch.no_grad()
def _forward(model: nn.Module, tokens: torch.Tensor, _number: int) -> None:
    model(input_ids=tokens, labels=tokens, use_cache=False)


def _predicted(family: str, profile: Profile, batch: int, seq: int) -> tuple[float, float, float]:
    spec = spec_of_config({"model_type": family, **MODELS[family]}, name=family)
    works = [forward_work(spec, segment, batch=batch, seq=seq) for segment in spec.segments]
    total = sum(works[1:], start=works[0])

    def seconds(bound: Bound, work: Work = total) -> float:
        return estimate(work, profile, bound=bound).seconds

    return seconds("central"), seconds("low"), seconds("high")


if __name__ == "__main__":
    main()
