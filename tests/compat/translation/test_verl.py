"""The table of verl's keys against the schema, against verl's own list where that is at hand, and by what it does."""

import json
from pathlib import Path

import pytest

from hybridrl.compat.translation import SYSTEMS, VERL
from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.load import resolve_config
from hybridrl.config.schema import SFTConfig
from hybridrl.config.values import holds, tree, value_keys

from .conftest import Load

SHARED = Path(__file__).parents[4] / "shared" / "data"
COMMANDS = ["verl_cmdlines.jsonl", "verl_cmdlines_releases.jsonl"]
KNOWN = tree(PPOConfig)
ROLLOUT, ACTOR, MODEL = (f"actor_rollout_ref.{part}" for part in ("rollout", "actor", "model"))

at_hand = pytest.mark.skipif(not SHARED.is_dir(), reason="needs verl's keys and command lines next to the project")


def ours(key: str) -> bool:
    return holds(KNOWN, key)


def verl_defaults() -> dict[str, object]:
    lines = (SHARED / "verl_keys.tsv").read_text(encoding="utf-8").splitlines()[1:]
    return {key: json.loads(default) for key, default, *_ in (line.split("\t") for line in lines)}


def command_lines(file: str) -> list[dict]:
    return [json.loads(line) for line in (SHARED / file).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_entry_speaks_of_a_key_that_is_one_here(system: str) -> None:
    named = {key for entry in SYSTEMS[system].entries for key in entry.keys if not entry.when}
    assert not (named | SYSTEMS[system].table["moved"].keys()) & KNOWN.keys()


@pytest.mark.parametrize("system", SYSTEMS)
def test_old_names_lead_to_keys_that_are_known_or_checked(system: str) -> None:
    table, known = SYSTEMS[system], tree(SFTConfig)
    names = {old: table.current_name(old) for old in table.table["moved"]}
    lost = [old for old, new in names.items() if not ours(new) and new not in known and table.entry_of(new) is None]
    assert lost == ["actor_rollout_ref.rollout.skip"] or not lost


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_is_set_instead_is_a_key_here(system: str) -> None:
    table = SYSTEMS[system].table
    keys = [*table["defaults"], *(key for entry in SYSTEMS[system].entries for key in entry.sets)]
    assert not [key for key in keys if key not in value_keys(PPOConfig)]
    supervised = [key for defaults in table.get("sft_defaults", {}).values() for key in defaults]
    assert not [key for key in supervised if key not in value_keys(SFTConfig)]


@at_hand
def test_every_key_of_verl_is_checked() -> None:
    names = [VERL.current_name(key) for key in verl_defaults()]
    assert not [name for name in names if not ours(name) and VERL.entry_of(name) is None]


@at_hand
def test_verl_s_own_defaults_are_accepted_and_are_not_warned_of_without_reason() -> None:
    plain = {key: value for key, value in verl_defaults().items() if value != "???" and "${" not in str(value)}
    plain |= {"actor_rollout_ref.rollout.name": "vllm"}
    for key in ("data.video_key", "data.audio_key"):
        del plain[key]  # a command that names them has such rows; a file may, as verl's own
    overrides = [f"++{key}={json.dumps(value)}" for key, value in plain.items()]
    found = resolve_config(PPOConfig, overrides, "ppo_trainer", offline=True).findings
    assert not [finding for finding in found.items if finding.severity == "error" or finding.code == "ignored-key"]


@at_hand
@pytest.mark.parametrize("file", COMMANDS)
def test_real_command_lines_are_accepted_unless_they_use_what_is_not_supported(file: str) -> None:
    """Each error names an unsupported key, or comes from a shell variable that is not set."""
    for line in command_lines(file):
        findings = resolve_config(PPOConfig, line["overrides"], "ppo_trainer", offline=True).findings
        errors = {} if line["unset_vars"] else {finding.code: finding.text for finding in findings.errors}
        others = ("remote sandboxes are", "it is of a family that reads pictures or sounds and is not trained")
        other = any(reason in text for reason in others for text in errors.values())
        assert not errors or "unsupported" in errors or other, line["script"]


@at_hand
def test_generative_reward_models_of_command_lines_need_a_server_and_nothing_else(tmp_path: Path) -> None:
    lines = [line["overrides"] for file in COMMANDS for line in command_lines(file)]
    enabled = [words for words in lines if any(word.endswith("reward_model.enable=True") for word in words)]
    generative = [words for words in enabled if any("custom_reward_function.path=" in word for word in words)]
    parameters = "data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer"
    for words in generative:
        values = dict(word.split("=", 1) for word in words)
        file, name = tmp_path / "reward.py", values["custom_reward_function.name"]
        file.write_text(f"async def {name}({parameters}): ...\n")
        words = [*words, f"custom_reward_function.path={file}"]
        (error,) = resolve_config(PPOConfig, words, "ppo_trainer", offline=True).findings.errors
        serve = f"hybridrl serve model.path={values['reward_model.model.path']} port=8001"
        assert error.text.endswith(f"start it: {serve}, and set reward.judge.base_url=http://127.0.0.1:8001/v1")
        words = [*words, "reward.judge.base_url=http://127.0.0.1:8001/v1"]
        loaded = resolve_config(PPOConfig, words, "ppo_trainer", offline=True)
        assert not loaded.findings.errors and not loaded.accept().reward.reward_model.enable
    assert generative


def test_token_ids_that_stay_are_accepted_and_another_choice_is_named(load: Load) -> None:
    key = "data.continuous_token.enable"
    assert load(*GRPO, f"{key}=true").notes == load(*GRPO, f"{key}=null").notes == load(*GRPO).notes
    (note,) = load(*GRPO, f"{key}=false").notes
    assert note.startswith(f"{key} has no effect: responses always stay token ids")


UV = "uv -v run --frozen --all-packages --extra vllm --extra fsdp"
ENVIRONMENT = "ray_kwargs.ray_init.runtime_env.py_executable"


def test_verl_s_environment_by_uv_is_left_out_with_one_warning(load: Load, tmp_path: Path) -> None:
    words = (*GRPO, f"{ENVIRONMENT}='{UV}'", "ray_kwargs.ray_init.runtime_env.env_vars.A=b")
    loaded = load(*words)
    assert loaded.config.ray_kwargs.ray_init == {"runtime_env": {"env_vars": {"A": "b"}}}
    (note,) = loaded.notes
    assert note.startswith(f"{ENVIRONMENT} has no effect: it starts workers in verl's environment through uv")
    (tmp_path / "mine.yaml").write_text(
        f"defaults: [ppo_trainer, _self_]\nray_kwargs: {{ray_init: {{runtime_env: {{py_executable: '{UV}'}}}}}}\n"
    )
    loaded = load(*GRPO, config_dir=tmp_path, config_name="mine")
    assert loaded.notes == [note]
    assert not loaded.config.ray_kwargs.ray_init["runtime_env"]


def test_a_python_that_the_user_names_reaches_ray(load: Load) -> None:
    loaded = load(*GRPO, f"{ENVIRONMENT}=/opt/python")
    assert loaded.config.ray_kwargs.ray_init == {"runtime_env": {"py_executable": "/opt/python"}}


def test_a_file_s_old_names_move_as_on_the_command_line_which_wins(load: Load, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "hydra: {searchpath: [file://verl/trainer/config]}\n"
        "data: {image_key: images}\n"
        "actor_rollout_ref: {actor: {optim: {warmup_style: cosine}, tis_imp_ratio_cap: 3.0}}\n"
        "reward_model: {reward_kwargs: {overlong_buffer_cfg: {len: 64}}}\n"
        "trainer: {remove_previous_ckpt_in_save: true}\n"
    )
    loaded = load(*GRPO, "trainer.max_actor_ckpt_to_keep=3", config_dir=tmp_path, config_name="mine")
    config = loaded.config
    assert config.actor_rollout_ref.actor.optim.lr_scheduler_type == "cosine"
    assert config.algorithm.rollout_correction.rollout_is_threshold == "3.0"
    assert config.reward.reward_kwargs.overlong_buffer_cfg.len == 64
    assert config.trainer.max_actor_ckpt_to_keep == 3
    assert len(loaded.notes) == 4 and all(" is now " in note for note in loaded.notes)


def test_a_whole_file_of_verl_is_read_as_its_keys_are(load: Load, tmp_path: Path) -> None:
    (tmp_path / "dapo.yaml").write_text(
        "hydra: {searchpath: [file://verl/trainer/config]}\n"
        "defaults: [ppo_trainer, _self_]\n"
        "data: {tool_config_path: '${oc.select:actor_rollout_ref.rollout.multi_turn.tool_config_path, null}'}\n"
        "algorithm: {filter_groups: {_target_: verl.trainer.config.FilterGroupsConfig, enable: true, metric: acc}}\n"
        "actor_rollout_ref: {actor: {router_replay: {_target_: verl.workers.config.RouterReplayConfig}}}\n"
        "ray_kwargs: {ray_init: {runtime_env: {py_executable: null}}}\n"
        "reward: {reward_manager: {name: dapo}}\n"
        "reward_model: {overlong_buffer: {enable: false, len: 0, penalty_factor: 0.0}}\n"
    )
    loaded = load(*GRPO, config_dir=tmp_path, config_name="dapo")
    assert loaded.config.algorithm.filter_groups.metric == "acc"
    assert loaded.config.reward.reward_manager.name == "dapo"
    assert not loaded.config.ray_kwargs.ray_init["runtime_env"]
    assert all("reward_model.overlong_buffer" in note for note in loaded.notes)


def test_a_buffer_of_no_tokens_is_rejected_where_it_is_used(load: Load) -> None:
    buffer = "reward.reward_kwargs.overlong_buffer_cfg"
    keys = (*GRPO, "reward.reward_manager.name=dapo", f"{buffer}.enable=true", f"{buffer}.len=0")
    (line,) = errors_of(load, *keys)
    assert f"{buffer}.len=0: responses have at most max_resp_len=512 tokens; set a part of that" in line


def errors_of(load: Load, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return list(caught.value.lines)


GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8")


def test_a_key_without_effect_is_a_warning_once_with_all_that_share_the_reason(load: Load) -> None:
    (note,) = load(*GRPO, f"{ACTOR}.fsdp_config.grad_offload=true", "critic.fsdp.grad_offload=true").notes
    assert note.startswith(f"{ACTOR}.fsdp_config.grad_offload, critic.fsdp.grad_offload have no effect")


def test_the_reference_s_sequence_parallel_size_is_the_actor_s(load: Load, cores) -> None:
    cores(4)
    size = "ulysses_sequence_parallel_size"
    actor, reference = f"{ACTOR}.{size}=2", f"actor_rollout_ref.ref.{size}"
    assert not load(*GRPO, "trainer.n_gpus_per_node=4", actor, f"{reference}=2").notes
    (note,) = load(*GRPO, "trainer.n_gpus_per_node=4", actor, f"{reference}=4").notes
    assert note == f"{reference} has no effect: the reference's rows are shared by the same devices as the actor's"


def test_a_schedule_s_length_is_the_run_s_and_another_one_is_said_to_be_ignored(load: Load) -> None:
    key = f"{ACTOR}.optim.total_training_steps"
    assert not load(*GRPO, "trainer.total_training_steps=100", f"{key}=100").notes
    assert not load(*GRPO, f"{key}=-1").notes
    (note,) = load(*GRPO, f"{key}=100").notes
    assert note.startswith(f"{key} has no effect: a schedule spans the whole run, as in verl")
    assert note.endswith("set trainer.total_training_steps")


@pytest.mark.parametrize(
    "neutral",
    [
        "trainer.balance_batch=True",
        f"{ACTOR}.fsdp_config.use_orig_params=False",
        f"{ROLLOUT}.load_format=dummy",
        f"{ROLLOUT}.multi_turn.enable=False",
        "custom_reward_function.path=null",
        "reward_model.enable=null",
        "reward.custom_reward_function.name=null",
        f"+{ACTOR}.rollout_n=${{{ROLLOUT}.n}}",
        "actor_rollout_ref.ref.strategy=fsdp",
        "data.return_raw_chat=",
        "ray_kwargs.ray_init.num_cpus=null",
    ],
)
def test_nothing_is_said_of_neutral_values(load: Load, neutral: str) -> None:
    assert load(*GRPO, neutral).notes == []


FIRE = f"{ROLLOUT}.use_fire_sampling=true: that sampling is not supported; set false"


@pytest.mark.parametrize(
    ("overrides", "errors"),
    [
        ([f"{ROLLOUT}.use_fire_sampling=True", "trainer.scheduler=x"],
         [FIRE, "trainer.scheduler=x: learning from a teacher model is not supported; set false"]),
        ([f"{ROLLOUT}.use_fire_sampling=${{data.shuffle}}"], [FIRE]),
        (["data.train_batch_size='$SIZE'"],
         ["data.train_batch_size=$SIZE: expected an integer (a shell variable that was not replaced?)"]),
        (["trainer.nnodes=${NNODES}", "data.shuffle=perhaps"],
         ["data.shuffle=perhaps: expected true or false",
          "trainer.nnodes=${NNODES}: Interpolation key 'NNODES' not found"]),
    ],
    ids=["keys that would change the result", "a reference counts as what it refers to",
         "a shell variable that was not replaced", "a reference that leads nowhere does not hide the rest"],
)  # fmt: skip
def test_what_cannot_work_is_rejected_with_its_value(load: Load, overrides: list[str], errors: list[str]) -> None:
    assert errors_of(load, *overrides) == errors


@pytest.mark.parametrize(
    ("old", "key", "value"),
    [
        ("rollout.n=8", "actor_rollout_ref.rollout.n", 8),
        ("critic.model.fsdp_config.param_offload=true", "critic.fsdp.param_offload", True),
        (f"{ACTOR}.optim.warmup_style=cosine", f"{ACTOR}.optim.lr_scheduler_type", "cosine"),
        (f"{ACTOR}.optim.lr_decay_style=WSD", f"{ACTOR}.optim.lr_scheduler_type", "wsd"),
        (f"{ACTOR}.optim.lr_decay_style=inverse-square-root", f"{ACTOR}.optim.lr_scheduler_type", "inverse_sqrt"),
        (f"{ACTOR}.checkpoint.contents=[model]", f"{ACTOR}.checkpoint.save_contents", ["model"]),
        (f"+{ACTOR}.policy_loss.tau_pos=1.5", f"{ACTOR}.tau_pos", 1.5),
        (f"+{ROLLOUT}.enable_sleep_mode=False", f"{ROLLOUT}.free_cache_engine", False),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.len=64", "reward.reward_kwargs.overlong_buffer_cfg.len", 64),
        ("trainer.remove_previous_ckpt_in_save=True", "trainer.max_actor_ckpt_to_keep", 1),
        (f"{ACTOR}.tis_imp_ratio_cap=3.0", "algorithm.rollout_correction.rollout_is_threshold", "3.0"),
        (f"{ACTOR}.tis_imp_ratio_cap=3.0", "algorithm.rollout_correction.rollout_is", "token"),
        ("critic.model.fsdp_config.offload_policy=True", "critic.fsdp.offload_policy", True),
        ("ray_init.num_cpus=4", "ray_kwargs.ray_init", {"num_cpus": 4}),
    ],
)
def test_an_old_name_sets_the_key_it_became_and_says_so(load: Load, old: str, key: str, value: object) -> None:
    loaded = load(*GRPO, old)
    found: object = loaded.config
    for name in key.split("."):
        found = vars(found)[name]
    assert found == value
    assert any(note.startswith(old.lstrip("+").split("=")[0]) and " is now " in note for note in loaded.notes)


REPLAY, CORRECTION = f"{ACTOR}.router_replay.mode", "algorithm.rollout_correction"
TWICE = [
    (f"{REPLAY}=R3", f"{ACTOR}.megatron.router_replay.mode=disabled"),
    (f"{ACTOR}.megatron.param_offload=true", f"{ACTOR}.fsdp_config.param_offload=false"),
    (f"{ACTOR}.megatron.dtype=bf16", f"{ACTOR}.torchtitan.dtype=fp32"),
    (f"{ACTOR}.megatron.context_parallel_size=2", f"{ACTOR}.veomni.ulysses_parallel_size=4"),
    (f"{ACTOR}.optim.decay_type=cosine", f"{ACTOR}.optim.lr_scheduler_type=linear"),
    (f"{ACTOR}.optim.min_lr=1e-7", f"{ACTOR}.optim.min_lr_ratio=0.5"),
    ("reward_model.reward_manager=dapo", "reward.reward_manager.name=naive"),
    (f"{ACTOR}.use_rollout_log_probs=true", f"{CORRECTION}.bypass_mode=false"),
    (f"{ACTOR}.tis_imp_ratio_cap=2", f"{CORRECTION}.rollout_is_threshold=3"),
    (f"+{ROLLOUT}.engine_kwargs.vllm.max_model_len=4096", f"{ROLLOUT}.max_model_len=2048"),
]


@pytest.mark.parametrize("pair", TWICE)
def test_two_places_of_one_setting_with_different_values_are_an_error(load: Load, pair) -> None:
    for words in (pair, pair[::-1]):
        (error,) = (line for line in errors_of(load, *GRPO, *words) if "two places" in line)
        assert all(text.lstrip("+") in error for text in pair) and "with different values; leave one out" in error


def test_two_places_with_the_same_value_and_one_that_is_set_twice_are_accepted(load: Load) -> None:
    words = (f"{ACTOR}.grad_clip=0.50", f"{ACTOR}.optim.clip_grad=0.5", f"{ACTOR}.megatron.router_replay.mode=null")
    config = load(*GRPO, *words, "data.shuffle=true", "data.shuffle=false").config
    assert config.actor_rollout_ref.actor.grad_clip == 0.5


@pytest.mark.parametrize(("rank", "alpha"), [(0, 8), (4, 64)])
def test_an_adapter_s_section_of_verl_counts_where_its_rank_is_not_0(load: Load, rank: int, alpha: int) -> None:
    flat = (f"{MODEL}.lora_rank=8", f"{MODEL}.lora_alpha=8", f"{MODEL}.target_modules=all-linear") if rank == 0 else ()
    section = (f"{MODEL}.lora.rank={rank}", f"{MODEL}.lora.alpha=64", f"{MODEL}.lora.target_modules=[linear_qkv]")
    model = load(*GRPO, *flat, *section[: 3 if rank == 0 else 2]).config.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha) == (rank or 8, alpha)


@pytest.mark.parametrize(
    ("in_file", "in_command"),
    [("grad_clip: 1.0, optim: {clip_grad: 0.5}", ()), ("grad_clip: 0.7", (f"{ACTOR}.optim.clip_grad=0.5",))],
)
def test_two_places_agree_where_one_has_what_is_usual_or_the_command_wins(load: Load, tmp_path, in_file, in_command):
    mine = "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {actor: {%s}}\n"
    (tmp_path / "mine.yaml").write_text(mine % in_file)
    config = load(*GRPO, *in_command, config_dir=tmp_path, config_name="mine").config
    assert config.actor_rollout_ref.actor.grad_clip == 0.5
    (tmp_path / "mine.yaml").write_text(mine % "grad_clip: 0.7, optim: {clip_grad: 0.5}")
    with pytest.raises(ConfigError, match="two places"):
        load(*GRPO, config_dir=tmp_path, config_name="mine")


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("vllm.max_model_len=1024", "max_model_len", 1024),
        ("vllm.gpu_memory_utilization=0.7", "gpu_memory_utilization", 0.7),
        ("sglang.context_length=1024", "max_model_len", 1024),
        ("sglang.disable_cuda_graph=true", "enforce_eager", True),
    ],
)
def test_an_argument_of_the_engine_that_has_a_key_sets_the_key(load: Load, argument: str, key: str, value) -> None:
    rollout = load(*GRPO, f"+{ROLLOUT}.engine_kwargs.{argument}").config.actor_rollout_ref.rollout
    assert vars(rollout)[key] == value and not rollout.engine_kwargs.vllm and not rollout.engine_kwargs.sglang


