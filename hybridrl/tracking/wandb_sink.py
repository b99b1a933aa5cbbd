"""Weights & Biases; without a key the run is recorded offline, and nobody is ever asked for one."""

import netrc
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from wandb import Settings, Table, init

from hybridrl.tracking.log import warn
from hybridrl.tracking.sink import SampleRow, Sink


class WandbSink(Sink):
    def __init__(self, run_dir: Path, project_name: str, experiment_name: str, config: dict[str, Any]) -> None:
        mode = os.environ.get("WANDB_MODE", "online")
        if mode == "online" and not _has_key():
            mode = "offline"
            warn(
                f"trainer.logger=wandb: no WANDB_API_KEY and no netrc entry, so the run is recorded offline; "
                f"`wandb sync {run_dir}/wandb/offline-run-*` uploads it"
            )
        self._run = init(
            project=project_name,
            name=experiment_name,
            config=config,
            dir=run_dir,
            mode=mode,
            # Its capture of the console would fight with the progress bar.
            settings=Settings(console="off", silent=mode != "online"),
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def samples(self, step: int, rows: list[SampleRow]) -> None:
        data = [[row.prompt, row.answer, row.ground_truth, row.score] for row in rows]
        table = Table(columns=["prompt", "answer", "ground truth", "score"], data=data)
        self._run.log({"validation samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    return path.is_file() and host in netrc.netrc(path).hosts
