"""The checks that need this machine, the model and the data: those that main_ppo runs before it starts devices, and
further ones that still apply if it would reject the configuration."""

import contextlib
import logging
import sys
from collections.abc import Iterator

from rich.console import Console

from hybridrl.config import PPOConfig
from hybridrl.config.findings import Findings
from hybridrl.doctor.machine import check_devices, check_gpus, check_machine, check_versions
from hybridrl.doctor.memory_plan import memory_plan
from hybridrl.doctor.reward import try_reward
from hybridrl.doctor.rows import check_rows, check_template
from hybridrl.doctor.run_directory import check_run_directory
from hybridrl.runs.prepare import RunInputs, prepare


def examine(config: PPOConfig, findings: Findings, *, with_reward: bool) -> None:
    """Add the findings about a configuration that has no errors by itself."""
    with _captured(findings):
        with _status("versions, machine, devices"):
            check_versions(config.trainer.device, findings)
            check_machine(config, findings)
            check_gpus(config, findings)
            check_devices(config, findings)
        with _status("the memory of each phase"):
            memory_plan(config, findings)
        with _status("model, tokenizer and data, as at the start of a run"):
            inputs = _prepare(config, findings)
        if inputs.prompts:
            with _status("the prompts"):
                check_rows(config, inputs.prompts, inputs.validation, findings)
        with _status("trainer.default_local_dir, and the checkpoint that a run would resume from"):
            check_run_directory(config, inputs, findings)
        if inputs.tokenizer is not None and inputs.prompts:
            with _status("the chat template"):
                check_template(config, inputs.tokenizer, inputs.prompts, findings)
            if with_reward:
                with _status("the reward, on a few rows"):
                    try_reward(config.reward, inputs.tokenizer, inputs.prompts, findings)


def _prepare(config: PPOConfig, findings: Findings) -> RunInputs:
    """Prepare the run's inputs and add what main_ppo would reject or print."""
    prepared = prepare(config)
    with findings.gathered("run.refused"):
        prepared.rejections.close()
    for message in prepared.messages:
        findings.info("run.adapter", message)
    return prepared


@contextlib.contextmanager
def _status(subject: str) -> Iterator[None]:
    """Show a status line on a terminal."""
    with Console(stderr=True).status(f"checking {subject} ..."):
        yield


@contextlib.contextmanager
def _captured(findings: Findings) -> Iterator[None]:
    """Keep prints of other code off standard output, and turn the package's log warnings into findings."""
    log, handler = logging.getLogger("hybridrl"), _LogFindings(findings)
    log.addHandler(handler)
    log.propagate = False
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        log.removeHandler(handler)
        log.propagate = True


class _LogFindings(logging.Handler):
    def __init__(self, findings: Findings) -> None:
        super().__init__(logging.WARNING)
        self._findings = findings

    def emit(self, record: logging.LogRecord) -> None:
        self._findings.warn("run.warning", record.getMessage())
