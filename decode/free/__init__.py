"""Proposers that need no training: they draft from the text itself, from other texts, or from what the target has computed already.

Whatever they propose, the output stays that of plain decoding (`verify.walk` is lossless for any tree, deterministic ones included); they ignore
the sampling noise, since they sample nothing. Each row has its own text and length; a row without a draft proposes only its root.
"""

from __future__ import annotations

from .datastore import Datastore, build_datastore, load_datastore
from .hybrid import Hybrid
from .lookahead import Lookahead
from .lookup import PromptLookup
from .recycling import TokenRecycling
from .retrieval import Retrieval
from .suffix import SuffixAutomaton

__all__ = [
    "Datastore",
    "Hybrid",
    "Lookahead",
    "PromptLookup",
    "Retrieval",
    "SuffixAutomaton",
    "TokenRecycling",
    "build_datastore",
    "load_datastore",
]
