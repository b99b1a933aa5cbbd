"""The scores of a reward model: conversations in its own token ids, and what becomes of the scores of functions."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase, Qwen2Config

from hybridrl.config import ConfigError
from hybridrl.config.schema_parts import CustomRewardConfig, RewardConfig, RewardModelConfig
from hybridrl.core.batch import Batch
from hybridrl.core.experience.trajectory import Episode, Trajectory, Turn
from hybridrl.data.pairs import conversation_ids
from hybridrl.data.prompts import Prompt
from hybridrl.data.tokenizer import Chat, load_tokenizer
from hybridrl.rewards.load import load_reward, uses_built_in
from hybridrl.rewards.score import Score, ScoringRequest
from hybridrl.runs.reward_model import (
    RewardModel,
    has_functions,
    position_limit,
    scorer_tokenizer,
)
from tests.core.training.families import model_config
from tests.data import stand_ins
from tests.sections import section_of

# As Qwen's, Llama's (which begins with the bos), Mistral's, Gemma's, Zephyr's, and one that writes the bos twice.
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "headers": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]\n\n{{ m.content | trim }}</s>{% endfor %}",
    "instructions": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
    "alternating": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<turn>{{ m.role }}\n{{ m.content }}\n{% endfor %}",
    "reasoning dropped": "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}",
    "doubled": "{{ bos_token }}{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
}
WORDS = ["What is a mask?", "fox 123\n202 é", "</s> The quick", "", "brown <|im_end|> ü 日本", "a</think>b"]


def conversations() -> list[list[dict[str, str]]]:
    """Thirty conversations of up to four rounds, one in three with a system message."""
    generator, made = np.random.default_rng(0), []
    for number in range(30):
        roles = ["system"] * (number % 3 == 0) + ["user", "assistant"] * (1 + number % 4)
        made.append([{"role": role, "content": " ".join(generator.choice(WORDS, 3))} for role in roles])
    return made


def tokenizer_of(directory: Path, template: str | None, **settings: Any) -> PreTrainedTokenizerBase:
    stand_ins.write(directory, stand_ins.of_bytes, "PreTrainedTokenizerFast", "qwen2", bos_token="<s>", **settings)
    if template:
        (directory / "chat_template.jinja").write_text(template)
    return load_tokenizer(str(directory))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_ids_of_a_conversation_are_those_of_its_tokenizers_own_template(name, tmp_path):
    tokenizer = tokenizer_of(tmp_path / "model", TEMPLATES[name])
    chats, rejected = [Chat(messages, []) for messages in conversations()], 0
    for chat, ids in zip(chats, conversation_ids(tokenizer, chats), strict=True):
        if not isinstance(ids, list):
            rejected += 1
            continue
        theirs = tokenizer.apply_chat_template(chat.messages, tokenize=True, return_dict=False)
        assert ids == theirs[name == "doubled" :]
        assert name not in ("headers", "doubled") or (ids[0] == tokenizer.bos_token_id != ids[1])
    assert rejected == (10 if name == "alternating" else 0)  # those with a system message


class Workers:
    """Scores a row by its last token; the number of tokens is recorded."""

    def __init__(self, score: Any = float) -> None:
        self.score, self.rows = score, []

    def fill(self, batch: Batch, signal: Any) -> Batch:
        assert signal.model == "reward_model" and batch.response_lengths.tolist() == [1] * len(batch)
        self.rows += batch.lengths.tolist()
        return replace(batch, values=torch.tensor([self.score(number) for number in batch.response_ids.tolist()]))


def reward_of(weight: float = 1.0, truncation: str = "error", **keys: Any) -> RewardConfig:
    return section_of(RewardConfig, "reward", reward_model=RewardModelConfig(True, "model", weight, truncation), **keys)


def episode(
    text: str = "fox", score: Score | None = None, prompt: Any = "What is a mask?", messages: Sequence[Any] = ()
) -> Episode:
    turn = Turn([1, 2], np.array([5, 6, 7]), np.zeros(3, np.float32), 0, "stop")
    score = score or Score(None, fault="none", detail="returned None")
    return Episode(
        Prompt(0, [1, 2], prompt, "maths", None, {}), 0, 0, Trajectory([turn], messages=messages), text, score
    )


@pytest.fixture
def tokenizer(tmp_path) -> PreTrainedTokenizerBase:
    return tokenizer_of(tmp_path / "model", TEMPLATES["chatml"])


def rate(tokenizer: PreTrainedTokenizerBase, *episodes: Episode, workers=None, most=None, **keys: Any):
    return RewardModel(workers or Workers(lambda _: 2.0), tokenizer, reward_of(**keys), most)(list(episodes))


def test_without_a_function_the_score_is_the_models_by_its_weight(tokenizer):
    (rated,) = rate(tokenizer, episode(), weight=-0.5)
    assert rated.score == Score(-1.0, {"score": -1.0, "reward_model": 2.0})


def test_it_is_added_to_the_score_of_functions_then_scaled_and_clipped(tokenizer):
    main = Score(1.0, {"acc": 1.0, "score": 1.0}, text="fox")
    (rated,) = rate(tokenizer, episode(score=main), scale=2.0, clip_range=[-1.0, 5.0])
    assert rated.score.value == 5.0 and rated.score.text == "fox"
    assert rated.score.extras == {"acc": 1.0, "score": 3.0, "reward_model": 2.0, "clipped": True}
    assert main == Score(1.0, {"acc": 1.0, "score": 1.0}, text="fox")  # as it is stored


def test_rewards_of_tokens_get_it_on_the_last_one(tokenizer):
    main = Score(1.0, {"score": 1.0}, token_rewards=[0.25, 0.25, 0.5])
    (rated,) = rate(tokenizer, episode(score=main))
    assert (rated.score.value, rated.score.token_rewards) == (3.0, [0.25, 0.25, 2.5])


def test_a_fault_of_a_function_stays_and_its_response_is_not_sent(tokenizer):
    failed, workers = Score(None, fault="timeout", detail="late"), Workers(lambda _: 2.0)
    rated = rate(tokenizer, episode(score=failed), episode(), workers=workers)
    assert [one.score.fault for one in rated] == ["timeout", None] and len(workers.rows) == 1
    assert rate(tokenizer, episode(score=failed), workers=workers)[0].score == failed and len(workers.rows) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_a_fault(tokenizer, value):
    (rated,) = rate(tokenizer, episode(score=Score(1.0, {"score": 1.0})), workers=Workers(lambda _: value))
    assert (rated.score.value, rated.score.fault) == (None, "reward_model:nan")


def test_messages_that_the_template_rejects_are_a_fault_of_their_row(tmp_path):
    tokenizer = tokenizer_of(tmp_path / "model", TEMPLATES["alternating"])
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "fox"}]
    rated = rate(tokenizer, episode(), episode(prompt=system))
    assert [one.score.fault for one in rated] == [None, "reward_model:template"]
    assert "roles must alternate" in rated[1].score.detail


def test_a_conversation_is_read_as_its_messages(tokenizer):
    messages = [{"role": role, "content": "fox"} for role in ("user", "assistant", "tool", "assistant")]
    workers = Workers(lambda _: 2.0)
    single = [{"role": "user", "content": "What is a mask?"}, {"role": "assistant", "content": "fox"}]
    rate(tokenizer, episode(), episode(text="unread", messages=messages), workers=workers)
    chats = (single, messages)
    assert workers.rows == [len(tokenizer.apply_chat_template(chat, return_dict=False)) for chat in chats]


def test_a_conversation_beyond_the_positions_is_a_fault_or_loses_its_oldest_turns(tokenizer):
    says = [{"role": role, "content": "fox"} for role in ["system", *["user", "assistant"] * 3, "user"]]
    answer = [*says, {"role": "assistant", "content": "fox"}]
    sizes = [len(tokenizer.apply_chat_template([says[0], *answer[start:]], tokenize=True, return_dict=False))
             for start in (1, 3, 5, 7)]  # fmt: skip
    workers = Workers(lambda _: 2.0)
    for most, read in ((sizes[0], sizes[0]), (sizes[0] - 1, sizes[1]), (sizes[3], sizes[3]), (sizes[3] - 1,) * 2):
        (rated,) = rate(tokenizer, episode(prompt=says), most=most, truncation="left", workers=workers)
        assert workers.rows.pop() == read
        assert rated.score.extras["reward_model_cut"] == (most < sizes[0]) and rated.score.value == 2.0
    (rated,) = rate(tokenizer, episode(prompt=says), most=sizes[0] - 1, workers=workers)
    assert (rated.score.value, rated.score.fault) == (None, "reward_model:length") and not workers.rows
    assert f"has {sizes[0]} tokens, and the reward model takes {sizes[0] - 1}" in rated.score.detail


def test_the_positions_are_those_of_its_configuration_unless_they_are_stretched(tmp_path):
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    for rope, limit in (({}, 64), ({"rope_parameters": stretched}, None)):
        Qwen2Config(**sizes, max_position_embeddings=64, **rope).save_pretrained(tmp_path)
        assert position_limit(model_config(str(tmp_path))) == limit


def test_a_reward_model_without_a_chat_template_is_rejected(tmp_path):
    tokenizer_of(tmp_path / "model", None)
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    config = Qwen2Config(**sizes, architectures=["Qwen2ForSequenceClassification"])
    (tmp_path / "model" / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(ConfigError, match=r"its tokenizer has no chat template .* chat_template.jinja"):
        scorer_tokenizer(model_config(str(tmp_path / "model")))


def test_a_reward_model_alone_needs_no_function_of_the_data_source():
    alone, named = reward_of(), reward_of(name="gsm8k")
    assert not has_functions(alone) and not uses_built_in(alone)
    assert has_functions(named) and uses_built_in(named)
    custom = CustomRewardConfig("x.py", "compute_score", {})
    assert has_functions(reward_of(functions={"a": "x.py"})) and has_functions(reward_of(custom_reward_function=custom))
    request = ScoringRequest("openai/gsm8k", "42", None, {})
    assert load_reward(alone, ["openai/gsm8k"]).score(request).fault == "none"
