"""Pictures of episodes in processes of their own, with real Ray actors and a client that responds at once."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybridrl.agents.environments.episode_loop import EpisodeLimits
from hybridrl.agents.environments.pool import EpisodeWorkers
from hybridrl.agents.environments.worker import EpisodeSettings
from hybridrl.core.carried import PICTURE_DIGEST
from hybridrl.core.cluster import RaySession
from hybridrl.core.pictures import PictureStore, Pixels, digest_of
from hybridrl.data.processor import PictureReader, load_processor
from tests.agents.environments.test_pool import SAMPLING, Sampler, run, specs
from tests.agents.sections import environments_of
from tests.vision_models import reader_that_sees

LIMITS = EpisodeLimits(prompt=200, response=3000, context=3200, turns=12, call_timeout=5, timeout=60, pictures=10)
ENVIRONMENT = '''
import os
from pathlib import Path

import numpy as np
from hybridrl.environments import Environment, Step


class Album(Environment):
    """Ten turns with five pictures, each of which is shown twice; its process may die once in the sixth."""

    def step(self, response):
        died = Path(self.config["place"], "died")
        if self.row.get("dies") and response.turn == 5 and not died.exists():
            died.touch()
            os._exit(3)
        if response.turn == 9:
            return Step(done=True, reward=1.0)
        shade = np.full((32, 32, 3), 40 * (response.turn % 5), np.uint8)
        return Step([{"role": "user", "content": [{"type": "image", "image": shade}]}])
'''


@pytest.fixture(scope="module")
def workers(tmp_path_factory) -> Iterator[EpisodeWorkers]:
    place = tmp_path_factory.mktemp("album")
    (place / "album.py").write_text(ENVIRONMENT)
    tokenizer = reader_that_sees(place / "model").processor.tokenizer
    settings = EpisodeSettings(
        partial(AutoTokenizer.from_pretrained, str(place / "model")),
        environments_of(environment=f"{place}/album.py:Album", environment_kwargs={"place": str(place)}),
        LIMITS,
        (tokenizer.eos_token_id,),
        formats={"format": "hermes"},
        load_reader=partial(load_reader, place / "model"),
    )
    session = RaySession("cpu", 1, 2, {}, 60)
    with EpisodeWorkers(session, settings, [f"{place}/episodes-{index}.log" for index in range(2)]) as workers:
        workers.wait_until_ready(120)
        yield workers
    session.close()


def load_reader(directory: Path, tokenizer: PreTrainedTokenizerBase) -> PictureReader:
    return PictureReader(load_processor(str(directory), tokenizer, {}), PictureStore())


@pytest.mark.parametrize("dies", [False, True])
def test_each_picture_is_stored_once_and_as_long_as_an_episode_with_it(workers, dies):
    puts: list[Pixels] = []
    store = PictureStore(lambda pixels: puts.append(pixels) or len(puts))
    tokenizer = workers.settings.load_tokenizer()
    sampler = Sampler(tokenizer)
    sampling = replace(SAMPLING, stop_ids=(tokenizer.eos_token_id,))
    wanted = [replace(spec, sampling=sampling) for spec in specs({"dies": dies})]
    trajectories = run(workers, wanted, sampler, store=store)
    assert [(each.stop, each.fault, len(each.turns)) for each in trajectories] == [("completed", None, 10)] * 2
    assert len(puts) == 5
    digests = [digest_of(pixels) for pixels in puts]
    for trajectory in trajectories:
        (row,) = trajectory.rows()
        shown = row.carried[PICTURE_DIGEST].tolist()
        assert shown[:4] == shown[5:] and {*shown} == {*digests}
        assert {picture.digest for picture in trajectory.pictures} == {*digests}
        assert store.handles(digests).keys() == {*digests}
    del trajectories, trajectory
    gc.collect()
    for digest in digests:
        with pytest.raises(KeyError):
            store.handles([digest])
