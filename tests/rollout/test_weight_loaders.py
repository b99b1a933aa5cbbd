from functools import partial

import torch
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload, record_metadata_for_reloading

from hybridrl.rollout.vllm.repairs import name_weight_loaders


def load_part(param: torch.nn.Parameter, loaded_weight: torch.Tensor, *, part: int) -> None:
    param.data.copy_(loaded_weight.chunk(2)[part])


def test_a_weight_whose_loader_is_a_partial_function_is_reloaded_as_one_with_a_named_loader():
    """As the norms of MiniMax-M2's queries and keys, of which each rank loads a part."""
    model = torch.nn.Sequential(torch.nn.RMSNorm(2))
    model[0].weight.weight_loader = partial(load_part, part=1)
    record_metadata_for_reloading(model)
    name_weight_loaders(model)
    initialize_layerwise_reload(model)
    with torch.device("cpu"):
        model[0].weight.weight_loader(model[0].weight, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert model[0].weight.tolist() == [3.0, 4.0]
