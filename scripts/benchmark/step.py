"""A whole step beside TRL's and beside bare vLLM and torch: `python scripts/benchmark/step.py [--peer trl/bin/python]`

The case 25m: a random model of 25 M parameters, 16 prompts x 8 answers; quickstart: its warm start and task, 32 x 8.
Answers' lengths are laid down (imposed.py) for all sides. First an update on the same samples from the same weights:
gradient norms must agree. Then in turn, each as often as --rounds says: a whole step here, a step of TRL's GRPOTrainer,
and apart from steps the rollout and the update of the same rows, here and bare. `--peer` names the Python of an
environment for trl_peer.py; without it TRL is left out.
"""

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from child import Child
from imposed import ANSWERS, SEED, Answers
from memory_plan import make_model
from models import SHAPES
from side_by_side import ROUNDS, Row, Seconds, arguments, cpu_seconds, report, told
from warm_start import warm_start

from hybridrl.batch import Batch, pack
from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.rollout import Request, Sampling
from hybridrl.runs import ppo
from hybridrl.trainer import Trainer
from hybridrl.training.worker_group import POLICY_FIELDS, TrainWorkers

HERE = Path(__file__).absolute().parent
PARTS = ("gen", "reward", "old_log_prob", "update_actor")


@dataclass(frozen=True)
class Case:
    """What a step is: its answers, and how many updates they make."""

    model: str
    rows: str
    answers: Answers
    updates: int
    lr: float = 1e-4

    def setting(self) -> dict[str, Any]:
        """What trl_peer.py reads."""
        return vars(self) | {"answers": asdict(self.answers) | {"lengths": self.answers.lengths}}


def case_25m(directory: Path) -> Case:
    make_model(SHAPES["25m"], directory / "model")
    rows = directory / "rows.jsonl"
    with open(rows, "w", encoding="utf-8") as file:
        for number in range(20 * ANSWERS["25m"].prompts):
            question = [{"role": "user", "content": f"What is {100 + 7 * number % 900}+{100 + 13 * number % 900}?"}]
            row = {"data_source": "none", "prompt": question, "reward_model": {"ground_truth": str(number)}}
            print(json.dumps(row), file=file)
    return Case(str(directory / "model"), str(rows), ANSWERS["25m"], updates=1)


def case_quickstart(directory: Path) -> Case:
    rows, model = (override.partition("=")[2] for override in warm_start(0, directory))
    return Case(model, rows, ANSWERS["quickstart"], updates=4)


CASES = {"25m": case_25m, "quickstart": case_quickstart}


def configuration(case: Case, directory: Path, slots: int, more: list[str]) -> PPOConfig:
    (directory / "reward.py").write_text("def compute_score(solution_str, **_):\n    return len(solution_str) % 7\n")
    values = {
        "data.train_files": case.rows,
        "data.shuffle": "false",
        "data.train_batch_size": case.answers.prompts,
        "data.max_prompt_length": 64,
        "data.max_response_length": case.answers.longest,
        "actor_rollout_ref.model.path": case.model,
        "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
        "actor_rollout_ref.model.external_lib": "imposed",
        "actor_rollout_ref.rollout.ignore_eos": "true",
        "actor_rollout_ref.rollout.n": case.answers.samples,
        "actor_rollout_ref.actor.ppo_mini_batch_size": case.answers.prompts // case.updates,
        "actor_rollout_ref.actor.optim.lr": case.lr,
        "algorithm.adv_estimator": "grpo",
        "reward.custom_reward_function.path": directory / "reward.py",
        "trainer.seed": SEED,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": slots,
        "trainer.total_training_steps": 1000,
        "trainer.total_epochs": 1000,
        "trainer.save_freq": -1,
        "trainer.logger": "[]",
        "trainer.default_local_dir": directory / f"run-{slots}",
    }
    return load_ppo_config([f"{key}={value}" for key, value in values.items()] + more)


