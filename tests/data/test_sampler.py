"""Orders as the configuration asks for them, and samplers of the user's own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Tokenizer

from hybridrl.config.error import ConfigError
from hybridrl.config.schema import DataConfig, SamplerConfig
from hybridrl.data.order import PromptOrder
from hybridrl.data.prompts import PromptDataset, load_prompts
from hybridrl.data.sampler import build_order

Write = Callable[..., str]
EASY_FIRST = """
class EasyFirst:
    def __init__(self, data_source, data_config):
        self.rows, self.name = data_source, data_config.get("difficulty_key", "level")
    def __iter__(self):
        levels = [self.rows[i]["extra_info"][self.name] for i in range(len(self.rows))]
        return iter(sorted(range(len(levels)), key=levels.__getitem__))
"""
SHUFFLED = """
import random
class Shuffled:
    def __init__(self, data_source, data_config):
        self.size, self.seed, self.epoch = len(data_source), data_config.seed, 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        rows = list(range(self.size))
        random.Random(f"{self.seed} {self.epoch}").shuffle(rows)
        return iter(rows)
"""


@pytest.fixture
def prompts(write: Write, config: DataConfig, plain_tokenizer: Qwen2Tokenizer) -> PromptDataset:
    levels = [3, 1, 2, 5, 4, 9, 8, 7]
    rows = [{"prompt": "x", "reward_model": {"ground_truth": ""}, "extra_info": {"level": level}} for level in levels]
    return load_prompts([write(*rows)], config, plain_tokenizer, max_samples=-1, shuffle=False, key="data.train_files")


def drawn(config: DataConfig, prompts: PromptDataset, source: str, name: str, place: Path, **own: Any) -> list[int]:
    """Two epochs, drawn in two parts as by a run that was resumed."""
    (place / "sampler.py").write_text(source)
    config = replace(config, sampler=SamplerConfig(str(place / "sampler.py"), name))
    whole = build_order(config, prompts, own)
    half = build_order(config, prompts, own)
    rows = whole.rows(0, 2 * whole.size)
    assert rows == [*half.rows(0, 5), *build_order(config, prompts, own).rows(5, 2 * half.size - 5)]
    return rows


def test_without_a_sampler_the_order_is_that_of_shuffle(config: DataConfig, prompts: PromptDataset) -> None:
    assert build_order(config, prompts) == PromptOrder(8, config.seed, config.shuffle)


def test_a_curriculum_is_drawn_as_the_rows_say(config: DataConfig, prompts: PromptDataset, tmp_path: Path) -> None:
    assert drawn(config, prompts, EASY_FIRST, "EasyFirst", tmp_path) == [1, 2, 0, 4, 3, 7, 6, 5] * 2


def test_a_sampler_reads_keys_of_the_users_own(config: DataConfig, prompts: PromptDataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"EasyFirst, epoch 0 fails: KeyError: 'rank' .*sampler.py:6"):
        drawn(config, prompts, EASY_FIRST, "EasyFirst", tmp_path, difficulty_key="rank")


def test_a_sampler_that_knows_epochs_has_another_order_in_each(
    config: DataConfig, prompts: PromptDataset, tmp_path: Path
) -> None:
    rows = drawn(config, prompts, SHUFFLED, "Shuffled", tmp_path)
    assert sorted(rows[:8]) == sorted(rows[8:]) == list(range(8))
    assert rows[:8] != rows[8:]


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ("import random\n  return iter(random.sample(range(8), 8))", "gives another order each time that it is asked"),
        ("return iter([0, 8])", "expected numbers of rows from 0 to 7"),
        ("return iter([])", "expected numbers of rows from 0 to 7"),
        ("import itertools\n  return itertools.count(0, 0)", "has no end"),
        ("return iter(['a'])", "epoch 0 fails: ValueError"),
    ],
)
def test_a_sampler_whose_epochs_cannot_be_had_again_is_refused(
    config: DataConfig, prompts: PromptDataset, tmp_path: Path, body: str, refused: str
) -> None:
    source = f"class Own:\n def __init__(self, data_source, data_config): pass\n def __iter__(self):\n  {body}\n"
    with pytest.raises(ConfigError, match=refused) as error:
        drawn(config, prompts, source, "Own", tmp_path)
    assert str(error.value).startswith("data.sampler.class_path=")


def test_a_sampler_that_learns_from_batches_is_refused_with_the_reason(
    config: DataConfig, prompts: PromptDataset, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"EasyFirst learns from batches .update., so that a run which goes on"):
        drawn(config, prompts, EASY_FIRST + "    def update(self, batch): pass\n", "EasyFirst", tmp_path)


def test_a_class_that_is_not_there_is_named_with_those_that_are(
    config: DataConfig, prompts: PromptDataset, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"sampler.py: there is no class Easy; there is EasyFirst"):
        drawn(config, prompts, EASY_FIRST, "Easy", tmp_path)


def test_weights_share_an_epoch_among_the_entries(
    write: Write, config: DataConfig, plain_tokenizer: Qwen2Tokenizer
) -> None:
    row = {"prompt": "x", "reward_model": {"ground_truth": ""}}
    files = [write(*[row] * 9, name="a.jsonl"), write(*[row] * 3, name="b.jsonl")]
    config = replace(config, train_files=files, train_weights=[1.0, 2.0])
    told = {"max_samples": -1, "shuffle": True, "key": "data.train_files"}
    loaded = load_prompts(files, config, plain_tokenizer, **told)
    order = build_order(config, loaded)
    entries = [int(loaded[row].row >= 9) for row in order.rows(0, order.size)]
    assert (entries.count(0), entries.count(1)) == (4, 8)


def test_an_entry_of_which_nothing_is_left_cannot_have_a_share(
    write: Write, config: DataConfig, plain_tokenizer: Qwen2Tokenizer
) -> None:
    short, long = ({"prompt": text, "reward_model": {"ground_truth": ""}} for text in ("x", "x" * 20))
    files = [write(short, name="a.jsonl"), write(long, name="b.jsonl")]
    config = replace(config, train_files=files, train_weights=[1.0, 2.0], max_prompt_length=4)
    config = replace(config, filter_overlong_prompts=True)
    loaded = load_prompts(files, config, plain_tokenizer, max_samples=-1, shuffle=False, key="data.train_files")
    with pytest.raises(ConfigError, match=r"no prompt of .*b.jsonl is left"):
        build_order(config, loaded)
