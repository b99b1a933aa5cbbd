"""What is sent to the engine does not depend on where the parameters are."""

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybridrl.core.training.fsdp import shard_and_fill
from hybridrl.core.training.layout import layout
from hybridrl.core.training.model import HOST, blank_language_model
from hybridrl.core.training.state import Sender
from hybridrl.required import required
from tests.core.training.families import model_config
from tests.core.training.on_ranks import on_ranks
from tests.core.training.test_state import fsdp_config


def digests(directory: str, offloaded: bool) -> list[int]:
    """The digest of every bucket that this rank sends."""
    ranks, blank = dist.get_world_size(), blank_language_model(model_config(directory), torch.float32)
    model = shard_and_fill(blank, directory, fsdp_config(), layout("cpu", ranks, ranks), HOST, offloaded=offloaded)
    sender = Sender(model, HOST, torch.float32, 1 << 14, merge=False)
    return [sender.fill(bucket, shared=False) for bucket in sender.plan.model]


def digests_twice(directory: str) -> list[list[int]]:
    """The digests of buckets with gaps, filled in memory that has other bytes in it each time."""
    blank = blank_language_model(model_config(directory), torch.float32)
    model = shard_and_fill(blank, directory, fsdp_config(), layout("cpu", 1, 1), HOST)
    sender, result = Sender(model, HOST, torch.float32, 1 << 14, merge=False), []
    for garbage in (1, 2):
        for bucket in sender.plan.model:
            sender.fill(bucket, shared=False)
        required(sender.buffer).tensor.fill_(garbage)
        result.append([sender.fill(bucket, shared=False) for bucket in sender.plan.model])
    return result


def test_digests_are_those_of_the_weights_whatever_was_in_memory_before(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 6, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 1}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=7, num_key_value_heads=1, **sizes)).save_pretrained(tmp_path)
    ((first, second),) = on_ranks(1, digests_twice, str(tmp_path))
    assert first == second


def test_offloaded_and_resident_parameters_give_the_engine_the_same_bytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_key_value_heads=2, **sizes)).save_pretrained(tmp_path)
    resident, offloaded = (on_ranks(2, digests, str(tmp_path), value) for value in (False, True))
    assert resident == offloaded and len(set(resident[0])) > 2
