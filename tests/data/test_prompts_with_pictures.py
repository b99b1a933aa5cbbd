"""Rows with pictures -> prompts: tokens, pixels, lengths, and what is rejected."""

import gc
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import CustomDatasetConfig, DataConfig
from hybridrl.core.carried import PICTURE_DIGEST, PICTURE_START
from hybridrl.core.pictures import PictureStore, PixelRule, digest_of
from hybridrl.data.pictures import PictureFault, decoded
from hybridrl.data.processor import PictureReader, load_processor, save_readers
from hybridrl.data.prompts import PromptDataset, load_prompts, read_responses
from hybridrl.required import required
from tests.data.conftest import OPTIONS
from tests.sections import section_of
from tests.vision_models import noise_picture, reader_that_sees, tokenizer_that_sees

SIZES = st.tuples(st.integers(1, 150), st.integers(1, 150))
QUESTION = "<image>Find x. You FIRST think about the reasoning process as an internal monologue."


def png(picture: Image.Image) -> bytes:
    file = BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def row(text: Any = QUESTION, pictures: Any = None, **more: Any) -> dict[str, Any]:
    """A row as verl's script writes those of geometry3k."""
    images = {} if pictures is None else {"images": pictures}
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": text}],
        **images,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 0, "answer": "3", "question": "Find x."},
        **more,
    }


def picture(size: tuple[int, int] = (80, 50), seed: int = 0) -> dict[str, Any]:
    return {"bytes": png(noise_picture(*size, seed)), "path": None}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory, reader: PictureReader) -> Callable[..., PromptDataset]:
    file = tmp_path_factory.mktemp("rows") / "rows.parquet"
    whole = section_of(DataConfig, "data", train_batch_size=8)

    def run(*rows: dict[str, Any], pictures: Any = reader, **settings: Any) -> PromptDataset:
        names = dict.fromkeys(name for row in rows for name in row)
        table = pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
        pyarrow.parquet.write_table(table, file)
        tokenizer = reader.processor.tokenizer
        return load_prompts([str(file)], replace(whole, **settings), tokenizer, **OPTIONS, pictures=pictures)

    return run


@pytest.fixture
def rejection(load: Callable[..., PromptDataset]) -> Callable[..., str]:
    def run(*rows: dict[str, Any], **options: Any) -> str:
        with pytest.raises(ConfigError) as error:
            load(*rows, **options)
        return str(error.value)

    return run


# -- the processor -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen3_5", "qwen3_vl_moe", "glm4v"])
def test_pixels_are_the_processors_own_before_its_rule(family, reader_of):
    reader = reader_of(family)
    processor = reader.processor.image_processor

    @given(SIZES, st.integers(0, 9))
    def of_any_size(size: tuple[int, int], seed: int) -> None:
        shown = noise_picture(*size, seed)
        pixels, own = reader.pixels(shown), processor(images=[shown], return_tensors="np")
        assert pixels["pixel_values"].dtype == np.uint8
        assert pixels["image_grid_thw"].tolist() == own["image_grid_thw"].tolist()
        tokens = reader.seen(png(shown)).tokens
        assert tokens == own["image_grid_thw"].prod() // 4 == len(pixels["pixel_values"]) // 4
        planes = pixels["pixel_values"].reshape(tokens * 4, 3, -1)  # [patches, colours, values]
        mean, deviation = (np.array(values)[:, None] for values in ([0.5, 0.5, 0.5], [0.5, 0.25, 0.5]))
        expected = ((planes / 255.0 - mean) / deviation).reshape(tokens * 4, -1)
        assert np.abs(expected - own["pixel_values"]).max() < 1e-6

    of_any_size()
    assert reader.rule == PixelRule(pytest.approx(1 / 255), (0.5, 0.5, 0.5), (0.5, 0.25, 0.5))


