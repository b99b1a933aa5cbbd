"""Weights & Biases; without an API key the run is recorded offline, and no key is prompted for."""

import os
import socket
from netrc import netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import getproxies

from wandb import Artifact, Settings, Table, init

from hybridrl.tracking.console import info
from hybridrl.tracking.report import read_metrics
from hybridrl.tracking.sink import SampleRow, Sink
from hybridrl.tracking.tracker import warn_offline

CONNECT_SECONDS = 10.0


class WandbSink(Sink):
    """A new W&B run, or the continuation of `run_id`. W&B accepts steps only in order and cannot delete: steps after
    the checkpoint stay as first logged. Missing earlier steps are logged again from `metrics.jsonl`; offline all steps
    are, since an uploaded offline recording replaces the previous one. The page of the run is uploaded with it."""

    offline = "offline; `wandb sync {run_dir}/wandb/offline-run-*` uploads it"

    def __init__(
        self, run_dir: Path, project: str, name: str, config: dict[str, Any], saved: dict[str, Any], offline: bool
    ) -> None:
        mode, run_id = "offline" if offline else os.environ.get("WANDB_MODE", "online"), saved.get("id")
        netrc_file = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))
        url = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai")
        has_key = os.environ.get("WANDB_API_KEY") or (netrc_file.is_file() and url.hostname in netrc(netrc_file).hosts)
        if mode == "online" and not has_key:
            mode = "offline"
            warn_offline("wandb", "no WANDB_API_KEY and no netrc entry", self.offline.format(run_dir=run_dir))
        if mode == "online" and not getproxies():  # W&B itself would retry for 90 s
            port = url.port or (443 if url.scheme == "https" else 80)
            socket.create_connection((url.hostname or "", port), timeout=CONNECT_SECONDS).close()
        self._page = run_dir / "report.html"
        self._run = init(
            project=project,
            name=name,
            config=config,
            dir=run_dir,
            mode=mode,
            id=run_id,
            resume="allow" if run_id else None,
            # W&B's capture of the console would break the progress bar.
            settings=Settings(console="off", silent=mode != "online"),
        )
        logged = read_metrics(run_dir)
        next_step, last_kept = max(logged, default=-1) + 1, self._run.starting_step - 1
        if next_step <= last_kept:
            info(f"W&B keeps steps {next_step} to {last_kept} as they were logged before the run stopped")
        for step, metrics in logged.items():
            self.log(step, metrics)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step >= self._run.starting_step:
            self._run.log(metrics, step=step)

    def samples(self, step: int, rows: list[SampleRow]) -> None:
        if step < self._run.starting_step:
            return
        data = [[row.prompt, row.response, row.ground_truth, row.score] for row in rows]
        table = Table(columns=["prompt", "response", "ground truth", "score"], data=data)
        self._run.log({"validation samples": table}, step=step)

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._run.id}

    def close(self) -> None:
        if self._page.is_file():
            artifact = Artifact(f"report-{self._run.id}", type="report")
            artifact.add_file(str(self._page))
            self._run.log_artifact(artifact)
        self._run.finish()
