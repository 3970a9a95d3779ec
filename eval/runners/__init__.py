"""Scripts that run in the environment of a serving engine, by its own python: they import nothing of draftsmith.

    ENGINE_PYTHON vllm_runner.py job.json result.json

A job holds the target, the drafter and prompts as token ids; the result holds what the engine generated, and where they can be seen, its drafts.
"""
