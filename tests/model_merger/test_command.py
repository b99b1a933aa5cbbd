import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrl.model_merger import merge
from hybridrl.model_merger.__main__ import command_parser, main
from hybridrl.model_merger.card import CARD
from hybridrl.model_merger.merge import REPORT
from hybridrl.model_merger.source import CheckFailed, check_in_transformers, open_source
from hybridrl.runtime.environment import worker_environment
from tests.checkpoint.shards import save_in_shards
from tests.compat.verl.files import qwen2
from tests.core.training.on_ranks import on_ranks


def save_both(top: Path) -> None:
    save_in_shards(top / "one" / "actor", qwen2(tie_word_embeddings=True))
    save_in_shards(top / "other" / "critic", qwen2(num_labels=1), value=True)


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("steps")
    on_ranks(2, save_both, directory)
    return directory


@pytest.fixture
def actor(steps) -> Path:
    return steps / "one" / "actor"


@pytest.fixture
def critic(steps) -> Path:
    return steps / "other" / "critic"


def merge_arguments(actor: Path, target: Path, *more: str) -> list[str]:
    return ["merge", "--backend", "fsdp", "--local_dir", str(actor), "--target_dir", str(target), *more]


def test_a_merge_prints_a_few_lines(actor, tmp_path, capsys):
    assert main(merge_arguments(actor, tmp_path / "merged", "--dtype", "bfloat16")) == 0
    output, errors = capsys.readouterr()
    assert output.splitlines()[0] == f"{actor}: Qwen2ForCausalLM, 26 tensors in shards"
    written = "1,572 parameters as bfloat16, saved as float32, 0.00 GB in "
    assert output.splitlines()[1].startswith(f"{tmp_path / 'merged'}: {written}")
    assert output.splitlines()[2].endswith(f"tensors: 26 of 26 equal bit for bit; for details see {REPORT}")
    assert errors == ""


def test_all_of_verls_arguments_are_accepted_and_those_without_effect_reported(actor, tmp_path, capsys):
    without_effect = ["--tie-word-embedding", "--use_cpu_initialization"]
    assert main(merge_arguments(actor, tmp_path / "merged", *without_effect, "--trust-remote-code")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines if "has no effect" in line] == without_effect[::-1]


def test_megatron_is_rejected_with_the_reason(actor, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["merge", "--backend", "megatron", "--local_dir", str(actor)])
    assert stop.value.code == 2
    assert "only FSDP shards are supported; verl's own merger converts Megatron's" in capsys.readouterr().err


@pytest.mark.parametrize("operation", ["merge", "test"])
def test_help_has_an_example(operation, capsys):
    with pytest.raises(SystemExit) as stop:
        main([operation, "--help"])
    assert stop.value.code == 0
    output = capsys.readouterr().out
    assert "hybridrl merge --local_dir" in output and "hybridrl merge test --local_dir" in output


def test_help_imports_neither_torch_nor_transformers():
    code = "import sys, hybridrl.model_merger.__main__; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "hybridrl.model_merger.__main__" in modules
    assert not {"torch", "transformers", "vllm", "hydra"} & set(modules)


# In place of vLLM: writes what the libraries of the process have read where it is imported, which is after all others.
ENGINE = """
import json, os, torch
read = {"TORCH_COMPILE_DISABLE": torch._dynamo.config.disable, "OMP_NUM_THREADS": torch.get_num_threads()}
print("READ", json.dumps({"environment": dict(os.environ)} | read), flush=True)
raise ImportError("this is no vLLM")
"""
SERVE = ["-m", "hybridrl.serve", "device=cpu", "port=0"]