def test_hydra_s_own_settings_have_no_effect_and_its_launchers_are_rejected(load: Load) -> None:
    notes = load(*GRPO, "hydra/job_logging=none", "hydra/hydra_logging=colorlog", "hydra.run.dir=x").notes
    names = ["hydra/job_logging", "hydra/hydra_logging", "hydra.run.dir"]
    assert [note.partition(" has no effect")[0] for note in notes] == names
    (line,) = errors_of(load, *GRPO, "hydra/launcher=joblib")
    assert "hydra/launcher: Hydra only reads the configuration here; hybridrl sweep runs several values" in line


def test_an_old_key_that_was_switched_off_sets_nothing(load: Load) -> None:
    loaded = load(*GRPO, "trainer.remove_previous_ckpt_in_save=False", f"{ACTOR}.tis_imp_ratio_cap=-1")
    assert loaded.notes == []
    assert loaded.config.trainer.max_actor_ckpt_to_keep is None
    assert loaded.config.algorithm.rollout_correction.rollout_is is None


def test_an_argument_that_vllm_no_longer_has_does_not_reach_it(load: Load) -> None:
    key = f"{ROLLOUT}.engine_kwargs.vllm"
    loaded = load(*GRPO, f"+{key}.disable_mm_preprocessor_cache=True", f"+{key}.kv_cache_dtype=fp8")
    assert loaded.config.actor_rollout_ref.rollout.engine_kwargs.vllm == {"kv_cache_dtype": "fp8"}
    assert loaded.notes == [f"{key}.disable_mm_preprocessor_cache has no effect: vLLM has no such argument any more"]