def test_a_processor_that_returns_no_bytes_is_used_as_it_is(reader_of):
    processor = reader_of().processor
    image_processor = processor.image_processor

    def normalised(images: Any, return_tensors: str, do_rescale: bool = True, do_normalize: bool = True) -> Any:
        return image_processor(images=images, return_tensors=return_tensors)

    processor.image_processor = normalised
    processor._get_num_multimodal_tokens = lambda image_sizes: {"num_image_tokens": [4]}
    shown = noise_picture(64, 64)
    reader = PictureReader(processor, PictureStore())
    pixels = reader.pixels(shown)["pixel_values"]
    assert reader.rule == PixelRule()
    assert pixels.dtype == np.float32
    assert np.array_equal(pixels, image_processor(images=[shown], return_tensors="np")["pixel_values"])


def test_arguments_of_the_image_processor_hold_for_tokens_and_pixels(reader_of):
    shown = noise_picture(320, 320)
    assert reader_of().seen(png(shown)).tokens == 64
    for arguments in ({"max_pixels": 16 * 1024}, {"size": {"shortest_edge": 1024, "longest_edge": 16 * 1024}}):
        reader = reader_of(**arguments)
        assert reader.seen(png(shown)).tokens == 16
        assert len(reader.pixels(shown)["pixel_values"]) == 64


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("max_pixel", "Qwen2VLImageProcessor takes no max_pixel; did you mean max_pixels?"),
        ("patch_size", "the model or the run fixes it"),
        ("do_normalize", "the model or the run fixes it"),
    ],
)
def test_other_arguments_are_rejected_with_the_nearest_name(reader_of, name, reason):
    with pytest.raises(ConfigError) as error:
        reader_of(**{name: 3})
    assert f"data.mm_processor_kwargs.{name}" in str(error.value) and reason in str(error.value)


def test_a_model_without_a_tower_has_no_processor(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert load_processor(str(tmp_path), tokenizer_that_sees(), {}) is None


def test_a_processor_without_its_files_is_rejected(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "vision_config": {}}))
    with pytest.raises(ConfigError, match=r"processor of pictures cannot be loaded.*preprocessor_config"):
        load_processor(str(tmp_path), tokenizer_that_sees(), {})


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_a_checkpoint_has_the_files_of_the_processor_and_loads_by_itself(tmp_path, name):
    model, saved = tmp_path / "model", tmp_path / "saved"
    model.mkdir()
    reader = reader_that_sees(model)
    if name == "processor_config.json":  # as newer versions of transformers save it
        reader.processor.save_pretrained(model)
        (model / "preprocessor_config.json").unlink()
    save_readers(reader.processor.tokenizer, str(model), str(saved))
    assert (saved / name).read_bytes() == (model / name).read_bytes()
    shutil.copyfile(model / "config.json", saved / "config.json")
    shown = noise_picture(80, 50)
    own = PictureReader(load_processor(str(saved), tokenizer_that_sees(), {}), PictureStore())
    assert digest_of(own.pixels(shown)) == digest_of(reader.pixels(shown)) and own.rule == reader.rule


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_a_row_of_geometry3k_is_a_prompt_as_the_processor_makes_it(load, reader):
    (prompt,) = load(row(pictures=[picture()]))
    parts = [{"type": "image"}, {"type": "text", "text": QUESTION.removeprefix("<image>")}]
    assert prompt.messages == [{"role": "user", "content": parts}]
    text = reader.processor.apply_chat_template(prompt.messages, add_generation_prompt=True)
    own = reader.processor(text=[text], images=[noise_picture(80, 50)])
    assert prompt.ids == own["input_ids"][0]
    assert prompt.carried[PICTURE_START].tolist() == [own["mm_token_type_ids"][0].index(1)]
    pixels = reader.pixels(noise_picture(80, 50))
    (shown,) = prompt.pictures
    assert shown.tokens == 4 and np.array_equal(shown.pixels["pixel_values"], pixels["pixel_values"])
    assert prompt.carried[PICTURE_DIGEST].tolist() == [shown.digest] == [digest_of(pixels)]


