"""Drafters in the formats of serving engines: one file an engine, one table of tensors a method (`table.py`), one check of what was written.

draftsmith export runs/quickstart/drafter --format vllm --out exported
draftsmith import exported --target builtin:quickstart --out drafter
"""

from __future__ import annotations

from . import llamacpp, openvino, sglang, speculators, tensorrt_llm, tgi, transformers, vllm
from .common import Engine

ENGINES: dict[str, Engine] = {
    module.ENGINE.name: module.ENGINE for module in (vllm, speculators, sglang, tensorrt_llm, tgi, llamacpp, openvino, transformers)
}
