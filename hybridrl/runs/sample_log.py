"""Sampled episodes in files, a few of them as tables, and the batches of steps with a diagnosis."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from hybridrl.core.batch import Batch
from hybridrl.core.carried import CONTEXT, CONTEXT_LENGTHS, PICTURE_DIGEST
from hybridrl.core.experience.trajectory import Episode, EpisodeKey, Trajectory
from hybridrl.core.pictures import Picture, Pixels
from hybridrl.required import required
from hybridrl.tracking.console import console, sample_table, warn
from hybridrl.tracking.records import (
    OWN_KEY,
    VERL_KEYS,
    delete_pictures,
    picture_file,
    prompt_text,
    record_files,
    write_pictures,
    write_records,
)
from hybridrl.tracking.sink import SampleRow
from hybridrl.tracking.tracker import Tracker

EXAMPLES, REPLAYS = 3, 3  # samples shown with a diagnosis, and batches that are retained
MOST_PIXELS = 1 << 28  # bytes that are retained with a batch
PIXELS = "pixels"  # in a file of a batch, pixels/<digest>/<name of an array>
TAKEN = {*VERL_KEYS, OWN_KEY} - {"score"}  # keys that every sample has itself
PART = 1024  # rows
SAMPLE_BITS = 20  # a prompt of a step has fewer samples than 2**20
WEIGHT_DIGITS = 4  # decimals of importance weights: float32 log-probs of engine and trainer differ by 1e-5
TOKEN_VALUES = {  # name in a record -> field of a batch
    "log_probs": "rollout_log_probs",
    "train_log_probs": "old_log_probs",
    "teacher_log_probs": "teacher_log_probs",
    "entropies": "entropies",
    "advantages": "advantages",
}

DecodeAll = Callable[[Sequence[int]], list[str]]  # token ids -> the text of each
Transcript = Callable[[Trajectory], dict[str, Any]]  # a conversation as fields of its record


class SampleLog:
    """Writes all samples of a step to a file in `training_dir` and `validation_dir`, if set (see tracking/records.py),
    and the first `shown` of a validation to the tracker; batches to `replay_dir`. In each of the two directories the
    files of the oldest steps are deleted once it exceeds `most` bytes; None: no limit.

    A thread writes the files while the next step is sampled, one at a time; `flush` waits for them.

    For `with_tokens` training samples per step, from the least to the largest advantage, every token is written, with
    its text from `decode`. `fetch` returns the pixels of pictures from their handles.
    """

    def __init__(
        self,
        tracker: Tracker,
        *,
        training_dir: str | None,
        validation_dir: str | None,
        replay_dir: Path,
        shown: int,
        with_tokens: int = 0,
        most: float | None = None,
        decode: DecodeAll = lambda ids: [""] * len(ids),
        transcript: Transcript = lambda _: {},
        fetch: Callable[[Sequence[Any]], Sequence[Pixels]] = list,
    ) -> None:
        self.tracker, self.training_dir, self.validation_dir = tracker, training_dir, validation_dir
        self.replay_dir, self.shown, self.with_tokens, self.decode = replay_dir, shown, with_tokens, decode
        self.most, self.transcript, self.fetch = most, transcript, fetch
        self.named = False
        self.thread, self.writing = ThreadPoolExecutor(1, "samples"), Future[None]()
        self.writing.set_result(None)
        self.last: tuple[Batch, Sequence[Episode]] | None = None  # batch and episodes of the last step

    def training_samples(self, step: int, episodes: Sequence[Episode], batch: Batch) -> None:
        """Write the samples of a step, with fields from `batch`: the trained rows."""
        self.last = batch, episodes
        if self.training_dir:
            self._start(Path(self.training_dir), step, episodes, batch)

    def validation_samples(self, step: int, episodes: Sequence[Episode]) -> None:
        if self.validation_dir:
            self._start(Path(self.validation_dir), step, episodes)
        if self.shown > 0:
            self.tracker.samples(step, _rows(episodes[: self.shown]))

    def record_diagnosis(self, step: int, *, show: bool) -> None:
        """Store the batch of the step that was just trained, and print a few of its samples if `show`."""
        batch, episodes = required(self.last)
        self.keep(step, batch, [picture for episode in episodes for picture in pictures_of(episode)])
        if show:
            self.show(step, episodes)

    def forget(self) -> None:
        """Free the samples of the last step: pixels are stored while an episode names them."""
        self.last = None

    def flush(self) -> None:
        """Wait until all samples are written."""
        self.writing.result()

    @staticmethod
    def show(step: int, episodes: Sequence[Episode]) -> None:
        """Print the samples of a few prompts."""
        shown = episodes[:: max(1, -(-len(episodes) // EXAMPLES))]
        console.print(sample_table(f"samples of step {step}", _rows(shown)))

    def keep(self, step: int, batch: Batch, pictures: Iterable[Picture] = ()) -> None:
        """Write the batch of a step, for `doctor replay`; the last few are retained. Its pixels are among these
        `pictures`."""
        read = {*batch.carried[PICTURE_DIGEST].tolist()} if PICTURE_DIGEST in batch.carried else {}
        shown = [*{picture for picture in pictures if picture.digest in read}]
        if (size := sum(picture.size for picture in shown)) > MOST_PIXELS:
            limit = f"{size / 2**20:.0f} MiB of pixels, and {MOST_PIXELS >> 20} MiB are kept"
            return warn(f"the batch of step {step} is not kept for doctor replay: its pictures have {limit}")
        try:
            arrays = batch.__getstate__()
            for picture, pixels in zip(shown, self.fetch([picture.pixels for picture in shown]), strict=True):
                arrays |= {f"{PIXELS}/{picture.digest}/{name}": array for name, array in pixels.items()}
            self.replay_dir.mkdir(exist_ok=True)
            np.savez(self.replay_dir / f"{step}.npz", allow_pickle=False, **arrays)
        except OSError as error:
            warn(f"{self.replay_dir}: {error.strerror or error}; the batch of step {step} is not kept")
        for older in replays(self.replay_dir)[:-REPLAYS]:
            older.unlink()

    def _start(self, *step: Any) -> None:
        self.flush()
        self.writing = self.thread.submit(self._write, *step)

    def _write(self, directory: Path, step: int, episodes: Sequence[Episode], batch: Batch | None = None) -> None:
        path = directory / f"{step}.jsonl"
        trained = None if batch is None else TrainedFields(batch, step - 1, self.with_tokens, self.decode)
        try:
            self._name_taken(episodes)
            shown = {picture for episode in episodes for picture in pictures_of(episode)}
            previews = {picture_file(each.digest): each.preview.jpeg for each in shown if each.preview}
            write_pictures(directory, previews)  # before the records: pictures older than deleted records are unused
            records = (sample_record(step, sample, trained, self.transcript(sample.trajectory)) for sample in episodes)
            write_records(path, records)
            if self.most is not None:
                delete_oldest(directory, self.most)
        except OSError as error:  # a full disk does not end the run
            warn(f"{path} could not be written: {error.strerror or error}; training continues", "samples-lost")

    def _name_taken(self, episodes: Sequence[Episode]) -> None:
        """Warn once of keys of the reward that are renamed in samples."""
        taken = sorted({name for episode in episodes for name in episode.score.extras if name in TAKEN})
        if taken and not self.named:
            self.named = True
            names = ", ".join(f"{name} as {_free(name)}" for name in taken)
            warn(f"the reward returns keys that every sample has itself; samples have {names}", "reward-keys")

    def delete_after(self, step: int) -> None:
        """Delete the samples of later steps: a run that resumes after this step samples them again."""
        for directory in filter(None, (self.training_dir, self.validation_dir)):
            for later, path in record_files(Path(directory)).items():
                if later > step:
                    path.unlink()


def delete_oldest(directory: Path, most: float) -> None:
    """Delete the samples of the oldest steps, with the pictures that only they have, until the other samples take at
    most `most` bytes; the newest step stays."""
    files = [(path, path.stat()) for path in record_files(directory).values()]
    total, last = sum(status.st_size for _, status in files), 0
    for path, status in files[:-1]:
        if total <= most:
            break
        path.unlink()
        total, last = total - status.st_size, status.st_mtime_ns
    if last:
        delete_pictures(directory, last)


BatchFields = Mapping[EpisodeKey, dict[str, Any]]  # fields of an episode from a step's batch


class TrainedFields(Mapping[EpisodeKey, dict[str, Any]]):
    """The fields of each episode of a batch, made on demand: its advantage (the mean over its trained tokens), and per
    token the weight version and the importance weight. `with_tokens` of the episodes, evenly from the least to the
    largest advantage, also get the values of each response token. `version` is the weight version at the start of the
    step."""

    def __init__(self, batch: Batch, version: int, with_tokens: int, decode: DecodeAll) -> None:
        self.rows, self.version, self.decode = (rows := batch.by_episode()), version, decode
        self.ends, self.contexts = [0, *rows.response_lengths.cumsum(0).tolist()], _contexts(rows)
        self.numbers = rows.position.numpy() << SAMPLE_BITS | rows.sample.numpy()
        self.sorted = self.numbers.argsort()
        advantages = _mean_advantages(rows)
        evenly = np.linspace(0, len(rows) - 1, min(with_tokens, len(rows))).round()
        self.with_tokens, self.advantages = {*advantages.argsort(stable=True)[evenly].tolist()}, advantages.tolist()

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[EpisodeKey]:
        return (("", *place) for place in zip(self.rows.position.tolist(), self.rows.sample.tolist(), strict=True))

    def __getitem__(self, key: EpisodeKey) -> dict[str, Any]:
        stream, position, sample = key
        number = position << SAMPLE_BITS | sample
        place = int(self.numbers.searchsorted(number, sorter=self.sorted))
        if stream or place == len(self) or self.numbers[row := int(self.sorted[place])] != number:
            raise KeyError(key)
        fields = {"trained": True, "advantage": _short(self.advantages[row]), **self._audit(row)}
        if self.contexts[row]:
            fields["teacher_reads"] = "".join(self.decode(self.contexts[row]))
        if row in self.with_tokens:
            fields["tokens"] = _tokens(self.rows.select([row]), self.decode)
        return fields

    def _audit(self, row: int) -> dict[str, Any]:
        """Return the weight versions of a row's tokens, as pairs of a version and its number of consecutive tokens. If
        the step has importance weights, also return that of each token: 0 if it was not trained on."""
        rows, tokens = self.rows, slice(*self.ends[row : row + 2])
        pairs = [[self.version, length := tokens.stop - tokens.start]]
        if rows.staleness is not None:
            versions = self.version - rows.staleness[tokens].numpy()
            changes = np.flatnonzero(np.diff(versions, prepend=versions[0] - 1))
            pairs = np.stack([versions[changes], np.diff(changes, append=length)], axis=1).tolist()
        if rows.importance_weights is None:
            return {"versions": pairs}
        weights = torch.where(required(rows.response_mask)[tokens], rows.importance_weights[tokens], 0.0)
        return {"versions": pairs, "weights": weights.double().numpy().round(WEIGHT_DIGITS).tolist()}


def _mean_advantages(rows: Batch) -> torch.Tensor:
    """Return the mean advantage of each row over its trained tokens [B]; a part of the rows at a time, for which the
    row of every token is in memory."""
    rows, count = rows.only("advantages", "response_mask"), len(rows)
    parts = (rows.select(range(at, min(at + PART, count))) for at in range(0, count, PART))
    return torch.cat([part.trained_mean(required(part.advantages)) for part in parts])


def _contexts(rows: Batch) -> list[list[int]]:
    """Return the token ids that the teacher of each row reads before the response; none if it is the row's prompt."""
    if CONTEXT not in rows.carried:
        return [[]] * len(rows)
    return [ids.tolist() for ids in rows.carried[CONTEXT].split(rows.carried[CONTEXT_LENGTHS].tolist())]


