"""The evaluation of one model: its questions, stored samples, sampling and scoring of the others, and results."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

from hybridrl import plugins
from hybridrl.agents.endpoint.episodes import load_episode_files, runs_episodes, start_episodes
from hybridrl.agents.environments.conversations import Conversations
from hybridrl.checkpoint.resume import code_fingerprint, model_fingerprint, sample_hash
from hybridrl.config import EvaluationConfig
from hybridrl.config.compose import as_yaml, save_config
from hybridrl.config.custom_code import import_libraries, publish_own_keys
from hybridrl.config.findings import Findings
from hybridrl.config.schema import ModelConfig, TrainerConfig
from hybridrl.config.schema_parts import RolloutConfig
from hybridrl.core.carried import PICTURE_DIGEST
from hybridrl.core.cluster import Group, RaySession
from hybridrl.core.cluster.group import control_limit
from hybridrl.core.experience.episodes import EpisodeRunner
from hybridrl.core.experience.trajectory import Episode, EpisodeRequest
from hybridrl.core.pictures import PictureStore, in_parts
from hybridrl.core.rollout import RolloutClient, Sampling
from hybridrl.core.rollout.client import ServerHandle
from hybridrl.core.rollout.fleet import RolloutFleet
from hybridrl.data.pictures import PictureFault, in_threads
from hybridrl.data.processor import PictureReader, picture_reader
from hybridrl.data.prompts import Prompt, PromptDataset, Prompts, load_prompts, read_prompts
from hybridrl.data.tokenizer import end_tokens
from hybridrl.evaluation.config import with_model
from hybridrl.evaluation.plan import Origin, PlannedResponse, collect_questions, counts, plan, reject_large_k
from hybridrl.evaluation.results import write_results
from hybridrl.evaluation.samples import SAMPLES, EvaluationProgress, Sample, SampleFile
from hybridrl.evaluation.scoring import (
    REWARD_LOG,
    Endpoint,
    connect,
    episode_sample,
    reward_digest,
    sample_remotely,
    score_again,
    write_responses,
)
from hybridrl.evaluation.targets import Target
from hybridrl.rewards.actors import open_scorer_pool
from hybridrl.rewards.load import check_data_sources, unit_of, uses_built_in
from hybridrl.rewards.rescoring import Rescorer
from hybridrl.rewards.score import Shaping
from hybridrl.runs.models import limit_pictures, reject_pictures
from hybridrl.runs.prepare import (
    decoder_elsewhere,
    model_tokenizer,
    reject_damaged_weights,
    reject_hub_model,
    reject_unknown_tokens,
    reject_unusable_overrides,
    tokenizer_elsewhere,
)
from hybridrl.runs.reward_trial import reject_failing_reward
from hybridrl.runs.settings import engine_fingerprint
from hybridrl.runs.setup import Sessions, open_directory
from hybridrl.runs.trials import Subject, run_trials
from hybridrl.tracking.console import info, stage

Merge = Callable[[str], str]  # merges shards or an adapter into a Hugging Face directory; returns other paths unchanged
FILES_KEY = "eval.files"


@dataclass(frozen=True)
class Evaluated:
    """One model's evaluation: its directory, samples and numbers."""

    name: str
    directory: Path
    samples: list[Sample]
    results: dict[str, Any]
    is_new: bool = True  # False: it was read from files

    @property
    def datasets(self) -> dict[str, Any]:
        return self.results["datasets"]


