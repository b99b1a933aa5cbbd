"""The facts of a machine, and what is said where those of several machines differ; without Ray."""

import json
import shutil
import socket
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest

from hybridrl.doctor.cluster import shared_paths
from hybridrl.doctor.facts import (
    ADDRESS,
    CLOCK,
    DIRECTORY,
    FILES,
    GLOO,
    GPU_FAULTS,
    GPU_USE,
    GPUS,
    INTERFACES,
    MEMORY,
    NETWORK,
    SHARED_MEMORY,
    TEMPORARY,
    VARIABLES,
    add_common_facts,
    bypassed,
    check_directory,
    compare_machines,
    facts_table,
    files_digest,
    gloo_fault,
    gpu_facts,
    interfaces,
    machine_facts,
    on_interface,
)
from hybridrl.doctor.links import reach
from hybridrl.doctor.machine import GIB, Gpu

MODEL = "actor_rollout_ref.model.path=/models/q"
FACTS = {
    "Python": "3.11.7",
    "hybridrl": "aa11",
    "torch": "2.13.0",
    "vllm": "0.32.0",
    "CUDA": "13.0",
    "NCCL": "2.29.7",
    "CUDA driver": "580.1",
    MODEL: "beef",
    MEMORY: 100.0,
    FILES: 65536,
    TEMPORARY: 100.0,
    SHARED_MEMORY: 100.0,
    DIRECTORY: "",
    CLOCK: 0.0,
    NETWORK: "",
}


def messages(**changes: Any) -> list[tuple[str, str, str]]:
    """What is reported if the facts of the second of three machines are changed."""
    findings = compare_machines({"a": FACTS, "b": FACTS | changes, "c": FACTS})
    return [(one.severity, one.code, one.cause) for one in findings.items if one.severity != "info"]


def test_equal_machines_are_not_reported():
    assert messages() == []


@pytest.mark.parametrize(
    ("fact", "value", "severity"),
    [
        *((library, "0.1", "error") for library in ("hybridrl", "torch", "vllm", "CUDA", "NCCL")),
        ("Python", "3.12.7", "error"),
        ("Python", "3.11.9", "warning"),
        ("CUDA driver", "570.0", "warning"),
    ],
)
def test_a_machine_with_another_version_is_named_with_both_versions(fact: str, value: str, severity: str):
    cause = f"{fact} differs: {FACTS[fact]} on a, c; {value} on b"
    assert messages(**{fact: value}) == [(severity, "cluster.versions", cause)]


@pytest.mark.parametrize(
    ("value", "problem"), [(None, "does not exist on b"), ("dead", "has different contents: beef on a, c; dead on b")]
)
def test_a_model_that_is_missing_or_has_other_contents_is_an_error_that_names_the_key(value, problem):
    assert messages(**{MODEL: value}) == [("error", "cluster.paths", f"{MODEL} {problem}")]


def test_a_directory_that_is_not_shared_and_a_machine_out_of_reach_are_errors_with_the_key_to_set():
    findings = compare_machines({"a": FACTS, "b": FACTS | {DIRECTORY: "not writable", NETWORK: "cannot reach a at x"}})
    directory, network = findings.errors
    assert directory.cause == "run directory, on b: not writable" and "trainer.default_local_dir" in directory.fix
    assert network.cause == "network, on b: cannot reach a at x" and "NCCL_SOCKET_IFNAME" in network.fix


def test_little_memory_and_a_clock_that_differs_are_warnings():
    assert messages(**{SHARED_MEMORY: 0.1}) == [("warning", "cluster.free", "/dev/shm free in GiB, on b: 0.1")]
    assert messages(**{CLOCK: -30.0}) == [("warning", "cluster.clock", "clock offset in s, on b: -30.0")]
    assert messages(**{CLOCK: 1.0}) == []


def test_few_open_files_are_a_warning():
    assert messages(**{FILES: 1024}) == [("warning", "cluster.limits", "open files, on b: 1024")]


