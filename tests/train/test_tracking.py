"""Trackers: one that is not installed is refused, and one that runs is not started again."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate import Accelerator
from draftsmith import UserError
from draftsmith.train import tracking

from . import small


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "is_wandb_available", lambda: False)
    monkeypatch.setattr(tracking, "is_tensorboard_available", lambda: True)
    tracking.check_trackers(["tensorboard"])
    with pytest.raises(UserError, match=r"train\.trackers: .* got wandb, which is not; pip install 'draftsmith\[wandb\]'"):
        tracking.check_trackers(["tensorboard", "wandb"])


def test_trackers_are_started_once_by_whoever_comes_first(tmp_path: Path) -> None:
    """A training starts them; the evaluation after it, or one whose training was over before, finds them or starts them."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (the extra [tensorboard])")
    accelerator = Accelerator(log_with=["tensorboard"], project_dir=str(tmp_path))
    for trackers, count in (("[]", 0), ("[tensorboard]", 1), ("[tensorboard]", 1)):
        tracking.start_trackers(accelerator, small.recipe(f"train.trackers={trackers}"), tmp_path)
        assert len(accelerator.trackers) == count
    accelerator.end_training()
