"""Merged directories to the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError

from hybridrl.config import ConfigError
from hybridrl.model_merger.report import REPORT


def refuse_without_token() -> None:
    if get_token() is None:
        raise ConfigError("--hf_upload_path needs a token: set HF_TOKEN to one that may write to the repository")


def upload(directory: Path, repository: str, *, private: bool, hub: HfApi) -> str:
    """Upload a merged directory, to a repository that is made where there is none. Returns its address."""
    try:
        hub.create_repo(repo_id=repository, private=private, exist_ok=True)
        found = hub.upload_folder(folder_path=directory, repo_id=repository, ignore_patterns=[REPORT])
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--hf_upload_path={repository}: {reason}; the merged model is in {directory}") from error
    return str(found)
