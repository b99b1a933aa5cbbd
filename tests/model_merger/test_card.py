"""The model card: facts of the files of a checkpoint and its run, and nothing else."""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from hybridrl import __version__
from hybridrl.config import load_ppo_config, load_sft_config
from hybridrl.config.compose import as_yaml
from hybridrl.model_merger.card import CARD, write_card
from tests.config import conftest as configs

a_machine_without_gpus, needed = configs.a_machine_without_gpus, configs.needed
LOGGED = [
    {"step": 0, "val-core/gsm8k/acc/mean@1": 0.25},
    {"step": 1, "critic/rewards/mean": 0.125, "critic/score/mean": 0.5},
    {"step": 4, "critic/rewards/mean": 0.5, "val-core/gsm8k/acc/mean@1": 0.75},
    {"step": 6, "critic/rewards/mean": 1.0, "val-core/gsm8k/acc/mean@1": 1.0},
]


def save(config: str, run: Path) -> Path:
    """Write the files of step 4 of a run; return the directory of its model."""
    step = run / "global_step_4"
    (step / "actor").mkdir(parents=True)
    (step / "config.yaml").write_text(config)
    state = {"step": 4, "prompts": 4096, "code": {"hybridrl": "0.0.9"}, "metrics": {"critic/rewards/mean": 0.5}}
    (step / "state.json").write_text(json.dumps(state))
    return step / "actor"


def card_of(checkpoint: Path, **options: bool) -> ModelCard:
    target = checkpoint.parent / "merged"
    target.mkdir(exist_ok=True)
    write_card(target, checkpoint, **options)
    return ModelCard((target / CARD).read_text())


def command(card: ModelCard) -> list[str]:
    return shlex.split(card.text.split("```sh\n")[1].split("```")[0].replace("\\\n", " "))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LOGGED))
    return tmp_path / "run"


KEYS = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.optim.lr=3e-6"]


def test_the_hub_reads_the_front_matter(needed: list[str], run: Path) -> None:
    config = yaml.safe_load(as_yaml(load_ppo_config([*needed, *KEYS])))
    config["actor_rollout_ref"]["model"]["path"] = "Qwen/Qwen2.5-0.5B-Instruct"
    config["data"]["train_files"] = ["openai/gsm8k:main:train", "more.parquet"]
    assert card_of(save(yaml.safe_dump(config), run)).data.to_dict() == {
        "base_model": "Qwen/Qwen2.5-0.5B-Instruct",
        "datasets": ["openai/gsm8k"],
        "library_name": "transformers",
        "tags": ["hybridrl", "reinforcement-learning", "grpo"],
        "pipeline_tag": "text-generation",
    }


def test_figures_are_those_up_to_the_step(needed: list[str], run: Path) -> None:
    text = card_of(save(as_yaml(load_ppo_config([*needed, *KEYS])), run)).text
    assert "| `critic/rewards/mean` | 0.125 (step 1) | 0.5 (step 4) |" in text
    assert "| `val-core/gsm8k/acc/mean@1` | 0.25 (step 0) | 0.75 (step 4) |" in text
    assert "with hybridrl 0.0.9 for 4 steps." in text and "| prompts used | 4,096 |" in text
    assert "| `algorithm.adv_estimator` | grpo |" in text and "kl_loss_coef` |" not in text
    assert "| reward | built in: by the data source of each row |" in text


def test_without_the_metrics_of_its_run_a_card_has_those_of_the_checkpoint(needed: list[str], tmp_path: Path) -> None:
    text = card_of(save(as_yaml(load_ppo_config([*needed, *KEYS])), tmp_path / "moved")).text
    assert "| `critic/rewards/mean` | 0.5 (step 4) | 0.5 (step 4) |" in text and "val-core" not in text


@pytest.mark.parametrize(
    "more",
    [
        ["+preset=dapo", "reward.functions={length: reward.py:length}", "own.note='a b, c'"],
        ["trainer.on_diagnosis={not-finite: stop}", "trainer.total_training_steps=5"],
        ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.rollout.name=vllm", "reward.name=gsm8k"],
    ],
)
def test_its_command_has_the_same_configuration(needed: list[str], run: Path, more: list[str]) -> None:
    Path("reward.py").write_text("def length(*_, **__):\n    return 0.0\n")
    config = load_ppo_config([*needed, *KEYS, *more])
    program, name, *words = command(card_of(save(as_yaml(config), run)))
    assert (program, name) == ("hybridrl", "train") and not any(word.startswith("critic.") for word in words)
    again = load_ppo_config(words)
    again.critic = config.critic  # without one
    assert again == config


