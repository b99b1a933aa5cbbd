"""Loading the tokenizer. Knows nothing about rows."""

import logging
from pathlib import Path

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybridrl.config.files import resolve_model
from hybridrl.config.findings import ConfigError

# Templates by name, for models that have none; these are the turn tokens of most other models.
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
    """Load the tokenizer from `tokenizer_path`, by default from the model; it always has a padding token.

    A local directory is read without the network; any other name is looked up on the Hugging Face hub.
    Raises ConfigError naming `data.tokenizer` or `model_key`.
    """
    key = "data.tokenizer" if tokenizer_path else model_key
    path = Path(tokenizer_path or resolve_model(model_path)).expanduser()
    tokenizer = _read(path, key, trust_remote_code)
    if custom_chat_template:
        template_key = f"{model_key.rpartition('.')[0]}.custom_chat_template={custom_chat_template}"
        _set_template(tokenizer, custom_chat_template, template_key)
    if tokenizer.eos_token_id is None:
        cause = f"{key}={path}: the tokenizer has no end-of-sequence token"
        raise ConfigError(cause, fix="set eos_token in its tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("the tokenizer has no padding token: padding with its end token %s", tokenizer.eos_token)
    return tokenizer


def _read(path: Path, key: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    local, fix = path.is_dir(), "data.tokenizer can name another"
    if not local and (path.is_absolute() or str(path).startswith(".") or len(path.parts) > 2):
        raise ConfigError(f"{key}={path}: there is no such directory")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=trust_remote_code, local_files_only=local
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        cause = "holds no tokenizer" if local else "is neither a directory nor a tokenizer on the hub"
        raise ConfigError(f"{key}={path}: {cause} ({reason})", fix=fix) from error
    # For some models transformers creates an empty tokenizer if the files are missing.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ConfigError(f"{key}={path}: holds no tokenizer", fix=fix)
    return tokenizer


def _set_template(tokenizer: PreTrainedTokenizerBase, template: str, key: str) -> None:
    """Set the chat template: Jinja text, a file, or a name from the tokenizer's templates or from TEMPLATES."""
    known = TEMPLATES | (tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {})
    if "{" in template or template in known:
        tokenizer.chat_template = known.get(template, template)
    elif (file := Path(template).expanduser()).is_file():
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    else:
        raise ConfigError(f"{key}: neither a file nor Jinja text nor one of the names {', '.join(known)}")
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{key[:80]}: line {error.lineno} of the template is not Jinja: {error.message}") from error
    except TemplateError:
        return  # it may require more than this conversation has; the rows decide