@given(st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=4), st.data())
def test_pictures_of_any_sizes_and_places(load, reader, drawn, data):
    """Each is in the place that the row gives it, in a text or as a part with its own content."""
    content, column, sizes = [], [], []
    for number, (size, inline) in enumerate(drawn):
        content.append({"type": "text", "text": "a" * data.draw(st.integers(1, 3))})
        content.append({"type": "image", "image": picture(size, number)} if inline else {"type": "image"})
        column += [] if inline else [picture(size, number)]
        sizes.append(size)
    (prompt,) = load(row(content, column), max_prompt_length=2048)
    expected = [reader.pixels(decoded(picture(size, number)["bytes"])) for number, size in enumerate(sizes)]
    assert prompt.carried[PICTURE_DIGEST].tolist() == [digest_of(pixels) for pixels in expected]
    placeholders = np.flatnonzero(np.array(prompt.ids) == reader.placeholder)
    counts = [len(pixels["pixel_values"]) // 4 for pixels in expected]
    ranges = zip(prompt.carried[PICTURE_START], counts, strict=True)
    assert placeholders.tolist() == [at for start, count in ranges for at in range(start, start + count)]


def test_equal_pictures_are_stored_once_while_a_prompt_holds_them(load, reader):
    prompts = load(*[row(f"<image>{number}", [picture()]) for number in range(3)])
    first, second, third = prompts
    assert first.pictures[0] is second.pictures[0] is third.pictures[0]
    digest = first.pictures[0].digest
    assert reader.store.handles([digest])[digest]["pixel_values"].dtype == np.uint8
    del first, second, third
    gc.collect()
    with pytest.raises(KeyError):
        reader.store.handles([digest])


def test_lengths_and_filters_count_all_tokens_of_pictures(load, caplog):
    caplog.set_level(logging.INFO)
    rows = [row("a"), row("<image>a", [picture((32, 32))]), row("<image>a", [picture((256, 256))])]
    prompts = load(*rows)
    assert prompts.lengths.tolist() == [len(prompt.ids) for prompt in prompts]
    plain, small, large = prompts.lengths.tolist()
    assert small - plain == 3 and large - small == 63  # <|vision_start|>, one placeholder or 64, <|vision_end|>
    assert "3 rows (2 with pictures)" in caplog.text
    short = load(*rows, max_prompt_length=small, filter_overlong_prompts=True)
    assert short.lengths.tolist() == [plain, small] and short.over == 1
    assert f"1 of 3 rows are longer than data.max_prompt_length={small}" in caplog.text


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_a_row_with_pictures_is_never_truncated(load, rejection, side):
    long = row("a" * 90)
    (prompt,) = load(long, max_prompt_length=50, truncation=side)
    assert len(prompt.ids) == 50
    rows = [long, row("<image>a", [picture((256, 256))])]
    message = rejection(*rows, max_prompt_length=50, truncation=side)
    assert "1 of 2 rows are longer than data.max_prompt_length=50" in message and "a picture cannot be cut" in message
    kept = load(row("a"), *rows, max_prompt_length=50, truncation=side, filter_overlong_prompts=True)
    assert len(kept) == 1 and kept.over == 2


BAD = [
    (
        row("<image><image>", [picture(), {"bytes": b"x", "path": None}]),
        "images[1]: not a picture of PNG, JPEG, WebP, GIF or BMP",
    ),
    (row(pictures=[picture((450, 2))]), "images[0]: 450 x 2 pixels: absolute aspect ratio must be smaller than 200"),
    (row("a", [picture()]), "places for 0 pictures (<image>, or parts without content), and the column images has 1"),
    (
        row(videos=["a.mp4"]),
        "more than text: the column videos; leave such rows out: videos and sounds are not trained",
    ),
    (row("a", audios=["a.wav"]), "more than text: the column audios; leave such rows out"),
    (
        row(pictures=[{"bytes": None, "path": "http://a.example/b.png"}]),
        "images[0]: 'http://a.example/b.png' is not on",
    ),
]


def test_all_bad_rows_are_named_at_once(rejection):
    message = rejection(row("fine"), *(bad for bad, _ in BAD[:5]))
    assert "5 bad rows" in message
    for number, (_, reason) in enumerate(BAD[:5]):
        assert f"rows.parquet, row {number + 2}: " in message and reason in message


@pytest.mark.parametrize(("bad", "reason"), BAD)
def test_a_bad_row_is_named_with_column_index_and_reason(rejection, bad, reason):
    message = rejection(row("fine"), bad)
    assert "1 bad row\n" in message and "rows.parquet, row 2: " in message and reason in message


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (row("<image>a<|image_pad|>", [picture()]), "the prompt has 2 tokens <|image_pad|>, and 1 pictures"),
        (
            row("a<|image_pad|>"),
            "the prompt has 1 tokens <|image_pad|>, and 0 pictures; a text may not have such tokens",
        ),
        (row("<image>a<|video_pad|>", [picture()]), "the prompt has 1 tokens <|video_pad|>, and 1 pictures"),
    ],
)
def test_no_text_has_a_placeholder(rejection, bad, reason):
    assert f"rows.parquet, row 2: with its chat template {reason}" in rejection(row("fine"), bad)


