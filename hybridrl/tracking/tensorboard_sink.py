"""TensorBoard event files, by TensorBoard's own writer (neither torch nor TensorFlow is needed)."""

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from hybridrl.tracking.sink import SampleRow, Sink


class TensorBoardSink(Sink):
    def __init__(self, directory: Path, start_step: int = 0) -> None:
        self._writer = EventFileWriter(str(directory))
        # TensorBoard forgets what an earlier run left in this directory from this step on.
        first_step = start_step + 1 if start_step else 0
        self._add(first_step, session_log=SessionLog(status=SessionLog.START))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=Summary(value=values))

    def samples(self, step: int, rows: list[SampleRow]) -> None:
        self._add(step, summary=text_pb("validation samples", _markdown(rows)))

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Summary | SessionLog) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))
        self._writer.flush()


def _markdown(rows: list[SampleRow]) -> str:
    def cell(text: str) -> str:
        return text.strip().replace("|", "\\|").replace("\n", "<br>")

    lines = ["| prompt | answer | ground truth | score |", "|---|---|---|---|"]
    lines += [f"| {cell(r.prompt)} | {cell(r.answer)} | {cell(r.ground_truth)} | {r.score:.3g} |" for r in rows]
    return "\n".join(lines)
