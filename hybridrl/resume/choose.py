"""Which saved step a run goes on from, and whether its configuration agrees with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from hybridrl.checkpoint.saved import Saved, check, newest_good, saved_steps
from hybridrl.config import ConfigError
from hybridrl.resume.changes import changes, decide
from hybridrl.resume.fingerprints import sibling

Say = Callable[[str], None]


def saved_step(mode: str, path: str | None, directory: Path, fingerprint: str, say: Say) -> Saved | None:
    """The step to go on from, by `trainer.resume_mode`; None: from the beginning. An explicit path is taken at the
    user's word, with a warning where it is not whole and healthy."""
    if mode == "disable":
        return None
    if mode == "auto":
        found = newest_good(directory, say)
        if found is None and (other := sibling(directory, fingerprint)):
            say(f"{other} holds saved steps of the same data, model and estimator; this run starts anew")
        return found
    key = f"trainer.resume_from_path={path}"
    step = Path(path or "").absolute()
    if not step.is_dir():
        raise ConfigError(f"{key}: there is no such directory; name a saved step, .../global_step_N")
    for fault in check(step):
        say(f"warning: {key}: {fault}; it is taken at your word")
    for saved in saved_steps(step.parent):
        if saved.path == step:
            return saved
    raise ConfigError(f"{key}: its state.json cannot be read, so it is no saved step; name another .../global_step_N")


def agree(saved: Saved, config: dict[str, Any], data: str, allow: list[str], reset_optimizer: bool, say: Say) -> None:
    """Say what changed in the configuration since the save; ConfigError for what cannot be, or was not allowed."""
    before = yaml.safe_load((saved.path / "config.yaml").read_text(encoding="utf-8"))
    found = changes(before, config, step=saved.path, same_rows=saved.state["data"] == data)
    decide(found, allow, reset_optimizer, say)
