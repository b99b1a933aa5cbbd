"""Orders from the configuration, and custom samplers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Tokenizer

from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import DataConfig, SamplerConfig
from hybridrl.data.order import PromptOrder, build_order
from hybridrl.data.prompts import PromptDataset, load_prompts

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
    infos = [{"level": level} if level % 2 else json.dumps({"level": level}) for level in levels]
    rows = [{"prompt": "x", "reward_model": {"ground_truth": ""}, "extra_info": extra} for extra in infos]
    return load_prompts([write(*rows)], config, plain_tokenizer, max_samples=-1, shuffle=False, key="data.train_files")


def drawn(
    config: DataConfig, prompts: PromptDataset, source: str, name: str, directory: Path, **custom_keys: Any
) -> list[int]:
    """Draw two epochs, and check that a resumed run draws the same."""
    (directory / "sampler.py").write_text(source)
    config = replace(config, sampler=SamplerConfig(str(directory / "sampler.py"), name))
    order, resumed = build_order(config, prompts, custom_keys), build_order(config, prompts, custom_keys)
    rows = order.rows(0, 2 * order.size)
    assert rows == [*order.rows(0, 5), *resumed.rows(5, 2 * order.size - 5)]
    return rows


def test_without_a_sampler_the_order_follows_shuffle(config, prompts):
    assert build_order(config, prompts).rows(0, 16) == PromptOrder(8, config.seed, config.shuffle).rows(0, 16)


def test_a_curriculum_follows_the_rows(config, prompts, tmp_path):
    assert drawn(config, prompts, EASY_FIRST, "EasyFirst", tmp_path) == [1, 2, 0, 4, 3, 7, 6, 5] * 2


def test_a_sampler_reads_custom_keys(config, prompts, tmp_path):
    with pytest.raises(ConfigError, match=r"EasyFirst, epoch 0 fails: KeyError: 'rank' .*sampler.py:6"):
        drawn(config, prompts, EASY_FIRST, "EasyFirst", tmp_path, difficulty_key="rank")


def test_an_epoch_aware_sampler_has_another_order_in_each_epoch(config, prompts, tmp_path):
    rows = drawn(config, prompts, SHUFFLED, "Shuffled", tmp_path)
    assert sorted(rows[:8]) == sorted(rows[8:]) == list(range(8))
    assert rows[:8] != rows[8:]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "import random\n  return iter(random.sample(range(8), 8))",
            "is not deterministic, so a resumed run could not draw the same prompts",
        ),
        ("return iter([0, 8])", "expected one or more row numbers from 0 to 7"),
        ("return iter([])", "expected one or more row numbers from 0 to 7"),
        ("import itertools\n  return itertools.count(0, 0)", "has no end"),
        ("return iter(['a'])", "epoch 0 fails: ValueError"),
    ],
)
def test_a_sampler_with_invalid_or_random_epochs_is_rejected(config, prompts, tmp_path, body, message):
    source = f"class Custom:\n def __init__(self, data_source, data_config): pass\n def __iter__(self):\n  {body}\n"
    with pytest.raises(ConfigError, match=message) as error:
        drawn(config, prompts, source, "Custom", tmp_path)
    assert str(error.value).startswith("data.sampler.class_path=")


def test_a_sampler_that_adapts_to_batches_is_rejected(config, prompts, tmp_path):
    with pytest.raises(ConfigError, match=r"EasyFirst adapts to batches .update., so a resumed run"):
        drawn(config, prompts, EASY_FIRST + "    def update(self, batch): pass\n", "EasyFirst", tmp_path)


def test_a_missing_class_is_named_with_the_existing_ones(config, prompts, tmp_path):
    with pytest.raises(ConfigError, match=r"sampler.py: there is no class Easy; it has EasyFirst"):
        drawn(config, prompts, EASY_FIRST, "Easy", tmp_path)


def test_weights_divide_an_epoch_among_the_entries(write, config, plain_tokenizer):
    row = {"prompt": "x", "reward_model": {"ground_truth": ""}}
    files = [write(*[row] * 9, name="a.jsonl"), write(*[row] * 3, name="b.jsonl")]
    config = replace(config, train_files=files, train_weights=[1.0, 2.0])
    options = {"max_samples": -1, "shuffle": True, "key": "data.train_files"}
    loaded = load_prompts(files, config, plain_tokenizer, **options)
    order = build_order(config, loaded)
    entries = [int(loaded[row].row >= 9) for row in order.rows(0, order.size)]
    assert (entries.count(0), entries.count(1)) == (4, 8)


def test_an_entry_without_remaining_prompts_is_rejected(write, config, plain_tokenizer):
    short, long = ({"prompt": text, "reward_model": {"ground_truth": ""}} for text in ("x", "x" * 20))
    files = [write(short, name="a.jsonl"), write(long, name="b.jsonl")]
    config = replace(config, train_files=files, train_weights=[1.0, 2.0], max_prompt_length=4)
    config = replace(config, filter_overlong_prompts=True)
    loaded = load_prompts(files, config, plain_tokenizer, max_samples=-1, shuffle=False, key="data.train_files")
    with pytest.raises(ConfigError, match=r"no prompt of .*b.jsonl is left"):
        build_order(config, loaded)
