"""What is masked as a secret, and what only looks like one."""

import pytest

from hybridrl.tracking.secrets import is_secret, mask_text, mask_values


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
