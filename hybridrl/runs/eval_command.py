"""All that one evaluation command does: each of its models, stored responses, comparisons, and what is printed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console

from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.compose import save_config
from hybridrl.config.custom_code import publish_own_keys
from hybridrl.config.load_eval import describe_sampling
from hybridrl.data.prompts import read_prompts
from hybridrl.evaluation.plan import Origin, Question, collect_questions, digest, plan
from hybridrl.evaluation.results import (
    RESULTS,
    SAMPLES,
    TABLE,
    add_to_results,
    comparisons,
    corrected,
    publish_text,
    selection_biases,
    write_results,
)
from hybridrl.evaluation.samples import Sample, SampleFile, by_dataset, read_samples
from hybridrl.evaluation.tables import (
    COMPARED,
    LEGEND,
    changes,
    columns,
    compared_rows,
    markdown,
    rich_table,
    rows,
)
from hybridrl.rewards.built_in import check_data_sources
from hybridrl.rewards.load import uses_built_in
from hybridrl.rollout import Sampling
from hybridrl.runs.eval_models import Target, find_targets
from hybridrl.runs.eval_scoring import Rescorer, blank_sample, reward_digest
from hybridrl.runs.evaluate import Evaluated, Merge, ModelEvaluation
from hybridrl.runs.setup import Sessions, open_directory
from hybridrl.tracking.console import console, info, on_terminal, warn

COMPARE_KEY = "eval.compare"
LOG_WIDTH = 240
STORED = Sampling(0, ())  # how stored responses were sampled is not known


def evaluate(config: PPOConfig, sessions: Sessions, merge: Merge) -> float:
    """Evaluate the models that the configuration names, print the tables, and return the share of faults."""
    baseline = earlier(config)
    if config.eval.responses:
        return report([score_stored(config)], config, baseline)
    targets = find_targets(config.eval.models, config.trainer.keep_best_ckpt)
    other = None if baseline else compared_model(config)
    loaded = [ModelEvaluation(config, one) for one in (*targets, *([other] if other else []))]
    info(describe_sampling(loaded[0].config))
    evaluated = [one.run(sessions, merge, one.directory(len(loaded) > 1)) for one in loaded]
    baseline = evaluated.pop() if other else baseline
    return report(evaluated, config, baseline)


def earlier(config: PPOConfig) -> Evaluated | None:
    """Return the evaluation whose directory `eval.compare` names, with the samples that its results are of."""
    directory = Path(config.eval.compare or "").expanduser()
    if config.eval.compare is None or not (directory / RESULTS).is_file():
        return None
    results = json.loads((directory / RESULTS).read_text(encoding="utf-8"))
    n, origins, stored = results["n"], results["origins"], read_samples(directory / SAMPLES)
    samples = [one for one in stored if one.origin in origins and one.sample < n.get(one.dataset, 0)]
    return Evaluated(results["model"]["name"], directory, samples, results, is_new=False)


def compared_model(config: PPOConfig) -> Target | None:
    """Return the model that `eval.compare` names."""
    name = config.eval.compare
    if name is None:
        return None
    targets = find_targets([name], config.trainer.keep_best_ckpt, COMPARE_KEY)
    if len(targets) > 1:
        raise ConfigError(f"{COMPARE_KEY}={name} names {len(targets)} models", fix="name one of them")
    return targets[0]


# -- stored responses --------------------------------------------------------------------------------------------------


def score_stored(config: PPOConfig) -> Evaluated:
    """Score responses that files hold, without an engine and without Ray."""
    settings, data, key = config.eval, config.data, "eval.responses"
    publish_own_keys(config.own)
    read = partial(read_prompts, config=data, key=key, truth_key=settings.reward_model_key)
    questions = collect_questions({file: read([file]) for file in settings.responses})
    sources = {one.prompt.data_source for one in questions}
    if uses_built_in(config.reward):
        check_data_sources(sources)
    name = Path(settings.responses[0]).stem
    default = Path(config.trainer.default_local_dir).expanduser() / "eval" / f"stored-{name}"
    directory = open_directory(settings.output_dir or default, "eval.output_dir")
    save_config(config, directory / "config.yaml")
    reward, wanted = reward_digest(config.reward), []
    responses = [_responses(question, settings.response_key) for question in questions]
    origin = digest(responses)
    for question, texts in zip(questions, responses, strict=True):
        needed = plan([question], {question.dataset: len(texts)}, STORED, None, 0, Origin(digest(texts), reward))
        needed = [replace(one, origin=origin) for one in needed]
        wanted += [(one, replace(blank_sample(one), response=text)) for one, text in zip(needed, texts, strict=True)]
    with SampleFile(directory / SAMPLES, resume=settings.resume) as file:
        known = {one.key: file.found.get(one.key) for one, _ in wanted}
        missing = [
            (one, sample) for one, sample in wanted if known[one.key] is None or file.is_stale(one.key, one.reward)
        ]
        log = directory / "logs" / "reward.log"
        if missing:
            with Rescorer(config.reward, sources, log) as rescorer:
                rescorer.score_again(missing, file)
        samples = [file.found[one.key] for one, _ in wanted]
    facts = {"model": {"name": name, "path": ", ".join(settings.responses)}, "files": settings.responses}
    facts["origins"] = [origin]
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


def report(evaluated: Sequence[Evaluated], config: PPOConfig, baseline: Evaluated | None = None) -> float:
    """Write and print the tables of all models and their comparisons; return the largest share of faults."""
    compared = [comparisons(one.samples, baseline.samples) for one in evaluated] if baseline else []
    corrected(compared)
    new = [*evaluated, *([baseline] if baseline and baseline.is_new else [])]
    for one, comparison in zip_longest(new, compared, fillvalue={}):
        write_table(one, baseline, comparison)
    _show("results", [(one.name, one.datasets) for one in new], columns, rows)
    if baseline:
        pairs = [(one.name, comparison) for one, comparison in zip(evaluated, compared, strict=True)]
        _show(f"compared with B = {baseline.name}", pairs, lambda _: [*COMPARED], lambda some, _: compared_rows(some))
        for one, comparison in zip(evaluated, compared, strict=True):
            _warn_of_differences(one, baseline)
            info("\n".join(f"{one.name}, {line}" for line in changes(comparison)))
    for one in new:
        info(f"samples and results of {one.name}: {one.directory}")
    if config.eval.responses:
        info(str(test_scores(evaluated[0].samples)))
    for name, bias in selection_biases([one.samples for one in evaluated]).items():
        count = len(evaluated)
        info(
            f"{name}: the best of {count} evaluations of one unchanged model looks {100 * bias:.1f} points better by "
            "chance; choose on one set and report on another"
        )
    counted = [sample for one in evaluated for sample in one.samples]
    return sum(sample.fault is not None for sample in counted) / max(len(counted), 1)


def write_table(one: Evaluated, baseline: Evaluated | None, comparison: Mapping[str, Any]) -> None:
    """Write table.md of a model, with its comparison if there is one, which results.json gets too."""
    names = columns(one.datasets)
    texts = [f"# {one.name}\n", markdown(names, rows(one.datasets, names)), LEGEND + "\n"]
    if "sampling" in one.results:
        facts = {name: value for name, value in one.results["sampling"].items() if value not in (None, (), [])}
        listed = ", ".join(f"{name}={value}" for name, value in facts.items())
        texts.append(f"{one.results['model']['path']}: {listed}, responses per question: {one.results['n']}\n")
    if baseline and comparison:
        texts += [f"## A = {one.name}, B = {baseline.name}\n", markdown(COMPARED, compared_rows(comparison))]
        texts += changes(comparison)
        add_to_results(one.directory, {"comparison": {"b": str(baseline.directory), "datasets": comparison}})
    publish_text(one.directory / TABLE, "\n".join(texts) + "\n")


def _show(title: str, parts: Sequence[tuple[str, Mapping[str, Any]]], name_columns: Any, make_rows: Any) -> None:
    """Print one table for all models, in a log as wide as it is; with several, a column names them."""
    names = name_columns({f"{name} {dataset}": one for name, datasets in parts for dataset, one in datasets.items()})
    cells = [[name, *cells] for name, datasets in parts for cells in make_rows(datasets, names)]
    head = ["model", *names] if len(parts) > 1 else names
    cells = cells if len(parts) > 1 else [line[1:] for line in cells]
    title = title if len(parts) > 1 else f"{parts[0][0]}: {title}"
    wide = console if on_terminal() else Console(file=console.file, width=LOG_WIDTH)
    wide.print(rich_table(title, head, cells, wide.width))


def _warn_of_differences(a: Evaluated, b: Evaluated) -> None:
    """Warn if two evaluations sampled differently, so that their difference is not that of the models alone."""
    first, second = (json.loads(json.dumps(one.results.get("sampling", {}), default=str)) for one in (a, b))
    names = [name for name in first if name not in ("seed", "preset") and first[name] != second.get(name, first[name])]
    if names:
        texts = ", ".join(f"{name}: {first[name]} and {second[name]}" for name in names)
        warn(f"{a.name} and {b.name} were sampled differently ({texts})")
