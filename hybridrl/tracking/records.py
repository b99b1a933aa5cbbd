"""The files of sampled episodes, `<step>.jsonl`, one JSON object per episode: verl's keys `input`, `output`, `gts`,
`score` and `step`, every key of the reward's dict, and hybridrl's further values under `episode` (docs/samples.md).

A file is written atomically: it exists with all lines, or not at all. Files of COMPRESSED bytes and more are compressed
as `<step>.jsonl.gz`. verl's files are read too. Pictures of prompts are next to them, `pictures/<digest>.jpg`.
"""

import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import yaml

from hybridrl.tracking.console import warn

COMPRESSED = 1 << 20  # bytes from which a file is compressed: files of small runs are plain
LEVEL = 3  # level of gzip: prose takes a third; the default saves 10% more, in 2.5 times as long
SUFFIXES = (".jsonl", ".jsonl.gz")
PICTURES, PICTURE = "pictures", re.compile(r"pictures/[0-9a-f]{16}\.jpg")  # next to the files
VERL_KEYS = ("input", "output", "gts", "score", "step")
OWN_KEY = "episode"
CONFIGURED = {"rollouts": "rollout_data_dir", "samples": "validation_data_dir"}
NUMBERS = ("row", "position", "sample", "advantage", "prompt_tokens", "sampled_tokens", "observed_tokens")
TOKEN_NUMBERS = ("ids", "sampled", "log_probs", "train_log_probs", "teacher_log_probs", "entropies", "advantages")


@dataclass(frozen=True)
class SampleRecord:
    """One episode in a file, e.g. `SampleRecord("user: 2+2?", "4", "4", 1.0, 7, {"acc": True}, {"row": 3})`.

    `score` is a finite number, None if the grader failed; `components` are the other keys of the reward's dict, and
    `episode` is empty in files of verl. Values of another type than the format's are left out. Names of pictures in
    `episode` are relative to `folder`.
    """

    prompt: str
    response: str
    truth: Any
    score: float | None
    step: int
    components: dict[str, Any]
    episode: dict[str, Any]
    folder: Path = field(default=Path(), compare=False)

    @property
    def group(self) -> tuple[int, str | int]:
        """The step and the prompt, common to all responses of a group."""
        return self.step, self.episode.get("position", self.prompt)

    def line(self) -> str:
        """Return the episode as a line of a file."""
        verl = zip(VERL_KEYS, (self.prompt, self.response, self.truth, self.score, self.step), strict=True)
        return _line(dict(verl) | self.components | ({OWN_KEY: self.episode} if self.episode else {}))


def prompt_text(messages: str | Sequence[Any]) -> str:
    """Return a prompt as the text of a file; an empty text if it has messages of another form."""
    if isinstance(messages, str):
        return messages
    if not all(isinstance(message, Mapping) and {"role", "content"} <= {*message} for message in messages):
        return ""
    return "\n".join(f"{message['role']}: {content_text(message['content'])}" for message in messages)


def content_text(content: Any) -> str:
    """Return what a message says, with `<image>` in the place of each picture."""
    if not isinstance(content, list):
        return str(content)
    parts = [part if isinstance(part, Mapping) else {} for part in content]
    return "".join(str(part.get("text", "")) if part.get("type") == "text" else "<image>" for part in parts)


def write_records(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write a file of episodes atomically, and replace an earlier file of its step; OSError leaves nothing behind. A
    large file is compressed, and its name ends in .gz."""
    temporary = path.with_name(f".{path.name}.writing")
    compressed = path.with_name(f"{path.name}.gz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            large = _write_lines(file, (f"{_line(record)}\n".encode() for record in records))
        final, other = (compressed, path) if large else (path, compressed)
        os.replace(temporary, final)
        other.unlink(missing_ok=True)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_lines(file: BinaryIO, lines: Iterator[bytes]) -> bool:
    """Write lines without having all of them in memory; return whether they are compressed, as many are."""
    first = bytearray()
    while len(first) < COMPRESSED:
        if (line := next(lines, None)) is None:
            file.write(first)
            return False
        first += line
    packer = zlib.compressobj(LEVEL, wbits=zlib.MAX_WBITS + 16)  # a gzip file without a time
    for part in chain([first], lines):
        file.write(packer.compress(part))
    file.write(packer.flush())
    return True


def picture_file(digest: int) -> str:
    """Return the name of a picture's file, relative to the files that name it."""
    return f"{PICTURES}/{digest % (1 << 64):016x}.jpg"


def write_pictures(directory: Path, pictures: Mapping[str, bytes]) -> None:
    """Write pictures by their names. A file that exists is marked as used now. Raises OSError."""
    for name, data in pictures.items():
        path = directory / name
        try:
            os.utime(path)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".writing")
            temporary.write_bytes(data)
            os.replace(temporary, path)


