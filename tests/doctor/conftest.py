import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.doctor import __main__ as program

Doctor = Callable[..., tuple[int, str]]

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor keeps the log of a reward's trial that a finding names: here, with the test's files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Run `hybridrl NAME` or `hybridrl doctor ...`; returns exit status and output."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*words: str) -> tuple[int, str]:
        try:
            status = (
                program.command(words[0], [*words[1:]]) if words[0] in program.FIRST_LEVEL else program.main([*words])
            )
        except SystemExit as usage:
            status = int(str(usage.code))
        output = capsys.readouterr()
        return status, output.out + output.err

    return run


def config_in(directory: Path) -> PPOConfig:
    """The configuration of a run "a run" of this directory, in which are files that only have to exist."""
    files = directory / "files"
    files.mkdir()
    (files / "train.jsonl").write_text("{}")
    (files / "config.json").write_text(json.dumps({"max_position_embeddings": 32768}))
    (files / "model.safetensors").touch()
    (files / "reward.py").write_text("def compute_score(solution_str): return 1.0\n")
    values = {
        "data.train_files": files / "train.jsonl",
        "actor_rollout_ref.model.path": files,
        "actor_rollout_ref.rollout.n": 8,
        "trainer.device": "cpu",
        "trainer.logger": "[]",
        "trainer.default_local_dir": directory / "a run",
    }
    return load_ppo_config([f"{key}={value}" for key, value in values.items()])


@pytest.fixture(scope="session")
def tokenizer() -> Qwen2Tokenizer:
    """A tokenizer of single bytes with a ChatML template."""
    special = Qwen2Tokenizer(eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=["<|im_start|>"])
    made = special.train_new_from_iterator([""], vocab_size=259, show_progress=False)
    made.chat_template = CHAT_TEMPLATE
    return made


@pytest.fixture(scope="session")
def model(tokenizer: Qwen2Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model of a few thousand random parameters and its tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=320, num_key_value_heads=2, max_position_embeddings=512, eos_token_id=1, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def command(model: Path, tmp_path: Path) -> list[str]:
    """A valid command: two rows like GSM8K's and a separate directory."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {n} + {n}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
        }
        for n in (1, 2)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"data.train_files={tmp_path}/rows.jsonl",
        "data.train_batch_size=2",
        "data.shuffle=false",
        "data.max_prompt_length=128",
        "data.max_response_length=64",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        "reward.num_workers=1",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.total_epochs=3",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
