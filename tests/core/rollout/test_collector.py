"""Responses as they are collected, against vLLM's own output processor."""

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from hybridrl.core.rollout.vllm.collector import Collector, Observer

BYTES = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    return Qwen2Tokenizer(vocab=BYTES, merges=[], eos_token="<eos>", pad_token="<pad>", unk_token=None)


def request(name: str, *stop: str, **options: int) -> EngineCoreRequest:
    parameters = SamplingParams(
        max_tokens=50,
        logprobs=0,
        flat_logprobs=True,
        stop=list(stop),
        include_stop_str_in_output=True,
        detokenize=bool(stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        **options,
    )
    made = EngineCoreRequest(f"{name}-1", [1, 2, 3], None, parameters, None, 0.0, None, None, None)
    made.external_req_id = name
    return made


def sampled(name: str, token: int, log_prob: float, reason: FinishReason | None = None) -> EngineCoreOutput:
    row = LogprobsLists(np.array([[token]]), np.array([[log_prob]], np.float32), np.array([1]))
    return EngineCoreOutput(f"{name}-1", [token], row, finish_reason=reason)


def iterations(texts: dict[str, list[int]], seed: int = 0) -> list[list[EngineCoreOutput]]:
    """What an engine samples for requests of these tokens; all end by their length, the first by a stop token."""
    generator, rounds = np.random.default_rng(seed), []
    for step in range(max(map(len, texts.values()))):
        going = {name: ids for name, ids in texts.items() if step < len(ids)}
        rounds.append([])
        for index, (name, ids) in enumerate(going.items()):
            end = FinishReason.LENGTH if index else FinishReason.STOP
            reason = end if step == len(ids) - 1 else None
            rounds[-1].append(sampled(name, ids[step], -float(generator.random()), reason))
    return rounds


def collecting(*requests: EngineCoreRequest, tokenizer: Qwen2Tokenizer | None = None) -> Collector:
    collector = Collector(Observer())
    collector.tokenizer = tokenizer
    for one in requests:
        collector.add_request(one, None, None, 0)
    return collector


def of_vllm(tokenizer, requests, rounds) -> dict[str, tuple[list[int], list[float], bool]]:
    processor, ended = OutputProcessor(tokenizer, log_stats=False), {}
    for one in requests:
        processor.add_request(one, None, None, 0)
    for outputs in rounds:
        for response in processor.process_outputs(outputs).request_outputs:
            (output,) = response.outputs
            log_probs = [float(value) for value in output.logprobs.logprobs]
            ended[response.request_id] = list(output.token_ids), log_probs, output.finish_reason == "length"
    return ended


def of_collector(tokenizer, requests, rounds) -> dict[str, tuple[list[int], list[float], bool]]:
    collector, ended = collecting(*requests, tokenizer=tokenizer), {}
    for outputs in rounds:
        outputs = [output for output in outputs if output.request_id in collector.responses]
        for response in collector.process_outputs(outputs).request_outputs:
            ended[response.name] = response.token_ids, response.log_probs.tolist(), response.truncated
    assert not collector.has_unfinished_requests()
    assert collector.tokens() == sum(len(ids) for ids, _, _ in ended.values())
    return ended


def test_ids_log_probs_and_ends_are_those_of_vllm():
    texts = {"a": [4, 5, 6], "b": [7], "c": [8, 9, 10, 11]}
    requests, rounds = [request(name) for name in texts], iterations(texts)
    collected = of_collector(None, requests, rounds)
    assert collected == of_vllm(None, requests, rounds)
    assert {name: ids for name, (ids, _, _) in collected.items()} == texts


def test_a_stop_text_ends_a_response_where_vllm_ends_it(tokenizer):
    texts = {
        name: tokenizer.encode(text) for name, text in {"a": "one two three", "b": "nothing", "c": "x two"}.items()
    }
    requests, rounds = [request(name, "tw", "two") for name in texts], iterations(texts)
    collected = of_collector(tokenizer, requests, rounds)
    assert collected == of_vllm(tokenizer, requests, rounds)
    assert [tokenizer.decode(ids) for ids, _, _ in collected.values()] == ["x tw", "one tw", "nothing"]


def test_the_tokens_of_a_response_are_heard_as_they_are_sampled(tokenizer):
    texts, heard = {"a": tokenizer.encode("one two three"), "b": tokenizer.encode("unheard")}, []
    collector = Collector(Observer())
    collector.tokenizer, collector.hear = tokenizer, {"a": heard.append, "never added": heard.append}
    for name in texts:
        collector.add_request(request(name, "two"), None, None, 0)
    collector.forget("never added")
    for number, outputs in enumerate(iterations(texts)):
        collector.process_outputs([output for output in outputs if output.request_id in collector.responses])
        assert len(heard) == min(number + 1, len("one two"))
    assert tokenizer.decode([token for tokens in heard for token in tokens]) == "one two" and not collector.hear


def test_a_stop_text_does_not_count_before_the_least_number_of_tokens(tokenizer):
    texts = {"a": tokenizer.encode("two and two more")}
    requests, rounds = [request("a", "two", min_tokens=5)], iterations(texts)
    collected = of_collector(tokenizer, requests, rounds)
    assert collected == of_vllm(tokenizer, requests, rounds)
    assert tokenizer.decode(collected["a"][0]) == "two and two"


def test_tokens_sampled_at_once_after_a_stop_text_are_dropped(tokenizer):
    collector = collecting(request("a", "b"), tokenizer=tokenizer)
    ids = tokenizer.encode("abc")
    row = LogprobsLists(np.array([ids]).T, np.array([[-1.0], [-2.0], [-3.0]], np.float32), np.ones(3))
    processed = collector.process_outputs([EngineCoreOutput("a-1", ids, row)])
    (response,) = processed.request_outputs
    assert (tokenizer.decode(response.token_ids), response.log_probs.tolist()) == ("ab", [-1.0, -2.0])
    assert processed.reqs_to_abort == ["a-1"], "the engine has not finished it"


def test_the_experts_are_those_of_every_token_before_the_last_one_kept(tokenizer):
    collector = collecting(request("a", "b"), request("c"), tokenizer=tokenizer)
    experts = np.arange(10, dtype=np.uint8).reshape(5, 1, 2)
    outputs = []
    for name, ids in (("a", tokenizer.encode("abc")), ("c", [4, 5, 6])):
        row = LogprobsLists(np.array([ids]).T, np.zeros((3, 1), np.float32), np.ones(3))
        reason = FinishReason.LENGTH if name == "c" else None
        outputs.append(EngineCoreOutput(f"{name}-1", ids, row, finish_reason=reason, routed_experts=experts))
    stopped, whole = collector.process_outputs(outputs).request_outputs
    assert len(stopped.token_ids) == 2  # after a prompt of three
    assert (
        stopped.carried["routes"].tolist() == experts[:4].tolist()
        and whole.carried["routes"].tolist() == experts.tolist()
    )
    assert whole.carried["routes"].dtype == np.int16
    assert collecting(request("a")).responses["a-1"].carried == {}


def test_the_log_probs_of_a_scored_prompt_are_its_own_tokens_and_not_the_likeliest():
    collector = collecting(request("a"))
    ranks = torch.tensor([7, 5])
    rows = LogprobsTensors(torch.tensor([[2, 9], [3, 8]]), torch.tensor([[-4.0, -0.5], [-5.0, -0.25]]), ranks)
    output = EngineCoreOutput("a-1", [7], new_prompt_logprobs_tensors=rows, finish_reason=FinishReason.LENGTH)
    (response,) = collector.process_outputs([output]).request_outputs
    first, *others = response.carried["prompt_log_probs"].tolist()
    assert first == [[0, 0, 0]] * 2  # nothing comes before it
    assert others == [[[2, -4.0, 7], [9, -0.5, 1]], [[3, -5.0, 5], [8, -0.25, 1]]]


def test_a_text_that_begins_before_an_interruption_ends_the_response_that_continues(tokenizer):
    ended = {}
    for begun in (2, 0):  # of the prompt's last two tokens: those of the response
        collector = collecting(tokenizer=tokenizer)
        made = request("x", "bc")
        made.prompt_token_ids = [1, 2, 3, BYTES["a"], BYTES["b"]]
        collector.begun = {"x": begun} if begun else {}
        collector.add_request(made)
        ended[begun] = collector.process_outputs([sampled("x", BYTES["c"], -0.5)])
    assert [response.token_ids for response in ended[2].request_outputs] == [[BYTES["c"]]]
    assert ended[2].reqs_to_abort == ["x-1"]
    assert ended[0].request_outputs == []


def test_interrupted_responses_have_what_was_sampled_and_are_forgotten():
    collector = collecting(request("x"), request("y"))
    collector.process_outputs([sampled("x", 7, -0.5)])
    interrupted = collector.interrupt()
    assert [(name, one.token_ids, one.log_probs.tolist()) for name, one in interrupted.items()] == [
        ("x-1", [7], [-0.5]),
        ("y-1", [], []),
    ]
    assert all(one.interrupted for one in interrupted.values())
    assert not collector.has_unfinished_requests()
    assert collector.tokens() == 1


def test_prompts_count_with_their_first_token_and_each_token_and_preemption_as_it_comes():
    collector = collecting(request("x"), request("y"))
    prompt = len(request("x").prompt_token_ids)
    counts = []
    for outputs in ([sampled("x", 7, -0.5)], [sampled("x", 8, -0.5), sampled("y", 9, -0.5)]):
        outputs[0].events = [EngineCoreEvent.new_event(EngineCoreEventType.PREEMPTED)]
        collector.process_outputs(outputs)
        counts.append((collector.observer.prefilled, collector.observer.sampled, collector.observer.stats.preemptions))
    assert counts == [(prompt, 1, 1), (2 * prompt, 3, 2)]


@pytest.mark.parametrize(("reason", "failure"), [("STOP", ""), ("LENGTH", ""), ("ABORT", "abort"), ("ERROR", "error")])
def test_a_response_is_complete_only_if_the_policy_or_a_limit_has_ended_it(reason, failure):
    collector = collecting(request("x"))
    (response,) = collector.process_outputs([sampled("x", 7, -0.5, FinishReason[reason])]).request_outputs
    assert response.failure == failure


def test_a_stop_text_ends_a_response_whatever_becomes_of_its_request(tokenizer):
    collector = collecting(request("x", "b"), tokenizer=tokenizer)
    (response,) = collector.process_outputs([sampled("x", BYTES["b"], -0.5, FinishReason.ABORT)]).request_outputs
    assert response.failure == ""
