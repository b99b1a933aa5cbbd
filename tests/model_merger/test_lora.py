import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from hybridrl.checkpoint.resume import model_fingerprint
from hybridrl.checkpoint.tensors import Tensors
from hybridrl.core.training.lora import add_adapter, export_adapter_settings
from hybridrl.core.training.model import adapter_parameters
from hybridrl.core.training.state import state_of
from hybridrl.model_merger import source, whole_model
from hybridrl.model_merger.__main__ import main
from tests.core.training.families import FAMILIES, load_language_model, load_value_model, model_config

FLOAT, IDS = torch.float32, torch.arange(9)[None]


@pytest.fixture
def base(tmp_path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["all heads one key, tied head"])
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("the base's")
    (tmp_path / "base" / "consolidated.pth").write_text("not to be copied")
    return tmp_path / "base"


@pytest.fixture
def save(base, tmp_path):
    """A function that saves a checkpoint trained through an adapter, and returns its path."""

    def write(name: str = "actor", noise: float = 0.3) -> Path:
        config = model_config(str(base), lora_rank=2, lora_alpha=6)
        model = (load_value_model if name == "critic" else load_language_model)(config, FLOAT)
        add_adapter(model.model, config, FLOAT, 0, "model")
        generator = torch.Generator().manual_seed(1)
        for parameter, value in adapter_parameters(model.model).items():
            if "lora_A" not in parameter:
                value.data = noise * torch.randn(value.shape, generator=generator)
        directory = tmp_path / "global_step_3" / name
        dcp.save(state_of(model, None, ["model"]), checkpoint_id=directory, no_dist=True)
        export_adapter_settings(model.model, directory / "huggingface")
        (directory / "huggingface" / "tokenizer.json").write_text("the run's")
        key = "critic.model.path" if name == "critic" else "actor_rollout_ref.model.path"
        (directory.parent / "state.json").write_text(json.dumps({"bases": {key: model_fingerprint(str(base))}}))
        return directory

    return write


def merge(directory: Path, target: Path, *more: str) -> int:
    return main(["merge", "--local_dir", str(directory), "--target_dir", str(target), *more])


