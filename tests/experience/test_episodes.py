"""An episode as a row, and a response as an episode of one turn."""

import numpy as np
import torch

from hybridrl.data.prompts import Prompt
from hybridrl.environments.episode import Trajectory, Turn
from hybridrl.experience.batching import PromptGroup, to_batch
from hybridrl.experience.episodes import Episode
from hybridrl.rewards.score import Score
from hybridrl.rollout import Completion

PROMPT = Prompt(0, [1, 2], "?", "maths", "42", {})


def turn(observed: list[int], sampled: list[int], stop: str = "stop") -> Turn:
    log_probs = -np.arange(1, len(sampled) + 1, dtype=np.float32)
    return Turn(observed, np.array(sampled), log_probs, 0, stop)


def test_a_completion_is_a_turn():
    completion = Completion(np.array([7, 8]), np.array([-0.5, -0.25], dtype=np.float32), True, 3)
    of_completion = Turn.of([1, 2], completion)
    assert of_completion == Turn([1, 2], completion.token_ids, completion.log_probs, 3, "length")


def test_an_episode_of_several_turns_is_one_row_in_which_only_sampled_tokens_count():
    turns = [turn([1, 2], [7, 8]), turn([3, 4, 5], [9]), turn([6], [10, 11], "length")]
    episode = Episode(PROMPT, 0, 0, Trajectory(turns, "max_tokens"), "", Score(1.0))
    assert (episode.truncated, episode.sampled_tokens) == (True, 5)
    batch = to_batch([PromptGroup(0, [episode])])
    assert batch.prompt_ids.tolist() == [1, 2]
    assert batch.response_ids.tolist() == [7, 8, 3, 4, 5, 9, 6, 10, 11]
    assert batch.rollout_log_probs.tolist() == [-1, -2, 0, 0, 0, -1, 0, -1, -2]
    assert batch.response_mask.tolist() == [True, True, False, False, False, True, False, True, True]
    assert batch.truncated.tolist() == [True]
    assert torch.equal(batch.rewards, torch.tensor([1.0]))
