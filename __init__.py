"""draftsmith: train drafters for speculative decoding, prove that they are lossless, measure what they gain, and export them."""

from __future__ import annotations

__version__ = "0.1.0"


class UserError(ValueError):
    """The user's input is wrong. The message is one line: what was wanted, what was got, what to do. The command line exits with 2."""
