"""The reward model of a run: a classifier in the training ranks, which scores a response at its conversation's last
token.

The model's own chat template renders the prompt and the response as a conversation, in token ids of its own tokenizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hybridrl.config import ConfigError
from hybridrl.config.schema import ModelConfig
from hybridrl.config.schema_parts import RewardConfig
from hybridrl.core.algorithms.algorithm import Signal
from hybridrl.core.batch import token_rows
from hybridrl.core.experience.trajectory import Episode
from hybridrl.core.training.loading import load_settings
from hybridrl.core.training.model import blank_score_model
from hybridrl.core.training.worker_group import TrainWorkers
from hybridrl.data.pairs import conversation_ids
from hybridrl.data.tokenizer import Chat, as_chat, load_tokenizer
from hybridrl.required import required
from hybridrl.rewards.load import uses_main
from hybridrl.rewards.score import Score, Shaping, as_score, combined
from hybridrl.runs.settings import REWARD_MODEL

KEY = "reward.reward_model"
SCORES = Signal(("values",), REWARD_MODEL, timing=REWARD_MODEL)


def has_functions(config: RewardConfig) -> bool:
    """Whether any function scores responses, and not the reward model alone."""
    return uses_main(config) or bool(config.functions or config.judged)


def scorer_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a reward model. Raises ConfigError if it has no chat template, or if it is no
    classifier."""
    blank_score_model(model, torch.float32)
    options = {"trust_remote_code": model.trust_remote_code, "model_key": f"{KEY}.model_path"}
    tokenizer = load_tokenizer(model.path, **options)
    if not tokenizer.chat_template:
        cause = f"{KEY}.model_path={model.path}: its tokenizer has no chat template to render a conversation with"
        raise ConfigError(cause, fix="save the one that it was trained with there, as chat_template.jinja")
    return tokenizer


def position_limit(model: ModelConfig) -> int | None:
    """Return the most tokens of a row that a model takes; None if it has no limit."""
    settings = load_settings(model).get_text_config().to_dict()
    rope = settings.get("rope_parameters") or {}
    return None if "factor" in rope else settings.get("max_position_embeddings") or settings.get("n_positions")


@dataclass(frozen=True)
class RewardModel:
    """Adds the reward model's scores to those of the reward functions. `most`: the tokens of a row that it takes."""

    workers: TrainWorkers
    tokenizer: PreTrainedTokenizerBase
    reward: RewardConfig
    most: int | None = None

    def __call__(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Return the episodes with their final scores. An episode with a fault is left as it is."""
        faults = {place: episode.score.fault not in (None, "none") for place, episode in enumerate(episodes)}
        places = [place for place, failed in faults.items() if not failed]
        scores = dict(zip(places, self._scores([_chat(episodes[place]) for place in places]), strict=True))
        weights, shaping = {"score": 1.0, REWARD_MODEL: self.reward.reward_model.weight}, Shaping.of(self.reward)
        rated = []
        for place, episode in enumerate(episodes):
            score = episode.score
            if place in scores:
                score = combined(score, {REWARD_MODEL: scores[place]}, weights)
                score = replace(score, extras=scores[place].extras | score.extras, text=episode.score.text)
            rated.append(replace(episode, score=shaping.shaped(score, episode.sampled_tokens)))
        return rated

    def _scores(self, chats: Sequence[Chat]) -> list[Score]:
        """Return the scores of conversations, or faults."""
        whole = list(conversation_ids(self.tokenizer, chats))
        rows = [self._fitting(*pair) for pair in zip(chats, whole, strict=True)]
        to_score = [row for row in rows if isinstance(row, list)]
        batch = token_rows(to_score, slice(-1, None))
        batch = replace(batch, group=torch.zeros_like(batch.group))  # any of them may begin alike
        values = iter(required(self.workers.fill(batch, SCORES).values).tolist() if to_score else ())
        scores = [_score(next(values)) if isinstance(row, list) else row for row in rows]
        if self.reward.reward_model.truncation == "left":
            for score, row, ids in zip(scores, rows, whole, strict=True):
                score.extras["reward_model_cut"] = row is not ids
        return scores

    def _fitting(self, chat: Chat, ids: list[int] | TemplateError) -> list[int] | Score:
        """Return the ids of a conversation, shortened as configured if the model takes fewer; or a fault."""
        if isinstance(ids, TemplateError) or not ids:
            return Score(None, fault="reward_model:template", detail=f"its chat template rejects the messages: {ids}")
        if self.most is None or len(ids) <= self.most:
            return ids
        if self.reward.reward_model.truncation == "error":
            detail = f"the conversation has {len(ids)} tokens, and the reward model takes {self.most}"
            fix = f"set {KEY}.truncation=left, or shorten responses"
            return Score(None, fault="reward_model:length", detail=f"{detail}; {fix}")
        system = [message for message in chat.messages[:1] if message["role"] == "system"]
        for start in [place for place, message in enumerate(chat.messages) if message["role"] == "user"][1:]:
            later = chat._replace(messages=[*system, *chat.messages[start:]])
            (shorter,) = conversation_ids(self.tokenizer, [later])
            ids = shorter if isinstance(shorter, list) else ids
            if len(ids) <= self.most:
                break
        return ids[-self.most :]


def _chat(episode: Episode) -> Chat:
    """Return an episode as a conversation. The decoded response has no tokens that end it."""
    response = {"role": "assistant", "content": episode.text}
    messages = episode.trajectory.messages or [*as_chat(episode.prompt.messages), response]
    return Chat(list(messages), episode.prompt.tools)


def _score(value: float) -> Score:
    score = as_score(value, {})
    return score if score.fault is None else replace(score, fault="reward_model:nan", detail=f"its score is {value}")
