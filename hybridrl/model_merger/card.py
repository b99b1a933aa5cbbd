"""The model card of a merged model, README.md as the Hugging Face hub reads it: facts of config.yaml and state.json in
the checkpoint, and of metrics.jsonl in its run. Secrets are masked."""

import re
import shlex
from contextlib import suppress
from itertools import chain
from math import isfinite, nan
from pathlib import Path
from typing import Any

import yaml

from hybridrl import __version__
from hybridrl.checkpoint.store import STATE
from hybridrl.config import PPOConfig, SFTConfig
from hybridrl.config.compose import SHIPPED, as_override, shipped
from hybridrl.config.files import is_row_file, parse_dataset_name, read_mapping
from hybridrl.config.findings import show
from hybridrl.config.values import leaves, value_keys, value_of
from hybridrl.tracking.report import read_metrics
from hybridrl.tracking.secrets import mask_values, without_users
from hybridrl.tracking.sink import LOSSES, REWARD, is_validation_score

CARD = "README.md"
ON_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
ACTOR, KL_LOSS = "actor_rollout_ref.actor", "actor_rollout_ref.actor.kl_loss_coef"
KL_REWARD = "algorithm.kl_ctrl.kl_coef"
SHOWN = (
    "algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode", KL_LOSS, KL_REWARD,
    f"{ACTOR}.optim.lr", "optim.lr", "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size",
    "actor_rollout_ref.rollout.n", "data.max_response_length", "actor_rollout_ref.model.lora_rank", "model.lora_rank",
)  # fmt: skip
KINDS = {"sft": ("supervised fine-tuning", ["sft"]), "rm": ("comparing pairs of responses", ["reward-model"])}
SWITCHES = {KL_LOSS: f"{ACTOR}.use_kl_loss", KL_REWARD: "algorithm.use_kl_in_reward"}
UNKNOWN = f"Merged by hybridrl {__version__} from a checkpoint that has no record of its training."
# Beginnings of keys that another run has in another way, as another directory or machine.
OF_ONE_RUN = (
    "trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir", "trainer.resume_",
    "trainer.logger", "trainer.device", "ray_kwargs.", "reward.judge.cache",
)  # fmt: skip


def write_card(directory: Path, checkpoint: Path, *, adapter: bool = False, generates: bool = True) -> None:
    """Write the card of a saved model, `.../global_step_N/actor`, to the directory of its merge, if that has none."""
    if not (directory / CARD).exists():
        try:
            text = _Facts(checkpoint.absolute()).card(adapter, generates)
        except (LookupError, TypeError, ValueError, AttributeError):  # files of another program or version
            text = _page({"library_name": "peft" if adapter else "transformers", "tags": ["hybridrl"]}, UNKNOWN)
        (directory / CARD).write_text(text, encoding="utf-8")


