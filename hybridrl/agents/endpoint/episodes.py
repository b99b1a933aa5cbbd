"""Whether and how a run has episodes of several turns: from the configuration to the processes, and what is checked
before they start."""

import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerBase

from hybridrl import project_file
from hybridrl.agents.endpoint import ADMIN_KEY, bound
from hybridrl.agents.endpoint.agent import Agents
from hybridrl.agents.endpoint.functions import load_agent
from hybridrl.agents.environments import AGENT, ENVIRONMENT, MULTI_TURN, ONLINE, Environment, EnvironmentSettings
from hybridrl.agents.environments.calls import KEY as FORMAT
from hybridrl.agents.environments.conversations import Conversations as Conversations
from hybridrl.agents.environments.dialogue import Dialogue
from hybridrl.agents.environments.episode_loop import AgentLoop, EpisodeLimits, EpisodeTools
from hybridrl.agents.environments.load import (
    SINGLE_RESPONSES,
    SINGLE_TURN,
    TOOL_AGENT,
    VERL,
    Choice,
    check_environments,
    choice_of,
    load_tools,
)
from hybridrl.agents.environments.load import load_files as load_environments
from hybridrl.agents.environments.pictures import NUMBERS
from hybridrl.agents.environments.pool import EpisodeWorkers
from hybridrl.agents.environments.template import KEY as TEMPLATE
from hybridrl.agents.environments.worker import EpisodeSettings
from hybridrl.config import ConfigError, schema
from hybridrl.config.checks.engine import continues_rollouts
from hybridrl.config.checks.training import this_machine
from hybridrl.config.custom_code import check_source, load_class, script_path
from hybridrl.config.files import resolve_model
from hybridrl.config.findings import Findings
from hybridrl.config.schema_parts import AgentConfig, MultiTurnConfig, RolloutConfig
from hybridrl.core.cluster import RaySession
from hybridrl.data.processor import PictureReader, picture_reader
from hybridrl.data.prompts import PromptDataset
from hybridrl.data.tokenizer import as_chat, end_tokens
from hybridrl.plugins import load
from hybridrl.rewards.load import uses_built_in
from hybridrl.runs.trials import Subject, Trial
from hybridrl.tracking.console import info

MODE = f"{MULTI_TURN}.tokenization_sanity_check_mode"
ARGUMENTS = "data.apply_chat_template_kwargs"
FULL = "actor_rollout_ref.rollout.full_determinism"
CORES_PER_PROCESS, MOST_PROCESSES = 4, 8  # per machine

EpisodesConfig = schema.PPOConfig | schema.EvaluationConfig
LoadTokenizer = Callable[[], PreTrainedTokenizerBase]

logger = logging.getLogger(__name__)


def environment_settings(section: schema.ActorRolloutRefConfig | schema.ServedConfig) -> EnvironmentSettings:
    rollout = section.rollout
    return EnvironmentSettings(rollout.multi_turn, rollout.agent, tuple(section.model.external_lib))


def load_episode_files(config: EpisodesConfig, findings: Findings) -> None:
    """Import the user's files for rows and episodes; the reward's is only read, as its own processes import it."""
    dataset, sampler, reward = config.data.custom_cls, config.data.sampler, config.reward.custom_reward_function
    for key, load_file, path, name in (
        ("reward.custom_reward_function.path", check_source, reward.path, reward.name),
        ("data.custom_cls.path", load_class, dataset.path, dataset.name),
        ("data.sampler.class_path", load_class, sampler.class_path, sampler.class_name),
    ):
        with findings.gathered():
            if path and name:
                load_file(path, name, key)
    if runs_episodes(config.actor_rollout_ref.rollout, ()):
        load_environments(environment_settings(config.actor_rollout_ref), findings)
    with findings.gathered():
        if (agent := config.actor_rollout_ref.rollout.agent).path:
            load_agent(f"{script_path(agent.path)}:{agent.name}")


def runs_episodes(rollout: RolloutConfig, environments: Collection[str]) -> bool:
    """Whether episodes run in processes of their own: if the configuration or a row names more than single responses.
    `environments` are the names in the rows."""
    named = any(name not in (SINGLE_TURN, *SINGLE_RESPONSES) for name in environments)
    chosen = choice_of({}, EnvironmentSettings(rollout.multi_turn, rollout.agent)) is not None
    return named or chosen or rollout.multi_turn.enable


