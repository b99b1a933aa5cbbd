"""Training from Python, in a script or a notebook: `train` and `Run`.

A run is the child process that its command starts (`hybridrl train`), with its checks and its process tree. What Python
holds, rows and a reward function, is written into the run's directory, so that the command alone resumes the run.
"""

import base64
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.checkpoint.store import holder, step_directories
from hybridrl.config import ConfigError, EvaluationConfig, PPOConfig
from hybridrl.config.catalog import ESTIMATORS, POLICY_LOSS_NAMES
from hybridrl.config.compose import as_override, presets, usual_value
from hybridrl.config.files import holds_adapter, resolve_model
from hybridrl.config.function_source import function_file, write_if_changed
from hybridrl.config.values import value_keys
from hybridrl.data import PROMPT_NAMES, TRUTH_NAMES, TRUTHS
from hybridrl.report.contents import is_run
from hybridrl.report.page import write_report
from hybridrl.runs.directory import RunDirectory
from hybridrl.runtime import EXIT_FAULTS, EXIT_REJECTED
from hybridrl.runtime.guard import end_with_parent
from hybridrl.tracking.console import warn
from hybridrl.tracking.faults import UNEXPECTED
from hybridrl.tracking.records import read_records
from hybridrl.tracking.report import draw_curves, ranges, read_metrics

if TYPE_CHECKING:
    from pandas import DataFrame

Data = str | os.PathLike | Iterable[str | os.PathLike] | Iterable[Mapping[str, Any]]
Reward = str | Callable[..., Any]
DIRECTORY, ROLLOUTS, INPUTS = "trainer.default_local_dir", "actor_rollout_ref.rollout.n", "inputs"
PROMPT, TRUTH, ESTIMATOR = "data.prompt_key", "data.ground_truth_key", "algorithm.adv_estimator"
KEYS = {*value_keys(PPOConfig), *value_keys(EvaluationConfig)}
NAMES = ("trainer.project_name", "trainer.experiment_name")  # in the default directory
SAMPLES = 8
TAIL_LINES = 1000  # the end of a command's output, with its error


class CommandFailed(RuntimeError):
    """A command that failed: `code` as in docs/errors.md, and its exit `status`, negative for a signal."""

    def __init__(self, text: str, code: str, status: int) -> None:
        super().__init__(text)
        self.code, self.status = code, status


def train(
    model: str | os.PathLike,
    data: Data,
    reward: Reward | None = None,
    *,
    validation: Data | None = None,
    algorithm: str = "grpo",
    samples: int | None = None,
    steps: int | None = None,
    directory: str | os.PathLike | None = None,
    **keys: Any,
) -> "Run":
    """Train a model by reinforcement learning, as `hybridrl train` does, and return the run when it has ended.

    `data` and `validation`: rows (dicts, a DataFrame, a Dataset) or what data.train_files takes. `reward`: a function,
    "path.py:function", or the name of a built-in one. `algorithm`: an advantage estimator, a policy loss or a preset.
    `samples`: responses per prompt (8, or the preset's). `keys`: further keys, as nested dicts or by dotted names; they
    win. A directory with a run of the same inputs is resumed. Raises ConfigError for rejected input, CommandFailed, and
    KeyboardInterrupt after the run has ended in order.
    """
    settings = flat(keys)
    default = Path("outputs", *(settings.get(key, usual_value(PPOConfig, key)) for key in NAMES))
    place = Path(directory or settings.get(DIRECTORY) or default).expanduser().absolute()
    if user := holder(place):
        raise ConfigError(f"directory={place} is in use by {user}", fix="wait for it, or name another directory")
    values = {"actor_rollout_ref.model.path": os.fspath(model), **_algorithm(algorithm, samples)}
    values |= {"trainer.total_training_steps": steps} if steps is not None else {}
    inputs = place / INPUTS
    for argument, key, rows in (("data", "data.train_files", data), ("validation", "data.val_files", validation)):
        if rows is not None:
            file = inputs / f"{'train' if argument == 'data' else argument}.jsonl"
            values |= _rows(argument, key, rows, file, values | settings)
    before = (inputs / "reward.py").read_bytes() if (inputs / "reward.py").is_file() else b""
    values |= _reward(reward, inputs / "reward.py")
    if before and before != (inputs / "reward.py").read_bytes() and step_directories(place):
        warn(f"{place} is resumed with another reward function; set directory= to start from scratch")
    run_command(["train", *overrides(values | settings | {DIRECTORY: str(place)})], place)
    return Run(place)


