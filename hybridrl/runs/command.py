"""Training as a command, for `main_ppo` and `main_sft`. Imports nothing heavy."""

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

from hybridrl.plugins import load
from hybridrl.runtime.environment import fork_server
from hybridrl.tracking.console import stage

Run = Callable[[Any], None]
# Keys to begin with, of `hybridrl sft` and `hybridrl rm`.
SUPERVISED_KEYS = (
    *("data.train_files", "data.val_files", "model.path", "data.max_length", "data.train_batch_size"),
    *("data.max_token_len_per_gpu", "optim.lr"),
    *("trainer.total_epochs", "trainer.n_gpus_per_node", "trainer.default_local_dir"),
)


def training(job: str) -> Callable[[Any], AbstractContextManager[Run]]:
    """Return a context manager that yields a function to run trainings, from data to saved model; they share one Ray
    session. Invalid input is rejected before Ray starts.

    `job` names the kind's `Job`, as "module:class".
    """

    @contextmanager
    def opened(first: Any) -> Iterator[Run]:
        trainer, samples = first.trainer, getattr(first, "actor_rollout_ref", None)
        engine = samples.rollout.name if samples else ""
        with fork_server(trainer.device, first.ray_kwargs.ray_init, first.devices_per_machine, engine=engine) as forks:
            with stage("loading torch, transformers and Ray"):  # only for a valid configuration
                from hybridrl.runs import setup

                job_class, check_start = pkgutil.resolve_name(job), load("preflight")

            with closing(setup.Sessions(forks)) as sessions:

                def run(config: Any) -> None:
                    check_start(config)
                    setup.train(config, job_class, sessions)

                yield run

    return opened
