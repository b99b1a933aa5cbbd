"""From configuration sections to the parts of a run. The one place, besides the front doors, that knows both."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rich.logging import RichHandler
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from hybridrl import device as devices
from hybridrl.checkpoint.read import open_tensors, stored_tensors
from hybridrl.checkpoint.saved import saved_steps
from hybridrl.checkpoint.store import Store
from hybridrl.cluster import Group, RaySession, WorkerDied, spawn
from hybridrl.config import ConfigError
from hybridrl.config.compose import as_dict, save_config
from hybridrl.config.families import why_unsupported
from hybridrl.config.model_directory import is_sharded, resolve_model
from hybridrl.config.schema import (
    ModelConfig,
    PPOConfig,
    TrainerConfig,
)
from hybridrl.config.schema_sft import SFTConfig, SFTTrainerConfig
from hybridrl.data.conversations import ConversationDataset
from hybridrl.data.prompts import PromptDataset
from hybridrl.saving import SaveTimes
from hybridrl.tracking import Resume, Tracker
from hybridrl.tracking.log import console, info, warn
from hybridrl.training.packing import Budget
from hybridrl.training.worker import TrainWorker
from hybridrl.training.worker_group import CriticPlan, PolicyPlan

Plan = TypeVar("Plan", PolicyPlan, CriticPlan)


def with_restarts(attempt: Callable[[], None], trainer: TrainerConfig | SFTTrainerConfig) -> None:
    """Make the attempt; where a worker died, again from the last saved step, `trainer.max_restarts` times.

    One that died before it had saved a step begins where it began, which `auto` need not find: at an explicit path.
    """
    directory = Path(trainer.default_local_dir).expanduser()
    for left in reversed(range(trainer.max_restarts + 1)):
        before = saved_steps(directory)
        try:
            return attempt()
        except WorkerDied as death:
            if not left:
                raise
            info(f"{death}\nthe workers are built anew, to go on from the last saved step (restarts left: {left - 1})")
            if saved_steps(directory) != before:
                trainer.resume_mode = "auto"


def open_run_directory(config: PPOConfig | SFTConfig) -> Path:
    """The directory that holds all of a run, with a place for the logs."""
    directory = Path(config.trainer.default_local_dir).expanduser()
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=logging.INFO,
        format="%(message)s",
        handlers=[RichHandler(console=console, show_path=False)],
        force=True,
    )
    for chatty in ("httpx", "httpcore", "datasets", "fsspec", "urllib3", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return directory.absolute()


def open_store(config: PPOConfig | SFTConfig, directory: Path) -> Store:
    """The saved steps of a run, whose directory is its own from here on; its configuration lies there too."""
    trainer = config.trainer
    store = Store(directory, keep=trainer.max_actor_ckpt_to_keep, keep_best=trainer.keep_best_ckpt)
    save_config(config, directory / "config.yaml")
    return store


def save_times(trainer: TrainerConfig | SFTTrainerConfig) -> SaveTimes:
    return SaveTimes(trainer.save_freq, trainer.save_freq_epochs, trainer.save_freq_secs, trainer.ckpt_freq_secs)


def open_tracker(config: PPOConfig | SFTConfig, directory: Path, steps: int, resume: Resume | None) -> Tracker:
    trainer = config.trainer
    names = (trainer.project_name, trainer.experiment_name)
    return Tracker(trainer.logger, directory, *names, as_dict(config), steps, resume)


def start_session(trainer: TrainerConfig | SFTTrainerConfig, ray_init: dict) -> RaySession:
    assert trainer.n_gpus_per_node is not None
    if trainer.device == "cuda":
        for name in devices.without_expandable_segments():
            warn(f"{name}: workers run without expandable_segments, as engines could not open the trainer's memory")
    return RaySession(trainer.device, trainer.nnodes, trainer.n_gpus_per_node, ray_init, trainer.startup_timeout)


def start_train_workers(session: RaySession, logs: Path) -> Group:
    """One training rank a device, not built yet."""
    ranks = len(session.groups) * session.per_machine
    environment = devices.environment(session.device, session.per_machine)
    files = [str(logs / f"train-{rank}.log") for rank in range(ranks)]
    actors = [
        spawn(TrainWorker, session, rank, environment, rank, ranks, file, gpus=1) for rank, file in enumerate(files)
    ]
    return Group(actors, "train worker", files)


def as_laid_out(
    group: Group, policy: PolicyPlan, critic: CriticPlan | None, timeout: float
) -> tuple[PolicyPlan, CriticPlan | None]:
    """The plans of learners that are built: rows of a family that must not lie in one line are laid out apart."""
    padded = group.broadcast(TrainWorker.padded, timeout=timeout)[0]
    if padded["actor"] and not policy.updates.budget.padded:
        policy = _padded(policy, "actor")
    if critic is not None and padded["critic"] and not critic.updates.budget.padded:
        critic = _padded(critic, "critic")
    return policy, critic


def _padded(plan: Plan, name: str) -> Plan:
    info(
        f"{name}: its layers let rows that lie in one line see one another, so rows are padded to the longest of a pass"
    )
    budgets = {key: replace(value, padded=True) for key, value in vars(plan).items() if isinstance(value, Budget)}
    return replace(plan, updates=replace(plan.updates, budget=replace(plan.updates.budget, padded=True)), **budgets)


def refuse_hub_model(model: ModelConfig, key: str) -> None:
    """Refuse a model of the hub that is not there or cannot be trained; one in a directory was judged with the
    configuration."""
    if Path(model.path).is_dir():
        return
    try:
        settings = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code).to_dict()
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{key}={model.path} is neither a directory nor a model that the hub gives ({reason})"
        ) from error
    if reason := why_unsupported(settings | model.override_config):
        raise ConfigError(f"{key}={model.path}: {reason}")


def refuse_damaged_weights(model: ModelConfig, key: str) -> None:
    """Refuse a model whose files of weights cannot be read, by what they say of themselves; none of a hub's."""
    directory = resolve_model(model.path)
    try:
        if is_sharded(model.path):
            open_tensors(Path(model.path))
        elif directory.is_dir():
            stored_tensors(directory)
    except ConfigError as error:
        raise ConfigError(f"{key}={model.path}: {error}; save or download the model anew") from error


def refuse_unknown_tokens(model: ModelConfig, key: str, *datasets: PromptDataset | ConversationDataset | None) -> None:
    """Refuse rows with a token that the model has no row for. Rows without a token, as padding leaves, do no harm."""
    options = {"trust_remote_code": model.trust_remote_code, **model.override_config}
    known = AutoConfig.from_pretrained(str(resolve_model(model.path)), **options).get_text_config().vocab_size
    largest = max(dataset.largest_id for dataset in datasets if dataset is not None)
    if largest >= known:
        raise ConfigError(
            f"{key}={model.path}: the model knows {known} tokens, and the data has token {largest} of its tokenizer; "
            "name the model's own tokenizer in data.tokenizer, or give the model more rows (resize_token_embeddings)"
        )


def end_tokens(model_path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends an answer: the tokenizer's, and those that the model's generation config names."""
    named: set[int] = {tokenizer.eos_token_id}
    try:
        more = GenerationConfig.from_pretrained(str(resolve_model(model_path))).eos_token_id
    except OSError:
        more = None
    named |= set(more if isinstance(more, list) else [] if more is None else [more])
    return tuple(sorted(named))


def probe_ids(prompt_ids: list[int], length: int = 24) -> list[int]:
    """A fixed sequence that a hand-over is proven with: the end of the first prompt, repeated if short."""
    repeated = prompt_ids * (length // len(prompt_ids) + 1)
    return repeated[-length:]
