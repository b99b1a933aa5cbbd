"""Rows of a custom dataset class."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Tokenizer

from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import CustomDatasetConfig, DataConfig
from hybridrl.data.prompts import PromptDataset, load_prompts
from hybridrl.data.row_files import fingerprinted_files

Load = Callable[..., PromptDataset]
SUMS = """
import numpy as np
class Sums:
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        assert tokenizer.eos_token and processor is None and config.get("image_key", "images") == "images"
        self.top, self.files = config.get("top", 3), data_files
    def __len__(self):
        return self.top
    def __getitem__(self, number):
        return {
            "raw_prompt": np.array([{"role": "user", "content": f"{number}+1?"}]),
            "data_source": self.files[0],
            "reward_model": {"ground_truth": str(number + 1)},
        }
"""


@pytest.fixture(autouse=True)
def without_replacements_of_verl(monkeypatch):
    """A reward that another test loaded in this process makes `import verl` work."""
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not type(f).__module__.startswith("hybridrl")])
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def load(tmp_path: Path, config: DataConfig, tokenizer: Qwen2Tokenizer) -> Load:
    def run(source: str, name: str = "Sums", max_samples: int = -1, **custom_keys: Any) -> PromptDataset:
        (tmp_path / "custom.py").write_text(source)
        data = replace(config, custom_cls=CustomDatasetConfig(str(tmp_path / "custom.py"), name))
        options = {"max_samples": max_samples, "shuffle": False, "key": "data.train_files"}
        return load_prompts(["any"], data, tokenizer, custom_keys=custom_keys, **options)

    return run


def test_items_are_rows(load, tokenizer):
    prompts = load(SUMS)
    assert [prompt.ground_truth for prompt in prompts] == ["1", "2", "3"]
    assert "1+1?" in tokenizer.decode(prompts[1].ids)
    assert prompts.data_sources == {"any"}


def test_it_reads_custom_keys_and_max_samples_applies(load):
    assert len(load(SUMS, top=5)) == 5
    assert [prompt.row for prompt in load(SUMS, top=5, max_samples=2)] == [0, 1]


def test_bad_items_are_named_with_their_index(load):
    bad = SUMS.replace("return {\n", "if number == 1: return 5\n        return {\n")
    with pytest.raises(ConfigError, match=r"1 bad row\n  Sums, row 1: a int, not a mapping of columns"):
        load(bad)
    with pytest.raises(ConfigError, match=r"Sums, row 0: no ground truth"):
        load(SUMS.replace('"ground_truth"', '"truth"'))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import verl.utils\nclass Sums: pass", r"No module named 'verl'.*write Sums without it"),
        ("class Other: pass", r"there is no class Sums; it has Other"),
        ("class Sums:\n def __init__(self, data_files): 1/0", r"fails: ZeroDivisionError: .*custom.py:2"),
        ("class Sums:\n def __iter__(self): yield {}", r"Sums has no __len__ and __getitem__"),
        (SUMS.replace("return self.top", "return 0"), "Sums has no rows"),
        (
            SUMS.replace("return {\n", "raise KeyError('a')\n        return {\n"),
            r"Sums\[0\] fails: KeyError: 'a' .*custom.py:10",
        ),
    ],
)
def test_an_unusable_class_is_rejected_with_its_failing_line(load, source, message):
    with pytest.raises(ConfigError, match=message) as error:
        load(source)
    assert str(error.value).startswith("data.custom_cls.path=")


def test_a_broken_copy_of_verl_does_not_hide_the_hint(load, tmp_path, monkeypatch):
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("import tensordict_of_another_version\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"No module named 'tensordict_of.*write Sums without it"):
        load("from verl.utils.dataset import RLHFDataset\nclass Sums(RLHFDataset): pass")


def test_the_file_of_the_class_is_part_of_the_fingerprint(tmp_path, config):
    (tmp_path / "custom.py").touch()
    custom = CustomDatasetConfig(f"file://{tmp_path / 'custom.py'}", "Sums")
    assert fingerprinted_files(replace(config, train_files=["any"], custom_cls=custom)) == [tmp_path / "custom.py"]


def test_a_field_that_cannot_be_stored_is_named_with_its_row_and_type(load):
    source = SUMS.replace('"data_source":', '"numbers": (n for n in range(3)), "data_source":')
    with pytest.raises(ConfigError) as error:
        load(source)
    assert str(error.value).startswith("Sums, row 0: the column numbers holds a generator, which cannot be stored")
