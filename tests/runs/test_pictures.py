"""Rows with pictures before the start: what of a run cannot read them is named, and what it sets for the others."""

import base64
import json
from io import BytesIO
from pathlib import Path

import pytest

from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.config.checks.engine import EPISODE_PICTURES
from hybridrl.core.pictures import digest_of
from hybridrl.required import required
from hybridrl.runs.models import limit_pictures, picture_settings, vision_of
from hybridrl.runs.prepare import prepare
from hybridrl.runs.settings import build_algorithm, ppo_worker_config
from tests.vision_models import noise_picture, write_model_that_sees

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def data_url(width: int, height: int) -> str:
    file = BytesIO()
    noise_picture(width, height).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    """Two models that see, one of them with other patches, and rows of which one has two pictures."""
    made = tmp_path_factory.mktemp("pictures")
    models = {family: write_model_that_sees(made / family, family) for family in ("qwen3_vl", "qwen2_5_vl")}
    pictures = [[], [data_url(40, 30)], [data_url(40, 30), data_url(64, 96)]]
    rows = [
        {
            "data_source": "geo3k",
            "prompt": [{"role": "user", "content": "<image>" * len(urls) + "What?"}],
            "images": urls,
            "reward_model": {"ground_truth": "4"},
        }
        for urls in pictures
    ]
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made / "reward.py").write_text("def compute_score(solution_str): return 1.0\n")
    return {"rows": made / "rows.jsonl", "reward": made / "reward.py", **models}


def config_of(places: dict[str, Path], *more: str, rows: Path | None = None) -> PPOConfig:
    keys = [
        f"data.train_files={rows or places['rows']}",
        "data.train_batch_size=3",
        "data.max_prompt_length=64",
        f"{MODEL}.path={places['qwen3_vl']}",
        f"reward.custom_reward_function.path={places['reward']}",
        "algorithm.adv_estimator=grpo",
        f"trainer.default_local_dir={places['rows'].parent / 'run'}",
    ]
    return load_ppo_config([*keys, *more])


def test_an_engine_expects_the_most_pictures_of_a_row_and_the_largest_that_the_processor_makes(places):
    config = config_of(places, "+data.mm_processor_kwargs.max_pixels=2048")
    inputs = prepare(config)
    inputs.rejections.close()
    assert config.actor_rollout_ref.rollout.limit_images == 2
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm == {"mm_processor_kwargs": {"max_pixels": 2048}}
    vision = vision_of(config.actor_rollout_ref, list(inputs.datasets.values()))
    assert vision is not None and not vision.frozen
    assert vision.rule.mean == (0.5, 0.5, 0.5) and vision.rule.std == (0.5, 0.25, 0.5)
    assert vision.placeholder == 4 and 0.1 < vision.weight < 10
    assert len({digest_of(pixels) for pixels in (vision.blank, *vision.sample)}) == 3
    assert all(pixels["pixel_values"].dtype == "uint8" for pixels in vision.sample)


@pytest.mark.parametrize(("chosen", "expected"), [(None, EPISODE_PICTURES), (3, 3)])
def test_contexts_of_episodes_may_have_more_pictures_than_rows(places, chosen, expected):
    config = config_of(places)
    inputs = prepare(config)
    inputs.rejections.close()
    rollout = config.actor_rollout_ref.rollout
    assert rollout.limit_images == 2 < EPISODE_PICTURES
    rollout.limit_images = chosen
    assert limit_pictures(rollout, list(inputs.datasets.values()), episodes=True) == []
    assert rollout.limit_images == expected


@pytest.mark.parametrize(("frozen", "weight"), [(True, 1 / 3), (False, 1.0)])
def test_a_frozen_tower_is_that_of_the_policy_and_has_no_backward_pass(places, frozen, weight):
    """Of the three parts of its work only the forward pass is left. A reference is not trained at all."""
    more = [f"actor_rollout_ref.actor.freeze_vision_tower={frozen}", "actor_rollout_ref.actor.use_kl_loss=true"]
    config = config_of(places, *more)
    inputs = prepare(config)
    inputs.rejections.close()
    vision = required(vision_of(config.actor_rollout_ref, list(inputs.datasets.values())))
    models = ppo_worker_config(config, build_algorithm(config), places["rows"].parent, 1, vision).models
    seen = {name: required(model.vision) for name, model in models.items()}
    assert {name: of_model.frozen for name, of_model in seen.items()} == {"actor": frozen, "reference": False}
    assert seen["actor"].weight == pytest.approx(weight * vision.weight)


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        (["algorithm.adv_estimator=gae"], "critic.enable=true: models that see are trained without a critic"),
        ([f"{ROLLOUT}.limit_images=1"], f"{ROLLOUT}.limit_images=1: a row has 2 pictures"),
    ],
)
def test_what_cannot_read_them_is_named(places, more, cause):
    assert cause in str(prepare(config_of(places, *more)).rejections.errors)


def test_settings_of_the_processor_identify_rows_with_pictures_and_no_others(places, tmp_path):
    (tmp_path / "text.jsonl").write_text("".join(places["rows"].read_text().splitlines(keepends=True)[:1] * 3))

    def settings(rows: Path | None, *more: str) -> list[str]:
        config = config_of(places, *more, rows=rows)
        return picture_settings(config.actor_rollout_ref.rollout, required(prepare(config).prompts))

    smaller = "+data.mm_processor_kwargs.max_pixels=2048"
    assert len(settings(None)) == len(settings(None, smaller)) == 1 and settings(None) != settings(None, smaller)
    assert settings(tmp_path / "text.jsonl") == settings(tmp_path / "text.jsonl", smaller) == []


def test_a_reference_that_reads_pictures_otherwise_is_named(places):
    more = ["actor_rollout_ref.actor.use_kl_loss=true", f"actor_rollout_ref.ref.model.path={places['qwen2_5_vl']}"]
    found = str(prepare(config_of(places, *more)).rejections.errors)
    assert f"actor_rollout_ref.ref.model.path={places['qwen2_5_vl']} cannot read them: its patch_size differs" in found


def test_rows_of_text_need_no_room_for_pictures(places, tmp_path):
    row = json.loads(places["rows"].read_text().splitlines()[0])
    (tmp_path / "text.jsonl").write_text((json.dumps(row) + "\n") * 3)
    config = config_of(places, rows=tmp_path / "text.jsonl")
    inputs = prepare(config)
    inputs.rejections.close()
    assert config.actor_rollout_ref.rollout.limit_images == 0
    assert vision_of(config.actor_rollout_ref, list(inputs.datasets.values())) is None
