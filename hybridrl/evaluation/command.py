"""All that one evaluation command does: each of its models, stored responses, comparisons, and what is printed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.resume import digest
from hybridrl.checkpoint.store import step_directories
from hybridrl.config import ConfigError, EvaluationConfig
from hybridrl.config.compose import as_yaml, save_config
from hybridrl.config.custom_code import publish_own_keys
from hybridrl.config.schema_parts import EvalConfig
from hybridrl.core.rollout import Sampling
from hybridrl.data.prompts import read_responses
from hybridrl.evaluation.config import describe_sampling
from hybridrl.evaluation.model import Evaluated, Merge, ModelEvaluation, relabel
from hybridrl.evaluation.plan import (
    KEY,
    Origin,
    Question,
    collect_questions,
    find_targets,
    plan,
    reject_large_k,
    with_unique_names,
)
from hybridrl.evaluation.results import (
    COMPARED,
    LEGEND,
    add_to_results,
    changes,
    columns,
    compared_rows,
    comparisons,
    corrected,
    markdown,
    publish_text,
    read_results,
    reject_nothing_in_common,
    rich_table,
    rows,
    selection_biases,
    write_results,
)
from hybridrl.evaluation.samples import RESULTS, SAMPLES, TABLE, Sample, SampleFile, by_dataset
from hybridrl.evaluation.scoring import REWARD_LOG, Rescorer, blank_sample, reward_digest
from hybridrl.rewards.load import check_data_sources, uses_built_in
from hybridrl.runs.reward_trial import reject_failing_reward
from hybridrl.runs.setup import Sessions, open_directory
from hybridrl.tracking.console import Terminal, console, info, on_terminal, warn

COMPARE_KEY, MODEL_KEY = "eval.compare", "actor_rollout_ref.model.path"
LOG_WIDTH = 240
STORED = Sampling(0, ())  # how stored responses were sampled is not known


def evaluate(config: EvaluationConfig, sessions: Sessions, merge: Merge) -> float:
    """Evaluate the models that the configuration names, print the tables, and return the share of faults."""
    settings, keep_best, other = config.eval, config.trainer.keep_best_ckpt, None
    baseline = earlier(settings)
    if settings.responses:
        return report([score_stored(config, baseline)], settings, baseline)
    named = settings.models == [config.actor_rollout_ref.model.path]
    targets = find_targets(settings.models, keep_best, MODEL_KEY if named else KEY)
    if settings.compare and not baseline:
        other, *more = find_targets([settings.compare], keep_best, COMPARE_KEY)
        if more:
            cause = f"{COMPARE_KEY}={settings.compare} names {len(more) + 1} models"
            raise ConfigError(cause, fix="name one of them")
    targets = with_unique_names([*targets, *([other] if other else [])])
    loaded = [ModelEvaluation(config, one) for one in targets]
    if baseline:
        reject_nothing_in_common(loaded[0].questions, baseline.samples, f"{COMPARE_KEY}={settings.compare}")
    info(describe_sampling(settings, config.actor_rollout_ref.rollout))
    evaluated = []
    for one in loaded:
        evaluated.append(one.run(sessions, merge, one.directory))
        write_table(evaluated[-1], settings.k)
    baseline = evaluated.pop() if other else baseline
    return report(evaluated, settings, baseline)


def earlier(settings: EvalConfig) -> Evaluated | None:
    """Return the evaluation whose directory `eval.compare` names, with the samples that its results are of. Raises
    ConfigError if it is not complete, or if stored responses are to be compared with anything else."""
    if settings.compare is None:
        return None
    directory, setting = Path(settings.compare).expanduser(), f"{COMPARE_KEY}={settings.compare}"
    if (directory / RESULTS).is_file() or (directory / SAMPLES).is_file():
        results, samples = read_results(directory, setting)
        return Evaluated(results["model"]["name"], directory, samples, results, is_new=False)
    below = [str(one.parent) for one in sorted(directory.glob(f"*/{RESULTS}"))]
    if below and not step_directories(directory):
        raise ConfigError(f"{setting} has evaluations below it", fix=f"choose {' | '.join(below[:8])}")
    if settings.responses:
        fix = f"name a directory with {RESULTS}; a model is not sampled for stored responses"
        raise ConfigError(f"{setting} is not the directory of an evaluation", fix=fix)
    return None


# -- stored responses --------------------------------------------------------------------------------------------------


def score_stored(config: EvaluationConfig, baseline: Evaluated | None = None) -> Evaluated:
    """Score responses that files hold, without an engine and without Ray."""
    settings, key = config.eval, "eval.responses"
    publish_own_keys(config.own)
    read = partial(read_responses, config=config.data, key=key, truth_key=settings.reward_model_key)
    datasets = {file: read([file]) for file in settings.responses}
    questions = collect_questions(datasets)
    if uses_built_in(config.reward):
        check_data_sources({one.prompt.data_source for one in questions})
    responses = [_responses(question, settings.response_key) for question in questions]
    reject_large_k(settings.k, max(map(len, responses)), "leave it out")
    if baseline:
        reject_nothing_in_common(questions, baseline.samples, f"{COMPARE_KEY}={settings.compare}")
    name = Path(settings.responses[0]).stem
    default = Path(config.trainer.default_local_dir).expanduser() / "eval" / f"stored-{name}"
    directory = open_directory(settings.output_dir or default, "eval.output_dir")
    reward, wanted = reward_digest(config.reward), []
    for question, texts in zip(questions, responses, strict=True):
        needed = plan([question], {question.dataset: len(texts)}, STORED, None, 0, Origin(digest(texts), reward))
        wanted += [(one, replace(blank_sample(one), response=text)) for one, text in zip(needed, texts, strict=True)]
    with SampleFile(directory / SAMPLES, resume=settings.resume) as file:
        save_config(as_yaml(config), directory / "config.yaml")
        relabel([one for one, _ in wanted], file)
        missing = [
            pair for pair in wanted if pair[0].key not in file.found or file.is_stale(pair[0].key, pair[0].reward)
        ]
        if missing:
            reject_failing_reward(
                config.reward, config.data.max_response_length, None, datasets, directory / REWARD_LOG
            )
            sources = {one.prompt.data_source for one in questions}
            with Rescorer(config.reward, sources, directory / REWARD_LOG) as rescorer:
                rescorer.score_again(missing, file)
        samples = [file.found[one.key] for one, _ in wanted]
    facts = {"model": {"name": name, "path": ", ".join(settings.responses)}, "files": settings.responses}
    facts["n"] = {dataset: max(one.sample for one in some) + 1 for dataset, some in by_dataset(samples).items()}
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


def test_scores(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the numbers that verl's main_eval prints: the mean score of each row's responses, over the rows."""
    scores: dict[str, dict[str, list[float]]] = {}
    for one in samples:
        if one.score is not None:
            scores.setdefault(one.dataset, {}).setdefault(one.id, []).append(one.score)
    means = {name: [sum(row) / len(row) for row in rows.values()] for name, rows in scores.items()}
    return {f"test_score/{name}": sum(rows) / len(rows) for name, rows in means.items()}


