"""Pairs for a reward model: which rows are pairs, and their token ids."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from hybridrl.config import ConfigError
from hybridrl.config.schema import SFTDataConfig
from hybridrl.data.pairs import Pair, Pairs, load_pairs, pair_batch
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.required import required
from tests.data import stand_ins
from tests.sections import section_of

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
PROMPT, GOOD, BAD = ({"role": role, "content": text} for role, text in
                     (("user", "What is it?"), ("assistant", "a fox"), ("assistant", "mask")))  # fmt: skip
Read = Callable[..., Pairs]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> PreTrainedTokenizerBase:
    directory = tmp_path_factory.mktemp("tokenizer") / "model"
    stand_ins.write(directory, stand_ins.of_bytes, "PreTrainedTokenizerFast", "qwen2")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return load_tokenizer(str(directory))


@pytest.fixture
def read(tokenizer, tmp_path) -> Read:
    def load(*rows: dict[str, Any], **keys: Any) -> Pairs:
        file = tmp_path / "pairs.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        section = section_of(SFTDataConfig, "data", "sft_trainer", **{"max_length": 64, "seed": 0, **keys})
        options = {"max_samples": -1, "shuffle": False, "key": "data.train_files"}
        return load_pairs([str(file)], section, tokenizer, **options)

    return load


def test_texts_messages_and_whole_conversations_are_the_same_pair(read, tokenizer):
    rows = [
        {"prompt": "What is it?", "chosen": "a fox", "rejected": "mask"},
        {"prompt": [PROMPT], "chosen": [GOOD], "rejected": [BAD]},
        {"messages": [PROMPT], "chosen": "a fox", "rejected": "mask", "margin": 0.5},
        {"chosen": [PROMPT, GOOD], "rejected": [PROMPT, BAD]},
        {"prompt": "What is it?", "chosen": [PROMPT, GOOD], "rejected": [PROMPT, BAD], "margin": None},
    ]
    pairs = read(*rows)
    ids = [tokenizer.apply_chat_template([PROMPT, answer], return_dict=False) for answer in (GOOD, BAD)]
    assert [(pair.chosen, pair.rejected) for pair in pairs] == [tuple(ids)] * 5
    assert [pair.margin for pair in pairs] == [0.0, 0.0, 0.5, 0.0, 0.0] and pairs.largest_id == max(ids[0] + ids[1])


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"prompt": "What is it?", "chosen": "a fox"}, "the row has prompt, chosen"),
        ({"chosen": "a fox", "rejected": "mask"}, "responses to data.prompt_key=prompt"),
        ({"prompt": "What is it?", "chosen": "a fox", "rejected": "a fox"}, "are the same tokens; leave the row out"),
        ({"prompt": "?", "chosen": "a fox", "rejected": "mask", "margin": "wide"}, "margin is not a number: 'wide'"),
    ],
)
def test_rows_that_are_no_pairs_are_rejected_with_their_places(read, row, fault):
    with pytest.raises(ConfigError, match="line 2: ") as caught:
        read({"prompt": "What is it?", "chosen": "a fox", "rejected": "mask"}, row)
    assert fault in str(caught.value)


def test_a_long_pair_is_rejected_or_cut_at_its_beginning_and_not_to_equal_tokens(read, tokenizer):
    row = {"prompt": "What is it? " * 9, "chosen": "a fox", "rejected": "mask"}
    with pytest.raises(ConfigError, match=r"data.max_length=16; .* data.truncation=left"):
        read(row, max_length=16)
    (pair,) = read(row, max_length=16, truncation="left")
    assert len(pair.chosen) == len(pair.rejected) == 16 and pair.chosen[-1] == tokenizer.eos_token_id
    assert pair.chosen != pair.rejected
    with pytest.raises(ConfigError, match=r"the same tokens once they are cut to data\.max_length=1;"):
        read(row, max_length=1, truncation="left")


def test_the_rows_of_a_pair_are_neighbours_that_end_with_the_scored_token():
    batch = pair_batch([Pair([1, 2, 3], [4, 5], 0.5), Pair([6], [7, 8, 9, 10])])
    assert batch.lengths.tolist() == [3, 2, 1, 4] and batch.response_ids.tolist() == [3, 5, 6, 10]
    assert required(batch.rewards).tolist() == [0.5, 0, 0, 0] and required(batch.response_mask).all()