def delete_pictures(directory: Path, before: int) -> None:
    """Delete the pictures that were last used before a time in nanoseconds."""
    for path in directory.glob(f"{PICTURES}/*.jpg"):
        if PICTURE.fullmatch(f"{PICTURES}/{path.name}") and path.stat().st_mtime_ns < before:
            path.unlink()


def record_files(directory: Path) -> dict[int, Path]:
    """Return the files of a directory by step, in order; none if there is no such directory."""
    files = {}
    for suffix in SUFFIXES:
        for path in directory.glob(f"*{suffix}"):
            if (name := path.name.removesuffix(suffix)).isdecimal():
                files[int(name)] = path
    return dict(sorted(files.items()))


def open_records(path: Path) -> TextIO:
    """Open a file of episodes, compressed or not, as text."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8", errors="replace")


def records_of(run_dir: Path, name: str) -> dict[int, Path]:
    """Return the files of a run by step: from its directory `name`, else from the directory in its configuration, else
    from `run_dir` itself."""
    return record_files(run_dir / name) or record_files(_configured(run_dir, name)) or record_files(run_dir)


def _configured(run_dir: Path, name: str) -> Path:
    try:
        trainer = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))["trainer"]
        return Path(trainer[CONFIGURED[name]]).expanduser()
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return run_dir / name


def by_group(records: Iterable[SampleRecord]) -> dict[tuple[int, str | int], list[SampleRecord]]:
    """Return samples by step and prompt, in the order in which prompts occur."""
    groups: dict[tuple[int, str | int], list[SampleRecord]] = {}
    for record in records:
        groups.setdefault(record.group, []).append(record)
    return groups


def read_records(path: Path) -> Iterator[SampleRecord]:
    """Yield the episodes of a file. Lines that are not JSON objects, as in an incomplete copy, are skipped with one
    warning."""
    skipped = 0
    try:
        lines = open_records(path)
    except OSError as error:
        warn(f"{path} cannot be read: {error.strerror}", "samples-lost")
        return
    with lines:
        while True:
            try:
                if not (line := lines.readline()):
                    break
                yield _record(json.loads(line), path.parent)
            except (EOFError, gzip.BadGzipFile, zlib.error):  # the rest of a compressed file
                skipped += 1
                break
            except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
                skipped += 1
    if skipped:
        warn(f"{path}: {skipped} line{'s' * (skipped > 1)} cannot be read as a sample and skipped", "samples-lost")


def _record(record: dict[str, Any], folder: Path) -> SampleRecord:
    components = {name: value for name, value in record.items() if name not in (*VERL_KEYS, OWN_KEY)}
    prompt, response, truth, score, step = map(record.get, VERL_KEYS)
    if prompt is None and response is None:
        raise ValueError("no sample")
    episode = record.get(OWN_KEY)
    checked = checked_episode(episode) if isinstance(episode, dict) else {}
    number = float(score) if _is_number(score) else None
    texts = as_text(prompt), as_text(response), truth
    return SampleRecord(*texts, number, int(step or 0), components, checked, folder)


def checked_episode(episode: dict[str, Any]) -> dict[str, Any]:
    """Return hybridrl's values of an episode, without unusable ones, as in an edited file."""
    wrong = {name for name in NUMBERS if name in episode and not _is_number(episode[name])}
    wrong |= {name for name in ("messages", "turns") if not _is_list_of(episode.get(name, []), dict)}
    if not (_is_list_of(images := episode.get("images", []), dict) and all(map(_is_image, images))):
        wrong.add("images")
    if not _are_tokens(episode.get("tokens")):
        wrong.add("tokens")
    return {name: value for name, value in episode.items() if name not in wrong}


def _is_image(image: dict[str, Any]) -> bool:
    """Whether a picture has a file of pictures, and its size; or, as one of a tool, none of both."""
    size, file = [image.get("width"), image.get("height")], image.get("file")
    if file is None:
        return size == [None, None]
    return all(map(_is_number, size)) and PICTURE.fullmatch(as_text(file)) is not None


def _are_tokens(tokens: Any) -> bool:
    """Whether all lists about the tokens of a response have one value per token."""
    if not isinstance(tokens, dict) or not {"ids", "texts", "sampled", "log_probs"} <= tokens.keys():
        return False
    if not all(isinstance(values, list) for values in tokens.values()) or len({*map(len, tokens.values())}) > 1:
        return False
    numbers = (value for name in TOKEN_NUMBERS for value in tokens.get(name, []))
    return all(map(_is_number, numbers)) and _is_list_of(tokens["texts"], str)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number in the range of a float."""
    try:
        return isinstance(value, bool | int | float) and math.isfinite(value)
    except OverflowError:
        return False


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _line(record: dict[str, Any]) -> str:
    """Return a record as one line; a surrogate (half a character, which a model can write) as its escape code."""
    return json_text(record).encode("utf-8", "backslashreplace").decode()


def json_text(value: Any, indent: int | None = None) -> str:
    """Return a value as standard JSON: null for NaN and infinity."""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, ensure_ascii=False, default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(_finite(key)): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