def with_addresses(*addresses: str, local: bool = False, **of_last: str) -> list[tuple[str, str]]:
    """The findings of machines a, b, ... with these addresses in Ray; the last one has other facts."""
    plain = FACTS | dict.fromkeys(VARIABLES, "") | {GLOO: ""}
    machines = {
        name: plain | {ADDRESS: f"{address} on eth0", INTERFACES: "eth0 10.0.0.1" if local else f"eth0 {address}"}
        for name, address in zip("abc", addresses, strict=False)
    }
    list(machines.values())[-1].update(of_last)
    add_common_facts(machines)
    return [(one.code, one.cause) for one in compare_machines(machines).items if one.severity != "info"]


def test_addresses_differ_and_are_shown_but_not_reported():
    assert with_addresses("10.0.0.1", "10.0.0.2", "10.0.0.3") == []


def test_a_machine_whose_name_is_an_address_that_others_cannot_reach_is_named_unless_all_are_local():
    fault = {GLOO: "it listens at the loopback"}
    expected = [("cluster.address", "address of gloo, on b: it listens at the loopback")]
    assert with_addresses("10.0.0.1", "10.0.0.2", **fault) == expected
    assert with_addresses("10.0.0.1", "127.0.0.2", local=True, **fault) == []


@pytest.mark.parametrize(
    ("address", "interface", "usable"),
    [("127.0.1.1", "", False), ("10.0.0.2", "", True), ("10.9.9.9", "", False), ("127.0.1.1", "eth0", True)],
)
def test_gloo_is_reached_at_the_address_of_the_name_or_by_an_interface_that_is_set(
    monkeypatch, address: str, interface: str, usable: bool
):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: address)
    monkeypatch.setattr("hybridrl.doctor.facts.interfaces", lambda: {"10.0.0.2": "eth0", "127.0.1.1": "lo"})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    assert bool(gloo_fault()) != usable


def test_an_address_is_shown_with_its_interface():
    assert interfaces()["127.0.0.1"] == "lo"
    assert (on_interface("127.0.0.1"), on_interface("10.1.2.3")) == ("127.0.0.1 on lo", "10.1.2.3 on no interface")


def test_a_variable_that_differs_and_a_proxy_for_the_machines_are_warnings():
    differs = [("cluster.environment", "HF_HOME differs: - on a; /models on b")]
    assert with_addresses("10.0.0.1", "10.0.0.2", HF_HOME="/models") == differs
    proxied = {"http_proxy": "http://proxy:1", "no_proxy": "localhost,10.0.0.1"}
    codes = with_addresses("10.0.0.1", "10.0.0.2", **proxied)
    assert ("cluster.environment", "proxy, on b: http_proxy=http://proxy:1 is used for 10.0.0.2") in codes
    assert not [
        cause
        for _, cause in with_addresses("10.0.0.1", "10.0.0.2", **proxied | {"no_proxy": "10.0.0.0/8"})
        if cause.startswith("proxy")
    ]


def test_no_proxy_names_addresses_networks_and_all():
    assert all(bypassed("10.0.0.2", names) for names in ("10.0.0.2", "a, 10.0.0.0/24", "*", "x,10.0.0.2"))
    assert not any(bypassed("10.0.0.2", names) for names in ("", "10.0.0.20", "10.0.1.0/24", "localhost"))


def test_gpus_that_are_missing_broken_in_use_or_of_another_kind_are_named():
    gpus = [Gpu(index, "H100", 80 * GIB, 80 * GIB) for index in range(8)]
    sound = gpu_facts(gpus, 8)
    assert sound == {GPUS: "8 x H100, 80 GiB", GPU_FAULTS: "", GPU_USE: ""}
    busy = gpus[3]._replace(free=40 * GIB, holders=((7, "python a.py, of b", 40 * GIB),))
    facts = gpu_facts([*gpus[:2], gpus[2]._replace(errors=2), busy, gpus[4]._replace(name="A100"), *gpus[5:7]], 8)
    assert facts[GPUS] == "6 x H100, 80 GiB; 1 x A100, 80 GiB"
    assert facts[GPU_FAULTS] == "Ray offers 8 GPUs, and the driver shows 7; GPU 2 has 2 uncorrected ECC errors"
    assert facts[GPU_USE] == "GPU 3: 50% of its memory is taken by process 7 (python a.py, of b, 40.0 GiB)"
    findings = compare_machines({"a": FACTS | sound, "b": FACTS | facts})
    assert [(one.severity, one.code) for one in findings.items[1:]] == [
        ("warning", "cluster.gpus"),
        ("error", "cluster.gpus"),
        ("warning", "cluster.gpus"),
    ]