def test_without_a_column_image_is_a_word_and_a_warning_says_so(load, reader, caplog):
    (prompt,) = load(row("what does <image> mean?", []))
    assert "<image>" in reader.processor.tokenizer.decode(prompt.ids) and prompt.pictures == ()
    assert "1 rows have <image> as text: no picture in data.image_key=images" in caplog.text
    caplog.clear()
    load(row("a"), row("<image>", [picture()]))
    assert "as text" not in caplog.text


def test_another_column_may_have_the_pictures(load):
    (prompt,) = load(row("<image>", shown=picture()), image_key="shown")
    assert len(prompt.pictures) == 1


def test_a_plain_text_with_a_picture_is_a_message(load):
    shown = row(pictures=[picture()])
    assert load(shown | {"prompt": QUESTION})[0].ids == load(shown)[0].ids


def test_a_model_that_reads_no_pictures_rejects_them_with_the_reason(rejection):
    message = rejection(row(pictures=[picture()]), pictures="its processor is missing")
    assert "the column images; leave such rows out: its processor is missing" in message


def test_a_template_for_texts_is_rejected(load, reader, rejection):
    tokenizer = reader.processor.tokenizer
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
        assert 'the chat template rejects it: can only concatenate str (not "list")' in rejection(
            row(pictures=[picture()])
        )
        tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
        assert "the prompt has 0 tokens <|image_pad|>, and 1 pictures" in rejection(row(pictures=[picture()]))
    finally:
        tokenizer.chat_template = template


def test_a_processor_with_another_expansion_is_rejected(rejection, reader, monkeypatch):
    monkeypatch.setattr(reader.processor, "replace_image_token", lambda *arguments, **more: "<|image_pad|>a" * 4)
    message = rejection(row(pictures=[picture()]))
    assert "Qwen3VLProcessor makes of a row with pictures" in message and "train this family on rows of text" in message


def test_stored_responses_to_pictures_are_read_without_them(tmp_path, config):
    (tmp_path / "a.jsonl").write_text(
        "".join(
            json.dumps(each) + "\n"
            for each in [
                row(pictures=["gone.png"], responses=["x"]),
                {"data_source": "x", "images": ["gone.png"], "reward_model": {"ground_truth": "1"}, "responses": ["x"]},
            ]
        )
    )
    shown, bare = read_responses([str(tmp_path / "a.jsonl")], config, key="eval.files", truth_key="reward_model")
    assert shown.messages[0]["content"][0] == {"type": "image"} and bare.messages == ""


# -- between load and draw ---------------------------------------------------------------------------------------------


