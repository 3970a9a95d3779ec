"""transformers' own generate: greedy generation in float32, one prompt after the other, with the drafts of every round.

    python transformers_runner.py job.json result.json

job: target, speculative (method, model, num_speculative_tokens; or null), prompts, max_tokens. result: outputs, drafts (a list a prompt, a list a
round), versions.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOUND: list[list[int]] = []


def record(kind: type) -> None:
    """Keep what a candidate generator proposes behind the text."""
    propose = kind.get_candidates  # type: ignore[attr-defined]

    def recorded(self: Any, input_ids: Any, *arguments: Any, **more: Any) -> Any:
        candidates, logits = propose(self, input_ids, *arguments, **more)
        if candidates.shape[1] > input_ids.shape[1]:
            FOUND.append(candidates[0, input_ids.shape[1] :].tolist())
        return candidates, logits

    kind.get_candidates = recorded  # type: ignore[attr-defined]


def main(job_file: str, result_file: str) -> None:
    """Run the job."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.generation import candidate_generator

    job = json.loads(Path(job_file).read_text())
    speculative = job["speculative"] or {}
    method, place = speculative.get("method"), speculative.get("model")
    target = AutoModelForCausalLM.from_pretrained(place if method == "mtp" else job["target"], dtype=torch.float32).eval()
    target.generation_config.eos_token_id = None
    settings: dict[str, Any] = {}
    if method == "mtp":
        layer = target.config.num_hidden_layers
        target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layer}\..*"]
        settings["use_mtp"] = True
        record(candidate_generator.MTPCandidateGenerator)
    elif method == "dflash":
        settings |= {"assistant_model": AutoModel.from_pretrained(place, dtype=torch.float32).eval(), "speculation_type": "dflash"}
        record(candidate_generator.DFlashTokenCandidateGenerator)
    elif method is not None:
        draft = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
        draft.generation_config.num_assistant_tokens = speculative["num_speculative_tokens"]
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0
        draft.generation_config.eos_token_id = None
        settings["assistant_model"] = draft
        record(candidate_generator.AssistedCandidateGenerator)
    outputs, drafts = [], []
    for prompt in job["prompts"]:
        FOUND.clear()
        ids = torch.tensor([prompt])
        with torch.no_grad():
            answer = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=job["max_tokens"], **settings)
        outputs.append(answer[0, len(prompt) :].tolist())
        drafts.append(list(FOUND))
    versions = {name: version(name) for name in ("transformers", "torch")}
    first = 0 if method not in (None, "mtp", "dflash") else 1  # assistant models draft before the target has read the prompt
    Path(result_file).write_text(json.dumps({"outputs": outputs, "drafts": drafts, "first": first, "versions": versions}))


if __name__ == "__main__":
    main(*sys.argv[1:])
