import pytest

from hybridrl.config import ConfigError
from hybridrl.config.checks import resolve_ppo
from hybridrl.config.checks.training import Machine
from hybridrl.config.findings import Findings
from hybridrl.config.load import load_ppo_config, load_sft_config

from .conftest import errors_of

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


UNKNOWN = {
    "data.train_bach_size=4": "unknown key data.train_bach_size; nearest: data.train_batch_size",
    "rollout.temprature=1": "unknown key rollout.temprature; nearest: actor_rollout_ref.rollout.temperature, "
    "actor_rollout_ref.rollout.val_kwargs.temperature",
    "model.path=x": "unknown key model.path; nearest: actor_rollout_ref.model.path, actor_rollout_ref.ref.model.path, "
    "critic.model.path",
    "critic.lr=1": "unknown key critic.lr; nearest: critic.optim.lr, actor_rollout_ref.actor.optim.lr",
    "n_gpus=1": "unknown key n_gpus; nearest: actor_rollout_ref.rollout.n_gpus_per_node, trainer.n_gpus_per_node",
    "mine.thing=1": "unknown key mine.thing; hybridrl train --help all lists all keys",
}
UNREADABLE = {
    "data.seed": "cannot read data.seed: expected key=value",
    "=3": "cannot read =3: expected key=value",
    "trainer.experiment_name=a=b": "cannot read trainer.experiment_name=a=b: expected a value, or one in quotes: "
    "'trainer.experiment_name=\"a=b\"'",
    "data.val_files=a.jsonl,b.jsonl": "data.val_files=a.jsonl,b.jsonl: one value is expected; "
    "for a list write data.val_files=[a.jsonl,b.jsonl]; hybridrl sweep runs each value",
    "~trainer.seed": "~trainer.seed: this key must have a value; set it to another one",
    "data={seed: 1}": "data={seed: 1}: data is a section; set the keys in it one by one: data.key=value",
    f"{ROLLOUT}=8": f"{ROLLOUT}=8: is a section; set the keys in it, such as {ROLLOUT}.name=...",
}
OF_ANOTHER_TYPE = {
    "data.train_batch_size=abc": "expected an integer",
    "data.max_prompt_length=1.5": "expected an integer",
    f"{ROLLOUT}.n=true": "expected an integer",
    f"{ACTOR}.ppo_mini_batch_size=": "expected an integer",
    f"{ACTOR}.ppo_epochs=null": "expected an integer",
    "trainer.seed=[1, 2]": "expected an integer",
    "trainer.nnodes={a: 1}": "expected an integer",
    "trainer.total_training_steps=all": "expected an integer or null",
    f"{ACTOR}.optim.lr=fast": "expected a number",
    f"{ACTOR}.grad_clip=nan": "expected a number",
    f"{ACTOR}.optim.betas=0.9": "expected 2 values: [a, b]",
    "data.shuffle=perhaps": "expected true or false",
    "trainer.keep_best_ckpt=typo": "is not a validation metric; name one, such as val-core/gsm8k/acc/mean@1, or "
    "-val/loss",
    "data.prompt_key=": "expected text",
    "trainer.experiment_name=[a]": "expected text",
    "ray_kwargs.ray_init=auto": "expected names and values: {name: value, ...}",
}
NOT_FINITE = {
    f"{ACTOR}.optim.lr=inf": "must be finite",
    f"{ROLLOUT}.temperature=inf": "must be finite",
    "trainer.step_timeout=inf": "must be finite",
    f"{ACTOR}.entropy_coeff=-inf": "must be finite",
    "data.train_weights=[1, inf]": "must be finite",
}
OUT_OF_RANGE = {
    f"{ROLLOUT}.agent.port=99999": "must be at least 1 and at most 65535",
    "data.train_batch_size=-3": "must be at least 1",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=0": "must be at least 1",
    "trainer.total_training_steps=0": "must be at least 1",
    "reward.timeout=0": "must be more than 0",
    f"{ROLLOUT}.top_p=1.5": "must be more than 0 and at most 1",
    f"{ACTOR}.optim.betas=[0.9, 1]": "must be at least 0 and less than 1",
    "trainer.device=gpu": "choose auto | cuda | cpu",
    f"{ROLLOUT}.dtype=int8": "choose bf16 | fp16 | fp32 | bfloat16 | float16 | float32 | null",
    "actor_rollout_ref.actor.policy_loss.loss_mode=ppo": "choose vanilla | gspo | cispo | sapo | geo_mean | gmpo | "
    "gpg | clip_cov | kl_cov | dppo_tv | dppo_kl | dro | path/to/file.py:function",
}
NOT_THERE = {
    f"{ACTOR}.policy_loss.loss_mode=a.py:f": "there is no file a.py",
    "data.train_files=trian.jsonl": "there is no file trian.jsonl (in . there are train.jsonl)",
    "data.val_files=a/b.jsonl": "there is no file a/b.jsonl (a does not exist)",
    "actor_rollout_ref.model.path=./m": "there is no such directory",
    "data.tokenizer=/x/t": "there is no such directory (/x does not exist)",
    "reward.custom_reward_function.path=r.py": "there is no such file; give the path of a .py file",
}