class ModelEvaluation:
    """The evaluation of one model. The constructor loads and checks everything that works without a device."""

    def __init__(self, config: EvaluationConfig, target: Target) -> None:
        self.target = target
        self.config = config if target.is_address else with_model(config, target.whole_path, target.key)
        self.endpoint: Endpoint | None = None
        if target.is_address:
            self.endpoint = connect(target.path, config.eval.served_model, config.eval.concurrency, target.key)
        publish_own_keys(config.own)
        self.datasets: dict[str, PromptDataset | Prompts] = {}
        self.tokenizer, self.reader = None, None
        findings = Findings()
        load_episode_files(config, findings)
        findings.close()
        with findings.gathered():
            prompts = self._load()
        findings.close()
        self.questions = collect_questions(prompts)
        self.sources = {question.prompt.data_source for question in self.questions}
        environments = {name for question in self.questions for name in question.environments}
        self.runs_episodes = runs_episodes(self.config.actor_rollout_ref.rollout, environments)
        self.function_scores = not (self.runs_episodes and uses_built_in(config.reward))
        self.subject = Subject(self.config, self.tokenizer, self.datasets)
        if not self.target.is_address:
            run_trials(self.subject, findings)
            with findings.gathered():
                read = [rows for rows in self.datasets.values() if isinstance(rows, PromptDataset)]
                rollout = self.config.actor_rollout_ref.rollout
                reject_pictures(limit_pictures(rollout, read, episodes=self.runs_episodes) or ())
        elif self.runs_episodes:
            cause = f"{self.target.key}={self.target.path}: rows with environments or tools need a model of files"
            findings.error("conflict", cause, "serve nothing, and name the model's directory", keys=self.target.key)
        if self.function_scores and uses_built_in(config.reward):
            with findings.gathered():
                check_data_sources(self.sources, config.reward.name)
        findings.close()
        model = self.config.actor_rollout_ref.model.path
        stop_ids = () if self.tokenizer is None else end_tokens(model, self.tokenizer)
        self.sampling = Sampling.of_validation(self.config.actor_rollout_ref.rollout, stop_ids)
        self.counts = counts(self.questions, config.eval.n, self.sampling.temperature)
        greedy = config.eval.greedy and self.sampling.temperature > 0
        self.greedy = replace(self.sampling, temperature=0.0, top_p=1.0, top_k=-1) if greedy else None
        reject_large_k(config.eval.k, max(self.counts.values()))

    def _load(self) -> dict[str, Sequence[Prompt]]:
        """Load the rows. For a local model also load the tokenizer and check files; an address needs no token ids."""
        config, data, model = self.config, self.config.data, self.config.actor_rollout_ref.model
        options = {"max_samples": data.val_max_samples, "shuffle": data.validation_shuffle, "key": FILES_KEY}
        options |= {"needs_truth": uses_built_in(config.reward)}
        load = partial(read_prompts, config=data, **options)
        if not self.target.is_address:
            import_libraries(model.external_lib)
            section = self.config.actor_rollout_ref
            reject_hub_model(model, self.target.key, section.rollout, config.trainer.device)
            reject_unusable_overrides(model, "actor_rollout_ref.model.override_config")
            reject_damaged_weights(model, self.target.key)
            self.tokenizer = model_tokenizer(data, model, self.target.key)
            options |= {"tokenizer": self.tokenizer, "custom_keys": config.own.get("data")}
            pictures = picture_reader(data, model, self.tokenizer)
            self.reader = pictures if isinstance(pictures, PictureReader) else None
            load = partial(load_prompts, config=data, pictures=pictures, **options)
        self.datasets |= {file: load([file]) for file in config.eval.files}
        if not self.target.is_address:
            reject_unknown_tokens(model, self.target.key, *self.datasets.values())
        # Pixels are made once for the digests, and once more when the engines are there.
        return {file: [replace(prompt, pictures=()) for prompt in rows] for file, rows in self.datasets.items()}

    @cached_property
    def policy(self) -> str:
        """The fingerprint of the model and of its sampling, without the requests."""
        if self.endpoint is not None:
            arguments = self.config.data.apply_chat_template_kwargs
            return sample_hash(self.endpoint.address, self.endpoint.model, *([arguments] if arguments else []))
        section, path = self.config.actor_rollout_ref, self.target.path
        models = dict.fromkeys((path, section.model.path))  # an adapter and its base
        weights = [model_fingerprint(model) for model in models]
        engine = engine_fingerprint(section.model, section.rollout)
        episodes = [asdict(section.rollout.multi_turn), asdict(section.rollout.agent)] if self.runs_episodes else []
        return sample_hash(weights, engine, episodes)

    def sampling_facts(self) -> dict[str, Any]:
        names = ("temperature", "top_p", "top_k", "max_tokens", "stop")
        facts = {name: vars(self.sampling)[name] for name in names}
        return facts | {"preset": self.config.eval.preset, "seed": self.config.eval.seed}

    @property
    def directory(self) -> Path:
        """The directory of the samples and results."""
        settings = self.config.eval
        if settings.output_dir:
            return Path(settings.output_dir).expanduser() / self.target.name
        data = [settings.files, asdict(self.config.data)["apply_chat_template_kwargs"], self.runs_episodes]
        name = f"{self.target.name}-{sample_hash(self.sampling_facts(), data)[:8]}"
        return Path(self.config.trainer.default_local_dir).expanduser() / "eval" / name

    def planned(self) -> list[PlannedResponse]:
        reward = reward_digest(self.config.reward) if self.function_scores else ""
        origin = Origin(self.policy, reward, whole_rows=self.runs_episodes)
        return plan(self.questions, self.counts, self.sampling, self.greedy, self.config.eval.seed, origin)

    def run(self, sessions: Sessions, merge: Merge, directory: Path) -> Evaluated:
        """Sample and score the responses that are not stored yet, and write the results."""
        open_directory(directory, "eval.output_dir")
        planned, began = self.planned(), time.monotonic()
        responses = " + ".join(f"{name}: {count} per question" for name, count in self.counts.items())
        info(f"{self.target.name}: {len(self.questions)} questions, {responses}, {len(planned)} responses")
        with SampleFile(directory / SAMPLES, resume=self.config.eval.resume) as file:
            save_config(as_yaml(self.config), directory / "config.yaml")
            relabel(planned, file)
            missing = [item for item in planned if not file.has(item.key)]
            stored = [item for item in planned if file.has(item.key)]
            stale = [item for item in stored if file.is_stale(item.key, item.reward)]
            if unit_of(self.config.reward) == "group":  # a score depends on all responses to the question
                parts = {item.question.number for item in stored} & {item.question.number for item in missing + stale}
                stale = [item for item in planned if item.question.number in parts]
            if stored:
                again = f", {len(stale)} of them to be scored again" * bool(stale)
                info(f"{len(stored)} responses are stored in {file.path}{again}")
            if self.function_scores and (stale or missing):
                reject_failing_reward(self.subject, directory / REWARD_LOG)
            if missing:
                self._sample_missing(missing, file, sessions, merge, directory)
            if stale:
                ended = [(item, file.samples[item.key]) for item in stale if file.has(item.key)]
                with self._rescorer(directory) as rescorer:
                    score_again(rescorer, ended, file)
            samples = [file.samples[item.key] for item in planned if item.key in file.samples]
        facts = self._facts(planned, missing, samples, time.monotonic() - began)
        all_greedy = self.sampling.temperature == 0
        results = write_results(directory, samples, facts, self.config.eval.k, all_greedy=all_greedy)
        write_responses(directory, self.questions, samples)
        return Evaluated(self.target.name, directory, samples, results)

    def _sample_missing(
        self, missing: list[PlannedResponse], file: SampleFile, sessions: Sessions, merge: Merge, directory: Path
    ) -> None:
        """Sample and score the missing responses; each sample is written to the file when it has its score."""
        with EvaluationProgress(len(missing)) as progress:

            def keep(sample: Sample) -> None:
                file.append(sample)
                progress(sample)

            try:
                if self.endpoint is None:
                    with self.runner(sessions, merge, directory) as runner:
                        sample_here(runner, missing, keep, self.reader)
                else:
                    with self._rescorer(directory) as rescorer:
                        arguments = self.config.data.apply_chat_template_kwargs
                        asyncio.run(sample_remotely(self.endpoint, missing, rescorer, keep, arguments))
            except KeyboardInterrupt:
                info(f"{progress.done} of {len(missing)} responses are stored; the same command resumes")
                raise

    def _facts(
        self, planned: list[PlannedResponse], missing: list[PlannedResponse], samples: list[Sample], seconds: float
    ) -> dict:
        """Return the entries of results.json other than the numbers."""
        keys = {item.key for item in missing}
        new = [sample for sample in samples if sample.key in keys]
        tokens = sum(sample.tokens for sample in new)
        sampling_seconds = max((sample.seconds for sample in new), default=0.0)
        template = "" if self.tokenizer is None else sample_hash(str(self.tokenizer.chat_template))
        path = self.endpoint.model if self.endpoint is not None else self.target.path
        return {
            "model": {"name": self.target.name, "path": self.target.path, "served": path, "fingerprint": self.policy},
            "files": self.config.eval.files,
            "sampling": self.sampling_facts(),
            "n": self.counts,
            "chat_template": template,
            "versions": code_fingerprint(),
            "responses": len(planned),
            "generated": len(missing),
            "seconds": seconds,
            "generated_tokens": tokens,
            "tokens_per_second": tokens / sampling_seconds if sampling_seconds else None,
        }

    def _rescorer(self, directory: Path) -> Rescorer:
        return Rescorer(self.config.reward, self.sources, directory / REWARD_LOG, self.tokenizer)

    @contextmanager
    def runner(self, sessions: Sessions, merge: Merge, directory: Path) -> Iterator[EpisodeRunner]:
        """Start scorers, engines and processes of episodes."""
        config, logs = self.config, directory / "logs"
        model = config.actor_rollout_ref.model
        load, decoder = (partial(call, config.data, model) for call in (tokenizer_elsewhere, decoder_elsewhere))
        with ExitStack() as stack:
            session = stack.enter_context(sessions.open(config.trainer, config.ray_kwargs.ray_init, config.own))
            scorers = stack.enter_context(open_scorer_pool(session, config.reward, logs, self.sources, decoder))
            episodes = None
            if self.runs_episodes:
                ends = end_tokens(config.actor_rollout_ref.model.path, self.tokenizer)
                episodes = stack.enter_context(start_episodes(config, session, load, ends, logs))
            section = config.actor_rollout_ref
            model = replace(section.model, path=merge(self.target.path))
            client = stack.enter_context(started_engines(model, section.rollout, config.trainer, session, logs))
            store = PictureStore(Group.share)
            if self.reader is not None:
                self.reader.store = store
                client.handles = store.handles
            scorers.wait_until_loaded()
            if episodes is not None:
                episodes.wait_until_ready(config.trainer.startup_timeout)
            yield EpisodeRunner(
                client,
                scorers,
                config.eval.seed,
                Shaping.of(config.reward),
                episodes and Conversations(episodes, client, config.eval.seed, store),
                function_scores=not uses_built_in(config.reward),
                add_environment_reward=config.reward.add_environment_reward,
            )