class Sides:
    """The run's own parts and the other sides, each to be asked for one thing once a round."""

    def __init__(self, hall: Trainer, case: Case, directory: Path, others: dict[str, Child]) -> None:
        self.hall, self.case, self.directory, self.others = hall, case, directory, others
        self.steps = 0
        self.found: dict[str, Seconds] = defaultdict(lambda: Seconds([], []))
        self.shares: dict[str, list[float]] = defaultdict(list)

    def rows(self) -> Batch:
        """The first step's prompts with random answers, all parts of the rows but what the policy says of them."""
        given, generator = self.case.answers, torch.Generator().manual_seed(0)
        lengths, repeats = given.lengths, range(given.samples)
        prompts = [self.hall.experience.prompts[row].ids for row in range(given.prompts) for _ in repeats]
        answers = [torch.randint(20, 250, (length,), generator=generator).tolist() for length in lengths]
        prompt_ids, prompt_lengths = pack(prompts, torch.int32)
        response_ids, response_lengths = pack(answers, torch.int32)
        group = torch.arange(given.prompts).repeat_interleave(given.samples)
        rows = Batch(
            prompt_lengths=prompt_lengths,
            response_lengths=response_lengths,
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            group=group,
            position=group,
            sample=torch.arange(given.samples).repeat(given.prompts),
            rewards=torch.tensor([float(length % 7) for length in lengths]),
            truncated=torch.zeros(len(lengths), dtype=torch.bool),
            response_mask=torch.ones(len(response_ids), dtype=torch.bool),
        )
        return self.hall.algorithm.advantages(rows)[0]

    def agree(self) -> dict[str, float]:
        """An update on the same samples from the same weights, on every side: each one's norm of the gradient."""
        batch, workers = self.rows(), self.hall.workers
        if workers.needs_old_log_probs(batch):
            batch = workers.log_probs(batch)
        self.save_update(batch)
        norms = {"here": workers.update_policy(batch, 1)[1]["actor/grad_norm"]}
        if "bare" in self.others:
            norms["bare"] = self.others["bare"].ask("update", file=str(self.directory / "update.pt"))["grad_norm"]
        if "TRL" in self.others and self.case.updates == 1:  # it mixes rows before it cuts them into more
            answers = batch.response_ids.split(batch.response_lengths.tolist())
            norms["TRL"] = self.others["TRL"].ask("step", answers=[ids.tolist() for ids in answers])["grad_norm"]
        for name, norm in norms.items():
            if abs(norm / norms["here"] - 1) > 1e-3:
                raise SystemExit(f"{name} computes another gradient: norms {norms}")
        return norms

    def save_update(self, batch: Batch) -> None:
        """The rows, passes and loss of a step's updates on one rank, for the bare side."""
        workers, plan = self.hall.workers, self.hall.workers.policy.updates
        alone = TrainWorkers(workers.group.only([0]), workers.policy, None, workers.export_dtype, workers.timeout)
        rows, cut = batch.only(*POLICY_FIELDS), plan.mini_batches(batch.group, 1)
        _, [(_, mini_batches)] = alone._mini_batches(rows, cut, plan.budget)
        loss = replace(workers.policy.loss, own_old_log_probs=batch.old_log_probs is None)
        torch.save((rows, mini_batches, loss), self.directory / "update.pt")

    # -- one thing of one side -----------------------------------------------------------------------------------

    def note(self, name: str, seconds: float, cpu: float) -> None:
        self.found[name].wall.append(seconds)
        self.found[name].cpu.append(cpu)

    def timed(self, name: str, work: Any) -> Any:
        cpu, began = cpu_seconds(), time.perf_counter()
        result = work()
        self.note(name, time.perf_counter() - began, cpu_seconds() - cpu)
        return result

    def step(self) -> None:
        self.steps += 1
        metrics = self.timed("step", lambda: self.hall.train_step(self.steps))
        metrics |= self.hall.engine.take_metrics()
        spent = {part: metrics.get(f"timing_s/{part}", 0.0) for part in PARTS}
        for part, seconds in spent.items():
            self.shares[part].append(seconds)
        self.shares["other"].append(self.found["step"].wall[-1] - sum(spent.values()))
        for part in ("update_weights", "switch", "adv"):
            self.shares[part].append(metrics.get(f"timing_s/{part}", 0.0))
        self.tokens = self.checked(metrics["perf/response_tokens"])

    def checked(self, tokens: float) -> float:
        """The tokens of a side's answers, which are as many as were laid down."""
        if tokens != sum(self.case.answers.lengths):
            raise SystemExit(f"{tokens:.0f} tokens were written where {sum(self.case.answers.lengths)} were laid down")
        return tokens

    def rollout(self) -> None:
        """The last step's requests once more, after a hand-over."""
        engine, (requests, sampling) = self.hall.engine, self.asked
        engine.to_rollout(version=-self.steps)
        self.timed("rollout", lambda: list(engine.pool.generate(requests, sampling)))
        engine.to_training()

    def update(self) -> None:
        batch = self.last
        self.timed("update", lambda: self.hall.workers.update_policy(batch, self.steps))

    def peer(self) -> None:
        answer = self.timed("TRL", lambda: self.others["TRL"].ask("step"))
        self.shares["TRL gen"].append(answer["gen"])
        self.shares["TRL tokens"].append(self.checked(answer["tokens"]))

    def bare(self, what: str, file: str) -> None:
        answer = self.others["bare"].ask(what, file=str(self.directory / file))
        if what == "generate":
            self.checked(sum(map(len, answer["answers"])))
        self.note(f"bare {what}", answer["seconds"], answer["cpu"])

    # -- a round ---------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Keep what steps ask of engines and of trainers, to do it again apart from a step."""
        pool_generate, update_policy = self.hall.engine.pool.generate, self.hall.workers.update_policy

        def generate(requests: list[Request], sampling: Sampling) -> Any:
            self.asked = list(requests), sampling
            return pool_generate(requests, sampling)

        def update(batch: Batch, step: int) -> Any:
            self.last = batch
            return update_policy(batch, step)

        self.hall.engine.pool.generate, self.hall.workers.update_policy = generate, update

    def round(self) -> None:
        self.step()
        if "TRL" in self.others:
            self.peer()
        if "bare" in self.others:
            requests, _ = self.asked
            lengths = [len(ids) for ids in self.last.response_ids.split(self.last.response_lengths.tolist())]
            asked = [
                {"prompt": request.prompt_ids, "seed": request.seed, "max_tokens": length}
                for request, length in zip(requests, lengths, strict=True)
            ]
            (self.directory / "requests.json").write_text(json.dumps(asked))
            self.save_update(self.last)
            self.rollout()
            self.bare("generate", "requests.json")
            self.update()
            self.bare("update", "update.pt")