@pytest.mark.parametrize(
    "wanted",
    [
        UNKNOWN,
        UNREADABLE,
        {override: f"{override}: {fault}" for override, fault in OF_ANOTHER_TYPE.items()},
        {override: f"{override}: {fault}" for override, fault in NOT_FINITE.items()},
        {override: f"{override}: {fault}" for override, fault in OUT_OF_RANGE.items()},
        {override: f"{override}: {fault}" for override, fault in NOT_THERE.items()},
        {"data.train_files=": "data.train_files=: name one file or more: [a.jsonl, b.parquet]"},
        {
            "data.train_files=empty": "data.train_files=empty: the directory empty has no files that end in "
            ".parquet, .json, .jsonl, .csv, .tsv"
        },
        {"data=mine": "data=mine: there is no such configuration file; choose ppo | sft"},
        {"trainer.project_name=${no.key}": "trainer.project_name=${no.key}: Interpolation key 'no.key' not found"},
        {"trainer.seed=-1": "trainer.seed=-1: must be at least 0"},  # said once, not of each key that follows it
    ],
    ids=lambda wanted: next(iter(wanted)),
)
def test_all_that_is_wrong_is_in_one_message_with_key_value_and_fix(load, wanted):
    assert sorted(errors_of(load, *wanted)) == sorted(wanted.values())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.max_prompt_length=900",
            "actor_rollout_ref.model.path=model: the model takes 1024 positions, a row may have 1412; "
            "lower data.max_prompt_length or data.max_response_length",
        ),
        (
            f"{ROLLOUT}.max_model_len=1000",
            f"{ROLLOUT}.max_model_len=1000: prompt and response may have 1024 tokens; lower data.max_prompt_length or "
            "data.max_response_length, or leave max_model_len at null",
        ),
        (f"{ROLLOUT}.min_tokens=513", f"{ROLLOUT}.min_tokens=513: a response has at most 512 tokens"),
        ("trainer.val_only=true", "trainer.val_only=true: there is nothing to validate; set data.val_files"),
        (
            "algorithm.rollout_correction={rollout_is: token, rollout_is_threshold: null}",
            "algorithm.rollout_correction.rollout_is_threshold=null: algorithm.rollout_correction.rollout_is=token "
            "needs a bound; set 2.0",
        ),
        (
            "trainer.logger=[console,tensorbord]",
            "trainer.logger=tensorbord: choose among console, verl_console, file, tensorboard, wandb, mlflow, swanlab, "
            "trackio, clearml, path/to/file.py:Class; did you mean tensorboard?",
        ),
        (
            "actor_rollout_ref.model.path=Qwen/Qwen2.5-Omni-7B",
            "actor_rollout_ref.model.path=Qwen/Qwen2.5-Omni-7B: by its name (Omni) it is of a family that reads "
            "pictures or sounds and is not trained",
        ),
        (
            "trainer.device=cuda",
            "trainer.device=cuda: this machine has no usable GPU: CUDA_VISIBLE_DEVICES= hides them; unset it, or set "
            "trainer.device=cpu",
        ),
        (
            "trainer.nnodes=2",
            "trainer.nnodes=2: without a Ray cluster to join there is only this machine; "
            "run ray start on each machine and set RAY_ADDRESS, or leave trainer.nnodes at 1",
        ),
        (
            "trainer.default_local_dir=train.jsonl/run",
            "trainer.default_local_dir=train.jsonl/run: {here}/train.jsonl is a file; name a directory",
        ),
    ],
)
def test_keys_that_cannot_go_together_are_rejected(load, tmp_path, override, message):
    assert errors_of(load, override) == [message.format(here=tmp_path)]


@pytest.mark.parametrize("greedy", ["temperature=0", "do_sample=false"])
def test_equal_responses_to_a_prompt_are_rejected(load, greedy):
    assert errors_of(load, f"{ROLLOUT}.{greedy}", f"{ROLLOUT}.n=8") == [
        f"{ROLLOUT}.{greedy}: all n=8 responses to a prompt would be equal; "
        f"set {ROLLOUT}.do_sample=true and {ROLLOUT}.temperature=1.0"
    ]


