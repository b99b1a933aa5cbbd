"""What a user can get wrong in a command: each is answered before anything heavy starts, with the key and what to do.

Commands go through the front door (`main_ppo.main`) on a real model and real rows, up to the start of Ray.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hybridrl import main_ppo
from hybridrl.checkpoint.store import Store
from hybridrl.config import ConfigError
from hybridrl.runs import command, prepare, setup
from tests.scripts import run_script

MAKE_DATA = Path(__file__).parents[2] / "recipes" / "quickstart" / "make_data.py"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CHANGED, CRITIC_CHANGED = "actor_rollout_ref.model.override_config", "critic.model.override_config"
REWARD = "reward.custom_reward_function"

FILES = {
    "reward.py": "def score(solution_str, ground_truth): return float(ground_truth in solution_str)\nNUMBER = 3\n",
    "syntax.py": "def score(solution_str:\n",
    "imports.py": "import no_such_module\ndef score(solution_str): return 1.0\n",
    "wrong.py": "def score(answer): return 1.0\n",
    "raises.py": "def score(solution_str): raise KeyError('label')\n",
    "text.py": "def score(solution_str): return 'good'\n",
    "wrong_signature.py": "def advantages(rewards): return rewards\ndef loss(log_probs): return log_probs\n",
    "shape.py": (
        "def advantages(batch): return batch.rewards, batch.rewards\n"
        "def loss(batch, log_probs, settings): return log_probs.mean(), {}\n"
        "def by_parts(batch): return batch.reward_parts.mean(1), batch.rewards\n"
        "by_parts.reads = ('reward_parts',)\n"
    ),
    "own_data.py": "class Rows: ...\n",
    "extensions.py": (
        "from hybridrl.health import Diagnosis\n"
        "from hybridrl.tracking import Sink\n"
        "class Quiet(Sink):\n"
        "    def log(self, step, metrics): pass\n"
        "class Deaf(Sink):\n"
        "    def log(self, step): pass\n"
        "class Broken(Quiet):\n"
        "    def __init__(self, run_dir): (run_dir / 'no' / 'file').touch()\n"
        "class NoSink: ...\n"
        "def half(update, total_updates): return 0.5\n"
        "def short(update): return 1.0\n"
        "def late(update, total_updates): return [1.0, 1.0][update]\n"
        "def all_well(history): return None\n"
        "def eager(history): return 'bad' if history.steps > 3 else None\n"
        "def no_steps(history): return Diagnosis(str(history.recent[-1]), 'wait')\n"
        "def flat_score(history): return None\n"
    ),
    "broken.jsonl": '{"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}\n{"prompt": \n',
    "no_truth.jsonl": '{"prompt": "1+1=", "answer": "2"}\n',
    "no_prompt.jsonl": '{"question": "1+1=", "reward_model": {"ground_truth": "2"}}\n',
    "columns.jsonl": '{"prompt": 7, "reward_model": {"ground_truth": "2"}}\n' * 50,
    "long.jsonl": json.dumps({"prompt": "1+1=" * 100, "reward_model": {"ground_truth": "2"}}) + "\n",
    "source.jsonl": json.dumps({"prompt": "1+1=", "data_source": "mine", "reward_model": {"ground_truth": "2"}}) + "\n",
    "empty.jsonl": "",
    "broken.parquet": "PAR1 not a table",
    "tab.yaml": "defaults: [ppo_trainer, _self_]\ndata:\n\ttrain_batch_size: 8\n",
    "bare.yaml": "data: {train_batch_size: 8}\n",
    "a_file": "",
    "rows/notes.txt": "",
}


START_SESSION = setup.start_session


class Started(Exception):
    """The command was accepted: it would start Ray now."""


@dataclass
class Answer:
    status: int
    text: str
    started: bool


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's rows and model, and files with one fault each."""
    directory = tmp_path_factory.mktemp("bad")
    assert not run_script(MAKE_DATA, "--out", directory)
    for name, text in FILES.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    for name, missing in {"no_weights": "model.safetensors", "no_tokenizer": "tokenizer.json"}.items():
        shutil.copytree(directory / "model", directory / name)
        (directory / name / missing).unlink()
    shutil.copytree(directory / "model", directory / "no_template")
    (directory / "no_template" / "chat_template.jinja").unlink(missing_ok=True)
    settings = directory / "no_template" / "tokenizer_config.json"
    settings.write_text(json.dumps({k: v for k, v in json.loads(settings.read_text()).items() if k != "chat_template"}))
    shutil.copytree(directory / "model", directory / "other_tokens")
    tokenizer = directory / "other_tokens" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"7":', '"seven":').replace('"8":', '"7":'))
    (directory / "run" / "global_step_3" / "actor").mkdir(parents=True)
    return directory


