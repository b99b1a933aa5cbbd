"""Requests as vLLM takes them, checked first: some that it accepts would end it."""

import numpy as np
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from hybridrl.core.rollout.types import RejectedRequest, Request

LARGEST = 2**63 - 1  # of torch's integers
STOP_CHARACTERS = 10_000  # of all texts that end a response: each is searched for after every token


def checked_params(request: Request, vocabulary: int, context: int) -> SamplingParams:
    """Return the sampling parameters of a request; RejectedRequest if an engine with so many token ids, and contexts of
    so many tokens, cannot sample it."""
    try:
        _check(request, vocabulary, context)
        return _params(request)
    except (ValueError, TypeError, VLLMValidationError) as error:
        raise RejectedRequest(str(error)) from error


def _check(request: Request, vocabulary: int, context: int) -> None:
    prompt, sampling = np.asarray(request.prompt_ids), request.sampling
    if not 0 < len(prompt) < context:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens; one may have 1 to {context - 1} (rollout.max_model_len)"
        )
    if prompt.ndim != 1 or prompt.dtype.kind != "i":
        raise TypeError("the prompt is no list of token ids")
    if prompt.min() < 0 or prompt.max() >= vocabulary:
        wrong = int(prompt[(prompt < 0) | (prompt >= vocabulary)][0])
        raise ValueError(f"the prompt has the token id {wrong}; the model has 0 to {vocabulary - 1}")
    for name, value in {"seed": request.seed, "max_tokens": sampling.max_tokens}.items():
        if type(value) is not int or not 0 <= value <= LARGEST:
            raise ValueError(f"{name}={value!r:.80} is no integer from 0 to 2**63 - 1")
    if (size := sum(map(len, sampling.stop))) > STOP_CHARACTERS:
        raise ValueError(f"the texts of stop have {size} characters together, more than {STOP_CHARACTERS}")


def _params(request: Request) -> SamplingParams:
    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        structured_outputs=sampling.json_schema and StructuredOutputsParams(json=sampling.json_schema),
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        stop_token_ids=[] if sampling.ignore_eos else list(sampling.stop_ids),
        ignore_eos=sampling.ignore_eos,
        seed=request.seed if sampling.temperature > 0 else None,
        logprobs=0,
        flat_logprobs=True,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