def test_keys_that_must_be_set_are_named(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_ppo_config(["data.train_files=???"])
    assert str(caught.value).splitlines() == [
        "data.train_files is not set; add data.train_files=...",
        "actor_rollout_ref.model.path is not set; add actor_rollout_ref.model.path=...",
    ]


def test_keys_that_contradict_each_other_are_reported_together(load):
    lines = errors_of(load, "trainer.val_only=true", "data.max_prompt_length=2000", "trainer.nnodes=3")
    assert [line.split("=")[0] for line in lines] == [
        "trainer.nnodes",
        "actor_rollout_ref.model.path",
        "trainer.val_only",
    ]


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        (
            "config.json",
            "the directory has no config.json, so it is not a Hugging Face model (it has model.safetensors)",
        ),
        (
            "model.safetensors",
            "the directory has no weights (*.safetensors or *.bin); save or download the model again",
        ),
    ],
)
def test_a_model_directory_that_is_not_whole_is_rejected(load, tmp_path, remove, message):
    (tmp_path / "model" / remove).unlink()
    assert errors_of(load) == [f"actor_rollout_ref.model.path=model: {message}"]


def test_a_model_configuration_that_is_no_json_is_rejected(load, tmp_path):
    (tmp_path / "model" / "config.json").write_text("{")
    (line,) = errors_of(load)
    assert line.startswith("actor_rollout_ref.model.path=model: its config.json cannot be read (")


def test_a_hub_name_is_not_looked_for(load):
    assert (
        load("actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B").config.actor_rollout_ref.model.path
        == "Qwen/Qwen2.5-0.5B"
    )


ONE_GPU = Machine(gpus=1, cores=8, memory_bytes=16 << 30)


@pytest.mark.parametrize(
    ("device", "count", "width", "message"),
    [
        ("cuda", 8, 1, "trainer.n_gpus_per_node=8: this machine has 1 GPUs; set trainer.n_gpus_per_node=1"),
        (
            "cpu", 11, 1,
            "trainer.n_gpus_per_node=11: free memory is enough for 10 CPU devices; set trainer.n_gpus_per_node=10"
        ),
        ("cuda", 1, 2, f"{ROLLOUT}.tensor_model_parallel_size=2: must divide trainer.n_gpus_per_node=1; set 1"),
        ("cpu", 4, 3, f"{ROLLOUT}.tensor_model_parallel_size=3: must divide trainer.n_gpus_per_node=4; set 1 or 4"),
        (
            "cpu", 4, 2,
            f"{ROLLOUT}.tensor_model_parallel_size=2: with trainer.n_gpus_per_node=4 on CPU only a single engine can "
            "span several devices; set trainer.n_gpus_per_node=2"
        )
    ]
)  # fmt: skip
def test_more_than_the_machine_has_is_rejected(load, device, count, width, message):
    config = load().config
    config.trainer.device, config.trainer.n_gpus_per_node = device, count
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = width
    config.actor_rollout_ref.actor.fsdp_config.fsdp_size = config.critic.fsdp.fsdp_size = -1
    findings = Findings()
    resolve_ppo(config, findings, ONE_GPU)
    assert [finding.text for finding in findings.errors] == [message]


@pytest.mark.parametrize(("name", "accepted"), [*((f"a{one}b", "a-b") for one in "/\\#?%:"), (129 * "a", 128 * "a")])
def test_a_project_that_wandb_rejects_is_rejected_where_wandb_logs(load, name, accepted):
    project = f"trainer.project_name='{name}'" if "\\" not in name else f"trainer.project_name={name}"
    load(project)
    load("trainer.project_name='a b.c_é'", wandb := "trainer.logger=[console,wandb]")
    (said,) = errors_of(load, project, wandb)
    assert said.startswith(f"trainer.project_name={name}: W&B accepts names of up to 128 characters")
    assert said.endswith(f"; set trainer.project_name={accepted}")


@pytest.mark.parametrize("key", ["RAY_ADDRESS", "ray_kwargs.ray_init.address"])
@pytest.mark.parametrize(
    ("address", "host"),
    [
        *((form.format("10.0.0.1"), "10.0.0.1") for form in ("http://{}:8265", "ray://{}:10001", "{}", "{}:99999")),
        ("10.0.0.1:8265/jobs", "10.0.0.1"),
        ("[fe80::1]", "[fe80"),
        ("://", "HOST"),
    ],
)
def test_an_address_by_which_no_ray_is_joined_is_rejected_by_its_form(load, monkeypatch, key, address, host):
    monkeypatch.setenv("RAY_ADDRESS", address if key == "RAY_ADDRESS" else "auto")
    (said,) = errors_of(load, *[f"++{key}='{address}'"] * ("." in key))
    name = key.rpartition(".")[2]
    assert f"{name}={address} is not the HOST:PORT at which a Ray is joined" in said
    assert f"; set {name}={host}:6379" in said and said.startswith("ray_kwargs.ray_init=")