@pytest.fixture
def answer(place, tmp_path, session_start, monkeypatch, capsys) -> Iterator[Callable[..., Answer]]:
    """Give a command to main_ppo; what it prints, its exit status, and whether it would have started."""
    starts = []

    def start(trainer: object, ray_init: dict, *more: object) -> None:
        if ray_init.get("address"):
            START_SESSION(trainer, ray_init, *more)
        starts.append(True)
        raise Started

    session_start(start)
    monkeypatch.setattr(command, "fork_server", lambda *_, **__: nullcontext())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(place)

    def run(*words: str) -> Answer:
        values = {
            "data.train_files": "train.jsonl",
            "data.train_batch_size": "8",
            "data.max_prompt_length": "32",
            "data.max_response_length": "24",
            "actor_rollout_ref.model.path": "model",
            f"{ROLLOUT}.n": "4",
            "algorithm.adv_estimator": "grpo",
            f"{REWARD}.path": "reward.py",
            f"{REWARD}.name": "score",
            "reward.num_workers": "1",
            "trainer.n_gpus_per_node": "1",
            "trainer.total_training_steps": "2",
            "trainer.default_local_dir": f"{tmp_path}/run",
        }
        given = {word.partition("=")[0] for word in words}
        rest = [f"{key}={value}" for key, value in values.items() if key not in given and f"~{key}" not in given]
        try:
            status = main_ppo.main([*rest, *(word for word in words if not word.startswith("~"))])
        except SystemExit as usage:
            status = int(str(usage.code))
        output = capsys.readouterr()
        return Answer(status, " ".join((output.out + output.err).split()), bool(starts))

    yield run