def episode_limits(rollout: RolloutConfig, prompt: int, *, pausable: bool) -> EpisodeLimits:
    """The limits of an episode whose first prompt has up to `prompt` tokens; `pausable`: sampling may pause while the
    devices train."""
    multi_turn, response = rollout.multi_turn, rollout.response_length
    return EpisodeLimits(
        prompt=prompt,
        response=response,
        context=rollout.max_model_len or prompt + response,
        turn=multi_turn.max_assistant_response_length,
        turns=multi_turn.max_assistant_turns,
        user_turns=multi_turn.max_user_turns,
        invalid_calls=multi_turn.max_consecutive_invalid_tool_calls,
        call_timeout=multi_turn.tool_timeout,
        timeout=multi_turn.episode_timeout,
        held=pausable,
        pictures=rollout.limit_images or 0,
    )


def episode_settings(
    config: EpisodesConfig, load_tokenizer: LoadTokenizer, end_ids: tuple[int, ...]
) -> EpisodeSettings:
    """Return the settings of the episode processes. With agents outside the run, log where they find its episodes."""
    section, data, trainer = config.actor_rollout_ref, config.data, config.trainer
    rollout, pausable = section.rollout, continues_rollouts(trainer.v1, section.rollout)
    key = os.environ.get(ADMIN_KEY) or secrets.token_urlsafe(16)
    agents = agents_of(rollout, trainer.nnodes, key, needs_reward=uses_built_in(config.reward))
    if rollout.agent.mode == ONLINE:
        info(invitation(rollout.agent, key))
    return EpisodeSettings(
        load_tokenizer,
        environment_settings(section),
        episode_limits(rollout, data.max_prompt_length, pausable=pausable),
        end_ids,
        formats=_formats(section.model, rollout.multi_turn, data),
        configuration=asdict(config),
        agents=agents,
        load_reader=partial(_reader, data, section.model) if rollout.limit_images else None,
    )


