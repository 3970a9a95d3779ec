"""vLLM: greedy generation in float32, one prompt after the other, with the drafts of every round.

    python vllm_runner.py job.json result.json

job: target, speculative (vLLM's own config, or null), prompts, max_tokens, max_model_len. result: outputs, drafts (a list a prompt, a list a
round), metrics, versions.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOUND: list[list[int]] = []


def record() -> None:
    """Keep what every proposer drafts."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    propose = GPUModelRunner.propose_draft_token_ids

    def recorded(self: Any, *arguments: Any, **more: Any) -> Any:
        drafts = propose(self, *arguments, **more)
        rows = drafts.tolist() if hasattr(drafts, "tolist") else drafts
        if rows:
            FOUND.append([int(token) for token in rows[0]])
        return drafts

    GPUModelRunner.propose_draft_token_ids = recorded


def main(job_file: str, result_file: str) -> None:
    """Run the job."""
    defaults = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    for name, value in {**defaults, "VLLM_LOGGING_LEVEL": "WARNING"}.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job_file).read_text())
    settings: dict[str, Any] = {} if job["speculative"] is None else {"speculative_config": job["speculative"]}
    if job["speculative"] is not None:
        record()
    llm = LLM(
        model=job["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=job["max_model_len"],
        max_num_seqs=1,
        max_num_batched_tokens=job["max_model_len"],
        enable_prefix_caching=False,
        disable_log_stats=False,
        **settings,
    )
    params = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    outputs, drafts = [], []
    for prompt in job["prompts"]:
        FOUND.clear()
        answer = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        outputs.append(list(answer[0].outputs[0].token_ids))
        drafts.append(list(FOUND))
    metrics = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            metrics[metric.name.removeprefix("vllm:spec_decode_")] = getattr(metric, "value", None) or getattr(metric, "values", 0)
    versions = {}
    for name in ("vllm", "vllm-cpu", "torch", "transformers", "speculators"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    result = {"outputs": outputs, "drafts": drafts, "metrics": metrics, "versions": versions}
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
