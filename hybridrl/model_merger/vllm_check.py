"""Compare a merged directory in vLLM, decoding greedily, with the checkpoint's own tensors in transformers."""

from pathlib import Path

import torch
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from hybridrl.checkpoint.tensors import UNREADABLE
from hybridrl.core.rollout.vllm.repairs import CPU_ATTENTION, Repaired, prepare_for
from hybridrl.core.rounding import beyond_rounding
from hybridrl.model_merger.checks import checkpoint_model, outputs
from hybridrl.model_merger.source import CheckFailed, MergeSource, type_name

PROMPT, RESPONSE = 8, 24  # tokens


def check_in_vllm(source: MergeSource, directory: Path) -> str:
    """Compare the log-probs of a greedy response; return a description of the result, or raise CheckFailed."""
    prompt = [number * 37 % source.model.config.get_text_config().vocab_size for number in range(PROMPT)]
    prepare_for(directory)
    try:
        engine = LLM(
            model=str(directory),
            dtype=type_name(source.dtype),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=PROMPT + RESPONSE,
            max_num_seqs=1,
            kv_cache_memory_bytes=256 << 20,
            worker_extension_cls=f"{Repaired.__module__}.{Repaired.__qualname__}",
            **(CPU_ATTENTION if current_platform.is_cpu() else {}),
        )
    except UNREADABLE as error:
        cause = f"vLLM cannot load what was written ({str(error).splitlines()[0]})"
        raise CheckFailed(f"{cause}; --verify transformers needs no vLLM") from error
    greedy = SamplingParams(temperature=0.0, max_tokens=RESPONSE, ignore_eos=True, logprobs=0, detokenize=False)
    response = engine.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)[0].outputs[0]
    steps = zip(response.token_ids, response.logprobs, strict=True)
    rollout = torch.tensor([step[token].logprob for token, step in steps])
    expected = outputs(checkpoint_model(source), torch.tensor([*prompt, *response.token_ids]))[-RESPONSE:]
    if difference := beyond_rounding(rollout, expected, type_name(source.dtype)):
        raise CheckFailed(f"in vLLM log-probs differ from those of the checkpoint {difference}")
    gap = float((rollout - expected).abs().max())
    return f"greedy log-probs of {RESPONSE} tokens within {gap:.1g} of transformers'"