SIX = [f"{ROLLOUT}.n=0", "data.seed=-1", "algorithm.gamma=2", f"{ROLLOUT}.top_p=0", "trainer.nnodes=x"]
# Words that the answer must have: the key, the value and what to do.
REJECTED = {
    # keys and values
    "a typo": (["data.train_batchsize=8"], ["data.train_batchsize", "data.train_batch_size"]),
    "a typo in a group": ([f"{ACTOR}.optm.lr=1e-4"], [f"{ACTOR}.optm.lr", f"{ACTOR}.optim.lr"]),
    "two typos": (["data.shufle=true", f"{ROLLOUT}.temprature=1"], ["data.shuffle", f"{ROLLOUT}.temperature"]),
    "a word for a number": (["data.train_batch_size=many"], ["data.train_batch_size=many", "integer"]),
    "a fraction for a count": (["data.train_batch_size=1.5"], ["data.train_batch_size=1.5", "integer"]),
    "an estimator": (["algorithm.adv_estimator=grop"], ["algorithm.adv_estimator=grop", "grpo"]),
    "an aggregation": ([f"{ACTOR}.loss_agg_mode=token_mean"], [".loss_agg_mode=token_mean", "mean token-mean?"]),
    "a group of Hydra": ([f"{ACTOR.replace('.', '/')}=x"], ["actor_rollout_ref/actor", "key=value"]),
    "a plugin of Hydra": (["hydra/sweeper=optuna"], ["hydra/sweeper", "hybridrl sweep"]),
    "a form of KL": ([f"{ACTOR}.kl_loss_type=k9"], [f"{ACTOR}.kl_loss_type=k9", "k3"]),
    "a negative rate": ([f"{ACTOR}.optim.lr=-1"], [f"{ACTOR}.optim.lr=-1", "at least 0"]),
    "a negative batch": (["data.train_batch_size=-4"], ["data.train_batch_size=-4", "at least 1"]),
    "negative samples": ([f"{ROLLOUT}.n=-1"], [f"{ROLLOUT}.n=-1", "at least 1"]),
    "no samples": ([f"{ROLLOUT}.n=0"], [f"{ROLLOUT}.n=0", "at least 1"]),
    "a negative seed": (["data.seed=-1"], ["data.seed=-1", "at least 0"]),
    "half an epoch": (["trainer.total_epochs=0.5"], ["trainer.total_epochs=0.5", "integer"]),
    "an optimizer": ([f"{ACTOR}.optim.optimizer=Adamm"], [f"{ACTOR}.optim.optimizer=Adamm", "Adam"]),
    "six faults": (
        [*SIX, "data.shufle=true"],
        [*SIX, "data.shufle", "data.shuffle"],
    ),
    "TRL's learning rate": (["learning_rate=1e-6"], ["learning_rate", f"{ACTOR}.optim.lr"]),
    "TRL's group size": (["num_generations=8"], ["num_generations", f"{ROLLOUT}.n"]),
    "TRL's beta": (["beta=0.1"], ["beta", "kl_loss_coef"]),
    "a batch above the rows": (["data.train_batch_size=40960"], ["data.train_batch_size=40960", "or less"]),
    "dashes": (["--data.shuffle=false"], ["--data.shuffle", "key=value"]),
    "no equals sign": (["data.shuffle"], ["data.shuffle", "key=value"]),
    "blanks around it": (["data.shuffle =", "false"], ["data.shuffle", "key=value"]),
    "an empty variable": (["actor_rollout_ref.model.path="], ["actor_rollout_ref.model.path"]),
    "a sweep of one run": (["-m"], ["a sweep needs a key with several values"]),
    "several values without a sweep": (["data.seed=1,2"], ["data.seed=1,2", "hybridrl sweep"]),
    "a sweep with an invalid value": (["-m", "data.seed=1,-2"], ["seed=-2", "at least 0"]),
    # configuration files
    "a configuration that is not there": (["-cn", "mine"], ["mine"]),
    "a tab in YAML": (["-cp", ".", "-cn", "tab"], ["tab.yaml", "line 3"]),
    "a file without defaults": (["-cp", ".", "-cn", "bare"], ["bare", "defaults: [ppo_trainer, _self_]"]),
    # data
    "no data": (["data.train_files=nowhere.jsonl"], ["data.train_files", "nowhere.jsonl"]),
    "a directory without rows": (["data.train_files=rows"], ["data.train_files", "rows"]),
    "no rows": (["data.train_files=empty.jsonl"], ["data.train_files", "empty.jsonl"]),
    "a line that is no JSON": (["data.train_files=broken.jsonl"], ["broken.jsonl, line 2", "not JSON"]),
    "a file that is no parquet": (["data.train_files=broken.parquet"], ["data.train_files", "broken.parquet"]),
    "a bucket": (["data.train_files=s3://bucket/train.parquet"], ["s3://bucket/train.parquet"]),
    "no truth": (["data.train_files=no_truth.jsonl"], ["no_truth.jsonl, line 1", "data.ground_truth_key=answer"]),
    "no prompt": (["data.train_files=no_prompt.jsonl"], ["no_prompt.jsonl", "data.prompt_key=question"]),
    "another type of prompt": (["data.train_files=columns.jsonl"], ["columns.jsonl, line 1", "prompt"]),
    "a long prompt": (["data.train_files=long.jsonl"], ["data.max_prompt_length"]),
    "a home that no shell expanded": (["data.train_files=~nobody/x.jsonl"], ["~nobody/x.jsonl"]),
    # models
    "a critic of other tokens": (
        ["algorithm.adv_estimator=gae", "critic.model.path=other_tokens"],
        ["critic.model.path=", "other_tokens: it reads the policy's token ids", "'seven' where the policy's has"],
    ),
    "a reference of other tokens": (
        [f"{ACTOR}.use_kl_loss=true", "actor_rollout_ref.ref.model.path=other_tokens"],
        ["actor_rollout_ref.ref.model.path=", "other_tokens: it reads the policy's token ids", "'seven'"],
    ),
    "a mistyped directory": (["actor_rollout_ref.model.path=./modle"], ["actor_rollout_ref.model.path", "modle"]),
    "a model that the hub has not": (
        ["actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instrukt"],
        ["actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instrukt", "hub"],
    ),
    "a step's directory": (["actor_rollout_ref.model.path=run/global_step_3"], ["global_step_3", "actor"]),
    "no weights": (["actor_rollout_ref.model.path=no_weights"], ["no_weights", "weights"]),
    "no tokenizer": (["actor_rollout_ref.model.path=no_tokenizer"], ["no_tokenizer", "tokenizer"]),
    "no chat template": (["actor_rollout_ref.model.path=no_template"], ["no_template", "chat template"]),
    "a negative rank": (["actor_rollout_ref.model.lora_rank=-1"], ["lora_rank=-1", "at least 0"]),
    "a typo in a model's setting": (
        [f"{CHANGED}.rope_scalling.rope_type=yarn", f"{CHANGED}.atention_dropout=0.1"],
        [f"{CHANGED}.rope_scalling", "did you mean rope_scaling?", "did you mean attention_dropout?"],
    ),
    "a typo in a critic's setting": (
        ["algorithm.adv_estimator=gae", "critic.model.path=model", f"{CRITIC_CHANGED}.hiden_act=relu"],
        [f"{CRITIC_CHANGED}.hiden_act", "did you mean hidden_act?"],
    ),
    "a type of positions": (
        [f"{CHANGED}.rope_scaling.type=yarnn", f"{CHANGED}.rope_scaling.factor=4.0"],
        [f"{CHANGED}.rope_parameters.rope_type=yarnn", "did you mean yarn?"],
    ),
    "a typo below positions": (
        [f"{CHANGED}.rope_parameters.rope_type=yarn", f"{CHANGED}.rope_parameters.facter=4.0"],
        [f"{CHANGED}.rope_parameters.facter", "did you mean factor?"],
    ),
    "stretched positions without a factor": (
        [f"{CHANGED}.rope_scaling.rope_type=yarn"], [f"{CHANGED}.rope_parameters: Missing required keys", "'factor'"],
    ),
    "a word in a model's setting": (
        [f"{CHANGED}.max_window_layers=two"], [f"{CHANGED}.max_window_layers", "expected int, got str"],
    ),
    "another number of layers": (
        [f"{CHANGED}.num_hidden_layers=1"], [f"{CHANGED}.num_hidden_layers", f"set {CHANGED}.layer_types too"],
    ),
    "layers that are not there": (
        ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=[q_porj]"],
        ["q_porj", "q_proj"],
    ),
    # the user's own files
    "no reward file": ([f"{REWARD}.path=nowhere.py"], [f"{REWARD}.path", "nowhere.py"]),
    "a directory as reward": ([f"{REWARD}.path=rows"], [f"{REWARD}.path", "rows"]),
    "no such function": ([f"{REWARD}.name=scores"], ["scores", "score"]),
    "another signature": ([f"{REWARD}.path=wrong.py"], ["wrong.py", "answer"]),
    "an argument too many": ([f"+{REWARD}.reward_kwargs.strict=true"], ["strict"]),
    "a syntax error": ([f"{REWARD}.path=syntax.py"], ["syntax.py", "was never closed", "syntax.py:1"]),
    "an import that fails": ([f"{REWARD}.path=imports.py"], ["imports.py", "no_such_module"]),
    "a reward that raises": ([f"{REWARD}.path=raises.py"], ["KeyError", "label", "reward.on_error"]),
    "a reward that returns text": ([f"{REWARD}.path=text.py"], ["'good'", "not a number"]),
    "no reward for the source": (
        [f"{REWARD}.path=null", "data.train_files=source.jsonl", "data.train_batch_size=1"],
        ["mine", f"{REWARD}.path"],
    ),
    "a class without a name": (["data.custom_cls.path=own_data.py"], ["data.custom_cls.name"]),
    "no estimator file": (["algorithm.adv_estimator=nowhere.py:mine"], ["nowhere.py"]),
    "an estimator without a name": (["algorithm.adv_estimator=shape.py"], ["shape.py", "shape.py:"]),
    "no such estimator": (["algorithm.adv_estimator=shape.py:mine"], ["shape.py", "mine", "advantages"]),
    "an estimator that does not parse": (["algorithm.adv_estimator=syntax.py:mine"], ["never closed", "syntax.py:1"]),
    "an estimator's signature": (["algorithm.adv_estimator=wrong_signature.py:advantages"], ["it returns Batch"]),
    "an estimator's shape": (["algorithm.adv_estimator=shape.py:advantages"], ["advantages", "shape"]),
    "a loss's signature": ([f"{ACTOR}.policy_loss.loss_mode=wrong_signature.py:loss"], ["wrong_signature.py:loss"]),
    "a loss's shape": ([f"{ACTOR}.policy_loss.loss_mode=shape.py:loss"], ["shape.py:loss", "shape"]),
    "an estimator of components without names": (
        ["algorithm.adv_estimator=shape.py:by_parts"], ["shape.py:by_parts", "algorithm.gdpo_reward_keys"],
    ),
    # custom sinks, schedules and health rules
    "no sink file": (["trainer.logger=[console,nowhere.py:Sink]"], ["trainer.logger", "there is no file nowhere.py"]),
    "no such sink": (["trainer.logger=[extensions.py:Loud]"], ["trainer.logger=extensions.py:Loud", "Quiet"]),
    "a sink's signature": (["trainer.logger=[extensions.py:Deaf]"], ["Deaf.log has other parameters", "extensions.md"]),
    "a sink that raises": (["trainer.logger=[extensions.py:Broken]"], ["Broken fails when", "extensions.py:8"]),
    "a class that is no sink": (["trainer.logger=[extensions.py:NoSink]"], ["is not a subclass of hybridrl.tracking"]),
    "a schedule": ([f"{ACTOR}.optim.lr_scheduler_type=cosin"], ["mean cosine?", "path/to/file.py:function"]),
    "no schedule file": ([f"{ACTOR}.optim.lr_scheduler_type=nowhere.py:half"], ["there is no file nowhere.py"]),
    "a schedule's signature": (
        [f"{ACTOR}.optim.lr_scheduler_type=extensions.py:short"],
        [f"{ACTOR}.optim.lr_scheduler_type=extensions.py:short has other parameters"],
    ),
    "a schedule that raises": (
        ["algorithm.adv_estimator=gae", "critic.optim.lr_scheduler_type=extensions.py:late", "critic.model.path=model"],
        ["critic.optim.lr_scheduler_type=extensions.py:late fails at update 2", "IndexError", "extensions.py:12"],
    ),
    "no rule file": (["trainer.health_rules=[nowhere.py:rule]"], ["trainer.health_rules", "no file nowhere.py"]),
    "a rule without a name": (["trainer.health_rules=[a_file]"], ["path/to/file.py:function"]),
    "a rule that returns text": (["trainer.health_rules=[extensions.py:eager]"], ["after 4 made-up", "Diagnosis("]),
    "a rule that raises": (["trainer.health_rules=[extensions.py:no_steps]"], ["after 0 made-up steps", "IndexError"]),
    "a rule with a known code": (["trainer.health_rules=[extensions.py:flat_score]"], ["a rule flat-score already"]),
    "an action without a rule": (
        ["trainer.on_diagnosis={all-wel: stop}", "trainer.health_rules=[extensions.py:all_well]"],
        ["no rule has the code all-wel", "did you mean all-well?"],
    ),
    "an action": (["trainer.on_diagnosis={clipping: explode}"], ["clipping: explode: choose off | warn | stop"]),
    # devices and engines
    "devices that an engine does not divide": (
        [f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=3"],
        [f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node"],
    ),
    "heads that an engine does not divide": (
        [f"{ROLLOUT}.tensor_model_parallel_size=3", "trainer.n_gpus_per_node=3"],
        [f"{ROLLOUT}.tensor_model_parallel_size=3", "heads"],
    ),
    "twice the memory": ([f"{ROLLOUT}.gpu_memory_utilization=2"], [f"{ROLLOUT}.gpu_memory_utilization=2", "at most"]),
    "a negative temperature": ([f"{ROLLOUT}.temperature=-1"], [f"{ROLLOUT}.temperature=-1", "at least 0"]),
    "no probability": ([f"{ROLLOUT}.top_p=0"], [f"{ROLLOUT}.top_p=0", "more than 0"]),
    "a response beyond the model": (["data.max_response_length=1000000"], ["data.max_response_length"]),
    "another engine": ([f"{ROLLOUT}.name=trtllm"], [f"{ROLLOUT}.name=trtllm", "sglang | vllm"]),
    "another trainer": ([f"{ACTOR}.strategy=deepspeed"], [f"{ACTOR}.strategy=deepspeed", "fsdp2"]),
    "no reward model": (["reward_model.enable=true"], ["no model is named", "reward.reward_model.model_path"]),
    # the run's directory, and trackers
    "a file as directory": (["trainer.default_local_dir=a_file"], ["trainer.default_local_dir", "a_file"]),
    "a directory that cannot be": (["trainer.default_local_dir=/proc/x"], ["trainer.default_local_dir", "/proc/x"]),
    "no path to resume from": (["trainer.resume_mode=resume_path"], ["trainer.resume_from_path"]),
    "no such step": (
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=run/global_step_9"],
        ["global_step_9"],
    ),
    "a logger without its package": (["trainer.logger=[clearml]"], ["trainer.logger=clearml", "pip install clearml"]),
}  # fmt: skip

# Not an error, as it can be meant: the command starts, with a warning or a note that has these words.
WARNED = {
    "fewer prompts than a mini-batch": ([f"{ACTOR}.ppo_mini_batch_size=64"], ["one update"]),
    "mini-batches of different sizes": ([f"{ACTOR}.ppo_mini_batch_size=3"], ["3 mini-batches of up to 3"]),
    "positions that are stretched": (
        [f"{CHANGED}.rope_scaling.type=yarn", f"{CHANGED}.rope_scaling.factor=4.0", f"{CHANGED}.embd_pdrop=0.0"], [],
    ),
    "one response per prompt": ([f"{ROLLOUT}.n=1"], [f"{ROLLOUT}.n=1", "warning"]),
    "a critic that nothing uses": (["critic.enable=true"], ["warning", "critic"]),
    "validations without data": (["trainer.test_freq=1"], ["warning", "trainer.test_freq", "data.val_files"]),
    "a budget below a row": ([f"{ACTOR}.ppo_max_token_len_per_gpu=20"], ["warning", "ppo_max_token_len_per_gpu=20"]),
    "more devices than cores": (
        [f"trainer.n_gpus_per_node={2 * (os.cpu_count() or 1)}"],
        ["warning", "trainer.n_gpus_per_node"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REJECTED)
def test_it_is_rejected_before_the_start(answer, case):
    words, expected = REJECTED[case]
    found = answer(*words)
    assert (found.status, found.started) == (2, False), found.text
    assert "Traceback" not in found.text
    assert [part for part in expected if part not in found.text] == [], found.text


@pytest.mark.parametrize("case", WARNED)
def test_it_is_said_and_the_run_starts(answer, case):
    words, expected = WARNED[case]
    found = answer(*words)
    assert found.started, found.text
    assert [part for part in expected if part not in found.text] == [], found.text


def test_a_cluster_that_does_not_respond_is_rejected(answer):
    found = answer("ray_kwargs.ray_init.address=127.0.0.1:9")
    assert found.status == 2, found.text
    assert "no Ray responds at 127.0.0.1:9" in found.text and "ray start --head" in found.text


def test_an_address_at_which_another_program_listens_is_rejected_soon(answer):
    """Ray itself would try for minutes, as with the port of its dashboard."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        found = answer(f"ray_kwargs.ray_init.address=127.0.0.1:{server.server_port}")
        server.shutdown()
    assert found.status == 2 and f"no Ray responds at 127.0.0.1:{server.server_port}" in found.text, found.text
    assert "another program listens there" in found.text


LATE = {
    "an environment": ([f"{ROLLOUT}.multi_turn.environment=own_data.py:Guess"], "there is no class Guess"),
    "a class that is no environment": ([f"{ROLLOUT}.multi_turn.environment=own_data.py:Rows"], "no method step"),
    "tools": ([f"{ROLLOUT}.multi_turn.function_tool_path=imports.py"], "no_such_module"),
    "an agent": ([f"{ROLLOUT}.agent.path=own_data.py"], "has no function run"),
    "a dataset": (["data.custom_cls.path=own_data.py", "data.custom_cls.name=Row"], "there is no class Row; it has"),
    "a sampler": (["data.sampler.class_path=imports.py", "data.sampler.class_name=A"], "no_such_module"),
    "a reward": ([f"{REWARD}.name=scroe"], "there is no function scroe"),
    "an estimator": (["algorithm.adv_estimator=wrong_signature.py:advantage"], "has no function advantage"),
    "a schedule": ([f"{ACTOR}.optim.lr_scheduler_type=extensions.py:hlf"], "has no function hlf"),
}


@pytest.mark.parametrize("case", LATE)
def test_the_users_files_are_loaded_before_models_and_rows_are_read(answer, monkeypatch, case):
    monkeypatch.setattr(prepare, "load_tokenizer", lambda *_, **__: pytest.fail("a tokenizer or rows were read"))
    words, expected = LATE[case]
    found = answer(*words)
    assert (found.status, found.started) == (2, False) and expected in found.text, found.text
    assert "row 0" not in found.text


def test_a_directory_in_use_is_rejected(answer, tmp_path):
    (tmp_path / "run").mkdir()
    store = Store(tmp_path / "run")
    try:
        found = answer()
    finally:
        store.close()
    assert (found.status, found.started) == (2, False), found.text
    assert str(os.getpid()) in found.text and "trainer.default_local_dir" in found.text


def test_custom_sinks_schedules_and_rules_that_work_are_accepted(answer):
    keys = {"trainer.logger": "[console,extensions.py:Quiet]", "trainer.health_rules": "[extensions.py:all_well]"}
    keys |= {f"{ACTOR}.optim.lr_scheduler_type": "extensions.py:half", "trainer.on_diagnosis": "{all-well: stop}"}
    found = answer(*(f"{key}={value}" for key, value in keys.items()))
    assert found.started, found.text


def test_a_run_that_learns_from_a_teacher_alone_needs_neither_rewards_nor_ground_truths(answer):
    teacher = "+distillation.teacher_models.teacher_model.model_path=model", "distillation.enabled=true"
    rows = "data.train_files=no_truth.jsonl", "data.train_batch_size=1", "data.ground_truth_key=none"
    none = f"{REWARD}.path=null"
    alone = answer(*teacher, *rows, none, "distillation.distillation_loss.use_task_rewards=false")
    assert alone.started and "no reward function for rows of unknown: scores are 0, only teachers are" in alone.text
    both = answer(*teacher, *rows, none)
    assert both.status == 2 and "the ground truth is null" in both.text


def test_the_command_without_a_fault_starts(answer):
    found = answer()
    assert found.started, found.text


def test_a_teacher_with_another_chat_template_is_named_with_both_texts(answer, place):
    shutil.copytree(place / "model", place / "other_template")
    settings = place / "other_template" / "chat_template.jinja"
    settings.write_text(settings.read_text().replace("<|im_start|>", "<|im_start|> "))
    teacher = "+distillation.teacher_models.teacher_model.model_path=other_template", "distillation.enabled=true"
    given = answer(*teacher)
    assert given.started and "m_start|> user" in given.text and "where the policy's has 'im_start|>user" in given.text


def test_supervised_fine_tuning_has_no_key_of_reward_models():
    config = SimpleNamespace(data=None, model=None, pairs=SimpleNamespace(center=0.1))
    with pytest.raises(ConfigError, match="is a key of reward models; train one: hybridrl rm"):
        prepare.load_sft_inputs(cast(Any, config))
