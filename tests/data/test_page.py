"""The examples of docs/data.md work."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from transformers import Qwen2Tokenizer

from hybridrl.config.schema import CustomDatasetConfig, DataConfig, SamplerConfig
from hybridrl.data.order import build_order
from hybridrl.data.prompts import load_prompts

from .conftest import OPTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
SHOWN = {name: code for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL)}


def test_the_example_row_is_valid(write: Callable[..., str], config: DataConfig, tokenizer: Qwen2Tokenizer) -> None:
    (shown,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (prompt,) = load_prompts([write(json.loads(shown))], config, tokenizer, **OPTIONS)
    assert (prompt.ground_truth, prompt.extra_info) == ("4", {"index": 0})


def test_the_custom_classes_work(tmp_path: Path, config: DataConfig, tokenizer: Qwen2Tokenizer) -> None:
    for name, code in SHOWN.items():
        (tmp_path / name).write_text(code)
    dataset = CustomDatasetConfig(str(tmp_path / "my_data.py"), "Sums")
    sampler = SamplerConfig(str(tmp_path / "my_sampler.py"), "EasyFirst")
    config = replace(config, custom_cls=dataset, sampler=sampler)
    # The dataset of the page has no levels, which the sampler of the page sorts by.
    text = (tmp_path / "my_data.py").read_text()
    (tmp_path / "my_data.py").write_text(text.replace('"sums"}', '"sums", "extra_info": {"level": -number}}'))
    prompts = load_prompts(["any"], config, tokenizer, **OPTIONS, custom_keys={"top": 3})
    assert [prompt.ground_truth for prompt in prompts] == ["1", "2", "3"]
    assert build_order(config, prompts).rows(0, 4) == [2, 1, 0, 2]
