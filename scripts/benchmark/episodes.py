"""What episodes cost: processes and dispatch against the engine's own time, and against sleeping tools.

python scripts/benchmark/episodes.py            64 episodes of 8 turns with real engines, in turn with bare calls
python scripts/benchmark/episodes.py --sleeping 1,000 episodes of 4 turns whose tools sleep a second, without engines

Both print seconds and their ratio. Bare calls sample the same turns from the same prompts, without environments.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from side_by_side import ROUNDS, Arguments
from transformers import AutoTokenizer
from warm_start import make_data

from hybridrl.agents.environments import EnvironmentSettings
from hybridrl.agents.environments.episode_loop import EpisodeLimits
from hybridrl.agents.environments.pool import EpisodeDispatch, EpisodeWorkers, SampleTurn
from hybridrl.agents.environments.worker import EpisodeSettings, EpisodeSpec
from hybridrl.config import load_ppo_config
from hybridrl.config.compose import shipped
from hybridrl.config.schema_parts import AgentConfig, MultiTurnConfig
from hybridrl.config.values import value_of
from hybridrl.core.cluster import RaySession
from hybridrl.core.experience.trajectory import Trajectory
from hybridrl.core.rollout import Completion, Request, RolloutClient, Sampling
from hybridrl.runs.ppo import start_devices
from hybridrl.runs.settings import build_algorithm, ppo_worker_config

ENVIRONMENTS = Path(__file__).with_name("waiting_environments.py")


def open_workers(
    session: RaySession, directory: Path, name: str, turns: int, seconds: float, end: int, limits: EpisodeLimits
) -> EpisodeWorkers:
    """Start one process whose episodes run in a class of ENVIRONMENTS."""
    load = partial(AutoTokenizer.from_pretrained, str(directory / "data" / "model"))
    kwargs = {"turns": turns, "seconds": seconds}
    values = value_of(shipped("ppo_trainer").values, "actor_rollout_ref.rollout")
    chosen = {"environment": f"{ENVIRONMENTS}:{name}", "environment_kwargs": kwargs}
    multi_turn = MultiTurnConfig(**values["multi_turn"] | chosen)
    environments = EnvironmentSettings(multi_turn, AgentConfig(**values["agent"]))
    settings = EpisodeSettings(load, environments, limits, (end,), formats={"format": "hermes"})
    workers = EpisodeWorkers(session, settings, [f"{directory}/episodes.log"])
    workers.wait_until_ready(300)
    return workers


async def run(workers: EpisodeWorkers, specs: Sequence[EpisodeSpec], sample: SampleTurn) -> list[Trajectory]:
    found = {}
    with closing(EpisodeDispatch(workers)) as dispatch:
        async for some in dispatch.run(specs, sample):
            found |= dict(some)
    return [found[index] for index in range(len(specs))]


def specs_of(count: int, sampling: Sampling) -> list[EpisodeSpec]:
    chat = [{"role": "user", "content": "Count."}]
    return [EpisodeSpec(number, 0, chat, {"index": number}, sampling, 1, number) for number in range(count)]


def sleeping(directory: Path, count: int, turns: int) -> None:
    """Print the seconds of episodes whose tools sleep, against those of the sleep alone."""
    session = RaySession("cpu", 1, 1, {}, 60)
    tokenizer = AutoTokenizer.from_pretrained(directory / "data" / "model")
    end = tokenizer.eos_token_id
    sampling = Sampling(max_tokens=64, stop_ids=(end,))
    ids = np.array([*tokenizer("7")["input_ids"], end])
    completion = Completion(ids, np.zeros(len(ids), np.float32), False, 0)

    def sample(_: Request) -> "asyncio.Future[Completion]":
        future = asyncio.get_running_loop().create_future()
        future.set_result(completion)
        return future

    limits = EpisodeLimits(prompt=256, response=1024, context=2048)
    for name in ("Talk", "Sleep"):
        with open_workers(session, directory, name, turns, 1.0, end, limits) as workers:
            asyncio.run(run(workers, specs_of(10, sampling), sample))
            began = time.monotonic()
            ended = asyncio.run(run(workers, specs_of(count, sampling), sample))
            seconds = time.monotonic() - began
        assert {one.stop for one in ended} == {"completed"}, ended[0]
        kind = "coroutines" if name == "Talk" else "plain functions"
        print(f"{kind:<16} {count} episodes x {turns} turns: {seconds:.2f} s, {seconds / turns:.3f} x the sleep alone")
    session.close()


def against_bare_calls(directory: Path, count: int, turns: int, tokens: int, rounds: int) -> None:
    """Print the seconds of episodes, and those of the same turns sampled without environments, in turn."""
    values = {
        "data.train_files": directory / "data" / "train.jsonl",
        "data.max_prompt_length": 64,
        "data.max_response_length": turns * (tokens + 24),
        "actor_rollout_ref.model.path": directory / "data" / "model",
        "actor_rollout_ref.rollout.max_num_seqs": count,
        "trainer.n_gpus_per_node": 1,
        "trainer.default_local_dir": directory / "run",
    }
    config = load_ppo_config([f"{key}={value}" for key, value in values.items()])
    session = RaySession("cpu", 1, 1, {}, 60)
    logs = directory / "logs"
    logs.mkdir()
    worker = ppo_worker_config(config, build_algorithm(config), directory / "run", steps=1)
    _, engine = start_devices(config, session, worker, logs, [1, 2, 3])
    engine.to_rollout(0)
    # Responses of a fixed length, so that all turns are alike: the last token counts as the end of a turn.
    sampling = Sampling(max_tokens=tokens, stop_ids=(), ignore_eos=True)
    limits = EpisodeLimits(prompt=64, response=turns * (tokens + 24), context=64 + turns * (tokens + 24))
    tokenizer = AutoTokenizer.from_pretrained(directory / "data" / "model")

    def ended(client: RolloutClient, request: Request) -> "asyncio.Future[Completion]":
        async def complete() -> Completion:
            got = await client.generate(request)
            ids = np.append(got.token_ids[:-1], tokenizer.eos_token_id)
            return Completion(ids, got.log_probs, False, got.versions)

        return asyncio.ensure_future(complete())

    async def bare(trajectories: Sequence[Trajectory]) -> None:
        async def one(number: int, trajectory: Trajectory) -> None:
            context: list[int] = []
            for turn_number, turn in enumerate(trajectory.turns):
                context += turn.observed
                request = Request(number, 0, list(context), 1, sampling, turn_number)
                await engine.client.generate(request)
                context += turn.sampled.tolist()

        await asyncio.gather(*(one(*item) for item in enumerate(trajectories)))

    sample = partial(ended, engine.client)
    seconds: dict[str, list[float]] = {"episodes": [], "bare": []}
    with open_workers(session, directory, "Talk", turns, 0.0, tokenizer.eos_token_id, limits) as workers:
        trajectories: list[Trajectory] = []
        for number in range(rounds + 1):  # the first warms up
            began = time.monotonic()
            trajectories = asyncio.run(run(workers, specs_of(count, sampling), sample))
            middle = time.monotonic()
            asyncio.run(bare(trajectories))
            if number:
                seconds["episodes"].append(middle - began)
                seconds["bare"].append(time.monotonic() - middle)
    assert {len(one.turns) for one in trajectories} == {turns}, trajectories[0]
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    print(f"{count} episodes x {turns} turns x {tokens} tokens, median of {rounds} rounds in turn:")
    print(f"episodes {medians['episodes']:.2f} s, bare calls {medians['bare']:.2f} s, ratio ", end="")
    print(f"{medians['episodes'] / medians['bare']:.3f}")
    session.close()


def main() -> None:
    parser = Arguments(__doc__, episodes=4, turns=2, tokens=4, rounds=1)
    parser.add_argument("--sleeping", action="store_true", help="without engines, with tools that sleep a second")
    parser.add_argument("--episodes", type=int, help="by default 64, or 1,000 that sleep")
    parser.add_argument("--turns", type=int, help="by default 8, or 4 that sleep")
    parser.add_argument("--tokens", type=int, default=32, help="per response")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="against bare calls")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if not make_data(0, directory):
            raise SystemExit("the model could not be made")
        if arguments.sleeping:
            sleeping(directory, arguments.episodes or 1000, arguments.turns or 4)
        else:
            count, turns = arguments.episodes or 64, arguments.turns or 8
            against_bare_calls(directory, count, turns, arguments.tokens, arguments.rounds)


if __name__ == "__main__":
    main()
