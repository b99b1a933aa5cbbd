"""The configuration of an evaluation: that of a training run, of which only what an evaluation uses is checked.

Keys of the section `eval` win over a preset, which wins over the sampling of the command.
"""

import re
from dataclasses import replace
from pathlib import Path

from hybridrl.config.compose import CONF, as_dict
from hybridrl.config.findings import Finding, Findings
from hybridrl.config.load import Report, ResolvedConfig, resolve_config, resolve_values
from hybridrl.config.schema import PPOConfig
from hybridrl.config.schema_eval import PRESETS
from hybridrl.config.schema_rollout import SHIPPED_SHARE, WHOLE_SHARE
from hybridrl.config.values import MISSING, Plain, value_of

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
TRAIN_FILES = "data.train_files"
USED = ("eval.", "data.", f"{MODEL}.", f"{ROLLOUT}.", "reward.", "trainer.", "ray_kwargs.", "own.")
# Keys of these sections that only training reads.
UNUSED = (TRAIN_FILES, "data.train_batch_size", f"{ROLLOUT}.n", f"{ROLLOUT}.do_sample", f"{ROLLOUT}.temperature")
UNUSED += (
    f"{ROLLOUT}.val_kwargs.n",
    f"{ROLLOUT}.log_prob_micro_batch_size",
    "trainer.resume_mode",
    "trainer.resume_from_path",
)
UNUSED += (f"{ROLLOUT}.response_length", f"{ROLLOUT}.free_cache_engine", "trainer.test_freq", "trainer.logger")
UNUSED += ("trainer.max_restarts", "trainer.val_only")
# Where sampling is set: the key of `eval`, and the keys of a run that it sets.
SAMPLING = {
    "temperature": (f"{ROLLOUT}.val_kwargs.temperature",),
    "top_p": (f"{ROLLOUT}.val_kwargs.top_p",),
    "top_k": (f"{ROLLOUT}.val_kwargs.top_k",),
    "max_tokens": ("data.max_response_length", f"{ROLLOUT}.response_length"),
}
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
    config_name: str = "ppo_trainer",
    config_dir: Path = CONF,
    report: Report | None = None,
    show: Report | None = None,
) -> PPOConfig:
    """The configuration of an evaluation, with the sampling that it names. Raises ConfigError with all that is wrong;
    the model's own settings are checked by `with_model`, for each of the models."""
    arguments = [_current(text) for text in overrides]
    first = resolve_config(PPOConfig, arguments, config_name, config_dir)
    _relevant(first.findings).close(first.config)
    assert first.config is not None and first.values is not None
    result = resolve_config(PPOConfig, arguments + _implied(first.config, first.values), config_name, config_dir)
    config, findings = result.config, _relevant(result.findings)
    assert config is not None
    _check(config, findings, result)
    findings = _renamed(findings, _length_name(config))
    for finding in findings.items:
        to = {"warning": report, "info": show}.get(finding.severity)
        if to is not None:
            to(finding.text)
    findings.close(config)
    return config


def with_model(config: PPOConfig, path: str, key: str = f"{MODEL}.path") -> PPOConfig:
    """The configuration with another model, checked again with its settings. Raises ConfigError; `key` is the setting
    that names the model."""
    values = as_dict(config)
    values["actor_rollout_ref"]["model"]["path"] = path
    findings = Findings()
    loaded = resolve_values(PPOConfig, Plain(values, {}, {}), findings)
    _renamed(_relevant(findings, UNUSED), {f"{MODEL}.path": key} | _length_name(config)).close()
    rollout = loaded.actor_rollout_ref.rollout
    rollout.free_cache_engine = False
    rollout.engine_kwargs.vllm["load_format"] = "auto"  # of weights: by default they come from a trainer
    if loaded.trainer.device == "cuda" and rollout.gpu_memory_utilization == SHIPPED_SHARE:
        rollout.gpu_memory_utilization = WHOLE_SHARE
    return loaded


