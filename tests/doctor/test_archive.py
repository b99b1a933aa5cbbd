"""`hybridrl bundle`: what the archive holds, and that no secret is in it."""

import json
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from hybridrl.checkpoint.store import Store
from hybridrl.doctor import __main__ as doctor
from hybridrl.doctor.leftovers import TAIL_BYTES, write_bundle
from hybridrl.required import required
from hybridrl.tracking import Tracker
from hybridrl.tracking.console import warn
from hybridrl.tracking.faults import recording
from hybridrl.tracking.secrets import mask_text, without_users

SECRETS = {
    "hub": "hf_" + "a1B2" * 8,
    "open": "sk-proj-" + "x9Yz" * 6,
    "git": "ghp_" + "Q7w8" * 9,
    "wandb": "0123456789abcdef" * 2 + "01234567",
    "cloud": "AKIA" + "ABCD1234" * 2,
    "web": "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
    "password": "correct horse",
    "named": "Zebra+77/plain",
    "signature": "f00dfeed",
    "environment": "only-in-the-environment",
    "link": "p4ss-in-a-link",
    "person": "jane.doe",
    "judge": "lower-case-key",
    "option": "after-an-option",
    "netrc": "in-a-netrc",
    "camel": "refreshed",
    "private": "MIIEowIBAAKCAQEAfirst",
    "end of private": "Zm9vYmFylast",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a secret in every place where one may be."""
    directory = tmp_path / "run"
    (directory / "logs").mkdir(parents=True)
    home = tmp_path / "home" / SECRETS["person"]
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", SECRETS["hub"])
    monkeypatch.setenv("MY_API_KEY", SECRETS["environment"])
    monkeypatch.setenv("RAY_OPTIONS", f"key is {SECRETS['environment']}")
    monkeypatch.setenv("WANDB_API_KEY", SECRETS["wandb"])
    secret = SECRETS
    (directory / "config.yaml").write_text(
        f"trainer:\n  default_local_dir: {home}/run\n  rollout_data_dir: {directory}/rollouts\n"
        f"data:\n  train_files: [s3://me:{secret['link']}@host/x.parquet, /home/{secret['person']}/y.parquet]\n"
        f"  prompt_key: question\n  max_token_len_per_gpu: 16384\n"
        f"own:\n  judge:\n    api_key: {secret['named']}\n    token: {secret['open']}\n"
        f"  judge_key: >-\n    {secret['judge']}\n"
        f"  service_password: '{secret['password']}'\n"
        f"ray_kwargs: {{ray_init: {{runtime_env: {{env_vars: {{OPENAI_KEY: {secret['named']}}}}}}}}}\n"
    )
    with recording(directory), closing(Store(directory)) as store, Tracker([], directory, "p", "e", {}, 2) as tracker:
        for step in range(300):
            tracker.log(step, {"loss": 0.25})
        (store.begin(2) / "weights").write_bytes(b"WEIGHTS" * 1000)
        store.publish(2, {"healthy": True, "recovery": False, "metrics": {}})
        warn(f"the judge says: Authorization: Bearer {secret['web']}, key {secret['cloud']}")
        warn(f"the judge got {secret['environment']}")
    (directory / "logs" / "rollout-0.log").write_text(
        f"GET https://host/x?X-Amz-Signature={secret['signature']}&n=1\n--token={secret['git']}\n{secret['wandb']}\n"
        "generated 512 tokens, token: 17\n"
        f"the judge rejects {secret['named']} and {secret['password']}; [{secret['judge']!r}]\n"
        f"serve --token {secret['option']}\nmachine host login me password {secret['netrc']}\n"
        f"{{'refreshToken': '{secret['camel']}'}}\n"
        f"-----BEGIN PRIVATE KEY-----\n{secret['private']}\n{secret['end of private']}\n-----END PRIVATE KEY-----\n"
    )
    for log in ("reward.log", "scoring-0.log"):
        (directory / "logs" / log).write_text("a SAMPLE that the reward prints\n")
    (directory / "rollouts").mkdir()
    (directory / "rollouts" / "2.jsonl").write_text('{"output": "a SAMPLE"}\n')
    return directory


def texts(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as file:
        return {name.partition("/")[2]: required(file.extractfile(name)).read().decode() for name in file.getnames()}


def test_no_secret_no_weight_no_data_and_no_sample_is_packed(run, tmp_path):
    write_bundle(run, tmp_path / "report.tar.gz")
    packed = texts(tmp_path / "report.tar.gz")
    everything = "\n".join([*packed.values(), (run / "faults.jsonl").read_text()])
    assert {name: text for name, text in SECRETS.items() if text in everything} == {}
    assert "WEIGHTS" not in everything and "SAMPLE" not in everything


def test_of_a_long_log_whole_lines_are_packed_as_a_secret_is_known_by_the_name_before_it(run, tmp_path):
    log = run / "logs" / "trainer-0.log"
    log.write_text('"password": "c4n4ry' + "0" * (TAIL_BYTES - 8) + '"\nthe last line\n')
    write_bundle(run, tmp_path / "packed.tar.gz", samples=True)
    assert texts(tmp_path / "packed.tar.gz")["logs/trainer-0.log"] == "the last line\n"


def test_what_explains_a_run_is_packed_and_stays_readable(run, tmp_path):
    names = write_bundle(run, tmp_path / "report.tar.gz")
    packed = texts(tmp_path / "report.tar.gz")
    assert names == list(packed) == [
        "why.json", "machine.json", "packages.txt", "checkpoints.json", "config.yaml", "faults.jsonl", "metrics.jsonl",
        "logs/rollout-0.log",
    ]  # fmt: skip
    assert json.loads(packed["why.json"])["code"] == "finished"
    assert json.loads(packed["checkpoints.json"])["2"]["healthy"] is True
    assert json.loads(packed["machine.json"])["environment"]["WANDB_API_KEY"] == "***"
    assert "prompt_key: question\n  max_token_len_per_gpu: 16384\n" in packed["config.yaml"]
    assert "- s3://***@host/x.parquet\n  - /home/USER/y.parquet" in packed["config.yaml"]
    assert "default_local_dir: ~/run" in packed["config.yaml"]
    assert "X-Amz-Signature=***&n=1" in packed["logs/rollout-0.log"]
    assert "generated 512 tokens, token: 17" in packed["logs/rollout-0.log"]
    assert [json.loads(line)["step"] for line in packed["metrics.jsonl"].splitlines()] == list(range(100, 300))
    codes = [json.loads(line)["code"] for line in packed["faults.jsonl"].splitlines()]
    assert codes == ["begun", "warning", "warning", "finished"]
    assert any(line.startswith("torch==") for line in packed["packages.txt"].splitlines())


@pytest.mark.parametrize("name", ["bundle", "report"])  # its earlier name
def test_samples_are_packed_where_requested(run, tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert doctor.main([name, str(run), "--samples", "--out", "mine.tar.gz"]) == 0
    assert "mine.tar.gz" in capsys.readouterr().out
    packed = texts(tmp_path / "mine.tar.gz")
    assert "a SAMPLE" in packed["samples/rollout_data_dir-2.jsonl"] and "a SAMPLE" in packed["logs/reward.log"]
    assert (tmp_path / "mine.tar.gz").stat().st_mode & 0o077 == 0


def test_what_is_no_secret_is_left():
    numbers = ("eos_token_id: 2", "token: null", '"response_length/mean": 12.5', "max_tokens=17,")
    for text in (*numbers, "tokenizer: path/to/it", "a@b.c"):
        assert without_users(mask_text(text)) == text
