"""The configuration of an evaluation. It has the keys of a training run, and reads those that it uses.

Keys of the section `eval` win over a preset, which wins over the sampling of the command.
"""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from hybridrl.config.checks import MODEL, ROLLOUT, algorithm, check_ignored, resolve_rollout, training
from hybridrl.config.checks.engine import check_engine
from hybridrl.config.checks.model import check_model, check_served, is_large, resolve_dtype, resolve_for_cpu
from hybridrl.config.compose import CONF, usual_value
from hybridrl.config.files import HUB_NAME, path_or_hub
from hybridrl.config.findings import Checker, Findings
from hybridrl.config.load import Report, read_config
from hybridrl.config.reading import Plain, Reading
from hybridrl.config.schema import EvaluationConfig, PPOConfig, ServingConfig
from hybridrl.config.schema_parts import PRESETS, SHIPPED_SHARE, WHOLE_SHARE, EvalConfig, RolloutConfig
from hybridrl.tracking.console import warn

PATH, LENGTH = f"{MODEL}.path", "data.max_response_length"
SAMPLING = ("temperature", "top_p", "top_k", "max_tokens")
# The names of verl's main_eval.
VERL_NAMES = {
    "data.path": "eval.responses",
    "data.response_key": "eval.response_key",
    "data.data_source_key": "data.reward_fn_key",
    "data.reward_model_key": "eval.reward_model_key",
}


def load_eval_config(
    overrides: list[str],
    *,
    config_name: str = "",
    config_dir: Path = CONF,
    report: Report | None = None,
    show: Report | None = None,
) -> EvaluationConfig:
    """Load the configuration of an evaluation, with its sampling resolved. Raises ConfigError with all errors; the
    settings of each model are checked by `with_model`."""
    result = read_config(EvaluationConfig, [_current(text) for text in overrides], config_name, config_dir)
    if result.config is not None and result.values is not None:
        result.cross_check(partial(_resolve, follows=result.values.follows))
        settings, section = result.config.eval, result.config.actor_rollout_ref
        settings.files = settings.files or result.config.data.val_files
        if not result.findings.errors and not settings.responses:
            _check(settings, section.model.path, section.rollout.val_kwargs.temperature, result.findings)
    return result.accept(report, show)


def with_model(config: EvaluationConfig, path: str, key: str = PATH) -> EvaluationConfig:
    """Return the configuration with another model, checked with its settings. Raises ConfigError. `key`: the setting
    that names the model."""
    findings, device, named = Findings(), config.trainer.device, asdict(config.actor_rollout_ref)
    named["model"]["path"], values = path, {"actor_rollout_ref": named}
    reading = Reading(ServingConfig, Plain(values, {}, {}), partial(usual_value, PPOConfig))
    _close(reading.findings, key)
    section, check = reading.config.actor_rollout_ref, Checker(findings, values)
    model, rollout = section.model, section.rollout
    if device == "cpu":
        resolve_for_cpu(ROLLOUT, model, rollout, check)
    for finding in findings.items:
        if finding.severity == "warning":
            warn(finding.text, finding.code)
    model.tokenizer_path = config.data.tokenizer or model.tokenizer_path  # engines do not see the data
    rollout.dtype, rollout.free_cache_engine = resolve_dtype(rollout.dtype, device), False
    rollout.enable_rollout_routing_replay = False
    for arguments in vars(rollout.engine_kwargs).values():
        arguments["load_format"] = "auto"  # the default expects weights from a trainer
    if device == "cuda" and rollout.gpu_memory_utilization == SHIPPED_SHARE:
        rollout.gpu_memory_utilization = WHOLE_SHARE
    check_served(MODEL, model, rollout, device, check)
    fix = training.shorten(config.actor_rollout_ref.rollout, config.data, _shorter(config.eval))
    check_model(MODEL, model, rollout.max_model_len or 0, fix, check)
    _close(findings, key)
    return replace(config, actor_rollout_ref=section)


def _close(findings: Findings, key: str) -> None:
    """Raise ConfigError if there are errors, with the key that the user set for the model."""
    items = [replace(item, keys=tuple(key if name == PATH else name for name in item.keys)) for item in findings.items]
    Findings(items).close()


def describe_sampling(settings: EvalConfig, rollout: RolloutConfig) -> str:
    """The resolved sampling in one line."""
    used, preset = rollout.val_kwargs, f" of preset {settings.preset}" if settings.preset else ""
    text = f"sampling{preset}: temperature={used.temperature:g}"
    if used.temperature > 0:
        text += f" top_p={used.top_p:g} top_k={used.top_k}"
    return f"{text} max_tokens={rollout.response_length} seed={settings.seed}"


