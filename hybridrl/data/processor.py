"""The processor of a model that sees: pictures in RGB -> the arrays that the model reads, and their tokens.

When rows are loaded, a picture is decoded once, for its size, from which the processor counts its tokens; no pixel is
kept. It is decoded again whenever its prompt is drawn. Engines and trainers read the same arrays, made one picture at a
time and not normalised: both apply the processor's rule to them.
"""

import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoProcessor, PreTrainedTokenizerBase
from transformers.utils import cached_file

from hybridrl.config.custom_code import attempt
from hybridrl.config.files import resolve_model
from hybridrl.config.findings import ConfigError, nearest
from hybridrl.config.schema import DataConfig, ModelConfig
from hybridrl.core.pictures import Picture, PictureStore, PixelRule, tokens_of
from hybridrl.data.pictures import CORES, Encoded, PictureFault, content, decoded, preview

BLIND = "only text is supported, since the model reads no pictures"
KEY = "data.mm_processor_kwargs"
THREADS = min(16, max(CORES // 2, 1))
FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
LIBRARIES = ("pillow", "torchvision")  # decode and resize
RAW = {"do_rescale": False, "do_normalize": False}
# Arguments that the model or the run fixes.
FIXED = {
    *("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std", "rescale_factor", "do_convert_rgb"),
    *("data_format", "input_data_format", "device", "disable_grouping", "return_tensors", *RAW),
}


class Seen(NamedTuple):
    """A picture between load and draw: its tokens, and a checksum of its file."""

    tokens: int
    check: int  # int32


def load_processor(
    model_path: str,
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any],
    *,
    trusted: bool = False,
    key: str = KEY,
) -> Any:
    """Return the processor of a model that sees, with this tokenizer; None if the model reads no pictures. `arguments`
    are those of its image processor, from `key`. Raises ConfigError."""
    place = resolve_model(model_path)
    options = {"trust_remote_code": trusted, "local_files_only": place.is_dir()}
    settings = attempt(partial(AutoConfig.from_pretrained, str(place), **options))
    if getattr(settings, "vision_config", None) is None:
        return None
    read = partial(AutoProcessor.from_pretrained, str(place), tokenizer=tokenizer, **options)
    processor = attempt(read)
    if isinstance(processor, Exception) or not hasattr(processor, "image_processor"):
        fix = "save its processor there (preprocessor_config.json), and install torchvision"
        raise ConfigError(f"{model_path}: the model's processor of pictures cannot be loaded: {processor}", fix=fix)
    names = [name for name in get_type_hints(processor.image_processor.valid_kwargs) if name not in FIXED]
    for name in arguments:
        if name in FIXED:
            raise ConfigError(f"{key}.{name}: the model or the run fixes it", fix="leave it out", keys=key)
        if name not in names:
            fix = f"did you mean {' or '.join(nearest(name, names)) or ', '.join(sorted(names))}?"
            raise ConfigError(f"{key}.{name}: {type(processor.image_processor).__name__} takes no {name}", fix=fix)
    changed = attempt(partial(read, **arguments)) if arguments else processor
    if isinstance(changed, Exception):
        raise ConfigError(f"{key}={dict(arguments)}: the processor rejects it: {changed}", keys=key) from changed
    return changed


def save_readers(tokenizer: PreTrainedTokenizerBase, model_path: str, directory: str) -> None:
    """Write what a model reads its inputs with next to a checkpoint of it: the tokenizer, and the files of its
    processor, if it has any, without which no engine can load a model that sees."""
    tokenizer.save_pretrained(directory)
    for name in FILES:
        file = cached_file(str(resolve_model(model_path)), name, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            shutil.copyfile(file, Path(directory, name))


class PictureReader:
    """Reads pictures with the processor of a model that sees, in threads. `store` has the pixels of prompts in use,
    `rule` makes them the model's inputs."""

    def __init__(self, processor: Any, store: PictureStore) -> None:
        self.processor, self.store = processor, store
        self.placeholder: int = processor.image_token_id
        names = (getattr(processor, f"{kind}_token", None) for kind in ("image", "video", "audio"))
        self._placeholders = {processor.tokenizer.convert_tokens_to_ids(name): name for name in names if name}
        self._threads = ThreadPoolExecutor(THREADS, "pictures")
        self._tokens = lru_cache(maxsize=1 << 16)(self._count)
        blank = Image.new("RGB", (64, 64))
        raw = attempt(partial(self._arrays, blank, **RAW))
        self._flags = RAW if isinstance(raw, dict) and raw["pixel_values"].dtype == np.uint8 else {}
        self.rule = _rule(processor.image_processor) if self._flags else PixelRule()
        self.bytes_per_token = sum(array.nbytes for array in self.pixels(blank).values()) / self._tokens((64, 64))

    def seen(self, encoded: Encoded) -> Seen:
        """Decode a picture for its size, and count its tokens from that. Raises PictureFault."""
        data = content(encoded)
        return Seen(self._tokens(decoded(data).size), _checksum(data))

    def picture(self, encoded: Encoded, seen: Seen) -> Picture:
        """Return a picture, whose pixels are stored. Raises PictureFault if it is not the one that was seen."""
        data = content(encoded)
        if _checksum(data) != seen.check:
            raise PictureFault("it has changed since the rows were loaded")
        return self._stored(decoded(data), seen.tokens)

    def shown(self, data: bytes) -> Picture:
        """Return the picture of a file's bytes, such as an environment's, whose pixels are stored. Raises
        PictureFault."""
        picture = decoded(data)
        return self._stored(picture, self._tokens(picture.size))

    def again(self, pictures: Iterable[Encoded], digests: Sequence[int]) -> tuple[Picture, ...]:
        """Store the pixels of a prompt's pictures once more. Raises PictureFault if one has changed."""
        stored = tuple(self.picture(encoded, self.seen(encoded)) for encoded in pictures)
        if [picture.digest for picture in stored] != [*digests]:
            raise PictureFault("a picture has changed since the rows were loaded")
        return stored

    def pixels(self, picture: Image.Image) -> dict[str, np.ndarray]:
        """Return the arrays of a picture in RGB, by the processor's names for them: uint8, or normalised and in float32
        by a processor that cannot do otherwise."""
        return self._arrays(picture, **self._flags)

    def placeholder_fault(self, ids: list[int], pictures: int) -> str:
        """Describe a prompt that has not one placeholder per picture, and no others; "" if it has."""
        counts = {token: ids.count(token) for token in self._placeholders}
        wrong = [token for token in counts if counts[token] != (pictures if token == self.placeholder else 0)]
        faults = [f"{counts[token]} tokens {self._placeholders[token]}" for token in wrong]
        if not faults:
            return ""
        cause = f"with its chat template the prompt has {' and '.join(faults)}, and {pictures} pictures"
        return f"{cause}; a text may not have such tokens, and the template must write one for each picture"

    def check_expansion(self, text: str, pictures: Iterable[Encoded], ids: Sequence[int]) -> None:
        """Raise ConfigError unless the processor makes these ids of a prompt's text and pictures."""
        images = [decoded(content(each)) for each in pictures]
        own = attempt(lambda: self.processor(text=[text], images=images, add_special_tokens=False)["input_ids"][0])
        if isinstance(own, Exception) or [*own] != [*ids]:
            result = own if isinstance(own, Exception) else f"{len(own)} token ids"
            cause = f"{type(self.processor).__name__} makes of a row with pictures: {result}"
            expected = f"expected {len(ids)}, with one placeholder per picture repeated for each of its tokens"
            raise ConfigError(f"{cause}; {expected}", fix="train this family on rows of text only")

    def start(self, work: Any, *arguments: Any) -> Any:
        """Begin work in a thread; return its future."""
        return self._threads.submit(work, *arguments)

    def _stored(self, picture: Image.Image, counted: int) -> Picture:
        pixels = self.pixels(picture)
        if "image_grid_thw" in pixels:
            tokens = tokens_of(pixels, self.processor.image_processor.merge_size)
            if tokens != counted:
                raise PictureFault(f"the processor makes {tokens} tokens of it and counts {counted} from its size")
        return self.store.add(pixels, counted, preview(picture))

    def _arrays(self, picture: Image.Image, **flags: bool) -> dict[str, np.ndarray]:
        arrays = self.processor.image_processor(images=[picture], return_tensors="pt", **flags)
        return {name: torch.as_tensor(value).numpy() for name, value in arrays.items()}

    def _count(self, size: tuple[int, int]) -> int:
        width, height = size
        counted = attempt(lambda: self.processor._get_num_multimodal_tokens(image_sizes=[(height, width)]))
        if isinstance(counted, Exception):
            raise PictureFault(f"{width} x {height} pixels: {counted}") from counted
        return int(counted["num_image_tokens"][0])


def picture_reader(data: DataConfig, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> PictureReader | str:
    """Return the reader of pictures of a model that sees, or why rows may not have any. Raises ConfigError."""
    trusted, arguments = data.trust_remote_code or model.trust_remote_code, data.mm_processor_kwargs
    try:
        processor = load_processor(model.path, tokenizer, arguments, trusted=trusted)
    except ConfigError as error:
        if arguments:
            raise
        return str(error)  # rows of text need no processor
    if processor is not None:
        return PictureReader(processor, PictureStore())
    if arguments:
        raise ConfigError(f"{KEY}={arguments}: {BLIND}", fix="leave it out", keys=KEY)
    return BLIND


def version_change(before: Mapping[str, Any]) -> str:
    """Describe the libraries of pictures that have other versions than before; "" if none has."""
    pairs = {name: (before.get(name), version(name)) for name in LIBRARIES if before.get(name)}
    changed = [f"{name} {now}, not {earlier}" for name, (earlier, now) in pairs.items() if earlier != now]
    return f"pictures are read by {' and '.join(changed)}, so that pixels may differ" if changed else ""


def _rule(processor: Any) -> PixelRule:
    scale = float(processor.rescale_factor) if processor.do_rescale else 1.0
    if not processor.do_normalize:
        return PixelRule(scale)
    return PixelRule(scale, tuple(map(float, processor.image_mean)), tuple(map(float, processor.image_std)))


def _checksum(data: bytes) -> int:
    return zlib.crc32(data) - (1 << 31)