def test_an_own_key_is_kept_for_own_code(load: Load) -> None:
    loaded = load(*GRPO, "+own.bonus=0.5", "+my.key.deep=[1,2]")
    assert loaded.config.own == {"bonus": 0.5, "my": {"key": {"deep": [1, 2]}}}
    assert loaded.notes == ["my.key.deep is kept as own.my.key.deep for your own code"]


def test_a_deleted_key_becomes_null_where_it_may(load: Load) -> None:
    config = load("trainer.total_training_steps=3", "~trainer.total_training_steps", "~trainer.balance_batch").config
    assert config.trainer.total_training_steps is None


def test_a_trainer_key_left_empty_by_the_shell_takes_its_default_with_a_warning(load: Load) -> None:
    loaded = load(*GRPO, "trainer.nnodes=")
    assert loaded.config.trainer.nnodes == 1
    assert loaded.notes == ["trainer.nnodes is empty (is a shell variable not set?): 1 is used"]


def test_all_that_is_wrong_is_reported_at_once(load: Load) -> None:
    wrong = errors_of(load, "data.shufle=1", "trainer.seed=x", "trainer.val_only=true", "trainer.scheduler=x")
    named = [line.split("=")[0].split(";")[0] for line in wrong]
    assert named == ["unknown key data.shufle", "trainer.seed", "trainer.scheduler", "trainer.val_only"]