# -- what is printed ---------------------------------------------------------------------------------------------------


def report(evaluated: Sequence[Evaluated], settings: EvalConfig, baseline: Evaluated | None = None) -> float:
    """Write and print the tables of all models and their comparisons; return the largest share of faults."""
    new, ks = [*evaluated, *([baseline] if baseline and baseline.is_new else [])], settings.k
    for one in new:
        write_table(one, ks)
    _show("results", [(one.name, one.datasets) for one in new], partial(columns, ks=ks), rows)
    if baseline:
        _report_comparisons(evaluated, baseline, ks)
    for one in new:
        info(f"samples and results of {one.name}: {one.directory}")
    if settings.responses:
        info(str(test_scores(evaluated[0].samples)))
    for name, bias in selection_biases([one.samples for one in evaluated]).items():
        count = len(evaluated)
        info(
            f"{name}: the best of {count} evaluations of one unchanged model looks at most {100 * bias:.1f} points "
            "better by chance; choose on one set and report on another"
        )
    return max(_explain_faults(one) for one in new)


def _report_comparisons(evaluated: Sequence[Evaluated], baseline: Evaluated, ks: Sequence[int]) -> None:
    """Write and print how each model differs from the one it is compared with."""
    compared = [comparisons(baseline.samples, one.samples) for one in evaluated]
    corrected(compared)
    pairs = [(one.name, comparison) for one, comparison in zip(evaluated, compared, strict=True)]
    names = f"A = {baseline.name}, B = {evaluated[0].name if len(evaluated) == 1 else 'the model of the row'}"
    _show(f"comparison, {names}", pairs, lambda _: [*COMPARED], lambda some, _: compared_rows(some))
    for one, comparison in zip(evaluated, compared, strict=True):
        write_table(one, ks, baseline, comparison)
        _warn_of_differences(baseline, one)
        for dataset, numbers in comparison.items():
            if numbers["other_prompt"]:
                cause = f"{dataset}: {numbers['other_prompt']} questions have the same id and another prompt in"
                warn(f"{cause} {baseline.name} and {one.name}; they are not compared")
        if lines := changes(comparison):
            info("\n".join(f"{one.name}, {line}" for line in lines))