class Run:
    """A run, by its directory. Tables are pandas DataFrames, read from the files when they are requested."""

    def __init__(self, directory: str | os.PathLike) -> None:
        self.directory = Path(directory).expanduser().absolute()
        if not is_run(self.directory):
            raise ConfigError(f"{directory} is not the directory of a run", fix=f"name its {DIRECTORY}")

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    def _repr_html_(self) -> str:
        """Return the curves, for a notebook."""
        curves = draw_curves(self.directory)
        image = base64.b64encode(curves.read_bytes()).decode() if curves else ""
        return f'<p>{self.directory}</p><img style="max-width:100%" src="data:image/png;base64,{image}">'

    @property
    def metrics(self) -> "DataFrame":
        """All metrics: a row per step, a column per name."""
        from pandas import DataFrame

        return DataFrame.from_dict(read_metrics(self.directory), orient="index").rename_axis("step")

    def samples(self, step: int | None = None, *, validation: bool = False) -> "DataFrame":
        """Return the responses of a step, by default the last one: prompt, response, ground_truth, score, the further
        values of the reward, and those of docs/samples.md under `episode`."""
        from pandas import DataFrame

        files = RunDirectory(self.directory).samples("samples" if validation else "rollouts")
        step = max(files, default=0) if step is None else step
        if step not in files:
            raise ConfigError(f"step={step}: there are no samples", fix=f"choose {ranges([*files]) or 'another run'}")
        rows = []
        for record in read_records(files[step]):
            values = {"prompt": record.prompt, "response": record.response, "ground_truth": record.truth}
            values["score"] = record.score
            rows.append(values | record.episode | record.components | values)
        return DataFrame(rows)

    def report(self) -> Path:
        """Write the run's page again and return its path."""
        return write_report([self.directory], self.directory / "report.html")

    @property
    def model_path(self) -> str:
        """The Hugging Face directory of the newest healthy checkpoint; shards and adapters are merged once."""
        checkpoints = RunDirectory(self.directory).checkpoints
        saved = [step for step in checkpoints if step.current and not step.problem]
        if not saved:
            raise ConfigError(f"{self.directory} has no checkpoint", fix="see trainer.save_freq")
        actor, merged = str(saved[-1].path / "actor"), saved[-1].path / "merged"
        if any(resolve_model(actor).glob("model*.safetensors")) and not holds_adapter(actor):
            return str(resolve_model(actor))
        if not (merged / "config.json").is_file():
            run_command(["merge", "--local_dir", actor, "--target_dir", str(merged)], self.directory)
        return str(merged)

    @property
    def command(self) -> str:
        """The shell command that resumes the run."""
        return RunDirectory(self.directory).resume_command()

    def evaluate(self, data: Data, reward: Reward | None = None, **keys: Any) -> "DataFrame":
        """Evaluate the newest checkpoint by `hybridrl eval`, with the run's own keys; without `reward` by the run's.
        Returns the numbers of results.json, a row per dataset. Raises as `train` does."""
        from pandas import Index, json_normalize

        settings, inputs, out = flat(keys), self.directory / INPUTS, self.directory / "eval"
        own = RunDirectory(self.directory).config.get("data", {})
        columns = {key: own[name] for key in (PROMPT, TRUTH) if own.get(name := key.partition(".")[2])}
        values = {"eval.models": [f"{self.directory}:last"], "eval.output_dir": str(out)}
        values |= _rows("data", "eval.files", data, inputs / "evaluation.jsonl", columns | settings)
        values |= _reward(reward, inputs / "evaluation_reward.py") | settings
        run_command(["eval", "-cp", str(self.directory), "-cn", "config", *overrides(values)], self.directory)
        written = Path(values["eval.output_dir"]).glob("*/results.json")
        newest = max(written, key=lambda file: file.stat().st_mtime_ns)
        datasets = json.loads(newest.read_text(encoding="utf-8"))["datasets"]
        return json_normalize([*datasets.values()]).set_index(Index(datasets, name="dataset"))


# -- arguments -> keys -------------------------------------------------------------------------------------------------


