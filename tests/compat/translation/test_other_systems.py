"""Keys of SkyRL and AReaL: translated by `migrate`, and rejected in a sentence where a run starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.compat.translation import SYSTEMS
from hybridrl.config import PPOConfig
from hybridrl.config.load import resolve_config
from hybridrl.config.values import tree

from .test_asynchronous import accepted, notes, resolved
from .test_verl import GRPO, at_hand, command_lines, errors_of

TOP = Path(__file__).parents[3]


@at_hand
def test_skyrl_s_command_lines_are_accepted_unless_they_use_what_is_not_supported():
    """Others are rejected for functions of their own by a name that is none here, or train on nothing."""
    for line in command_lines("skyrl_cmdlines.jsonl"):
        system = SYSTEMS["SkyRL"]
        result = resolve_config(PPOConfig, line["overrides"], "ppo_trainer", offline=True, translation=system)
        errors = result.findings.errors
        if all(finding.code != "unsupported" for finding in errors):
            names = {key.rpartition(".")[2] for finding in errors for key in finding.keys}
            assert names <= {"loss_mode", "adv_estimator", "train_files"}, line["script"]


SKYRL = (
    *("data.train_data=['train.jsonl']", "trainer.policy.model.path=model", "trainer.strategy=fsdp"),
    *("trainer.algorithm.advantage_estimator=reinforce++", "trainer.policy.optimizer_config.lr=2e-6"),
    *("trainer.policy.fsdp_config.cpu_offload=true", "trainer.placement.policy_num_gpus_per_node=2"),
    *("trainer.placement.ref_num_gpus_per_node=2", "trainer.train_batch_size=64"),
    *("trainer.policy_mini_batch_size=32", "trainer.micro_train_batch_size_per_gpu=4", "trainer.resume_mode=null"),
    "generator.inference_engine.backend=vllm",
    "generator.inference_engine.gpu_memory_utilization=0.8",
    "generator.num_inference_engines=1",
    "generator.n_samples_per_prompt=5",
    "generator.sampling_params.max_generate_length=256",
    "environment.env_class=gsm8k",
    "generator.max_turns=4",
)


def test_a_command_of_skyrl_is_translated():
    config = accepted(*SKYRL, system="SkyRL")
    section = config.actor_rollout_ref
    assert config.algorithm.adv_estimator == "reinforce_plus_plus"
    assert (section.rollout.n, config.data.max_response_length, config.trainer.n_gpus_per_node) == (5, 256, 2)
    assert (section.actor.optim.lr, section.actor.ppo_mini_batch_size) == (2e-6, 32)
    assert section.actor.fsdp_config.offload_policy
    assert section.rollout.gpu_memory_utilization == 0.8
    assert (section.rollout.multi_turn.max_assistant_turns, section.rollout.multi_turn.environment) == (4, None)
    assert config.trainer.resume_mode == "disable"
    findings = resolved(*SKYRL, system="SkyRL").findings.items
    assert all(" is now " in one.text for one in findings if one.code != "not-here")


def test_a_run_rejects_the_keys_of_each_other_system_in_a_sentence_that_names_migrate(load):
    skyrl = ["generator.max_turns", "+trainer.policy.optimizer_config.lr", "data.train_data", "trainer.epochs"]
    hint = "not of a run here; hybridrl migrate run.sh prints the command for hybridrl"
    assert errors_of(load, *(f"{key}=3" for key in [*skyrl, "generator.x", "actor.path", "gconfig.n_samples"])) == [
        f"{', '.join(skyrl).replace('+', '')} and 1 more are keys of SkyRL, {hint}",
        f"actor.path, gconfig.n_samples are keys of AReaL, {hint}",
    ]


def test_a_file_with_keys_of_another_system_is_rejected_likewise(load, tmp_path):
    values = "generator: {max_turns: 1}\ndata: {shufle: 1}\n"
    (tmp_path / "mine.yaml").write_text(f"defaults: [ppo_trainer, _self_]\n{values}")
    with pytest.raises(ValueError) as caught:
        load(*GRPO, config_dir=tmp_path, config_name="mine")
    sentence, unknown = str(caught.value).splitlines()
    assert sentence.startswith("generator.max_turns is a key of SkyRL, not of a run here; hybridrl migrate")
    assert unknown.startswith(f"unknown key data.shufle in {tmp_path / 'mine.yaml'}; nearest: data.shuffle")


@pytest.mark.parametrize(
    ("system", "override", "message"),
    [
        ("SkyRL", "trainer.strategy=jax", "training runs on FSDP2; set fsdp2"),
        ("SkyRL", "generator.no_such_key=1", "it has no counterpart here; leave it out"),
        ("SkyRL", "trainer.algorithm.dynamic_sampling.type=replace", "replacing prompts is not supported"),
        ("verl", "data.video_key=videos", "videos and sounds are not trained"),
        ("AReaL", "actor.init_from_scratch=true", "training starts from a model's weights; set false"),
        ("AReaL", "actor.backend=megatron", "only devices in one group, such as megatron:d4t2e2, are translated"),
        (
            "AReaL",
            "critic.backend='megatron:(attn:d4t2|ffn:d2e4)'",
            "only devices in one group, such as megatron:d4t2e2",
        ),
    ],
)
def test_what_another_system_has_and_is_not_here_is_rejected_in_a_line(system, override, message):
    (error,) = resolved(override, system=system).findings.errors
    assert error.text.replace("'", "").startswith(f"{override}: {message}".replace("'", ""))


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_key_of_another_system_is_rejected_where_null_switches_it_off(system):
    entries = [entry for entry in SYSTEMS[system].entries if entry.kind in ("translated", "combined")]
    off = [entry for entry in entries if entry.value_of("null") is None]  # for the others, null is a choice
    plain = [f"{key}=null" for entry in off for key in entry.keys if "*" not in key and key not in tree(PPOConfig)]
    assert plain and accepted(*plain, system=system) == accepted()


def test_areal_s_sections_are_not_taken_for_verl_s_of_the_same_name():
    keys = ["actor.path=model", "actor.eps_clip=0.4", "actor.kl_ctl=0.1", "actor.reward_norm.std_level=null"]
    config = accepted(*keys, "rollout.n=2", system="AReaL")
    assert config.actor_rollout_ref.model.path == "model"
    assert config.actor_rollout_ref.actor.clip_ratio_high == 0.4
    assert config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.kl_coef == 0.1
    assert config.algorithm.norm_adv_by_std_in_grpo is False
    assert config.actor_rollout_ref.rollout.n == 2  # verl's older name


def test_skyrl_s_megatron_sizes_are_those_of_fsdp():
    section = "trainer.policy.megatron_config"
    sizes = ("tensor_model_parallel_size=2", "expert_model_parallel_size=4", "context_parallel_size=2")
    actor = accepted(
        "trainer.strategy=megatron", *(f"{section}.{size}" for size in sizes), system="SkyRL"
    ).actor_rollout_ref.actor
    assert (actor.fsdp_config.tensor_parallel_size, actor.fsdp_config.expert_parallel_size) == (2, 4)
    assert actor.ulysses_sequence_parallel_size == 2
    more = (f"{section}.pipeline_model_parallel_size=2", f"{section}.transformer_config_kwargs.moe_aux_loss_coeff=0.1")
    assert [note.partition(":")[0] for note in notes("trainer.strategy=megatron", *more, system="SkyRL")] == [
        "trainer.strategy has no effect",
        f"{section}.pipeline_model_parallel_size has no effect",
        f"{section}.transformer_config_kwargs.moe_aux_loss_coeff has no effect",
    ]


@pytest.mark.parametrize(
    "key",
    [
        "trainer.policy.megatron_config.moe_enable_routing_replay",
        "generator.enable_return_routed_experts",
        "generator.inference_engine.enable_return_routed_experts",
    ],
)
def test_skyrl_s_routing_replay_is_that_of_the_actor(key):
    for value, mode in (("true", "R3"), ("false", "disabled")):
        config = accepted(f"{key}={value}", system="SkyRL")
        assert config.actor_rollout_ref.actor.router_replay.mode == mode


@pytest.mark.parametrize(
    ("settings", "value", "errors"),
    [
        ('{"vision_config": {}, "max_position_embeddings": 4096}', "true", 0),
        ('{"max_position_embeddings": 4096}', "true", 1),
        ('{"max_position_embeddings": 4096}', "false", 0),
        (None, "true", 0),  # a model of the hub
    ],
)
def test_skyrl_s_generator_of_pictures_needs_a_model_that_sees(tmp_path, settings, value, errors):
    model = "a/b"
    if settings:
        (tmp_path / "config.json").write_text(settings)
        (tmp_path / "model.safetensors").touch()
        model = tmp_path
    words = [f"trainer.policy.model.path={model}", f"generator.vision_language_generator={value}"]
    texts = [finding.text for finding in resolved(*words, system="SkyRL").findings.errors]
    said = "generator.vision_language_generator=true: the model reads no pictures; set false, or name one that does"
    assert texts == [said] * errors


def test_areal_s_critic_is_divided_as_its_backend_says():
    config = accepted("actor.backend=megatron:d4t2", "critic.backend=megatron:d2t4e2c1", system="AReaL")
    actor, critic = config.actor_rollout_ref.actor.fsdp_config, config.critic.fsdp
    assert (actor.tensor_parallel_size, critic.tensor_parallel_size, critic.expert_parallel_size) == (2, 4, 2)


def test_an_environment_of_skyrl_is_the_rows_environment():
    config = accepted("environment.env_class=text2sql", system="SkyRL")
    assert config.actor_rollout_ref.rollout.multi_turn.environment == "text2sql"


def test_a_command_with_keys_of_hybridrl_alone_loads_no_translation(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {shuffle: false}\nown: {bonus: 1}\n")
    words = "['data.train_files=x', 'actor_rollout_ref.model.path=a/b', '+own.x=1', '+preset=grpo', '~trainer.seed']"
    code = (
        "import sys\nfrom pathlib import Path\nfrom hybridrl.config import PPOConfig\n"
        "from hybridrl.config.load import resolve_config\n"
        f"result = resolve_config(PPOConfig, {words}, 'mine', Path({str(tmp_path)!r}), offline=True)\n"
        "print(result.config.own, [name for name in sys.modules if name.startswith('hybridrl.compat')])"
    )
    printed = subprocess.run([sys.executable, "-c", code], cwd=TOP, capture_output=True, text=True, check=True).stdout
    assert printed == "{'bonus': 1, 'x': 1} []\n"


SECTIONS = (
    *("sglang.context_length=32768", "sglang.mem_fraction_static=0.8", "sglang.disable_radix_cache=true"),
    *("sglang.max_running_requests=64", "sglang.disable_cuda_graph=false", "sglang.schedule_policy=lpm"),
    *("sglang.attention_backend=fa3", "sglang.skip_tokenizer_init=true", "sglang.chunked_prefill_size=-1"),
    *("sglang.max_prefill_tokens=4096", "sglang.max_total_tokens=null", "vllm.gpu_memory_utilization=0.9"),
)


@pytest.mark.parametrize("backend", ['allocation_mode="sglang:d4+fsdp:d4"', 'rollout.backend="sglang:d4t2"'])
def test_areal_s_section_of_its_engine_becomes_keys_or_arguments_of_the_engine(backend):
    rollout = accepted(backend, *SECTIONS, system="AReaL").actor_rollout_ref.rollout
    assert rollout.name == "sglang"
    assert (rollout.max_model_len, rollout.max_num_seqs, rollout.max_num_batched_tokens) == (32768, 64, 4096)
    assert (rollout.gpu_memory_utilization, rollout.enforce_eager, rollout.enable_prefix_caching) == (0.8, False, False)
    assert rollout.engine_kwargs.sglang == {"schedule_policy": "lpm", "attention_backend": "fa3"}


def test_areal_s_section_of_an_engine_that_it_does_not_use_changes_nothing():
    allocation = 'allocation_mode="vllm:d4+fsdp:d4"'
    rollout = accepted(allocation, *SECTIONS, system="AReaL").actor_rollout_ref.rollout
    plain = accepted(allocation, "vllm.gpu_memory_utilization=0.9", system="AReaL").actor_rollout_ref.rollout
    rollout.engine_kwargs.sglang = {}  # which vLLM does not read
    assert rollout == plain and rollout.gpu_memory_utilization == 0.9


@pytest.mark.parametrize("section", ["generator", "generator.inference_engine"])
def test_skyrl_s_engine_is_kept_with_its_arguments(section):
    keys = (f"{section}.engine_init_kwargs.page_size=16", f"{section}.backend=sglang")
    rollout = accepted(*keys, system="SkyRL").actor_rollout_ref.rollout
    assert (rollout.name, rollout.engine_kwargs.sglang, rollout.engine_kwargs.vllm) == ("sglang", {"page_size": 16}, {})
    rollout = accepted(
        keys[0].replace("page", "block"), f"{section}.backend=vllm", system="SkyRL"
    ).actor_rollout_ref.rollout
    assert (rollout.name, rollout.engine_kwargs.sglang, rollout.engine_kwargs.vllm) == ("vllm", {}, {"block_size": 16})
