import json
import runpy
from pathlib import Path

import pytest

from hybridrl.config.load import resolve_config
from hybridrl.config.schema import PPOConfig
from tests.scripts import run_script

RECIPE = Path(__file__).parents[2] / "recipes" / "pretrained"


def countries(file: Path) -> dict[str, str]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["prompt"]: row["reward_model"]["ground_truth"] for row in rows}


def test_a_country_is_trained_on_or_held_out_and_each_is_asked_alike(tmp_path):
    assert not run_script(RECIPE / "make_data.py", "--out", tmp_path)
    train, val = (countries(tmp_path / f"{split}.jsonl") for split in ("train", "val"))
    assert (len(train), len(val)) == (84, 32) and not train.keys() & val.keys()
    assert train["Question: What is the capital of France?\nAnswer:"] == "Paris"
    assert all(prompt.endswith("?\nAnswer:") and "/" not in prompt for prompt in train | val)


@pytest.mark.parametrize(
    ("answer", "truth", "score", "first"),
    [
        (" Paris", "Paris", 1.0, 1.0),
        (" PARIS.\n", "Paris", 1.0, 1.0),
        (" Paris, the city", "Paris", 0.5, 1.0),
        (" The capital is Paris", "Paris", 0.0, 0.0),
        (" Parisian", "Paris", 0.0, 0.0),
        (" Brasília", "Brasilia", 1.0, 1.0),
        (" N\N{RIGHT SINGLE QUOTATION MARK}Djamena", "N'Djamena", 1.0, 1.0),
        (" Port au Prince", "Port-au-Prince", 1.0, 1.0),
        (" Kiev", "Kyiv/Kiev", 1.0, 1.0),
        (" N'Djamena is", "N'Djamena", 0.5, 1.0),
        ("", "Paris", 0.0, 0.0),
    ],
)
def test_half_is_for_the_right_name_first_and_half_for_nothing_after_it(answer, truth, score, first):
    result = runpy.run_path(str(RECIPE / "reward.py"))["compute_score"]("capitals", answer, truth)
    assert (result["score"], result["acc"]) == (score, first) and result["alone"] == (score == 1)


def test_the_configuration_is_accepted_for_any_model():
    assert not resolve_config(PPOConfig, [], "train", RECIPE, offline=True).findings.errors


def write(run: Path, name: str, step: int, answers: list[str]) -> None:
    (run / name).mkdir(parents=True, exist_ok=True)
    rows = [{"input": "q", "output": answer, "gts": "Oslo", "score": 0.0} for answer in answers]
    (run / name / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(("after", "status"), [(9, 0), (8, 1)])
def test_the_results_are_those_of_held_out_countries_before_and_after(tmp_path, capsys, after, status):
    write(tmp_path, "samples", 0, [" A town", *[" Oslo"] * 2, *[" No"] * 7])
    write(tmp_path, "samples", 1, [*[" Oslo"] * after, *[" No"] * (10 - after)])
    lines = [{"step": 0, "timing_s/testing": 1.0}, {"step": 1, "timing_s/step": 2.5, "critic/rewards/mean": 0.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run_script(RECIPE / "show.py", tmp_path) == status
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert (
        "Oslo A town Oslo" in shown and f"right name first 0.200 0.{after}00" in shown and "mean reward 0.250" in shown
    )
    assert any("held-out countries are right, 85%" in line for line in shown) == bool(status)