def flat(values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return nested sections by dotted keys; a key that holds names and values keeps its dict. Raises ConfigError."""
    settings = {}
    for name, value in values.items():
        key = f"{section}{name}"
        if isinstance(value, Mapping) and key not in KEYS:
            settings |= flat(value, f"{key}.")
        else:
            settings[key] = plain(key, value)
    return settings


def plain(key: str, value: Any) -> Any:
    """Return a value as a number, a text, or a list or dict of them. Raises ConfigError for another one."""
    if isinstance(value, Mapping):
        return {name: plain(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(key, item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    value = value.item() if hasattr(value, "item") else value  # a number of numpy
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(f"{key} is of type {type(value).__name__}", fix="give a number, a text, a list or a dict")


def overrides(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={as_override(value)}" for key, value in values.items()]


def _algorithm(name: str, samples: int | None) -> dict[str, Any]:
    """Return the keys of an algorithm; an unknown name is an estimator, which the command rejects with the names."""
    if name in presets() and name not in ESTIMATORS:
        return {"preset": name, **({ROLLOUTS: samples} if samples else {})}
    loss = name in POLICY_LOSS_NAMES and name not in ESTIMATORS
    policy = {"actor_rollout_ref.actor.policy_loss.loss_mode": name} if loss else {}
    return {ESTIMATOR: "grpo" if loss else name, ROLLOUTS: samples or SAMPLES, **policy}


def _reward(reward: Reward | None, file: Path) -> dict[str, Any]:
    """Return the keys of a reward; the source of a function is written into `file`."""
    if reward is None:
        return {}
    if isinstance(reward, str):
        path, colon, name = reward.rpartition(":")  # file:///path.py has a colon, too
        path, name = (path, name) if colon and name.isidentifier() else (reward, "compute_score")
        if reward.isidentifier():
            return {"reward.name": reward}
    else:
        path, name = function_file(reward, file, "reward")
    return {"reward.custom_reward_function.path": path, "reward.custom_reward_function.name": name}


def _rows(argument: str, key: str, data: Data, file: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of rows: names of files as they are; other rows are written into `file`, and the columns of their
    prompts and truths are named. Raises ConfigError."""
    if isinstance(data, str | os.PathLike):
        return {key: os.fspath(data)}
    if isinstance(data, Mapping):
        raise ConfigError(
            f"{argument} is a dict of {', '.join(map(str, data))}", fix="give one table, or a list of rows"
        )
    table: Any = data
    if hasattr(data, "iterrows"):  # pandas marks missing values by NaN
        table = table.astype(object).where(table.notna(), None).to_dict("records")
    rows = [*table] if isinstance(table, Iterable) else []
    if rows and all(isinstance(row, str | os.PathLike) for row in rows):
        return {key: [os.fspath(row) for row in rows]}
    lines, plain = [], partial(_plain, file.parent)
    for number, row in enumerate(rows):
        try:
            lines.append(json.dumps({**row}, ensure_ascii=False, allow_nan=False, default=plain) + "\n")
        except (TypeError, ValueError) as error:
            cause = f"{argument}: row {number} cannot be written as JSON ({error})"
            raise ConfigError(cause, fix="rows are dicts of texts, numbers, pictures, lists and dicts") from error
    if not rows:
        raise ConfigError(f"{argument} has no rows", fix="give dicts such as {'prompt': ..., 'answer': ...}")
    write_if_changed(file, "".join(lines))
    columns = {}
    for column, usual, names in (
        (PROMPT, {"prompt"}, PROMPT_NAMES),
        (TRUTH, {*TRUTHS, "query_id"}, TRUTH_NAMES),
    ):
        named = [name for name in names if name in rows[0]]
        if named and column not in settings and not usual & {*rows[0]}:
            columns[column] = named[0]
    return {key: str(file), **columns}


def _plain(directory: Path, value: Any) -> Any:
    """Return a value of numpy as Python's, and a picture as the name of a PNG file below a directory; TypeError for
    others."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if type(value).__module__.startswith("PIL."):
        from hybridrl.data.pictures import as_png

        data = as_png(value)
        name = f"pictures/{hashlib.sha256(data).hexdigest()[:16]}.png"
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
        return name
    raise TypeError(f"{value!r:.60} is of type {type(value).__name__}")


# -- the command -------------------------------------------------------------------------------------------------------


def run_command(words: Sequence[str], directory: Path) -> None:
    """Run a command of hybridrl to its end and print its output line by line. Ctrl-C is passed on to it, and raised
    once it has ended. Raises ConfigError for rejected input, else CommandFailed."""
    child = subprocess.Popen(
        [sys.executable, "-m", "hybridrl", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        process_group=0,  # a terminal, or a notebook, would send it a second signal
        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
    )
    tail, interrupted = deque[str](maxlen=TAIL_LINES), False
    try:
        while child.returncode is None:
            try:
                for line in child.stdout or ():
                    tail.append(line)
                    print(line, end="", flush=True)
                child.wait()
            except KeyboardInterrupt:
                interrupted = True
                child.send_signal(signal.SIGINT)
    finally:
        child.terminate()  # where printing failed
        child.wait()
    if interrupted:
        raise KeyboardInterrupt
    if child.returncode:
        raise _failure("".join(tail), child.returncode, directory)


def _failure(output: str, status: int, directory: Path) -> Exception:
    """Return the exception for the output and the exit status of a command."""
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    if status == EXIT_REJECTED:
        error = re.search(r"^(?:.*: )?error:\s+(.*)", output, re.MULTILINE | re.DOTALL)
        return ConfigError(error[1].strip() if error else last)
    signalled = f"the command was killed by {signal.Signals(-status).name}" if status < 0 else ""
    failed = re.search(r"^failed(?: \[([\w-]+)\])?:\s+(.*)", output, re.MULTILINE | re.DOTALL)
    other = "reward-faults" if status == EXIT_FAULTS else "killed" if failed or signalled else UNEXPECTED
    code, text = (failed[1] or other, failed[2].strip()) if failed else (other, signalled or last)
    text = f"failed [{code}]: {text}\nlogs: {directory / 'logs'}; hybridrl why {directory}"
    return CommandFailed(text, code, status)
