"""OpenVINO GenAI: greedy generation in float32 on a CPU, one prompt after the other. It does not show its drafts; it counts those that were accepted.

    python openvino_runner.py job.json result.json

job: target, speculative (method, model, num_speculative_tokens, layers; or null), prompts, max_tokens. result: outputs, metrics, versions. Models are
converted by optimum-cli of the same environment; what is converted is kept beside the temporary files, by path and time of the last change.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any


def converted(model: str, head: bool = False, layers: list[int] | None = None) -> str:
    """The folder of a model, or an EAGLE-3 head, in OpenVINO's form. layers: those that the head reads, as outputs counted from 0."""
    stamp = max(path.stat().st_mtime for path in Path(model).iterdir())
    place = Path(tempfile.gettempdir()) / f"draftsmith-openvino-{hashlib.sha256(f'{model} {stamp} {head} {layers}'.encode()).hexdigest()[:16]}"
    if not (place / "done").is_file():
        command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino", "--model", model]
        command += ["--task", "text-generation-with-past", "--weight-format", "fp32", *(["--trust-remote-code"] if head else []), str(place)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        if layers:
            import openvino as ov

            drafter = ov.Core().read_model(place / "openvino_model.xml")
            drafter.set_rt_info(layers, ["hidden_layers_list"])
            ov.save_model(drafter, place / "told.xml", compress_to_fp16=False)
            del drafter
            for kind in ("xml", "bin"):
                (place / f"told.{kind}").replace(place / f"openvino_model.{kind}")
        (place / "done").touch()
    return str(place)


def main(job_file: str, result_file: str) -> None:
    """Run the job."""
    import numpy
    import openvino as ov
    import openvino_genai as genai

    job = json.loads(Path(job_file).read_text())
    speculative: dict[str, Any] = job["speculative"] or {}
    settings: dict[str, Any] = {}
    if speculative:
        head = speculative["method"] == "eagle3"
        settings["draft_model"] = genai.draft_model(converted(speculative["model"], head, speculative["layers"] if head else None), "CPU")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.enable_prefix_caching = False
    pipeline = genai.LLMPipeline(converted(job["target"]), "CPU", scheduler_config=scheduler, INFERENCE_PRECISION_HINT="f32", **settings)
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = job["max_tokens"], True, False
    if speculative:
        config.num_assistant_tokens = speculative["num_speculative_tokens"]
    outputs, accepted, drafted = [], 0, 0
    for prompt in job["prompts"]:
        ids = ov.Tensor(numpy.array([prompt], dtype=numpy.int64))
        answer = pipeline.generate(genai.TokenizedInputs(ids, ov.Tensor(numpy.ones((1, len(prompt)), dtype=numpy.int64))), config)
        outputs.append(list(answer.tokens[0]))
        if speculative:
            counted = answer.extended_perf_metrics
            accepted, drafted = accepted + int(counted.get_num_accepted_tokens()), drafted + int(counted.get_num_draft_tokens())
    metrics = {"num_accepted_tokens": accepted, "num_draft_tokens": drafted}
    versions = {name: version(name) for name in ("openvino-genai", "openvino", "optimum-intel")}
    Path(result_file).write_text(json.dumps({"outputs": outputs, "metrics": metrics, "versions": versions}))


if __name__ == "__main__":
    main(*sys.argv[1:])
