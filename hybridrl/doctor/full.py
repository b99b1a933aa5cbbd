"""Everything that can be known of a run on this machine: what is asked, and in which order.

Runs what main_ppo runs before it starts devices, and goes on with what can still be asked where that refuses.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator

from rich.console import Console

from hybridrl.config import PPOConfig
from hybridrl.config.findings import Finding, Findings
from hybridrl.doctor.data_lint import lint
from hybridrl.doctor.devices import check_devices
from hybridrl.doctor.gpus import check_gpus
from hybridrl.doctor.machine import check_machine
from hybridrl.doctor.memory_plan import memory_plan
from hybridrl.doctor.reward_trial import try_reward
from hybridrl.doctor.run_directory import check_run_directory
from hybridrl.doctor.template import check_template
from hybridrl.doctor.versions import check_versions
from hybridrl.runs.prepare import Prepared, prepare


def examine(config: PPOConfig, findings: Findings, *, with_reward: bool) -> None:
    """Add what there is to say of a configuration in which nothing is refused."""
    with _apart(findings):
        with _telling("versions, machine, devices"):
            check_versions(config.trainer.device, findings)
            check_machine(config, findings)
            check_gpus(config, findings)
            check_devices(config, findings)
        with _telling("the memory that each phase takes"):
            memory_plan(config, findings)
        with _telling("model, tokenizer and data, as at the start of a run"):
            prepared = prepare(config)
        _tell(prepared, findings)
        if prepared.prompts:
            with _telling("the prompts"):
                lint(config, prepared.prompts, prepared.validation, findings)
        with _telling("trainer.default_local_dir, and what a run would go on from"):
            check_run_directory(config, prepared, findings)
        if prepared.tokenizer is not None and prepared.prompts:
            with _telling("the chat template"):
                check_template(config, prepared.tokenizer, prepared.prompts, findings)
            if with_reward:
                with _telling("the reward, on a few rows"):
                    try_reward(config.reward, prepared.tokenizer, prepared.prompts, findings)


def _tell(prepared: Prepared, findings: Findings) -> None:
    for line in prepared.refusals.lines:
        findings.refuse("run.refused", line)
    findings.found += [Finding("run.adapter", "information", line) for line in prepared.remarks]


@contextlib.contextmanager
def _telling(what: str) -> Iterator[None]:
    """A line on a terminal for as long as it takes; what is refused in it is said by whoever asks."""
    with Console(stderr=True).status(f"looking at {what} ..."):
        yield


@contextlib.contextmanager
def _apart(findings: Findings) -> Iterator[None]:
    """Keep what others print off standard output, and take what the package logs as findings."""
    log, handler = logging.getLogger("hybridrl"), _AsFindings(findings)
    log.addHandler(handler)
    log.propagate = False
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        log.removeHandler(handler)
        log.propagate = True


class _AsFindings(logging.Handler):
    def __init__(self, findings: Findings) -> None:
        super().__init__(logging.WARNING)
        self._findings = findings

    def emit(self, record: logging.LogRecord) -> None:
        self._findings.found.append(Finding("run.warning", "warning", record.getMessage()))
