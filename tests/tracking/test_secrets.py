"""What is masked as a secret, and what only looks like one."""

import json
import logging

import pytest

from hybridrl.config import PPOConfig, SFTConfig
from hybridrl.config.values import value_keys
from hybridrl.tracking.faults import read_faults, record, recording
from hybridrl.tracking.secrets import MASK, is_secret, mask_text, mask_values, remember

C = "cAnArY7x9Q"
PEM = f"-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA{C}ab/+==\n{C}def\n-----END RSA PRIVATE KEY-----"
FORMS = [
    *(f"own.judge_key={C}", f"judge_key: {C}", f"judgeKey: {C}", f"++own.service_key={C}", f"export JUDGE_KEY={C}"),
    *(f"--token {C}", f"--api-key={C}", f"-token {C}", f"['--token', '{C}']", f'"--password",\n  "{C}"'),
    f"--hf-token {C}",
    *(f"machine api.wandb.ai login user password {C}", f"machine h\n  login u\n  password {C}\n"),
    *(f"machine h\\n login u\\n password {C}\\n", f"localhost:5432:db:me:{C}", f"//registry.npmjs.org/:_authToken={C}"),
    *(PEM, PEM[:60], PEM[70:], repr(PEM), str(PEM.splitlines()), f"client-key-data: {C}", f"private_key_id: {C}"),
    *(f"refreshToken={C}", f'"refreshToken": "{C}"', f'{{\\"accessToken\\": \\"{C}\\"}}', f"clientSecret: '{C}'"),
    *(f"sasToken={C}", f"APIKey: {C}", f"apikey={C}", f"OPENAIAPIKEY={C}", f"WANDB_API_KEY={C}", f"api_token: {C}"),
    *(f"https://me:{C}@host/x", f"https://{C}@host", f"postgres://u:p/{C}@h/db", f"https://u:p@{C}@h/"),
    f"redis://:{C}@h",
    *(f"Authorization: Bearer {C}", f"Authorization: Token {C}", f"authorization: {C}", f"X-Api-Key: {C}"),
    f"Bearer {C}",
    *(f'{{"detail": "Authorization: Bearer {C}"}}', f"http.extraHeader=AUTHORIZATION: basic {C}", f"Cookie: a; b={C}"),
    *(f"curl -u me:{C} https://x", f"Server=x;Password={C};Db=y", f"AccountKey={C};x", f"?sig={C}&x=1", f"?key={C}"),
    *(f"passwd={C}", f"db_password = {C}", f"PGPASSWORD={C}", f"password: 'it\\'s {C}'", f'password="a {C} b"'),
    *(f"DB_PASS={C}", f"passphrase={C}", f"GITHUB_PAT={C}", f"github_pat: {C}", f'"auth": "{C}"', f"password={C}"),
    *(f"AWS_SECRET_ACCESS_KEY={C}", f"aws_secret_access_key = {C}", f"secrets: {{a: {C}}}", f"+own.creds.secret.x={C}"),
    *(f"hub_token={C}", f"token={C}", f"api_key='{C}'", f"api_key={C}", f"webhook: {C}", f"session_token: {C}"),
    *(f"hf_{C}ab", f"sk-proj-{C}", f"sk_live_{C}", f"ghp_{C}ab", f"github_pat_{C}", f"glpat-{C}", f"xoxb-1-{C}"),
    *(f"xoxe.xoxp-{C}abcd", f"AIzaSy{C * 3}", f"npm_{C}abc", f"pypi-{C}", f"gsk_{C}", f"nvapi-{C}", f"wandb_v1_{C}"),
    *(f"https://hooks.slack.com/services/T0/B0/{C}", f"eyJhbGciOiJI.{C}.{C}", f"dckr_pat_{C}"),
    *(f"hvs.{C}", f"lsv2_pt_{C}"),
]  # fmt: skip


@pytest.mark.parametrize("text", FORMS)
def test_forms_of_secrets(text):
    for around in ("a {} b", "ValueError: {} (reward.py:3)", "kwargs={{{}, n: 1}}", "x=1, {}", "[rank 0]: step=3: {}"):
        assert C not in mask_text(around.format(text)).replace("def\n", "")
    record = json.dumps({"fault": "raised", "detail": f"ValueError: {text} (reward.py:3)"})
    assert C not in mask_text(record) and C not in mask_text(json.dumps({"line": record}))
    assert C not in str(mask_values({"a": [text], "argv": ["--api-key", C]}))