class _Facts:
    """The facts that the files of a checkpoint and of its run hold about a saved model. Raises LookupError, TypeError,
    ValueError or AttributeError where a file is missing or another program's."""

    def __init__(self, checkpoint: Path) -> None:
        self.saved = checkpoint.parent
        self.state, config = (read_mapping(self.saved / name) for name in (STATE, "config.yaml"))
        # Value by value: within a command, quotes around one would be taken for a part of it.
        config = _anonymous(mask_values(config))
        self.values, self.supervised = dict[str, Any](), "actor_rollout_ref" not in config
        self.schema = SFTConfig if self.supervised else PPOConfig
        for key in value_keys(self.schema):
            with suppress(KeyError):  # a configuration of another version
                self.values[key] = value_of(config, key)
        scores = self.values.get("pairs.center") is not None
        self.command = ("rm" if scores else "sft") if self.supervised else "train"
        section = "critic." if checkpoint.name == "critic" else "" if self.supervised else "actor_rollout_ref."
        self.base = self.values.get(f"{section}model.path")

    def card(self, adapter: bool, generates: bool) -> str:
        algorithm = str(self.values.get("algorithm.adv_estimator")).rpartition(":")[2]
        kind, tags = KINDS.get(self.command, ("reinforcement learning", ["reinforcement-learning", algorithm]))
        sources = (entry for entry in self.values["data.train_files"] if not is_row_file(Path(entry)))
        front = {
            "base_model": self.base if _on_hub(self.base) else None,
            "datasets": [name for entry in sources if _on_hub(name := parse_dataset_name(entry).name)],
            "library_name": "peft" if adapter else "transformers",
            "tags": ["hybridrl", *tags],
            "pipeline_tag": "text-generation" if generates and self.command != "rm" else None,
        }
        trained = f"Trained by {kind} with hybridrl {self.state['code']['hybridrl']} for {self.state['step']} steps."
        used = (key for key in SHOWN if self.values.get(key) and self.values.get(SWITCHES.get(key, key)))
        keys = {f"`{key}`": show(self.values[key]) for key in used}
        tables = _table("what | value", self._facts()), _table("key | value", keys)
        return _page(front, trained, *tables, *self._figures(), self._command())

    def _facts(self) -> dict[str, str]:
        """Return the base model, the data and the reward."""
        data = ", ".join(f"`{entry}`" for entry in self.values["data.train_files"])
        facts = {"base model": f"`{self.base}`", "training data": data}
        facts["rows used" if self.supervised else "prompts used"] = f"{self.state['prompts']:,}"
        if not self.supervised:
            custom, name = self.values.get("reward.custom_reward_function.path"), self.values.get("reward.name")
            function = f"`{Path(custom or '').name}:{self.values.get('reward.custom_reward_function.name')}`"
            facts["reward"] = function if custom else f"built in: {name or 'by the data source of each row'}"
        return facts

    def _figures(self) -> list[str]:
        """Return a table of reward, loss and validation scores: first, and at the checkpoint's step."""
        logged, last = read_metrics(self.saved.parent, lambda *_: None), self.state["step"]
        steps = {step: metrics for step, metrics in logged.items() if step <= last} or {last: self.state["metrics"]}
        figures = {}
        for name in [*REWARD[:1], *LOSSES, *sorted({*filter(is_validation_score, chain(*steps.values()))})]:
            series = {step: metrics[name] for step, metrics in steps.items() if isfinite(metrics.get(name, nan))}
            if series:
                ends = (f"{series[step]:.4g} (step {step})" for step in (min(series), max(series)))
                figures[f"`{name}`"] = " | ".join(ends)
        return [_table("metric | first | last up to this checkpoint", figures)] if figures else []

    def _command(self) -> str:
        """Return the command to repeat the run, with the keys that differ from the defaults."""
        usual, words = shipped(SHIPPED[self.schema]), [f"hybridrl {self.command}"]
        omitted = ("own", *OF_ONE_RUN, *["critic."] * (self.values.get("critic.enable") is False))
        keys = leaves(self.values.get("own") or {}, "own.")  # a section's keys are set one by one
        for key, value in self.values.items():
            expected = self.values.get(usual.follows.get(key, ""), value_of(usual.values, key))
            if value not in (expected, [expected], expected or []) and not key.startswith(omitted):
                keys[key] = value
        words += [shlex.quote(f"{key}={as_override(value)}") for key, value in keys.items()]
        block = "```sh\n" + " \\\n    ".join(words) + "\n```"
        return f"To repeat the run:\n\n{block}"


def _anonymous(value: Any) -> Any:
    """Return nested values without the names of users."""
    if isinstance(value, dict):
        return {name: _anonymous(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_anonymous(each) for each in value]
    return without_users(value) if isinstance(value, str) else value


def _page(front: dict[str, Any], *parts: str) -> str:
    matter = yaml.safe_dump({name: value for name, value in front.items() if value}, sort_keys=False)
    return f"---\n{matter}---\n\n" + "\n\n".join(parts) + "\n"


def _table(head: str, rows: dict[str, str]) -> str:
    return "\n".join([f"| {head} |", "|---" * len(head.split("|")) + "|", *(f"| {a} | {b} |" for a, b in rows.items())])


def _on_hub(name: Any) -> bool:
    return isinstance(name, str) and bool(ON_HUB.fullmatch(name)) and not Path(name).exists()
