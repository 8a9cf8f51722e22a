"""Scores prompts with vLLM, for ``python -m studies.zoinfer.mixed --vllm PYTHON``: run by an interpreter that has vLLM, and nothing of zosim.

Started with the directory of a model, that of its adapters, their names, their rank and a number of threads; then each line of standard input is a
batch, ``{"prompts": [[...]], "options": [...], "adapters": [...]}``, and each line of standard output its scores and seconds. Each prompt is
continued by the one token that is allowed, and what is returned is that token's log-probability: no logits of other places are made.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Answer batches until standard input ends."""
    model, folder, names, rank, threads = sys.argv[1:]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{int(threads) - 1}" if int(threads) > 1 else "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM itself says is no answer
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm: Any = LLM(
        model=model, skip_tokenizer_init=True, dtype="float32", enable_lora=True, max_loras=len(names.split(",")), max_lora_rank=int(rank),
        max_model_len=256, max_num_seqs=256, max_num_batched_tokens=16384, enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip
    adapters = {
        name: LoRARequest(name, number + 1, f"{folder}/{name}")
        for number, name in enumerate(names.split(","))
    }
    for line in sys.stdin:
        batch = json.loads(line)
        prompts = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
        sampling = [
            SamplingParams(
                max_tokens=1, temperature=0, logprobs=0, allowed_token_ids=[option], detokenize=False
            )
            for option in batch["options"]
        ]
        requests = [adapters.get(name) for name in batch["adapters"]]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, sampling, lora_request=requests, use_tqdm=False)
        seconds = time.perf_counter() - begin
        scores = [
            output.outputs[0].logprobs[0][option].logprob
            for output, option in zip(outputs, batch["options"], strict=True)
        ]
        print(json.dumps({"scores": scores, "seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
