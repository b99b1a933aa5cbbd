"""The stages of long reasoning: accepted as they are, each continuing the one before with a longer limit."""

import pytest

from hybridrl.config import load_ppo_config
from hybridrl.doctor import __main__ as doctor
from tests.recipes.test_large import TOP

RECIPE = TOP / "recipes" / "long_reasoning"
STAGES = {"stage1_8k": (8192, 1000), "stage2_16k": (16384, 1500), "stage3_32k": (32768, 1750)}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_is_accepted_for_another_machine(name, capsys):
    assert doctor.main(["--config-only", "--config-path", str(RECIPE), "--config-name", name]) == 0
    assert "no errors" in capsys.readouterr().out


def test_each_stage_continues_where_the_one_before_ends_as_the_pages_have_it(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    rows = [f"data.{part}_files={tmp_path}/rows.jsonl" for part in ("train", "val")]
    local = [*rows, f"trainer.default_local_dir={tmp_path}", "trainer.n_gpus_per_node=2", "trainer.device=cpu"]
    pages = [RECIPE / "README.md", TOP / "docs" / "long_reasoning.md"]
    before = 0
    for name, (tokens, last) in STAGES.items():
        config = load_ppo_config(local, config_name=name, config_dir=RECIPE)
        assert (config.data.max_response_length, config.trainer.total_training_steps) == (tokens, last)
        assert config.trainer.resume_from_path == (f"{tmp_path}/global_step_{before}" if before else None)
        assert (config.trainer.experiment_name, config.algorithm.mask_truncated) == (name, before > 0)
        for page in pages:
            assert f"| `{name}` | {tokens:,} | {before + 1:,} to {last:,} |" in page.read_text(encoding="utf-8")
        before = last
