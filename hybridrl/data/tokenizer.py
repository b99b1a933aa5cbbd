"""Loads the tokenizer. Knows nothing about rows."""

import logging
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybridrl.config.error import ConfigError
from hybridrl.config.model_directory import resolve_model

logger = logging.getLogger(__name__)


def load_tokenizer(
    model_path: str,
    *,
    tokenizer_path: str | None = None,
    trust_remote_code: bool = False,
    custom_chat_template: str | None = None,
    model_key: str = "actor_rollout_ref.model.path",
) -> PreTrainedTokenizerBase:
    """The tokenizer at `tokenizer_path`, or else beside the model; it always has a padding token.

    A local directory is read without the network; any other name is asked of the Hugging Face hub.
    Raises ConfigError naming `data.tokenizer` or `model_key`.
    """
    key = "data.tokenizer" if tokenizer_path else model_key
    path = Path(tokenizer_path or resolve_model(model_path)).expanduser()
    tokenizer = _read(path, key, trust_remote_code)
    if custom_chat_template:
        tokenizer.chat_template = custom_chat_template
    _choose_pad_token(tokenizer, f"{key}={path}")
    return tokenizer


def _read(path: Path, key: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    local = path.is_dir()
    if not local and (path.is_absolute() or str(path).startswith(".") or len(path.parts) > 2):
        raise ConfigError(f"{key}={path}: there is no such directory")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=trust_remote_code, local_files_only=local
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        where = "holds no tokenizer" if local else "is neither a directory nor a tokenizer that the hub gives"
        raise ConfigError(f"{key}={path}: {where} ({reason}); data.tokenizer can name another") from error
    # For some models transformers makes up an empty tokenizer where the files are missing.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ConfigError(f"{key}={path}: holds no tokenizer; data.tokenizer can name another")
    return tokenizer


def _choose_pad_token(tokenizer: PreTrainedTokenizerBase, place: str) -> None:
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{place}: the tokenizer has no end-of-sequence token; set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("the tokenizer has no padding token: its end-of-sequence token %s pads", tokenizer.eos_token)