@pytest.mark.parametrize("command", ["serve", "merge"])
def test_libraries_read_what_is_set_for_an_engine_also_where_shards_are_merged_first(actor, tmp_path, command):
    model, engine = tmp_path / "actor", tmp_path / "path" / "vllm" / "__init__.py"
    shutil.copytree(actor, model)
    recipe = Path(__file__).parents[2] / "recipes" / "quickstart" / "make_data.py"
    runpy.run_path(str(recipe))["build_tokenizer"]().save_pretrained(model / "huggingface")
    engine.parent.mkdir(parents=True)
    engine.write_text(ENGINE)
    displayed = ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"]
    meant = {"OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE", *displayed}
    variables = {name: value for name, value in os.environ.items() if name not in meant}
    variables |= {"PYTHONPATH": str(tmp_path / "path"), "OMP_DISPLAY_ENV": "VERBOSE", "CUDA_VISIBLE_DEVICES": ""}
    merge = ["-m", "hybridrl.model_merger", *merge_arguments(model, tmp_path / "merged", "--verify", "vllm")]
    arguments = [*SERVE, f"model.path={model}"] if command == "serve" else merge
    ended = subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True, timeout=100)
    read, expected = json.loads(re.findall("READ (.*)", ended.stdout)[0]), worker_environment("cpu", 1)
    assert read["environment"] | expected | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} == read["environment"]
    assert (read["TORCH_COMPILE_DISABLE"], read["OMP_NUM_THREADS"]) == (True, int(expected["OMP_NUM_THREADS"]))
    by_libgomp = dict(re.findall(r"(\w+) = '(\w+)'", ended.stderr))  # when it was loaded
    assert [by_libgomp[name] for name in displayed] == [expected[name] for name in displayed]


@pytest.mark.parametrize("kind", ["actor", "critic"])
@pytest.mark.parametrize("dtype", [[], ["--dtype", "bfloat16"]], ids=["as saved", "bfloat16"])
def test_outputs_in_transformers_are_compared(kind, dtype, tmp_path, capsys, request):
    directory = request.getfixturevalue(kind)
    assert main(merge_arguments(directory, tmp_path / "merged", "--verify", "transformers", *dtype)) == 0
    result = {"actor": "log-probs for 64 tokens equal", "critic": "values for 64 tokens equal"}[kind]
    assert f"; transformers: {result};" in capsys.readouterr().out
    assert json.loads((tmp_path / "merged" / REPORT).read_text())["checked"]["transformers"] == result


def test_a_model_with_other_outputs_is_rejected(actor, tmp_path):
    assert main(merge_arguments(actor, tmp_path / "merged")) == 0
    file = tmp_path / "merged" / "model.safetensors"
    save_file(load_file(file) | {"model.norm.weight": torch.full((10,), 1.01)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckFailed, match=r"log-probs differ by up to 0\.0\d+ from those of the checkpoint"):
        check_in_transformers(open_source(actor), tmp_path / "merged")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_model_that_transformers_cannot_load_is_rejected(actor, tmp_path, name):
    assert main(merge_arguments(actor, tmp_path / "merged")) == 0
    (tmp_path / "merged" / name).write_text("{")
    with pytest.raises(CheckFailed, match="transformers cannot load what was written"):
        check_in_transformers(open_source(actor), tmp_path / "merged")


def test_a_failed_check_sets_the_exit_status_and_nothing_is_published(actor, tmp_path, capsys):
    def fails(source: object, directory: Path) -> str:
        raise CheckFailed("the outputs differ")

    arguments = command_parser().parse_args(merge_arguments(actor, tmp_path / "merged", "--verify", "transformers"))
    assert merge.run(arguments, fails) == 1
    assert capsys.readouterr().err == "failed: the outputs differ\n"
    assert not list(tmp_path.iterdir())


def test_replacing_an_earlier_merge_is_reported(actor, tmp_path, capsys):
    for message in ("", "replaced an earlier merge"):
        assert main(merge_arguments(actor, tmp_path / "merged")) == 0
        assert message in capsys.readouterr().out


def test_a_merged_directory_passes_the_test_and_another_does_not(actor, tmp_path, capsys):
    main(merge_arguments(actor, tmp_path / "merged", "--dtype", "bfloat16"))
    test = ["test", "--local_dir", str(actor), "--test_hf_dir", str(tmp_path / "merged")]
    assert main(test) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("26 tensors equal bit for bit, in bfloat16")
    file = tmp_path / "merged" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] += 0.25
    tensors["mine"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, file)
    assert main(test) == 1
    errors = capsys.readouterr().err
    for message in ("up_proj.weight is missing there", "mine is only there", "model.norm.weight differs by up to 0.25"):
        assert message in errors


