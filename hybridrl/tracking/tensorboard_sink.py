"""TensorBoard event files, by TensorBoard's own record writer: an event is in the file when `log` returns.

torch's SummaryWriter passes events to a thread that writes several at a time: a killed run would lose them.
"""

import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from hybridrl.tracking.sink import SampleRow, Sink

EVENT_FILE = "events.out.tfevents."


class TensorBoardSink(Sink):
    """Writes a new event file, after `last_step` if the run is resumed, else from step 0. The table of runs in
    TensorBoard's HPARAMS tab has `hyperparameters`."""

    def __init__(
        self, directory: Path, last_step: int | None = None, hyperparameters: dict[str, Any] | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names, which begin with a time in seconds. The new file must
        # come after the existing ones, although clocks of machines differ.
        times = [path.name.removeprefix(EVENT_FILE).split(".")[0] for path in directory.glob(f"{EVENT_FILE}*")]
        latest = max((int(number) for number in times if number.isdecimal()), default=0)
        name = f"{EVENT_FILE}{max(int(time.time()), latest + 1):010}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("wb")
        self._writer = RecordWriter(self._file)
        self._add(0, file_version="brain.Event:2")
        # TensorBoard discards earlier events of this directory from this step on.
        first_step = 0 if last_step is None else last_step + 1
        self._add(first_step, session_log=SessionLog(status=SessionLog.START))
        if hyperparameters:
            self._add(first_step, summary=hparams_pb(hyperparameters, trial_id=directory.parent.name))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=Summary(value=values))

    def samples(self, step: int, rows: list[SampleRow]) -> None:
        lines = ["| prompt | response | ground truth | score |", "|---|---|---|---|"]
        for row in rows:
            texts = [text.strip().replace("|", "\\|") for text in (row.prompt, row.response, row.ground_truth)]
            lines.append(f"| {' | '.join(texts)} | {row.score:.3g} |".replace("\n", "<br>"))
        self._add(step, summary=text_pb("validation samples", "\n".join(lines)))

    def state_dict(self) -> dict[str, Any]:
        os.fsync(self._file.fileno())
        return {}

    def close(self) -> None:
        self._file.close()

    def _add(self, step: int, **content: Summary | SessionLog | str) -> None:
        self._writer.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
        self._writer.flush()