def measure(hall: Trainer, case: Case, directory: Path, given: argparse.Namespace, config: PPOConfig) -> list[Row]:
    section = config.actor_rollout_ref
    optimizer = {"lr": section.actor.optim.lr, "betas": tuple(section.actor.optim.betas)}
    torch.save({"model": section.model, "optimizer": optimizer}, directory / "model.pt")
    torch.save((section.model, section.rollout, 1), directory / "engine.pt")
    (directory / "setting.json").write_text(json.dumps(case.setting()))
    with ExitStack() as stack:
        others = {}
        if not given.no_bare:
            bare = [sys.executable, str(HERE / "bare.py"), "--threads", str(given.threads)]
            # In this process vLLM's engine is as fast as it gets.
            environment = {"OMP_NUM_THREADS": str(given.threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            others["bare"] = stack.enter_context(Child(bare, directory / "bare.log", environment))
            others["bare"].ask("start_engine", file=str(directory / "engine.pt"))
            others["bare"].ask("start_updates", file=str(directory / "model.pt"))
        if given.peer:
            peer = [given.peer, str(HERE / "trl_peer.py"), str(directory / "setting.json"), "--micro", str(given.micro)]
            environment = {"OMP_NUM_THREADS": str(given.threads)}
            others["TRL"] = stack.enter_context(Child(peer, directory / "trl.log", environment))
        sides = Sides(hall, case, directory, others)
        norms = sides.agree()
        print("gradient norms on the same samples:", norms, flush=True)
        sides.watch()
        for number in range(-1, given.rounds):
            if number == 0:  # the first round filled caches
                sides.found.clear(), sides.shares.clear()
            sides.round()
            print(
                f"round {number}:",
                {name: round(seconds.wall[-1], 2) for name, seconds in sides.found.items()},
                flush=True,
            )
        print({name: round(median(values), 3) for name, values in sides.shares.items()}, f"tokens {sides.tokens}")
        return rows_of(sides, given)


def rows_of(sides: Sides, given: argparse.Namespace) -> list[Row]:
    found, shares, case, step = sides.found, sides.shares, sides.case, sides.found["step"]
    name, answers = f"{given.case}, {given.slots} slots", len(case.answers.lengths)
    rows = []
    if "TRL" in found:
        here, there = (f"{answers / side.median:.1f} samples/s; {told(side)}" for side in (step, found["TRL"]))
        bar = "at least 2 (aim 4)" if given.case == "25m" else "reported (aim 1)"
        rows.append(Row(f"whole step against TRL ({name})", here, there, found["TRL"].median / step.median, bar))
    if "bare update" in found:
        generate, update = found["bare generate"], found["bare update"]
        bare = generate.median + update.median
        what = f"whole step over bare vLLM + torch ({name})"
        rows.append(Row(what, told(step), f"{bare:.2f} s", step.median / bare, "at most 1.15 (aim 1.05)"))
        for what, ours, other, bar in (
            ("rollout against vLLM's generate", found["rollout"], generate, "at least 0.95 (aim 0.98)"),
            ("update against bare torch", found["update"], update, "at least 0.9 (aim 0.97)"),
        ):
            rows.append(Row(f"{what} ({name})", told(ours), told(other), other.median / ours.median, bar))
    parts = ", ".join(f"{part} {median(shares[part]):.2f}" for part in (*PARTS, "update_weights", "switch", "other"))
    outside, bar = median(shares["other"]) / step.median, "at most 0.05 (aim 0.03)"
    return [*rows, Row(f"share of a step outside its work ({name})", f"{parts} s", "", outside, bar)]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--case", choices=CASES, default="25m")
    parser.add_argument("--peer", help="the Python of TRL's environment")
    parser.add_argument("--micro", type=int, default=16, help="rows of a pass of TRL's")
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of the other sides")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-bare", action="store_true")
    parser.add_argument("overrides", nargs="*", help="key=value of the run")
    given = parser.parse_args()
    os.environ |= {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}", "IMPOSED": given.case}
    with TemporaryDirectory() as place:
        directory = Path(place)
        case = CASES[given.case](directory)
        config = configuration(case, directory, given.slots, given.overrides)
        rows: list[Row] = []

        class Measured(Trainer):
            def fit(self, done: int, start_up: dict[str, float]) -> None:
                rows.extend(measure(self, case, directory, given, config))

        ppo.Trainer = Measured
        ppo.draw_curves = ppo.summary = lambda directory: ""
        ppo.train(config)
        report(rows, given.json)


if __name__ == "__main__":
    main()
