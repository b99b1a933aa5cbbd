"""The evaluation command: its models, stored responses, and comparisons."""

from dataclasses import replace
from pathlib import Path

from hybridrl.checkpoint.resume import sample_hash
from hybridrl.checkpoint.store import step_directories
from hybridrl.config import ConfigError, EvaluationConfig
from hybridrl.config.compose import as_yaml, save_config
from hybridrl.config.custom_code import publish_own_keys
from hybridrl.config.schema_parts import EvalConfig
from hybridrl.core.cluster.failures import typed_errors
from hybridrl.core.rollout import Sampling
from hybridrl.data.prompts import read_responses
from hybridrl.evaluation.config import describe_sampling
from hybridrl.evaluation.model import Evaluated, Merge, ModelEvaluation, relabel
from hybridrl.evaluation.plan import Origin, Question, collect_questions, plan, reject_large_k
from hybridrl.evaluation.results import by_dataset, read_results, reject_nothing_in_common, write_results
from hybridrl.evaluation.samples import SAMPLES, SampleFile
from hybridrl.evaluation.scoring import REWARD_LOG, blank_sample, reward_digest, score_again
from hybridrl.evaluation.tables import report, write_table
from hybridrl.evaluation.targets import KEY, RESULTS, find_targets, with_unique_names
from hybridrl.rewards.load import check_data_sources, unit_of, uses_built_in
from hybridrl.rewards.rescoring import Rescorer
from hybridrl.runs.reward_trial import reject_failing_reward
from hybridrl.runs.setup import Sessions, open_directory
from hybridrl.runs.trials import Subject
from hybridrl.tracking.console import info

COMPARE_KEY, MODEL_KEY = "eval.compare", "actor_rollout_ref.model.path"
STORED = Sampling(0, ())  # stands for the unknown sampling of stored responses


@typed_errors("the evaluation")
def evaluate(config: EvaluationConfig, sessions: Sessions, merge: Merge) -> float:
    """Evaluate the models that the configuration names, print the tables, and return the share of faults."""
    settings, keep_best, other = config.eval, config.trainer.keep_best_ckpt, None
    baseline = earlier(settings)
    if settings.responses:
        return report([score_stored(config, baseline)], settings, baseline)
    named = settings.models == [config.actor_rollout_ref.model.path]
    targets = find_targets(settings.models, keep_best, MODEL_KEY if named else KEY)
    if settings.compare and not baseline:
        other, *others = find_targets([settings.compare], keep_best, COMPARE_KEY)
        if others:
            cause = f"{COMPARE_KEY}={settings.compare} names {len(others) + 1} models"
            raise ConfigError(cause, fix="name one of them")
    targets = with_unique_names([*targets, *([other] if other else [])])
    loaded = [ModelEvaluation(config, target) for target in targets]
    if baseline:
        reject_nothing_in_common(loaded[0].questions, baseline.samples, f"{COMPARE_KEY}={settings.compare}")
    info(describe_sampling(settings, config.actor_rollout_ref.rollout))
    evaluated = []
    for evaluation in loaded:
        evaluated.append(evaluation.run(sessions, merge, evaluation.directory))
        write_table(evaluated[-1], settings.k)
    baseline = evaluated.pop() if other else baseline
    return report(evaluated, settings, baseline)


def earlier(settings: EvalConfig) -> Evaluated | None:
    """Return the evaluation in the directory `eval.compare`, with the samples of its results. Raises ConfigError if it
    is not complete, or if stored responses are compared with anything but an evaluation."""
    if settings.compare is None:
        return None
    directory, setting = Path(settings.compare).expanduser(), f"{COMPARE_KEY}={settings.compare}"
    if (directory / RESULTS).is_file() or (directory / SAMPLES).is_file():
        results, samples = read_results(directory, setting)
        return Evaluated(results["model"]["name"], directory, samples, results, is_new=False)
    below = [str(file.parent) for file in sorted(directory.glob(f"*/{RESULTS}"))]
    if below and not step_directories(directory):
        raise ConfigError(f"{setting} has evaluations below it", fix=f"choose {' | '.join(below[:8])}")
    if settings.responses:
        fix = f"name a directory with {RESULTS}; a model is not sampled for stored responses"
        raise ConfigError(f"{setting} is not the directory of an evaluation", fix=fix)
    return None


# -- stored responses --------------------------------------------------------------------------------------------------


def score_stored(config: EvaluationConfig, baseline: Evaluated | None = None) -> Evaluated:
    """Score responses from files, without an engine and without Ray."""
    settings, key = config.eval, "eval.responses"
    publish_own_keys(config.own)
    options = {"truth_key": settings.reward_model_key, "needs_truth": (built_in := uses_built_in(config.reward))}
    datasets = {file: read_responses([file], config.data, key=key, **options) for file in settings.responses}
    questions = collect_questions(datasets)
    if built_in:
        check_data_sources({question.prompt.data_source for question in questions}, config.reward.name)
    responses = [_responses(question, settings.response_key) for question in questions]
    reject_large_k(settings.k, max(map(len, responses)), "leave it out")
    if baseline:
        reject_nothing_in_common(questions, baseline.samples, f"{COMPARE_KEY}={settings.compare}")
    name = Path(settings.responses[0]).stem
    default = Path(config.trainer.default_local_dir).expanduser() / "eval" / f"stored-{name}"
    directory = open_directory(settings.output_dir or default, "eval.output_dir")
    reward, planned = reward_digest(config.reward), []
    for question, texts in zip(questions, responses, strict=True):
        needed = plan([question], {question.dataset: len(texts)}, STORED, None, 0, Origin(sample_hash(texts), reward))
        filled = [replace(blank_sample(item), response=text) for item, text in zip(needed, texts, strict=True)]
        planned += zip(needed, filled, strict=True)
    with SampleFile(directory / SAMPLES, resume=settings.resume) as file:
        save_config(as_yaml(config), directory / "config.yaml")
        relabel([item for item, _ in planned], file)
        missing = [
            pair for pair in planned if pair[0].key not in file.samples or file.is_stale(pair[0].key, pair[0].reward)
        ]
        if unit_of(config.reward) == "group":  # a score depends on all responses to the question
            parts = {item.question.number for item, _ in missing}
            missing = [pair for pair in planned if pair[0].question.number in parts]
        if missing:
            reject_failing_reward(Subject(config, datasets=datasets), directory / REWARD_LOG)
            sources = {question.prompt.data_source for question in questions}
            with Rescorer(config.reward, sources, directory / REWARD_LOG) as rescorer:
                score_again(rescorer, missing, file)
        samples = [file.samples[item.key] for item, _ in planned]
    facts = {"model": {"name": name, "path": ", ".join(settings.responses)}, "files": settings.responses}
    facts["n"] = {dataset: max(sample.sample for sample in group) + 1 for dataset, group in by_dataset(samples).items()}
    return Evaluated(name, directory, samples, write_results(directory, samples, facts, settings.k))


def _responses(question: Question, column: str) -> list[str]:
    """Return the stored responses of a row: one text, or a list of them."""
    columns = question.prompt.columns
    value = columns.get(column)
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []
    if not texts or not all(isinstance(text, str) for text in texts):
        cause = f"eval.response_key={column}: row {question.prompt.row} has no responses there"
        raise ConfigError(cause, fix=f"its columns are {', '.join(columns)}")
    return texts