def describe_sampling(config: PPOConfig) -> str:
    """The resolved sampling in one line."""
    rollout, preset = config.actor_rollout_ref.rollout, config.eval.preset
    used = rollout.val_kwargs
    text = f"sampling{f' of preset {preset}' if preset else ''}: temperature={used.temperature:g}"
    if used.temperature > 0:
        text += f" top_p={used.top_p:g} top_k={used.top_k}"
    return f"{text} max_tokens={rollout.response_length} seed={config.eval.seed}"


def _current(text: str) -> str:
    """An argument under the name that it has here."""
    key, equals, value = text.partition("=")
    plain = key.lstrip("+")
    return f"{VERL_NAMES[plain]}{equals}{value}" if plain in VERL_NAMES else text


def _implied(config: PPOConfig, plain: Plain) -> list[str]:
    """The arguments that follow from the section `eval`: how to sample, and that no adapter is trained."""
    settings, arguments = config.eval, []
    preset = PRESETS.get(settings.preset or "", {})
    for name, keys in SAMPLING.items():
        value = vars(settings)[name]
        value = preset.get(name) if value is None else value
        arguments += [f"{key}={value}" for key in keys if value is not None]
    temperature = settings.temperature if settings.temperature is not None else preset.get("temperature")
    temperature = config.actor_rollout_ref.rollout.val_kwargs.temperature if temperature is None else temperature
    arguments.append(f"{ROLLOUT}.val_kwargs.do_sample={str(temperature > 0).lower()}")
    arguments.append("trainer.v1.trainer_mode=sync")  # all devices are for the engines
    arguments.append(f"{MODEL}.lora_rank=0")  # an adapter is merged before it is served
    if settings.models == [] and (adapter := value_of(plain.values, f"{MODEL}.lora_adapter_path")):
        arguments += [f"eval.models=['{adapter}']"]
    arguments.append(f"{MODEL}.lora_adapter_path=null")
    return arguments


def _relevant(findings: Findings, unused: tuple[str, ...] = (*UNUSED, f"{MODEL}.path")) -> Findings:
    """The findings that concern an evaluation; by default not those of the model, which is checked by itself."""

    def concerns(finding: Finding) -> bool:
        if not finding.keys or finding.code not in ("value", "conflict", "setting"):
            return True
        key = finding.keys[0]
        return f"{key}.".startswith(USED) and key not in unused

    return Findings([finding for finding in findings.items if concerns(finding)])


def _length_name(config: PPOConfig) -> dict[str, str]:
    """The name under which the longest response was set, by its name in a run."""
    preset = PRESETS.get(config.eval.preset or "", {})
    is_set = config.eval.max_tokens is not None or "max_tokens" in preset
    return {"data.max_response_length": "eval.max_tokens"} if is_set else {}


def _renamed(findings: Findings, names: dict[str, str]) -> Findings:
    """The findings with keys under the names that the user knows."""

    def renamed(text: str) -> str:
        return re.sub("|".join(map(re.escape, names)), lambda match: names[match[0]], text) if names else text

    return Findings(
        [
            replace(
                one, keys=tuple(names.get(key, key) for key in one.keys), cause=renamed(one.cause), fix=renamed(one.fix)
            )
            for one in findings.items
        ]
    )


def _check(config: PPOConfig, findings: Findings, result: ResolvedConfig) -> None:
    """Add what is missing or cannot work together, and fill in models and files."""
    settings = config.eval
    given = value_of(result.values.values, f"{MODEL}.path") if result.values else MISSING
    settings.files = settings.files or config.data.val_files
    if settings.responses:
        return
    if not settings.files:
        fix = "add eval.files=questions.jsonl, or data.val_files"
        findings.error("value", "eval.files and data.val_files are not set", fix, keys="eval.files")
    if not settings.models and given == MISSING:
        cause, fix = "no model is named", "add actor_rollout_ref.model.path=DIRECTORY, or eval.models=[...]"
        findings.error("value", f"eval.models: {cause}", fix, keys="eval.models")
    if not settings.models:
        settings.models = [given]
        config.actor_rollout_ref.model.path = given  # also if it is no directory of a model, such as RUN:best
    temperature = config.actor_rollout_ref.rollout.val_kwargs.temperature
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
