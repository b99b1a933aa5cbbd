"""Requests that an engine would die of, or never finish, are rejected before vLLM has them."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from hybridrl.core.carried import PICTURE_DIGEST, PICTURE_START
from hybridrl.core.rollout.engine import FatalRequest, RejectedRequest, Request, Sampling
from hybridrl.core.rollout.vllm.engine import checked_params

SOUND = Request(0, 0, [1, 2, 3], 7, Sampling(4, (0,)))


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([], "the prompt has 0 tokens; one may have 1 to 15"),
        ([1] * 16, "the prompt has 16 tokens"),
        ([1, 100], "the prompt has the token id 100; the model has 0 to 99"),
        ([-1, 1], "the prompt has the token id -1"),
        ([1, 2**70], "the prompt is not a list of token ids"),
        ([1, 2**63], "the prompt is not a list of token ids"),
        ([1.0, 2.0], "the prompt is not a list of token ids"),
        (["a"], "the prompt is not a list of token ids"),
        ([True], "the prompt is not a list of token ids"),
        ([None], "the prompt is not a list of token ids"),
        ([[1, 2]], "the prompt is not a list of token ids"),
        ([1, [2]], "inhomogeneous"),
        (None, "unsized"),
    ],
)
def test_a_prompt_that_the_model_cannot_have_is_rejected(ids, reason):
    with pytest.raises(RejectedRequest, match=reason):
        checked_params(replace(SOUND, prompt_ids=ids), 100, 16)


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"stop": ("",)}, "empty string"),
        ({"stop": ("a", "")}, "empty string"),
        ({"stop": ("a" * 5001, "b" * 5000)}, "the texts of stop have 10001 characters together, more than 10000"),
        ({"stop": (1,)}, "int"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens=-1 is not an integer"),
        ({"max_tokens": 2.5}, "max_tokens=2.5 is not an integer"),
        ({"max_tokens": 2**70}, "max_tokens=1180591620717411303424 is not an integer"),
        ({"max_tokens": None}, "max_tokens=None is not an integer"),
        ({"temperature": 1e9}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": "hot"}, "str"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"min_tokens": 5}, "min_tokens"),
    ],
)
def test_sampling_that_the_engine_does_not_have_is_rejected(sampling, reason):
    with pytest.raises(RejectedRequest, match=reason):
        checked_params(replace(SOUND, sampling=replace(SOUND.sampling, **sampling)), 100, 16)


@pytest.mark.parametrize("seed", [2**70, 2**63, -1, 1.5, "a", None, True])
def test_a_seed_that_torch_does_not_take_is_rejected(seed):
    with pytest.raises(RejectedRequest, match=r"seed=.* is not an integer from 0 to 2\*\*63 - 1"):
        checked_params(replace(SOUND, seed=seed), 100, 16)


def test_a_sound_request_is_accepted_up_to_every_limit():
    sampling = replace(SOUND.sampling, top_k=2**40, stop=("\ud800", "a" * 9999), temperature=0.0)
    ids = np.array([0, 99] * 7 + [1])
    parameters = checked_params(Request(0, 0, ids, 2**63 - 1, sampling), 100, 16)
    assert parameters.max_tokens == 4 and parameters.stop == ["\ud800", "a" * 9999]


@pytest.mark.parametrize(
    ("ids", "places", "reason"),
    [
        ([1, 7, 7, 2, 7], [range(1, 3), range(4, 5)], ""),
        ([1, 2], [], ""),
        ([7, 7, 7], [range(0, 1), range(1, 3)], ""),
        ([1, 7, 7, 2], [], "token 1 of the prompt is a placeholder outside the places of its 0 pictures"),
        ([1, 7, 7, 2], [range(1, 2)], "token 2 of the prompt is a placeholder outside the places of its 1 pictures"),
        ([1, 7, 7, 2], [range(1, 4)], "token 3 of the prompt is no placeholder in the places of its 1 pictures"),
        ([1, 7, 7, 2], [range(0, 2)], "token 0 of the prompt is no placeholder in"),
        ([1, 7, 7], [range(1, 4)], "token 3 of the prompt is no placeholder in"),
        ([1, 8], [], "token 1 of the prompt is a placeholder outside"),
        ([1, 8], [range(1, 2)], "a picture's placeholder is the token id 7, and not 8"),
    ],
)
def test_the_placeholders_of_a_prompt_are_exactly_the_places_of_its_pictures(ids, places, reason):
    count = len(places)
    carried = {PICTURE_DIGEST: np.arange(count), PICTURE_START: np.array([place.start for place in places], np.int32)}
    request = replace(SOUND, prompt_ids=ids, carried=carried)
    if not reason:
        assert checked_params(request, 100, 16, (7, 8), places).ignore_eos
        return
    with pytest.raises(RejectedRequest, match=reason):
        checked_params(request, 100, 16, (7, 8), places)


@pytest.mark.parametrize("kind", [RejectedRequest, FatalRequest])
def test_a_fault_travels_between_processes(kind):
    fault = pickle.loads(pickle.dumps(kind("the reason")))
    assert (type(fault), str(fault)) == (kind, "the reason")
