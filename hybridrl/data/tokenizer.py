"""Loads the tokenizer. Knows nothing about rows."""

import logging
from pathlib import Path

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybridrl.config.error import ConfigError
from hybridrl.config.model_directory import resolve_model

# For models that have none; theirs are the tokens that most others have for it.
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
}

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
        template_key = f"{model_key.rpartition('.')[0]}.custom_chat_template={custom_chat_template}"
        tokenizer.chat_template = _template(custom_chat_template, tokenizer, template_key)
        _refuse_bad_syntax(tokenizer, template_key)
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


def _template(named: str, tokenizer: PreTrainedTokenizerBase, key: str) -> str:
    """The template's text, which may be in a file or have a name: of those that the tokenizer has, or of ours."""
    own = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    known = TEMPLATES | own
    if "{" in named or named in known:
        return known.get(named, named)
    file = Path(named).expanduser()
    if not file.is_file():
        raise ConfigError(f"{key}: neither a file nor Jinja text nor one of the names {', '.join(known)}")
    return file.read_text(encoding="utf-8")


def _refuse_bad_syntax(tokenizer: PreTrainedTokenizerBase, key: str) -> None:
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{key[:80]}: line {error.lineno} of the template is no Jinja: {error.message}") from error
    except TemplateError:
        return  # it may ask for more than this conversation has, and is judged by the rows


def _choose_pad_token(tokenizer: PreTrainedTokenizerBase, place: str) -> None:
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{place}: the tokenizer has no end-of-sequence token; set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("the tokenizer has no padding token: its end-of-sequence token %s pads", tokenizer.eos_token)