def _reader(
    data: schema.DataConfig, model: schema.ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> PictureReader | None:
    reader = picture_reader(data, model, tokenizer)
    return reader if isinstance(reader, PictureReader) else None


def start_episodes(
    config: EpisodesConfig, session: RaySession, load_tokenizer: LoadTokenizer, end_ids: tuple[int, ...], logs: Path
) -> EpisodeWorkers:
    """Start the episode processes; they end with the context."""
    settings = episode_settings(config, load_tokenizer, end_ids)
    return EpisodeWorkers(session, settings, episode_logs(config.actor_rollout_ref.rollout, config.trainer, logs))


def _formats(model: schema.ModelConfig, multi_turn: MultiTurnConfig, data: schema.DataConfig) -> dict[str, Any]:
    """The arguments of EpisodeTools.of that are given by name."""
    settings = AutoConfig.from_pretrained(str(resolve_model(model.path)), trust_remote_code=model.trust_remote_code)
    return {
        "format": multi_turn.format,
        "model_type": settings.model_type,
        "arguments": data.apply_chat_template_kwargs,
        "history_reasoning": multi_turn.history_reasoning,
    }


def agents_of(
    rollout: RolloutConfig, machines: int, key: str, *, needs_reward: bool
) -> Callable[[EpisodeTools, Callable[[], Awaitable[None]] | None], Agents] | None:
    """Return a factory of the rows' agents; None if none are configured. Agents outside the run start sessions with
    `key`. ConfigError if the function does not exist, or if agents of this run cannot be outside."""
    agent = rollout.agent
    # With full_determinism turns are sampled once every episode wants one, so none may wait for another to end.
    concurrency = None if rollout.full_determinism else agent.concurrency
    if agent.mode == ONLINE:
        _check_online(rollout, machines)
        return partial(Agents, agent, concurrency, key, needs_reward=needs_reward)
    if agent.path is None:
        return None
    agent = replace(agent, path=str(script_path(agent.path)))
    load_agent(f"{agent.path}:{agent.name}")
    return partial(Agents, agent, concurrency, None, needs_reward=needs_reward)


def _check_online(rollout: RolloutConfig, machines: int) -> None:
    """Raise ConfigError if agents outside the run cannot take its episodes."""
    agent, findings = rollout.agent, Findings()
    for is_wrong, name, why, fix in (
        (agent.path, f"path={agent.path}", "agents are outside the run", "leave path out, or set mode=inline"),
        ((agent.num_workers or 1) > 1, f"num_workers={agent.num_workers}", "there is one endpoint", "set it to 1"),
        (rollout.full_determinism, "mode=online", "the order of requests is not fixed", "set full_determinism=false"),
    ):
        if is_wrong:
            findings.error(
                "conflict", f"{AGENT}.{name} does not go with agents that are online: {why}", fix, keys=AGENT
            )
    if machines == 1:
        with findings.gathered():
            bound(agent.host, agent.port, f"{AGENT}.").close()
    findings.close()


def invitation(agent: AgentConfig, key: str) -> str:
    """Say where agents outside the run find its episodes."""
    place = f"http://{agent.host}:{agent.port}/rl/start_session"
    return f"agents get episodes by POST {place} with the admin key {key} ({project_file('docs/endpoint.md')})"


def episode_logs(rollout: RolloutConfig, trainer: schema.TrainerConfig, logs: Path) -> list[str]:
    """Return the logs of the processes that run episodes, over all machines: one each."""
    per_machine = min(max(this_machine(count_gpus=False).cores // CORES_PER_PROCESS, 1), MOST_PROCESSES)
    online = rollout.agent.mode == ONLINE
    count = 1 if online else rollout.agent.num_workers or trainer.nnodes * per_machine
    return [str(logs / f"episodes-{index}.log") for index in range(count)]


def check_episodes(subject: Subject, findings: Findings) -> None:
    """Add errors about four things: a chat template whose turns cannot be continued exactly; files of environments and
    tools; prompts too long with the schemas of the tools; unreadable calls."""
    config, tokenizer, datasets = subject
    section, data, trainer = config.actor_rollout_ref, config.data, config.trainer
    rollout, model, multi_turn = section.rollout, section.model, section.rollout.multi_turn
    settings, continued = environment_settings(section), continues_rollouts(trainer.v1, rollout)
    uses_tools = settings.has_tools and choice_of({}, settings) == Choice("tools", TOOL_AGENT)
    with findings.gathered():
        limits = episode_limits(rollout, data.max_prompt_length, pausable=continued)
        formats = _formats(model, multi_turn, data)
        kit = EpisodeTools.of(tokenizer, end_tokens(model.path, tokenizer), limits, **formats)
        if differences := kit.dialogue.check(multi_turn.tokenization_sanity_check_mode, tools=uses_tools):
            raise ConfigError(
                f"{MODE}={multi_turn.tokenization_sanity_check_mode}: {'; '.join(differences)}",
                fix=f"see hybridrl doctor template {model.path}; set {TEMPLATE}, or {MODE}=disable",
            )
    with findings.gathered():
        agents_of(rollout, trainer.nnodes, "", needs_reward=uses_built_in(config.reward))
    if continued:
        check_continued(rollout, findings)
    with findings.gathered():
        rows = (rows.without_pixels(index).columns for rows in datasets.values() for index in range(len(rows)))
        runners = check_environments(settings, rows)
        if any(data.most_pictures for data in datasets.values()):
            _check_pictures(runners, data.apply_chat_template_kwargs)
    if uses_tools and not findings.errors:
        with findings.gathered():
            _check_lengths(data.max_prompt_length, kit.dialogue, settings, datasets)
    if not findings.errors:
        with findings.gathered():
            _check_format(multi_turn.format, kit, runners)


def _applies(subject: Subject) -> bool:
    environments = {name for rows in subject.datasets.values() for name in rows.environments}
    return runs_episodes(subject.config.actor_rollout_ref.rollout, environments)


TRIAL = Trial(MULTI_TURN, _applies, check_episodes)


def _check_pictures(runners: Sequence[Environment | AgentLoop], arguments: Mapping[str, Any]) -> None:
    """Reject what cannot show the pictures of rows in conversations of several turns."""
    if any(isinstance(runner, AgentLoop) for runner in runners):
        cause = "rows have pictures, and a row names an agent loop, which reads text alone"
        raise ConfigError(cause, fix=f"name {TOOL_AGENT} in agent_name, or an environment in {ENVIRONMENT}")
    if arguments.get(NUMBERS):
        cause = f"{ARGUMENTS}.{NUMBERS}=true numbers the pictures of a prompt, and later turns would begin again at 1"
        raise ConfigError(cause, fix="leave it out", keys=ARGUMENTS)


def _check_format(format: str, kit: EpisodeTools, runners: Sequence[Environment | AgentLoop]) -> None:
    """Reject calls that these environments and loops cannot read. Loops may have a parser of their own, or use one
    registered by a file."""
    environments = any(getattr(runner, "tools", ()) for runner in runners if not isinstance(runner, AgentLoop))
    loops = any(runner.reads_configured_format for runner in runners if isinstance(runner, AgentLoop))
    if load(VERL).is_registered(format):
        if environments:
            cause = f"{FORMAT}={format} is a parser of a file, which only agent loops use"
            raise ConfigError(cause, fix=f"name a loop in agent_name of every row, or set {FORMAT}=auto", keys=FORMAT)
    elif environments or loops or format != "auto":
        kit.parser()


def warn_of_unread_fields(rollout: RolloutConfig, datasets: Mapping[str, PromptDataset]) -> None:
    """Name the fields of rows that their episodes do not read."""
    settings = EnvironmentSettings(rollout.multi_turn, rollout.agent)
    for key, data in datasets.items():
        unread, fix = data.fields, f"configure tools or an environment below {MULTI_TURN}, or name one in agent_name"
        if runs_episodes(rollout, data.environments):
            only_tools = choice_of({}, settings) == Choice("tools", TOOL_AGENT)
            only_tools &= not rollout.multi_turn.interaction_config_path
            unread = unread & {"interaction_kwargs"} if only_tools else set()
            fix = f"set {MULTI_TURN}.interaction_config_path"
        if unread:
            logger.warning("%s: rows have %s, which nothing reads; %s", key, ", ".join(sorted(unread)), fix)


def check_continued(rollout: RolloutConfig, findings: Findings) -> None:
    """Reject settings that conflict with episodes outliving a step."""
    modes = "set trainer.v1.trainer_mode=sync and over_sample_rate=0"
    if rollout.full_determinism:
        cause = f"{FULL} does not go with episodes of several turns that outlive a step: when environments respond "
        findings.error("conflict", f"{cause}decides what the engines have in a batch", f"set {FULL}=false", keys=FULL)
    if rollout.agent.mode == ONLINE:
        cause = (
            f"{AGENT}.mode=online: agents outside the run would wait for an episode that outlives a step, and those "
        )
        findings.error("conflict", f"{cause}of the validation for them", modes, keys=f"{AGENT}.mode")


def _check_lengths(
    limit: int, dialogue: Dialogue, settings: EnvironmentSettings, datasets: Mapping[str, PromptDataset]
) -> None:
    """Reject a chat template that does not show the tools to the model, and prompts too long with their schemas."""
    schemas = [tool.schema for tool in load_tools(settings).values()]
    for key, data in datasets.items():
        chat = as_chat(data.without_pixels(0).messages)
        added = len(dialogue.start(chat, schemas).ids) - len(dialogue.start(chat).ids)
        if not added and settings.multi_turn.tokenization_sanity_check_mode != "disable":
            raise ConfigError(
                f"{MULTI_TURN}: the chat template does not show the tools to the model",
                fix=f"set {TEMPLATE}, or {MODE}=disable if the prompts describe them",
            )
        longest = int(data.lengths.max()) + added
        if longest > limit:
            count = int((data.lengths + added > limit).sum())
            raise ConfigError(
                f"data.max_prompt_length={limit}: {count} of {len(data)} prompts of {key} are longer with the schemas "
                f"of the tools, which take {added} tokens",
                fix=f"set data.max_prompt_length={longest}",
            )