def _explain_faults(one: Evaluated) -> float:
    """Warn of each kind of fault with its first detail; return their share."""
    faults: dict[str, list[Sample]] = {}
    for sample in one.samples:
        if sample.fault is not None:
            faults.setdefault(sample.fault, []).append(sample)
    for fault, some in faults.items():
        first = some[0]
        cause = f"{one.name}: {len(some)} of {len(one.samples)} responses have no score: {fault}, first "
        warn(f"{cause}{first.dataset}/{first.id}: {first.detail or 'no detail'}; see {one.directory / REWARD_LOG}")
    return sum(map(len, faults.values())) / max(len(one.samples), 1)


def write_table(
    one: Evaluated,
    ks: Sequence[int],
    baseline: Evaluated | None = None,
    comparison: Mapping[str, Any] | None = None,
) -> None:
    """Write table.md of a model, with its comparison if there is one, which results.json gets too."""
    names = columns(one.datasets, ks)
    texts = [f"# {one.name}\n", markdown(names, rows(one.datasets, names)), LEGEND + "\n"]
    if "sampling" in one.results:
        facts = {name: value for name, value in one.results["sampling"].items() if value not in (None, (), [])}
        listed = ", ".join(f"{name}={value}" for name, value in facts.items())
        texts.append(f"{one.results['model']['path']}: {listed}, responses per question: {one.results['n']}\n")
    if baseline and comparison:
        texts += [f"## A = {baseline.name}, B = {one.name}\n", markdown(COMPARED, compared_rows(comparison))]
        texts += changes(comparison)
        add_to_results(one.directory, {"comparison": {"a": str(baseline.directory), "datasets": comparison}})
    publish_text(one.directory / TABLE, "\n".join(texts) + "\n")


def _show(title: str, parts: Sequence[tuple[str, Mapping[str, Any]]], name_columns: Any, make_rows: Any) -> None:
    """Print one table for all models, in a log as wide as it is; with several, a column names them."""
    names = name_columns({f"{name} {dataset}": one for name, datasets in parts for dataset, one in datasets.items()})
    cells = [[name, *cells] for name, datasets in parts for cells in make_rows(datasets, names)]
    head = ["model", *names] if len(parts) > 1 else names
    cells = cells if len(parts) > 1 else [line[1:] for line in cells]
    title = title if len(parts) > 1 else f"{parts[0][0]}: {title}"
    wide = console if on_terminal() else Terminal(file=console.file, width=LOG_WIDTH)
    wide.print(rich_table(title, head, cells, wide.width))


def _warn_of_differences(a: Evaluated, b: Evaluated) -> None:
    """Warn if two evaluations sampled differently, so that their difference is not that of the models alone."""
    first, second = (json.loads(json.dumps(one.results.get("sampling", {}), default=str)) for one in (a, b))
    names = [name for name in first if name not in ("seed", "preset") and first[name] != second.get(name, first[name])]
    if names:
        texts = ", ".join(f"{name}: {first[name]} and {second[name]}" for name in names)
        warn(f"{a.name} and {b.name} were sampled differently ({texts})")
