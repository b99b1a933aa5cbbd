"""Evaluation of models on questions: `hybridrl eval key=value ...`"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from hybridrl.config import ConfigError, EvaluationConfig
from hybridrl.evaluation.config import load_eval_config
from hybridrl.runtime import EXIT_FAULTS
from hybridrl.runtime.cli import RunCommand, run_command
from hybridrl.runtime.environment import fork_server
from hybridrl.runtime.guard import guarded
from hybridrl.runtime.keeper import PrivateDirectory
from hybridrl.tracking.console import stage, warn


@contextmanager
def opened(first: EvaluationConfig) -> Iterator[Callable[[EvaluationConfig], int]]:
    """Yield a function that runs evaluations one after another, in the Ray session of the `first`. Ray starts only if
    responses are missing, and after invalid input is rejected."""
    samples = not first.eval.responses and not all(name.startswith("http") for name in first.eval.models)
    devices = first.trainer.device, first.ray_kwargs.ray_init, first.devices_per_machine
    server = fork_server(*devices, engine=first.actor_rollout_ref.rollout.name) if samples else nullcontext()
    with server as forks, closing(PrivateDirectory()) as merged:
        with stage("loading torch, transformers and Ray"):  # only for a valid configuration
            from hybridrl.doctor.start import check_evaluation_start
            from hybridrl.evaluation.command import evaluate
            from hybridrl.model_merger import whole_model
            from hybridrl.runs.setup import Sessions

        def run(config: EvaluationConfig) -> int:
            def merge(path: str) -> str:
                whole = whole_model(path, Path(tempfile.mkdtemp(dir=merged.path)), "eval.models")
                if whole != path and config.trainer.nnodes > 1:
                    fix = f"merge it where all machines see it: hybridrl merge --local_dir {path} --target_dir DIR"
                    raise ConfigError(f"eval.models={path} is in shards, which only this machine merges", fix=fix)
                return whole

            if not config.eval.responses:
                check_evaluation_start(config.eval.models, config.eval.compare, config.trainer.device)
            limit, share = config.reward.max_fault_rate, evaluate(config, sessions, merge)
            if share <= limit:
                return 0
            cause = f"exit status {EXIT_FAULTS}: {100 * share:.1f}% of the responses have no score"
            warn(f"{cause}, more than reward.max_fault_rate={limit:g}")
            return EXIT_FAULTS

        with closing(Sessions(forks)) as sessions:
            yield run


COMMAND = RunCommand(
    name="eval",
    purpose="Evaluate models on questions: accuracy with intervals, pass@k, maj@k, and paired comparisons.",
    example=(
        "eval.models=[outputs/run:last]",
        "eval.files=[aime24.jsonl,math500.jsonl]",
        "eval.preset=deepseek",
        "eval.greedy=true",
    ),
    config_name="ppo_trainer",
    first_keys=(
        "eval.files",
        "eval.models",
        "eval.n",
        "eval.preset",
        "eval.greedy",
        "eval.compare",
        "eval.output_dir",
        "reward.custom_reward_function.path",
        "data.max_prompt_length",
        "trainer.n_gpus_per_node",
    ),
    load=load_eval_config,
    open=opened,
)


def main(argv: list[str] | None = None) -> int:
    return run_command(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(guarded(main))
