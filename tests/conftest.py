"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import settings

# A deadline in wall-clock time fails where two processes share the cores; all else stays as the environment has it (CI draws the same cases always).
settings.register_profile("draftsmith", deadline=None)
settings.load_profile("draftsmith")
