"""A value that is set is used as it was written, or its key is named; whatever the key and the value."""

import json
import math
import os
from dataclasses import asdict
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.config import PPOConfig
from hybridrl.config.compose import CONF, shipped
from hybridrl.config.findings import show
from hybridrl.config.load import key_meanings, resolve_config
from hybridrl.config.values import Means, leaves, tree, value_of
from tests.fuzz import EXAMPLES
from tests.sections import keys_of_run

KEYS = [key for key in leaves(shipped("ppo_trainer").values) if not key.startswith(("eval.", "ray_kwargs."))]
TEXTS = ["", "a", "a b", "ä", "train.jsonl", "1", "1.0", "1e-3", "1_000", "true", "null", "inf", "nan", "0.5_5.0"]
TEXTS += ["a:b", "own.py:f", "${nope}", "$X", "[1]", "x" * 300, "~/x", "../x", "/", "sync", "token"]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([0, 1, 2, 3, 7, 0.5])
SCALARS |= st.sampled_from(TEXTS) | st.text(st.characters(exclude_categories=["C"]), max_size=8)
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.sampled_from(["a", "b.c"]), SCALARS, max_size=2)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return keys_of_run(tmp_path_factory.mktemp("set"))


def written(value: Any) -> str:
    """A value as a command line has it."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False) if value else '""'
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{written(name)}:{written(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)


def same(used: Any, value: Any) -> bool:
    """Whether a value is what was written: numbers and switches may be text and text a number, one value stands for a
    list of it, an empty text for nothing, and paths are absolute."""
    if used == value or (used != used and value != value):
        return True
    if isinstance(used, list):
        items = value if isinstance(value, list) else [] if value in (None, "") else [value]
        return len(used) == len(items) and all(map(same, used, items))
    if value in (None, ""):
        return used in (None, "", {})
    if isinstance(used, bool):
        return str(value).lower() == str(used).lower() or value in (str(int(used)), int(used))
    if isinstance(used, int | float) and isinstance(value, str):
        return float(value) == used
    if isinstance(used, str):
        text = str(value)
        return used in (text, os.path.abspath(os.path.expanduser(text)))
    return False


def other_names(hint: Any) -> dict[str, Any]:
    """The texts that stand for another value, as a key's type has them."""
    own = hint.values if isinstance(hint, Means) else {}
    return own | {text: value for part in get_args(hint) for text, value in other_names(part).items()}


MEANINGS = key_meanings(CONF / "ppo_trainer.yaml")
NAMES = {key: other_names(hint) for key, hint in tree(PPOConfig).items()}


@pytest.mark.parametrize("part", range(4))
def test_a_value_is_used_as_written_or_its_key_is_named(command: list[str], part: int) -> None:
    @settings(max_examples=EXAMPLES // 4)
    @given(key=st.sampled_from(KEYS[part::4]), value=VALUES)
    def check(key: str, value: Any) -> None:
        found = resolve_config(PPOConfig, [*command, f"{key}={written(value)}"], "ppo_trainer", CONF)
        named = [finding for finding in found.findings.items if key in finding.text or key in finding.keys]
        if found.findings.errors or named:
            assert named, (key, value, [finding.text for finding in found.findings.errors])
            return
        used, value = value_of(asdict(found.config), key), NAMES[key].get(show(value).lower(), value)
        chosen = value in (None, "") and "null" in MEANINGS.get(key, "")  # as the key's comment says
        assert same(used, value) or chosen, (key, value, used)

    check()