def test_a_secret_and_quotes_leave_the_command_as_one_that_can_be_read(needed: list[str], run: Path) -> None:
    kwargs = ["+reward.reward_kwargs.api_key=c4n4ry-value", """+reward.reward_kwargs.path="/tmp/a b/it's\""""]
    config = load_ppo_config([*needed, *KEYS, *kwargs, f"trainer.default_local_dir={run}"])
    card = card_of(save(as_yaml(config), run))
    again = load_ppo_config(command(card)[2:])
    assert again.reward.custom_reward_function.reward_kwargs == {"api_key": "***", "path": "/tmp/a b/it's"}
    assert "c4n4ry" not in card.text and str(run) not in card.text  # the repeated run writes nothing there


def test_a_supervised_run_has_no_reward(needed: list[str], run: Path) -> None:
    config = load_sft_config(["data.train_files=train.jsonl", "model.path=model", "optim.lr=0.001"])
    card = card_of(save(as_yaml(config), run))
    assert card.data.to_dict()["tags"] == ["hybridrl", "sft"] and "reward |" not in card.text
    assert command(card)[:2] == ["hybridrl", "sft"] and "optim.lr=0.001" in command(card)


def test_an_adapter_and_a_critic_are_described_as_such(needed: list[str], run: Path) -> None:
    checkpoint = save(as_yaml(load_ppo_config([*needed, *KEYS])), run)
    assert card_of(checkpoint, adapter=True).data.to_dict()["library_name"] == "peft"
    (checkpoint.parent / "merged" / CARD).unlink()
    assert "pipeline_tag" not in card_of(checkpoint.with_name("critic"), generates=False).data.to_dict()


def test_secrets_are_masked(needed: list[str], run: Path) -> None:
    secret = "hf_" + "abcdefghij" * 3
    keys = ["reward.custom_reward_function.path=r.py", f"reward.custom_reward_function.reward_kwargs.api_key={secret}"]
    Path("r.py").write_text("def compute_score(*_, **__):\n    return 0.0\n")
    text = card_of(save(as_yaml(load_ppo_config([*needed, *KEYS, *keys])), run)).text
    assert secret not in text and "`r.py:compute_score`" in text


def test_a_checkpoint_without_a_record_has_no_facts(tmp_path: Path) -> None:
    (tmp_path / "global_step_4" / "actor").mkdir(parents=True)
    card = card_of(tmp_path / "global_step_4" / "actor")
    assert card.data.to_dict() == {"library_name": "transformers", "tags": ["hybridrl"]}
    assert (
        card.text.strip() == f"Merged by hybridrl {__version__} from a checkpoint that has no record of its training."
    )


def test_a_card_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / CARD).write_text("mine")
    write_card(tmp_path, tmp_path / "actor")
    assert (tmp_path / CARD).read_text() == "mine"


DAMAGED = [
    "[1",
    "{}",
    "[]",
    "7",
    "data: 3",
    "data: {train_files: 5}",
    "actor_rollout_ref: [1]",
    "trainer: {seed: 1}",
    "\0",
]


@pytest.mark.parametrize("text", DAMAGED)
@pytest.mark.parametrize("name", ["config.yaml", "state.json", "metrics.jsonl"])
def test_a_damaged_file_costs_facts_and_not_the_merge(needed: list[str], run: Path, name: str, text: str) -> None:
    checkpoint = save(as_yaml(load_ppo_config([*needed, *KEYS])), run)
    (run / name if name == "metrics.jsonl" else checkpoint.parent / name).write_text(text)
    card = card_of(checkpoint)
    assert card.data.to_dict()["tags"][0] == "hybridrl"
    assert ("no record of its training" in card.text) == (name != "metrics.jsonl")


def test_no_user_is_named(needed: list[str], run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/root/alice")
    config = yaml.safe_load(as_yaml(load_ppo_config([*needed, *KEYS])))
    config["data"]["train_files"] = ["/root/alice/rows.jsonl", "/home/bob/more.jsonl"]
    text = card_of(save(yaml.safe_dump(config), run)).text
    assert "~/rows.jsonl" in text and "/home/USER/more.jsonl" in text and "alice" not in text and "bob" not in text
