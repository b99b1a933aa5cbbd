"""Reward files that import from verl, in separate processes: an import lasts as long as its process."""

from pathlib import Path

import pytest

from hybridrl.compat.verl.names import NAMES
from hybridrl.config import ConfigError
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.score import Score, ScoringRequest

BOX = r"so \boxed{42}"


def scored(config, solution: str = BOX, truth: str = "42", data_source: str = "lighteval/MATH") -> Score:
    with ScorerPool(config) as pool:
        return pool.submit([ScoringRequest(data_source, solution, truth, {"split": "test"})])[0].result(timeout=60)


def rejection(config) -> str:
    with pytest.raises(ConfigError) as raised, ScorerPool(config):
        pass
    return str(raised.value)


HELPERS = """
from __future__ import annotations
import verl.utils.torch_functional as verl_F
from verl import DataProto
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.utils.dataset import RLHFDataset
from verl.utils.import_utils import deprecated
from verl.utils.py_functional import timeout_limit
from verl.utils.ray_utils import get_event_loop
from verl.utils.reward_score import math_dapo, math_reward
from verl.utils.reward_score.math_dapo import last_boxed_only_string, normalize_final_answer, remove_boxed
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.reward_manager import AbstractRewardManager, register

class Tool(SandboxFusionTool):
    @rollout_trace_op
    async def execute(self, data: DataProto): ...

class Rows(RLHFDataset): ...

@register("mine")
class Manager(AbstractRewardManager): ...

@deprecated("other")
@timeout_limit(seconds=5)
def verify(solution, truth):
    return normalize_final_answer(remove_boxed(last_boxed_only_string(solution))) == normalize_final_answer(truth)

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    from verl.utils.reward_score import default_compute_score, gsm8k
    right = await get_event_loop().run_in_executor(None, lambda: verify(solution_str, ground_truth))
    return {
        "score": right,
        "default": default_compute_score(data_source, solution_str, ground_truth, extra_info),
        "math": math_reward.compute_score(solution_str, ground_truth) + 1,
        "dapo": math_dapo.compute_score(solution_str, ground_truth, strict_box_verify=True)["score"],
        "gsm8k": gsm8k.compute_score("#### 1,234", "1234"),
        "same": math_reward.is_equiv(r"\\dfrac12", "1/2"),
    }
"""


def test_a_file_made_for_verl_scores_without_it(reward_config):
    score = scored(reward_config(HELPERS))
    assert (score.value, score.detail) == (1.0, "")
    assert score.extras == {"score": True, "default": 1.0, "math": 2.0, "dapo": 1.0, "gsm8k": 1.0, "same": True}


USES = "\ndef compute_score(solution_str, ground_truth): return math_reward.compute_score(solution_str, ground_truth)"
IMPORT = "from verl.utils.reward_score import math_reward"


def test_an_import_within_try_gives_the_counterpart_too(reward_config):
    source = f"try:\n    {IMPORT}\nexcept ImportError:\n    math_reward = None"
    assert scored(reward_config(source + USES)).value == 1.0


@pytest.mark.parametrize(
    ("imported", "error", "said"),
    [
        ("verl.utils.reward_score.gsm8k import remove_boxed",
         "ImportError: verl is not installed, and verl.utils.reward_score.gsm8k.remove_boxed has no",
         ["of verl.utils.reward_score.gsm8k there are compute_score, extract_solution: "]),
        ("verl.utils.reward_score.poems import compute_score",
         "ModuleNotFoundError: verl is not installed, and verl.utils.reward_score.poems has no",
         ["of verl.utils.reward_score there are ", " default_compute_score", " math_dapo", " prime_code"]),
    ],
    ids=["name", "module"],
)  # fmt: skip
def test_what_has_no_counterpart_is_rejected_with_what_there_is(reward_config, tmp_path, imported, error, said):
    message = rejection(reward_config(f"import re\nfrom {imported}"))
    assert all(part in message for part in (error, *said)), message
    assert message.endswith(f"({tmp_path / 'my_reward.py'}:2)")


def test_a_class_of_verl_cannot_be_instantiated(reward_config):
    source = "from verl import DataProto\ndef compute_score(solution_str): return DataProto(1)"
    score = scored(reward_config(source))
    assert score.fault == "raised:NotImplementedError"
    assert "verl.DataProto is a class of verl, which is not installed; only reward functions run here" in score.detail


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package of a verl clone in a directory where modules are looked for, as a working directory is."""
    package = tmp_path / "clone/verl"
    (package / "utils/reward_score").mkdir(parents=True)
    (package / "utils/__init__.py").touch()
    (package / "utils/reward_score/__init__.py").touch()
    (package / "utils/reward_score/math_reward.py").write_text("def compute_score(solution, truth): return 17")
    monkeypatch.syspath_prepend(str(package.parent))
    return package


@pytest.mark.parametrize(("package", "value"), [(True, 17), (False, 1.0)])
def test_a_verl_that_can_be_imported_is_used_and_a_directory_of_its_name_not(reward_config, clone, package, value):
    if package:
        (clone / "__init__.py").write_text("from . import utils")
    assert scored(reward_config(IMPORT + USES)).value == value


def test_a_clone_without_its_libraries_neither_breaks_a_file_nor_hides_the_advice(reward_config, clone):
    (clone / "__init__.py").write_text("from . import utils\nimport tensordict_is_not_here")
    assert scored(reward_config(IMPORT + USES)).value == 1.0
    message = rejection(reward_config("from verl.utils.reward_score.gsm8k import remove_boxed"))
    assert f"the verl in {clone / '__init__.py'} does not import (ModuleNotFoundError: No module named" in message
    assert "there are compute_score, extract_solution: " in message


def test_every_counterpart_is_a_function_or_a_placeholder():
    targets = [target for names in NAMES.values() for target in names.values()]
    assert all(target is None or callable(target) for target in targets)


def test_parameters_under_other_names_are_bound_by_place_as_verls_prime_manager_calls(reward_config):
    parameters = "data_source, response, ground_truth"
    source = f"def compute_score({parameters}): return data_source + response + ground_truth == 'abc'"
    assert scored(reward_config(source), "b", "c", "a").value == 1.0


@pytest.mark.parametrize("names", ["response, ground_truth", "ground_truth, response, data_source", "a, b, c, d"])
def test_parameters_whose_place_is_not_known_are_rejected(reward_config, names):
    assert "name its parameters like these" in rejection(reward_config(f"def compute_score({names}): return 1.0"))