def relabel(planned: Sequence[PlannedResponse], file: SampleFile) -> None:
    """Give stored samples the current dataset and id of their question: samples are looked up by content."""
    for item in planned:
        names = {"dataset": item.question.dataset, "id": item.question.id}
        sample = file.samples.get(item.key)
        if sample and names != {"dataset": sample.dataset, "id": sample.id}:
            file.append(replace(sample, **names))


def sample_here(
    runner: EpisodeRunner,
    missing: Sequence[PlannedResponse],
    keep: Callable[[Sample], None],
    reader: PictureReader | None = None,
) -> None:
    """Sample and score responses with the engines of a runner; call `keep` with each sample that has its score."""
    planned = {("", item.question.number, item.sample): item for item in missing}
    prompts = {item.question.number: item.question.prompt for item in missing}
    readable = prompts.values() if reader is None else in_threads(partial(_with_pixels, reader), prompts.values())
    numbers, began = iter(prompts), time.monotonic()

    def finished(episode: Episode) -> None:
        keep(episode_sample(planned[episode.key], episode, time.monotonic() - began))

    for part in in_parts(readable):
        together = dict(zip(islice(numbers, len(part)), part, strict=True))
        requests = [
            EpisodeRequest(together[number], number, number, item.sample, question.seed_key, item.sampling)
            for item in missing
            for question, number in [(item.question, item.question.number)]
            if number in together
        ]
        runner.run_requests(requests, finished=finished)
        del part, together, requests  # else their pixels are in memory with those of the next part


