"""Rows from a data set class of the user's own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Tokenizer

from hybridrl.config.error import ConfigError
from hybridrl.config.schema import DataConfig, OwnDatasetConfig
from hybridrl.data.files import files_that_count
from hybridrl.data.prompts import PromptDataset, load_prompts

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


@pytest.fixture
def load(tmp_path: Path, config: DataConfig, tokenizer: Qwen2Tokenizer) -> Load:
    def run(source: str, name: str = "Sums", max_samples: int = -1, **own: Any) -> PromptDataset:
        (tmp_path / "own.py").write_text(source)
        data = replace(config, custom_cls=OwnDatasetConfig(str(tmp_path / "own.py"), name))
        told = {"max_samples": max_samples, "shuffle": False, "key": "data.train_files", "own": own}
        return load_prompts(["what it likes"], data, tokenizer, **told)

    return run


def test_its_items_are_rows(load: Load, tokenizer: Qwen2Tokenizer) -> None:
    prompts = load(SUMS)
    assert [prompt.ground_truth for prompt in prompts] == ["1", "2", "3"]
    assert "1+1?" in tokenizer.decode(prompts[1].ids)
    assert prompts.data_sources == {"what it likes"}


def test_it_reads_keys_of_the_users_own_and_max_samples_holds(load: Load) -> None:
    assert len(load(SUMS, top=5)) == 5
    assert [prompt.row for prompt in load(SUMS, top=5, max_samples=2)] == [0, 1]


def test_bad_items_are_told_with_their_number(load: Load) -> None:
    bad = SUMS.replace("return {\n", "if number == 1: return 5\n        return {\n")
    with pytest.raises(ConfigError, match=r"1 bad row\n  Sums, row 1: a int, not a mapping of columns"):
        load(bad)
    with pytest.raises(ConfigError, match=r"Sums, row 0: no ground truth"):
        load(SUMS.replace('"ground_truth"', '"truth"'))


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ("import verl.utils\nclass Sums: pass", r"No module named 'verl'.*let Sums stand by itself"),
        ("class Other: pass", r"there is no class Sums; there is Other"),
        ("class Sums:\n def __init__(self, data_files): 1/0", r"fails: ZeroDivisionError: .*own.py:2"),
        ("class Sums:\n def __iter__(self): yield {}", r"Sums has no __len__ and __getitem__"),
        (SUMS.replace("return self.top", "return 0"), "Sums has no rows"),
        (
            SUMS.replace("return {\n", "raise KeyError('a')\n        return {\n"),
            r"Sums\[0\] fails: KeyError: 'a' .*own.py:10",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_users_own_line(load: Load, source: str, refused: str) -> None:
    with pytest.raises(ConfigError, match=refused) as error:
        load(source)
    assert str(error.value).startswith("data.custom_cls.path=")


def test_a_copy_of_verl_that_does_not_import_does_not_hide_the_advice(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("import tensordict_of_another_version\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"No module named 'tensordict_of.*let Sums stand by itself"):
        load("from verl.utils.dataset import RLHFDataset\nclass Sums(RLHFDataset): pass")


def test_the_class_is_part_of_what_a_run_is_recognised_by(tmp_path: Path, config: DataConfig) -> None:
    (tmp_path / "own.py").touch()
    own = OwnDatasetConfig(f"file://{tmp_path / 'own.py'}", "Sums")
    assert files_that_count(replace(config, train_files=["what it likes"], custom_cls=own)) == [tmp_path / "own.py"]
