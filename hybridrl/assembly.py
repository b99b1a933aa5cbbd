"""From configuration sections to the parts of a run. The one place, besides the front doors, that knows both."""

import logging
from pathlib import Path

from rich.logging import RichHandler
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from hybridrl import device as devices
from hybridrl.algorithms import Algorithm, Clip
from hybridrl.algorithms.algorithm import ESTIMATORS
from hybridrl.algorithms.kl import KLWeight
from hybridrl.cluster import Group, RaySession, spawn
from hybridrl.config import ConfigError
from hybridrl.config.compose import as_dict, save_config
from hybridrl.config.families import why_unsupported
from hybridrl.config.own_code import load_function
from hybridrl.config.schema import (
    ActorRolloutRefConfig,
    AlgorithmConfig,
    ModelConfig,
    PPOConfig,
    RolloutConfig,
    SFTConfig,
    SFTTrainerConfig,
    TrainerConfig,
)
from hybridrl.rollout import Sampling
from hybridrl.tracking import Tracker
from hybridrl.tracking.log import console
from hybridrl.training.packing import Budget
from hybridrl.training.worker import LossConfig, TrainWorker, WorkerConfig, find_policy_loss
from hybridrl.training.workers import UpdatePlan


def open_run_directory(config: PPOConfig | SFTConfig) -> Path:
    """The directory that holds all of a run, with its configuration and a place for the logs."""
    directory = Path(config.trainer.default_local_dir).expanduser()
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    save_config(config, directory / "config.yaml")
    logging.basicConfig(
        level=logging.INFO,
        format="%(message)s",
        handlers=[RichHandler(console=console, show_path=False)],
        force=True,
    )
    for chatty in ("httpx", "httpcore", "datasets", "fsspec", "urllib3", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return directory.absolute()


def open_tracker(config: PPOConfig | SFTConfig, directory: Path, steps: int) -> Tracker:
    trainer = config.trainer
    return Tracker(trainer.logger, directory, trainer.project_name, trainer.experiment_name, as_dict(config), steps)


def start_session(trainer: TrainerConfig | SFTTrainerConfig, ray_init: dict) -> RaySession:
    assert trainer.n_gpus_per_node is not None
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


def ppo_worker_config(config: PPOConfig, uses_reference: bool, *, total_updates: int) -> WorkerConfig:
    section = config.actor_rollout_ref
    return WorkerConfig(
        device=config.trainer.device,
        model=section.model,
        fsdp=section.actor.fsdp_config,
        optimizer=section.actor.optim,
        total_updates=total_updates,
        collective_timeout=section.nccl_timeout,
        seed=config.trainer.seed,
        with_reference=uses_reference,
        reference_offload=section.ref.fsdp_config.param_offload,
    )


def build_algorithm(algorithm: AlgorithmConfig, *, kl_in_loss: bool) -> Algorithm:
    control = algorithm.kl_ctrl
    name = algorithm.adv_estimator
    return Algorithm(
        estimator=ESTIMATORS[name] if name in ESTIMATORS else load_function(name, "algorithm.adv_estimator"),
        normalise=algorithm.norm_adv_by_std_in_grpo,
        kl_in_reward=algorithm.kl_penalty if algorithm.use_kl_in_reward else None,
        kl_weight=KLWeight(control.kl_coef, control.target_kl if control.type == "adaptive" else None, control.horizon),
        kl_in_loss=kl_in_loss,
    )


def build_update_plan(section: ActorRolloutRefConfig, prompts_per_step: int) -> UpdatePlan:
    actor, rollout, ref = section.actor, section.rollout, section.ref
    find_policy_loss(actor.policy_loss.loss_mode)  # refused here rather than in the workers
    loss = LossConfig(
        policy_loss=_anywhere(actor.policy_loss.loss_mode),
        clip=Clip(actor.clip_ratio_low or 0.0, actor.clip_ratio_high or 0.0, actor.clip_ratio_c),
        aggregation=actor.loss_agg_mode,
        scale=actor.loss_scale_factor or 1.0,
        temperature=rollout.temperature if rollout.do_sample and rollout.temperature > 0 else 1.0,
        grad_clip=actor.grad_clip,
        entropy_coeff=actor.entropy_coeff,
        kl_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_form=actor.kl_loss_type,
    )
    padded = not section.model.use_remove_padding

    def budget(tokens: int, rows: int | None, by_tokens: bool) -> Budget:
        return Budget(tokens, None if by_tokens else rows, padded)

    return UpdatePlan(
        loss=loss,
        prompts_per_step=prompts_per_step,
        prompts_per_update=actor.ppo_mini_batch_size,
        epochs=actor.ppo_epochs,
        shuffle=actor.shuffle,
        seed=actor.data_loader_seed,
        update_budget=budget(
            actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz
        ),
        log_prob_budget=budget(
            rollout.log_prob_max_token_len_per_gpu,
            rollout.log_prob_micro_batch_size_per_gpu,
            rollout.log_prob_use_dynamic_bsz,
        ),
        reference_budget=budget(
            ref.log_prob_max_token_len_per_gpu,
            ref.log_prob_micro_batch_size_per_gpu,
            ref.log_prob_use_dynamic_bsz,
        ),
    )


def _anywhere(name: str) -> str:
    """The name of a function that workers find from any directory: an own file's path is made absolute."""
    return str(Path(name).expanduser().absolute()) if ":" in name else name


def training_sampling(rollout: RolloutConfig, stop_ids: tuple[int, ...]) -> Sampling:
    return Sampling(
        max_tokens=rollout.response_length,
        stop_ids=stop_ids,
        temperature=rollout.temperature if rollout.do_sample else 0.0,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        repetition_penalty=rollout.repetition_penalty,
        min_tokens=rollout.min_tokens,
        ignore_eos=rollout.ignore_eos,
    )


def validation_sampling(rollout: RolloutConfig, stop_ids: tuple[int, ...]) -> Sampling:
    chosen = rollout.val_kwargs
    return Sampling(
        max_tokens=rollout.response_length,
        stop_ids=stop_ids,
        temperature=chosen.temperature if chosen.do_sample else 0.0,
        top_p=chosen.top_p if chosen.do_sample else 1.0,
        top_k=chosen.top_k if chosen.do_sample else -1,
    )


def refuse_hub_model(model: ModelConfig, key: str) -> None:
    """Refuse a model of the hub that cannot be trained; one in a directory was judged with the configuration."""
    if not Path(model.path).is_dir():
        settings = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code).to_dict()
        reason = why_unsupported(settings | model.override_config)
        if reason:
            raise ConfigError(f"{key}={model.path}: {reason}")


def end_tokens(model_path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends an answer: the tokenizer's, and those that the model's generation config names."""
    named: set[int] = {tokenizer.eos_token_id}
    try:
        more = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:
        more = None
    named |= set(more if isinstance(more, list) else [] if more is None else [more])
    return tuple(sorted(named))


def probe_ids(prompt_ids: list[int], length: int = 24) -> list[int]:
    """A fixed sequence that a hand-over is proven with: the end of the first prompt, repeated if short."""
    repeated = prompt_ids * (length // len(prompt_ids) + 1)
    return repeated[-length:]


def say_batch_arithmetic(config: PPOConfig, steps: int) -> str:
    """How many samples and updates a step has, in one line."""
    prompts, answers = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    actor = config.actor_rollout_ref.actor
    updates = -(-prompts // actor.ppo_mini_batch_size)
    epochs = f" x {actor.ppo_epochs} epochs" if actor.ppo_epochs > 1 else ""
    return (
        f"{steps} steps: {prompts} prompts x {answers} answers = {prompts * answers} samples a step, "
        f"{updates} update{'s' * (updates > 1)} of {min(actor.ppo_mini_batch_size, prompts)} prompts{epochs}"
    )