def _current(text: str) -> str:
    """Return an argument with verl's name of the key replaced by hybridrl's."""
    key, equals, value = text.partition("=")
    plain = key.lstrip("+")
    return f"{VERL_NAMES[plain]}{equals}{value}" if plain in VERL_NAMES else text


def _sampling(settings: EvalConfig) -> dict[str, Any]:
    """The sampling settings of the section `eval`."""
    own = {name: vars(settings)[name] for name in SAMPLING if vars(settings)[name] is not None}
    return PRESETS.get(settings.preset or "", {}) | own


def _resolve(config: EvaluationConfig, findings: Findings, follows: dict[str, str]) -> None:
    """Fill in derived values, first those from the section `eval`: sampling, and that nothing is trained. Adds findings
    about values that cannot work."""
    settings, rollout, model = config.eval, config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    sampling = _sampling(settings)
    if (length := sampling.pop("max_tokens", None)) is not None:
        config.data.max_response_length = rollout.response_length = length
        if follows.get("reward.reward_kwargs.max_resp_len") == LENGTH:
            config.reward.reward_kwargs.max_resp_len = length
    vars(rollout.val_kwargs).update(sampling)
    rollout.val_kwargs.do_sample = rollout.val_kwargs.temperature > 0
    config.trainer.v1.trainer_mode, rollout.over_sample_rate, config.data.train_weights = "sync", 0.0, []
    if not settings.models and model.lora_adapter_path:
        settings.models = [model.lora_adapter_path]
    model.lora_rank, model.lora_adapter_path = 0, None  # an adapter is merged before it is served
    check = Checker(findings, asdict(config))
    with findings.gathered("conflict"):
        large = any(is_large(replace(model, path=path)) for path in (model.path, *settings.models))
        training.resolve_devices(config.trainer, config.ray_kwargs.ray_init, check, None, slots=1 if large else 2)
    config.data.seed = config.trainer.seed if config.data.seed is None else config.data.seed
    resolve_rollout(
        config.actor_rollout_ref.rollout, config.trainer, config.data, check.at(ROLLOUT), _shorter(settings)
    )
    check_ignored(config.data, rollout, check.at(ROLLOUT))
    check_engine(rollout, config.trainer, check.at(ROLLOUT))
    algorithm.check_data(config.data, check)
    algorithm.resolve_reward(config.reward, check)
    if config.reward.reward_model.enable:
        key = "reward.reward_model.enable"
        check.error(key, "training ranks compute a reward model, and an evaluation has none", f"set {key}=false")


def _shorter(settings: EvalConfig) -> str:
    """The fix for overlong rows, with the key that set the longest response."""
    return f"lower data.max_prompt_length or {'eval.max_tokens' if 'max_tokens' in _sampling(settings) else LENGTH}"


def _check(settings: EvalConfig, model: str | None, temperature: float, findings: Findings) -> None:
    """Add findings about missing and conflicting values, and fill in the model."""
    if not settings.files:
        fix = "add eval.files=questions.jsonl, or data.val_files"
        findings.error("value", "eval.files and data.val_files are not set", fix, keys="eval.files")
    if not settings.models and model is None:
        cause, fix = "no model is named", "add actor_rollout_ref.model.path=DIRECTORY, or eval.models=[...]"
        findings.error("value", f"eval.models: {cause}", fix, keys="eval.models")
    elif not settings.models:
        settings.models = [model]
    for name in filter(HUB_NAME.fullmatch, [*settings.models, settings.compare or ""]):
        if fault := path_or_hub(name):
            findings.error("value", fault.cause, fault.fix, keys="eval.models", value=name)
    if temperature == 0 and (settings.n or 1) > 1:
        cause = f"at temperature 0 all {settings.n} responses to a question are equal"
        fix = f"set eval.preset={next(iter(PRESETS))}, or eval.temperature=1.0, or eval.n=1"
        findings.error("conflict", cause, fix, keys="eval.n", value=settings.n)
    elif temperature == 0 and (over := [k for k in settings.k if k > 1]):
        cause = f"pass@{over[0]} needs {over[0]} responses per question, and at temperature 0 there is one"
        fix = f"set eval.preset={next(iter(PRESETS))} or eval.temperature=1.0, or leave out {over[0]}"
        findings.error("conflict", cause, fix, keys="eval.k")
    if settings.n and temperature > 0 and (over := [k for k in settings.k if k > settings.n]):
        cause = f"pass@{over[0]} needs {over[0]} responses per question, and there are eval.n={settings.n}"
        findings.error("conflict", cause, f"set eval.n={max(over)}, or leave out {over[0]}", keys="eval.k")