def test_the_table_marks_only_what_differs_or_fails():
    lines = facts_table({"a": FACTS, "b": FACTS | {"vllm": "0.26.0", MODEL: None, CLOCK: 0.2}}).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("!")] == ["vllm", MODEL]
    assert next(line for line in lines if "vllm" in line).endswith("0.32.0 on a; 0.26.0 on b")
    assert next(line for line in lines if "torch" in line).endswith("torch" + " " * (len(MODEL) - 3) + "2.13.0")


def test_the_facts_of_this_machine_agree_with_themselves(tmp_path: Path):
    (tmp_path / "loss.py").write_text("x = 1")
    facts = machine_facts("cpu", {"loss": f"{tmp_path}/loss.py:mine", "none": f"{tmp_path}/none.py"})
    assert facts["Python"].startswith("3.") and len(facts["hybridrl"]) == 10 and facts["ray"]
    assert facts["loss"] and facts["none"] is None
    assert not [one for one in compare_machines({"a": facts, "b": dict(facts)}).errors if "none" not in one.cause]


def test_temporary_space_is_that_of_the_fuller_of_tmp_and_tmpdir(free_space):
    free_space(9 << 30, {"/tmp": 5 << 30, gettempdir(): 2 << 30})
    assert (machine_facts("cpu", {})[TEMPORARY], machine_facts("cpu", {})[SHARED_MEMORY]) == (2.0, 9.0)
    free_space(9 << 30, {"/tmp": 1 << 30, gettempdir(): 2 << 30})
    assert machine_facts("cpu", {})[TEMPORARY] == 1.0


def test_a_model_s_fingerprint_is_that_of_a_copy_and_of_no_other_weights(tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    (first / "config.json").write_text("{}")
    with (first / "model.safetensors").open("wb") as file:
        file.truncate(40 << 20)  # more than is read as a whole
    shutil.copytree(first, second)
    before = files_digest(str(first))
    assert before is not None and files_digest(str(second)) == before
    with (second / "model.safetensors").open("rb+") as file:
        file.write(b"other weights differ in all places, so also here")
    assert files_digest(str(second)) != before
    assert files_digest(str(tmp_path / "third")) is None


def test_a_module_s_fingerprint_is_that_of_its_file():
    assert files_digest("pkg://json") == files_digest(json.__file__) == files_digest("json")
    assert files_digest("pkg://no.such.module") is files_digest("no_such_module") is None


def test_a_directory_is_shared_if_the_driver_s_file_is_seen_and_another_can_be_written(tmp_path: Path):
    assert check_directory(tmp_path, "marker", "reply") == "a file that the driver wrote is not visible"
    (tmp_path / "marker").touch()
    assert check_directory(tmp_path, "marker", "reply") == "" and (tmp_path / "reply").exists()
    assert check_directory(tmp_path, "marker", "no/reply") == "not writable (No such file or directory)"


def test_a_port_on_which_nothing_listens_is_out_of_reach():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert reach("127.0.0.1", port) == ""
    assert reach("127.0.0.1", port) == f"127.0.0.1:{port} ([Errno 111] Connection refused)"


def test_every_machine_needs_models_and_code_but_not_what_only_the_driver_reads(tmp_path: Path):
    model, code = tmp_path / "model", tmp_path / "code.py"
    model.mkdir()
    (model / "config.json").write_text("{}")
    code.touch()
    values = {
        "data": {"train_files": [str(code)], "custom_cls": {"path": str(code)}, "tokenizer": str(model)},
        "actor_rollout_ref": {
            "model": {"path": str(model), "external_lib": ["my_models"], "custom_chat_template": "{% for %}" * 999},
            "actor": {"policy_loss": {"loss_mode": f"{code}:mine"}},
        },
        "reward": {"custom_reward_function": {"path": f"file://{code}", "name": ""}},
        "algorithm": {"adv_estimator": f"{code}:mine"},
        "trainer": {"default_local_dir": str(model)},
    }
    assert sorted(key.partition("=")[0] for key in shared_paths(values)) == [
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        "actor_rollout_ref.model.external_lib",
        "actor_rollout_ref.model.path",
        "data.tokenizer",
        "reward.custom_reward_function.path",
    ]
