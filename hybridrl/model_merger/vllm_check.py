"""The merged directory loaded by vLLM, which answers greedily, against the checkpoint's own model in transformers."""

from pathlib import Path

import torch
from vllm import LLM, SamplingParams

from hybridrl.checkpoint.tensors import UNREADABLE
from hybridrl.model_merger.source import CheckFailed, Source, type_name
from hybridrl.model_merger.transformers_check import answers, own_model
from hybridrl.rollout.vllm import repairs

PROMPT, ANSWER = 8, 24
# The largest difference of a log-prob that rounding explains, by the type of the weights.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


def check_in_vllm(source: Source, directory: Path) -> str:
    """Refuse a directory of whose answer in vLLM transformers says otherwise. Returns what was found, in words."""
    prompt = [number * 37 % source.model.config.get_text_config().vocab_size for number in range(PROMPT)]
    repairs.prepare_for(directory)
    try:
        engine = LLM(
            model=str(directory),
            dtype=type_name(source.dtype),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=PROMPT + ANSWER,
            max_num_seqs=1,
            kv_cache_memory_bytes=256 << 20,
            worker_extension_cls=f"{repairs.__name__}.Repaired",
        )
    except UNREADABLE as error:
        raise CheckFailed(
            f"vLLM cannot load what was written ({str(error).splitlines()[0]}); --verify transformers needs no vLLM"
        ) from error
    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=0, detokenize=False)
    answer = engine.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)[0].outputs[0]
    theirs = torch.tensor([step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)])
    ours = answers(own_model(source), torch.tensor([*prompt, *answer.token_ids]))[-ANSWER:]
    gap = float((theirs - ours).abs().max())
    if not gap <= TOLERANCE[source.dtype]:
        raise CheckFailed(f"in vLLM log-probs differ by up to {gap:.2g} from those of the checkpoint")
    return f"greedy log-probs of {ANSWER} tokens within {gap:.1g} of transformers'"