@pytest.fixture
def on_disk(tmp_path, load) -> tuple[Path, PromptDataset]:
    (tmp_path / "a.png").write_bytes(png(noise_picture(80, 50)))
    return tmp_path / "a.png", load(row("a"), row("<image>", [str(tmp_path / "a.png")]))


def test_a_file_is_read_again_for_each_draw(on_disk):
    _, prompts = on_disk
    (picture,) = prompts[1].pictures
    assert prompts[1].fault == "" and required(picture.preview).width == 80 and required(picture.preview).height == 50


def test_what_needs_no_pixels_reads_no_file(on_disk, reader):
    file, prompts = on_disk
    file.unlink()
    prompt = prompts.without_pixels(1)
    assert prompt.fault == "" and prompt.ids.count(reader.placeholder) == 1 and [*prompt.encoded.values()] == [file]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda file: file.unlink(), "there is no file"),
        (lambda file: file.write_bytes(b""), "it has changed since the rows were loaded"),
        (lambda file: file.write_bytes(png(noise_picture(80, 50, 1))), "it has changed since the rows were loaded"),
        (lambda file: file.write_bytes(png(noise_picture(180, 50))), "it has changed since the rows were loaded"),
    ],
)
def test_a_file_that_has_changed_is_a_fault_of_its_prompt(on_disk, change, reason):
    file, prompts = on_disk
    change(file)
    text, shown = prompts
    assert text.fault == "" and not text.pictures
    assert "rows.parquet, row 2: " in shown.fault and reason in shown.fault and shown.pictures == ()


def test_pixels_that_were_freed_are_made_again_and_only_of_the_same_pictures(reader):
    first, second = (png(noise_picture(80, 50, seed)) for seed in (0, 1))
    digests = [digest_of(reader.pixels(decoded(file))) for file in (first, second)]
    assert [shown.digest for shown in reader.again([first, second], digests)] == digests
    with pytest.raises(PictureFault, match="a picture has changed since the rows were loaded"):
        reader.again([second, first], digests)


def test_pictures_are_read_ahead_up_to_a_limit_and_drawn_once(load, reader, monkeypatch):
    prompts = load(*[row("<image>", [picture((32, 32), number)]) for number in range(4)], row("a"))
    started, start = [], reader.start

    def recorded(work: Any, index: int) -> Any:
        started.append(index)
        return start(work, index)

    monkeypatch.setattr(reader, "start", recorded)
    prompts.read_ahead([3, 4, 1, 0], limit=2 * reader.bytes_per_token)
    assert started == [3, 1]
    prompts.read_ahead([1, 2])
    assert started == [3, 1, 2]
    assert [prompts[index].pictures[0].tokens for index in (3, 1, 2, 0)] == [1, 1, 1, 1]
    expected = [digest_of(reader.pixels(noise_picture(32, 32, number))) for number in range(4)]
    assert [int(prompt.carried[PICTURE_DIGEST][0]) for prompt in [*prompts][:4]] == expected


def test_pictures_of_a_custom_dataset(tmp_path, config, reader):
    source = """
from tests.vision_models import noise_picture
import numpy as np
class Shown:
    def __init__(self, data_files, processor):
        assert type(processor).__name__ == "Qwen3VLProcessor"
        self.kinds = [lambda one: one, np.asarray]
    def __len__(self):
        return 2
    def __getitem__(self, number):
        shown = self.kinds[number](noise_picture(80, 50))
        return {"prompt": [{"role": "user", "content": "<image>"}], "images": [shown], "data_source": "x",
                "reward_model": {"ground_truth": "1"}}
"""
    (tmp_path / "custom.py").write_text(source)
    data = replace(config, custom_cls=CustomDatasetConfig(str(tmp_path / "custom.py"), "Shown"))
    first, second = load_prompts(["any"], data, reader.processor.tokenizer, **OPTIONS, pictures=reader)
    expected = digest_of(reader.pixels(noise_picture(80, 50)))
    assert first.carried[PICTURE_DIGEST].tolist() == second.carried[PICTURE_DIGEST].tolist() == [expected]