@pytest.mark.parametrize("address", ["auto", "local", "10.0.0.1:6379", "a-b.example:1", "[fe80::1%eth0]:6379"])
def test_an_address_by_which_a_ray_is_joined_is_accepted(load, monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    load()


def test_a_ray_that_is_joined_may_have_more_devices_than_this_machine(load, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    trainer = load("trainer.device=cuda", "trainer.n_gpus_per_node=8", "trainer.nnodes=2").config.trainer
    assert (trainer.n_gpus_per_node, trainer.nnodes) == (8, 2)


def test_shards_must_divide_the_devices(load):
    key = f"{ACTOR}.fsdp_config.fsdp_size"
    assert errors_of(load, f"{key}=2", "trainer.n_gpus_per_node=3") == [
        f"{key}=2: must divide the 3 devices; set -1 for all of them"
    ]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (
            "data: {train_bach_size: 4}\ntrainer: {seed: x}",
            [
                "trainer.seed=x: expected an integer",
                "unknown key data.train_bach_size in {here}/mine.yaml; nearest: data.train_batch_size"
            ]
        ),
        ("reward: null", ["reward=null: is a section; set the keys in it, such as reward.name=..."]),
        ("trainer: {nnodes: 1, nnodes: 2}", ["found duplicate key nnodes"]),
        ("trainer: [", ["{here}/mine.yaml, or a file it lists, is not YAML"])
    ]
)  # fmt: skip
def test_an_own_file_is_checked_like_the_command(load, tmp_path, text, messages):
    (tmp_path / "mine.yaml").write_text(f"defaults: [ppo_trainer, _self_]\n{text}\n")
    lines = errors_of(load, config_dir=tmp_path, config_name="mine")
    assert len(lines) == len(messages)
    for line, message in zip(lines, messages, strict=True):
        assert message.format(here=tmp_path) in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no critic, reward, algorithm, distillation, trainer, eval, ray_kwargs, own; begin it with"),
        ("- a", "must be a DictConfig"),
        ("7", "Invalid loaded object type"),
        ("defaults: 3", "defaults must be a list"),
        ("defaults: [nothing]", "nothing: there is no such configuration file")
    ]
)  # fmt: skip
def test_a_file_that_is_no_configuration_is_rejected(load, tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(text)
    (line,) = errors_of(load, config_dir=tmp_path, config_name="mine")
    assert message in line


def test_a_configuration_that_is_not_there_is_rejected(load, tmp_path):
    (tmp_path / "mine.yaml").touch()
    assert errors_of(load, config_dir=tmp_path, config_name="mien") == [
        f"--config-name=mien: there is no {tmp_path}/mien.yaml; files there: mine"
    ]
    assert errors_of(load, config_dir=tmp_path / "x") == [f"--config-path={tmp_path}/x: there is no such directory"]


def test_supervised_fine_tuning_refuses_as_well(needed):
    with pytest.raises(ConfigError) as caught:
        load_sft_config(["data.train_files=train.jsonl", "model.path=model", "data.max_length=2048"])
    assert str(caught.value) == (
        "model.path=model: the model takes 1024 positions, a row may have 2048; lower data.max_length"
    )


def test_arguments_of_the_optimizer_that_change_its_state_are_rejected(load):
    key = f"{ACTOR}.optim.override_optimizer_config"
    assert errors_of(load, f"+{key}.amsgrad=true", f"+{key}.eps=1e-6") == [
        f"{key}: only eps, foreach and fused can be set there; leave out amsgrad"
    ]


@pytest.mark.parametrize(
    "key",
    [
        "data.train_files",
        "data.val_files",
        "data.custom_cls.path",
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.model.tokenizer_path",
        "actor_rollout_ref.model.lora_adapter_path",
        "reward.custom_reward_function.path",
        "trainer.default_local_dir",
        "trainer.rollout_data_dir",
        "trainer.validation_data_dir",
    ],
)
def test_a_name_longer_than_file_systems_take_is_rejected_by_its_key(load, key):
    long = f"/tmp/{300 * 'x'}"
    assert any(
        line.startswith(f"{key}={long}: File name too long; name another") for line in errors_of(load, f"{key}={long}")
    )