def test_no_key_of_the_configuration_looks_like_a_secret():
    keys = [*value_keys(PPOConfig), *value_keys(SFTConfig), "data.tools_key", "data.image_key", "pad_token_id"]
    assert [key for key in keys if is_secret(key)] == []
    texts = [f"{key}: word {key}=word --{key.rpartition('.')[2]} word" for key in keys]
    assert [text for text in texts if mask_text(text) != text] == []


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: key: foo", "hybridrl train key=value ...", "http://127.0.0.1:8000/v1/models",
        "rollout_is=token: 0.2", "step:1 - actor/loss:0.5 - response_length/mean:12.5", "12:30:05: a:b",
        "--max-tokens 5",
        '{"tokens": [1, 2], "token": 17}', "loss_agg_mode: token-mean", "see --help key", "2026-11-26 10:10:10,123 x",
        "api_key: null", "token: ''", "worker.py:1234:run:failed", "user@host: scp -r x", "max_token_len: 17",
    ],
)  # fmt: skip
def test_texts_without_a_secret(text):
    assert mask_text(text) == text


def test_a_value_of_the_environment_is_masked_wherever_it_occurs(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "only-in-the-environment")
    assert mask_text("rejected (only-in-the-environment)") == "rejected (***)"


def test_the_secrets_of_a_configuration_are_masked_wherever_they_occur():
    kwargs = {"api_key": f"{C}-1", "tokens": 3, "auth_tokens": [f'{C}-"2"'], "password": "two words"}
    remember({"reward": {"kwargs": kwargs}, "command": ["serve", "--token", f"{C}-3"], "score": f"{C}-4"})
    remember({"data": {"label_key": "the_solution", "hf_token": None}, "password": 12345678, "token": "short"})
    as_json = json.dumps(kwargs["auth_tokens"])
    text = f'rejected {C}-1, {C}-"2", {as_json}, two words; {C}-3 12345678; the_solution is short: {C}-4 3'
    kept = f'rejected ***, ***, ["***"], ***; *** ***; the_solution is short: {C}-4 3'
    assert mask_text(text) == kept


def test_a_fault_is_recorded_without_secrets(tmp_path):
    remember({"judge": {"token": f"{C}-5"}})
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "train-0.log").write_text(f"before\nrejected {C}-5\n")
    with pytest.raises(ValueError), recording(tmp_path):
        record("warning", f"{C}-5")
        logging.getLogger("hybridrl.judge").warning(f"{C}-5")
        raise ValueError(f"train-0 failed: {C}-5")
    faults = read_faults(tmp_path)
    assert [fault.text for fault in faults[1:]] == ["***", "***", "train-0 failed: ***"]
    assert faults[-1].tail == ["before", "rejected ***"]


@pytest.mark.parametrize("name", ["hf_token", "token", "wandb_api_key", "PGPASS", "DB_PWD", "db_pass", "OPENAI_KEY"])
def test_names_of_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize("name", ["eos_token", "tokenizer", "max_tokens", "prompt_key", "pass_rate", "kl_per_token"])
def test_names_that_only_look_like_those_of_secrets(name):
    assert not is_secret(name)


def test_texts_keep_all_but_the_secret():
    assert mask_text("s3://me:word@host/x, PGPASS=word DB_PWD='a b'") == "s3://***@host/x, PGPASS=*** DB_PWD='***'"
    plain = f"eos_token=<end> forward pass: 3 ms, token: 17, snapshots/{'0a' * 20}/config.json"
    assert mask_text(plain) == plain


def test_everything_below_a_secret_is_masked():
    assert mask_values({"secrets": [{"a": 1}, "x"], "b": None}) == {"secrets": [{"a": "***"}, "***"], "b": None}


def test_the_column_of_teachers_and_their_values_in_it_are_no_secrets():
    section = {"teacher_key": "kind", "teacher_models": {"one": {"key": "gsm8k", "model_path": "/m"}}, "key": "abc"}
    assert mask_values({"distillation": section}) == {"distillation": section | {"key": MASK}}