def _with_pixels(reader: PictureReader, prompt: Prompt) -> Prompt:
    if not prompt.encoded or prompt.fault:
        return prompt
    try:
        pictures = reader.again(prompt.encoded.values(), prompt.carried[PICTURE_DIGEST].tolist())
    except PictureFault as fault:
        return replace(prompt, fault=str(fault))
    return replace(prompt, pictures=pictures)


@contextmanager
def started_engines(
    model: ModelConfig, rollout: RolloutConfig, trainer: TrainerConfig, session: RaySession, logs: Path
) -> Iterator[RolloutClient]:
    """Start an engine per tensor-parallel group of devices, and yield their client. Engines load weights from files,
    also after a restart. They never sleep, since no trainer uses their devices."""
    limits = {"startup_timeout": trainer.startup_timeout, "timeout": control_limit(trainer.step_timeout)}
    fleet = RolloutFleet(session, plugins.load(f"engine.{rollout.name}"), model, rollout, logs=logs, **limits)
    info(f"logs of all processes: {logs}")

    def revive(index: int) -> ServerHandle:
        fleet.rebuild(index)
        client.capacity = fleet.rollout.max_num_seqs  # less, if it ran out of memory
        return fleet.handle(index)

    with stage(f"starting {len(fleet)} engine{'s' * (len(fleet) > 1)}"):
        fleet.finish_start(fleet.start())
    client = fleet.client(revive)
    client.capacity = fleet.rollout.max_num_seqs
    yield client
    fleet.kill(range(len(fleet)))