def test_what_follows_from_a_rejected_value_is_not_reported() -> None:
    overrides = ["data.train_files=x.jsonl", "actor_rollout_ref.model.path=a/b", "data.max_response_length=abc"]
    overrides.append(f"{ROLLOUT}.max_model_len=600")
    found = resolve_config(PPOConfig, overrides, "ppo_trainer", offline=True).findings
    assert [finding.text for finding in found.errors] == ["data.max_response_length=abc: expected an integer"]


def test_offline_neither_this_machine_s_files_nor_its_devices_count() -> None:
    overrides = ["data.train_files=/no/x.parquet", "actor_rollout_ref.model.path=/no/model", "trainer.nnodes=2"]
    overrides += ["trainer.n_gpus_per_node=8", f"{ROLLOUT}.tensor_model_parallel_size=4"]
    overrides += ["actor_rollout_ref.model.lora_adapter_path=/no/adapter", "actor_rollout_ref.model.lora_rank=8"]
    result = resolve_config(PPOConfig, overrides, "ppo_trainer", offline=True)
    assert not result.findings.errors
    absent = [finding.keys[0] for finding in result.findings.items if finding.code == "not-here"]
    assert absent == ["data.train_files", "actor_rollout_ref.model.lora_adapter_path", "actor_rollout_ref.model.path"]
    assert result.config is not None
    assert result.config.data.train_files == ["/no/x.parquet"]


def test_pictures_are_rows_of_the_model_s_own_patches(load: Load, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 16}')
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    (tmp_path / "model.safetensors").touch()
    keys = [*GRPO, f"actor_rollout_ref.model.path={tmp_path}", "data.return_multi_modal_inputs=false"]
    more = ["data.image_key=shown", "+data.mm_processor_kwargs.max_pixels=65536", "data.image_patch_size=16"]
    loaded = load(*keys, *more)
    assert loaded.config.data.image_key == "shown" and loaded.config.data.mm_processor_kwargs == {"max_pixels": 65536}
    assert not [note for note in loaded.notes if "image" in note or "multi_modal" in note]
    with pytest.raises(ConfigError, match=r"data.image_patch_size=14: .* set 16, or leave it out"):
        load(*keys, "data.image_patch_size=14")