def test_a_directory_that_cannot_be_merged_is_rejected_in_one_line(actor, tmp_path, capsys):
    assert main(merge_arguments(actor.parent, tmp_path / "merged")) == 2
    errors = capsys.readouterr().err
    assert errors == f"error: {actor.parent} holds no saved model; name the model in it, {actor}\n"


def test_damage_is_reported_in_one_line(tmp_path, capsys):
    (tmp_path / "model_world_size_1_rank_0.pt").write_bytes(bytes(100))
    assert main(merge_arguments(tmp_path, tmp_path / "merged")) == 1
    file = tmp_path / "model_world_size_1_rank_0.pt"
    assert capsys.readouterr().err == f"failed: {file} cannot be read: File is not a zip file\n"


class Hub:
    """Stands in for the Hugging Face hub."""

    def __init__(self, *cards: str) -> None:
        self.cards = cards  # repositories that have one
        self.repositories: dict[str, bool] = {}
        self.files: dict[str, set[str]] = {}

    def file_exists(self, repo_id: str, filename: str) -> bool:
        return repo_id in self.cards and filename == CARD

    def create_repo(self, repo_id: str, private: bool, exist_ok: bool) -> None:
        assert exist_ok
        self.repositories[repo_id] = private

    def upload_folder(self, folder_path: Path, repo_id: str, ignore_patterns: list[str]) -> str:
        self.files[repo_id] = {path.name for path in folder_path.iterdir()} - set(ignore_patterns)
        return f"https://hub/{repo_id}"


class FullHub(Hub):
    def upload_folder(self, **_: object) -> str:
        raise OSError("quota exceeded")


@pytest.mark.parametrize("private", [[], ["--private"]], ids=["public", "private"])
def test_a_merged_model_is_uploaded(actor, tmp_path, capsys, private):
    arguments = merge_arguments(actor, tmp_path / "merged", "--hf_upload_path", "me/mine", *private)
    hub = Hub()
    assert merge.run(command_parser().parse_args(arguments), hub=hub) == 0
    assert hub.repositories == {"me/mine": bool(private)}
    assert hub.files["me/mine"] == {path.name for path in (tmp_path / "merged").iterdir()} - {REPORT}
    assert capsys.readouterr().out.endswith("uploaded to https://hub/me/mine\n")


def test_a_card_in_the_repository_stays(actor, tmp_path):
    arguments = merge_arguments(actor, tmp_path / "merged", "--hf_upload_path", "me/mine")
    hub = Hub("me/mine")
    assert merge.run(command_parser().parse_args(arguments), hub=hub) == 0
    assert hub.files["me/mine"] == {path.name for path in (tmp_path / "merged").iterdir()} - {REPORT, CARD}


def test_a_failed_upload_is_reported_and_the_model_is_kept(actor, tmp_path, capsys):
    arguments = merge_arguments(actor, tmp_path / "merged", "--hf_upload_path", "me/mine")
    assert merge.run(command_parser().parse_args(arguments), hub=FullHub()) == 2
    merged = tmp_path / "merged"
    assert f"--hf_upload_path=me/mine: quota exceeded; the merged model is in {merged}" in capsys.readouterr().err
    assert (merged / "model.safetensors").is_file()


def test_an_upload_without_a_token_is_rejected_before_the_merge(actor, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(merge, "get_token", lambda: None)
    assert main(merge_arguments(actor, tmp_path / "merged", "--hf_upload_path", "me/mine")) == 2
    assert "set HF_TOKEN" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