def by_peft(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    return (
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload().state_dict()
    )


def test_base_and_adapter_are_merged_as_peft_merges_them(base, save, tmp_path, capsys):
    assert merge(save(), tmp_path / "merged", "--lora", "both", "--verify", "transformers") == 0
    output = capsys.readouterr().out
    assert "adapter: 14 of 14 adapted weights differ from the base" in output
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    expected = by_peft(base, tmp_path / "merged" / "lora_adapter")
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(merged(IDS).logits, AutoModelForCausalLM.from_pretrained(base)(IDS).logits, atol=0.1)
    files = {path.name for path in (tmp_path / "merged").iterdir()}
    assert not files & {"adapter_config.json", "consolidated.pth"}
    assert (tmp_path / "merged" / "tokenizer.json").read_text() == "the run's"
    report = json.loads((tmp_path / "merged" / "merge_report.json").read_text())
    assert set(report["checked"]) == {"source", "tensors", "adapter", "transformers", "lora_adapter"}
    assert "lora_adapter/adapter_model.safetensors" in report["files"]


def test_a_merge_with_its_adapter_is_replaced_by_another(save, tmp_path, capsys):
    step = save()
    for _ in range(2):
        assert merge(step, tmp_path / "merged", "--lora", "both") == 0
    assert "replaced an earlier merge" in capsys.readouterr().out


def test_a_base_in_half_precision_is_merged_in_full_precision(base, save, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(base)
    step = save()
    assert merge(step, tmp_path / "half") == 0 and merge(step, tmp_path / "full", "--dtype", "float32") == 0
    half, full = (load_file(tmp_path / name / "model.safetensors") for name in ("half", "full"))
    assert {value.dtype for value in half.values()} == {torch.bfloat16}
    assert all(torch.equal(value, full[name].bfloat16()) for name, value in half.items())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(full[name], half[name].float())


def test_the_adapter_alone_has_pefts_layout_and_can_be_written_again(base, save, tmp_path):
    step = save()
    assert merge(step, tmp_path / "adapter", "--lora", "adapter") == 0
    assert merge(step, tmp_path / "adapter", "--lora", "adapter") == 0
    assert merge(step, tmp_path / "merged") == 0
    expected = by_peft(base, tmp_path / "adapter")
    for name, value in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-6)
    assert not list((tmp_path / "adapter").glob("model*"))


def test_an_exported_adapter_merges_as_its_checkpoint_does(save, tmp_path):
    step = save()
    assert merge(step, tmp_path / "adapter", "--lora", "adapter") == 0
    assert merge(step, tmp_path / "one") == 0 and merge(tmp_path / "adapter", tmp_path / "other") == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "other"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_merging_into_half_precision_adds_in_full_precision(save, tmp_path):
    step = save()
    assert merge(step, tmp_path / "merged", "--dtype", "bfloat16") == 0
    assert merge(step, tmp_path / "full") == 0
    expected = load_file(tmp_path / "full" / "model.safetensors")
    for name, value in load_file(tmp_path / "merged" / "model.safetensors").items():
        assert torch.equal(value, expected[name].bfloat16())


def test_a_critics_adapter_makes_a_value_model(save, tmp_path):
    assert merge(save("critic"), tmp_path / "merged", "--verify", "transformers") == 0
    values = AutoModelForTokenClassification.from_pretrained(tmp_path / "merged")
    assert values.config.num_labels == 1 and values.score.weight.abs().max() > 0
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")


def test_in_place_of_an_untrained_adapter_its_base_is_used_where_a_model_is_needed(save, base, tmp_path, capsys):
    assert whole_model(str(save(noise=0.0)), tmp_path, "model.path") == str(base)
    assert "the adapter has not been trained yet (its B is zero), so its base is used" in capsys.readouterr().out
    assert whole_model(str(save()), tmp_path, "model.path") == f"{tmp_path}/merged"


def test_an_untrained_adapter_is_rejected_and_nothing_is_written(save, tmp_path, capsys):
    assert merge(save(noise=0.0), tmp_path / "merged") == 1
    assert "the merged weights equal the base's" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("fault", ["scaling", "left out", "another tensor"])
def test_wrongly_merged_weights_are_detected(save, tmp_path, monkeypatch, capsys, fault):
    def damaged(base: Tensors, adapter: source.Adapter) -> Tensors:
        correct = correct_merge(base, adapter)
        victim = next(name for name in base.meta if adapter.pair(name))

        def chunks(name: str):
            for offsets, part in correct.chunks(name):
                if fault == "scaling" and adapter.pair(name):
                    part = base.read(name) + (part - base.read(name)) * 1.01
                if fault == "left out" and name == victim:
                    part = base.read(name)
                yield offsets, part + 1e-3 if fault == "another tensor" and name == victim else part

        return Tensors(correct.form, correct.meta, chunks)

    correct_merge = source.merged
    monkeypatch.setattr(source, "merged", damaged)
    assert merge(save(), tmp_path / "merged") == 1
    assert "is not the base's with the adapter added" in capsys.readouterr().err


def test_a_base_that_changed_or_moved_is_rejected_with_a_fix(base, save, tmp_path, capsys):
    step = save()
    base.rename(tmp_path / "moved")
    assert merge(step, tmp_path / "merged") == 2
    assert "is not there; name the directory of that model: --base DIR" in capsys.readouterr().err
    assert merge(step, tmp_path / "merged", "--base", str(tmp_path / "moved")) == 0
    weights = load_file(tmp_path / "moved" / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, tmp_path / "moved" / "model.safetensors", metadata={"format": "pt"})
    assert merge(step, tmp_path / "merged", "--base", str(tmp_path / "moved")) == 2
    assert "other weights than the model that" in capsys.readouterr().err


def test_the_shards_are_compared_with_a_merged_directory(save, tmp_path, capsys):
    step = save()
    assert merge(step, tmp_path / "merged") == 0
    assert main(["test", "--local_dir", str(step), "--test_hf_dir", str(tmp_path / "merged")]) == 0
    assert "equal bit for bit" in capsys.readouterr().out
