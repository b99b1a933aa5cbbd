"""Models that see on a GPU: the attention of their towers, and whole models on rows with pictures."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from hybridrl.core.training import attention
from hybridrl.core.training.model import LanguageModel, check_log_probs
from hybridrl.core.training.packing import pack_rows
from hybridrl.core.training.vision import Vision, VisionConfig
from tests.vision_models import FAMILIES, noise_picture, reader_that_sees, settings_that_see

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = torch.device("cuda", 0)


def attended(inputs: list[Tensor], lengths: list[int], dtype: torch.dtype, *, kernel: bool) -> list[Tensor]:
    """Return the attention of pictures of these lengths, and the gradients of a weighted sum of it."""
    query, key, value = leaves = [each.to(dtype, copy=True).requires_grad_() for each in inputs]
    ends = torch.tensor([0, *lengths], device=query.device).cumsum(0).to(torch.int32)
    if kernel:
        limits = {"cu_seq_lens_q": ends, "max_length_q": max(lengths)}
        output = attention.attend_in_pictures(nn.Identity(), query, key, value, None, query.shape[-1] ** -0.5, **limits)
        result = output[0].transpose(1, 2)
    else:
        parts = zip(*(each.split(lengths, dim=2) for each in leaves), strict=True)
        result = torch.cat([F.scaled_dot_product_attention(*part) for part in parts], dim=2)
    weights = torch.linspace(-1, 1, result.numel(), device=query.device).view(result.shape)
    (result.float() * weights).sum().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("width", [64, 72, 80])  # of the heads of CLIP's towers, Qwen3-VL's and Qwen2.5-VL's
def test_the_kernel_of_a_tower_is_at_least_as_exact_as_torch_s_own(width):
    torch.manual_seed(0)
    lengths = [64, 1024, 4, 4096]
    inputs = [torch.randn(1, 16, sum(lengths), width, device=DEVICE) for _ in range(3)]
    exact = attended(inputs, lengths, torch.float32, kernel=False)
    ours, torchs = (attended(inputs, lengths, torch.bfloat16, kernel=kernel) for kernel in (True, False))
    for right, own, other in zip(exact, ours, torchs, strict=True):
        assert (own.float() - right).norm() <= 1.2 * (other.float() - right).norm()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_pictures_have_the_log_probs_of_the_model_s_own_forward_pass(tmp_path, family, dtype):
    reader = reader_that_sees(tmp_path, family)
    settings = settings_that_see(family, reader.placeholder, video_token_id=reader.placeholder + 1)
    torch.manual_seed(0)
    options = {"attn_implementation": attention.implementation(settings), "dtype": dtype}
    model = LanguageModel(AutoModelForImageTextToText.from_config(settings, **options).to(DEVICE))
    blank, *sample = (reader.pixels(noise_picture(size, 64)) for size in (64, 128, 160))
    model.vision = Vision(VisionConfig(reader.rule, blank, sample), model.model)
    check_log_probs(model, dtype, DEVICE, padded=False)
    rows = model.vision.sample_rows(range(10, 18), range(20, 24))
    outputs = model(model.vision.inputs(rows, pack_rows(rows, padded=False)).to(DEVICE), 1.0)
    outputs.log_probs.sum().backward()
    gradients = [parameter.grad for name, parameter in model.named_parameters() if ".visual." in name]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