def _tokens(row: Batch, decode: DecodeAll) -> dict[str, list[Any]]:
    """Return the token values of one row by name, without values that the step did not compute."""
    ids = row.response_ids.tolist()
    tokens: dict[str, list[Any]] = {"ids": ids, "texts": decode(ids), "sampled": row.sampled_mask.int().tolist()}
    for name, field in TOKEN_VALUES.items():
        if (values := row.value(field)) is not None:
            tokens[name] = list(map(_short, values.tolist()))
    return tokens


def _short(value: float) -> float:
    """Return a number with six digits, as precise as float32: engine and trainer differ by its rounding."""
    return float(f"{value:.6g}")


def pictures_of(episode: Episode) -> Sequence[Picture]:
    """Return the pictures of an episode, those of its prompt first."""
    return *episode.prompt.pictures, *episode.trajectory.pictures


def _image(picture: Picture) -> dict[str, Any]:
    name, preview = picture_file(picture.digest), picture.preview
    size = (preview.width, preview.height) if preview else (None, None)
    return {"digest": Path(name).stem, "width": size[0], "height": size[1], "file": name if preview else None}


def sample_record(
    step: int,
    episode: Episode,
    trained: BatchFields | None = None,
    conversation: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return an episode as a record of its file. `trained`: fields of the samples of a training step; `conversation`:
    fields of an episode of several turns."""
    prompt, trajectory, score = episode.prompt, episode.trajectory, episode.score
    observed = [len(turn.observed) for turn in trajectory.turns] or [0]
    facts = {
        "data_source": prompt.data_source,
        "row": prompt.row,
        "position": episode.position,
        "sample": episode.sample,
        "stop": trajectory.stop,
        "prompt_tokens": observed[0],
        "sampled_tokens": episode.sampled_tokens,
        "observed_tokens": sum(observed[1:]),
    }
    if pictures := pictures_of(episode):
        facts["images"] = [*map(_image, pictures)]
    if trained is not None:
        facts |= trained.get(episode.key, {"trained": False})
    if score.fault:
        facts |= {"fault": score.fault, "detail": score.detail}
    return {
        "input": prompt_text(episode.prompt.messages),
        "output": episode.text,
        "gts": prompt.ground_truth,
        "score": score.value,
        "step": step,
        **{_free(name): value for name, value in score.extras.items() if name != "score"},
        OWN_KEY: {**facts, **conversation},
    }


def _free(name: str) -> str:
    """Return the key of a reward's value in a sample; it is renamed if the sample has this key itself."""
    return f"reward/{name}" if name in TAKEN else name


def replays(directory: Path) -> list[Path]:
    """Return the batches that were kept, by step."""
    return sorted(directory.glob("*.npz"), key=lambda path: int(path.stem))


def read_batch(path: Path) -> tuple[Batch, list[Pixels]]:
    """Return a batch that was kept, and the pixels of its pictures."""
    batch, pixels = Batch.__new__(Batch), defaultdict[str, dict[str, np.ndarray]](dict)
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    for key in [key for key in arrays if key.startswith(f"{PIXELS}/")]:
        _, digest, name = key.split("/")
        pixels[digest][name] = arrays.pop(key)
    batch.__setstate__(arrays)
    return batch, [*pixels.values()]


def _rows(episodes: Sequence[Episode]) -> list[SampleRow]:
    scores = [math.nan if one.score.value is None else one.score.value for one in episodes]
    pairs = zip(episodes, scores, strict=True)
    return [
        SampleRow(prompt_text(one.prompt.messages), one.text, str(one.prompt.ground_truth), score)
        for one, score in pairs
    ]
