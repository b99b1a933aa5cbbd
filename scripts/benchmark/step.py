"""A whole step beside TRL's and beside bare vLLM and torch: `python scripts/benchmark/step.py [--peer trl/bin/python]`

The case 25m: a random model of 25 M parameters, 16 prompts x 8 answers whose lengths are laid down (imposed.py) for all
sides; quickstart: its warm start and task, 32 x 8, with lengths as they come. First an update on the same samples from
the same weights: gradient norms must agree. Then in turn, each as often as --rounds says: a whole step here, a step of
TRL's GRPOTrainer, and apart from steps the rollout and the update of the same rows, here and bare. `--peer` names the
Python of an environment for trl_peer.py; without it TRL is left out.
"""

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from child import Child
from imposed import LENGTHS, LONGEST, PROMPTS, SAMPLES, length_of
from memory_plan import make_model
from models import SHAPES
from side_by_side import ROUNDS, Row, arguments, cpu_seconds, report
from warm_start import warm_start

from hybridrl import ppo
from hybridrl.batch import Batch, pack
from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.rollout import Request, Sampling
from hybridrl.trainer import Trainer
from hybridrl.training.workers import POLICY_FIELDS

HERE = Path(__file__).absolute().parent
PARTS = ("gen", "reward", "old_log_prob", "update_actor")


@dataclass(frozen=True)
class Case:
    """What a step is: prompts and answers to each, updates, and answers' lengths where they are laid down."""

    model: str
    rows: str
    prompts: int
    n: int
    updates: int
    longest: int
    lr: float
    lengths: list[int] | None


def case_25m(directory: Path) -> tuple[Case, list[str]]:
    make_model(SHAPES["25m"], directory / "model")
    rows = directory / "rows.jsonl"
    with open(rows, "w", encoding="utf-8") as file:
        for number in range(20 * PROMPTS):
            question = [{"role": "user", "content": f"What is {100 + 7 * number % 900}+{100 + 13 * number % 900}?"}]
            row = {"data_source": "none", "prompt": question, "reward_model": {"ground_truth": str(number)}}
            print(json.dumps(row), file=file)
    case = Case(str(directory / "model"), str(rows), PROMPTS, SAMPLES, 1, LONGEST, 1e-4, LENGTHS)
    return case, ["actor_rollout_ref.rollout.ignore_eos=true", "actor_rollout_ref.model.external_lib=imposed"]


def case_quickstart(directory: Path) -> tuple[Case, list[str]]:
    rows, model = (override.partition("=")[2] for override in warm_start(0, directory))
    return Case(model, rows, 32, 8, 4, 64, 1e-4, None), []


CASES = {"25m": case_25m, "quickstart": case_quickstart}


def configuration(case: Case, directory: Path, slots: int, more: list[str]) -> PPOConfig:
    (directory / "reward.py").write_text("def compute_score(solution_str, **_):\n    return len(solution_str) % 7\n")
    values = {
        "data.train_files": case.rows,
        "data.shuffle": "false",
        "data.train_batch_size": case.prompts,
        "data.max_prompt_length": 64,
        "data.max_response_length": case.longest,
        "actor_rollout_ref.model.path": case.model,
        "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
        "actor_rollout_ref.rollout.n": case.n,
        "actor_rollout_ref.actor.ppo_mini_batch_size": case.prompts // case.updates,
        "actor_rollout_ref.actor.optim.lr": case.lr,
        "algorithm.adv_estimator": "grpo",
        "reward.custom_reward_function.path": directory / "reward.py",
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
        self.found: dict[str, list[float]] = defaultdict(list)
        self.cpu: dict[str, list[float]] = defaultdict(list)
        self.shares: dict[str, list[float]] = defaultdict(list)

    def rows(self) -> Batch:
        """The first step's prompts with random answers, all parts of the rows but what the policy says of them."""
        case, generator = self.case, torch.Generator().manual_seed(0)
        lengths = [length_of(p, s) % case.longest or 4 for p in range(case.prompts) for s in range(case.n)]
        prompts = [self.hall.experience.prompts[row].ids for row in range(case.prompts) for _ in range(case.n)]
        answers = [torch.randint(20, 250, (length,), generator=generator).tolist() for length in lengths]
        prompt_ids, prompt_lengths = pack(prompts, torch.int64)
        response_ids, response_lengths = pack(answers, torch.int64)
        group = torch.arange(case.prompts).repeat_interleave(case.n)
        rows = Batch(
            prompt_lengths=prompt_lengths,
            response_lengths=response_lengths,
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            group=group,
            position=group,
            sample=torch.arange(case.n).repeat(case.prompts),
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
        if "TRL" in self.others and self.case.updates == 1:
            answers = batch.response_ids.split(batch.response_lengths.tolist())
            norms["TRL"] = self.others["TRL"].ask("step", answers=[ids.tolist() for ids in answers])["grad_norm"]
        for name, norm in norms.items():
            if abs(norm / norms["here"] - 1) > 1e-3:
                raise SystemExit(f"{name} computes another gradient: norms {norms}")
        return norms

    def save_update(self, batch: Batch) -> None:
        """The rows, passes and loss of a step's updates on one rank, for the bare side."""
        workers, plan = self.hall.workers, self.hall.workers.policy.updates
        own = batch.old_log_probs is None
        loss = workers.policy.loss.__class__(**{**vars(workers.policy.loss), "own_old_log_probs": own})
        rows, group = batch.only(*POLICY_FIELDS), workers.group
        workers.group = group.only([0])
        (_, mini_batches), *_ = workers._mini_batches(rows, plan.mini_batches(batch.group, 1), plan.budget)[1]
        workers.group = group
        torch.save((rows, mini_batches, loss), self.directory / "update.pt")

    # -- one thing of one side -----------------------------------------------------------------------------------

    def note(self, name: str, seconds: float, cpu: float) -> None:
        self.found[name].append(seconds)
        self.cpu[name].append(cpu)

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
        self.shares["other"].append(self.found["step"][-1] - sum(spent.values()))
        for part in ("update_weights", "switch", "adv"):
            self.shares[part].append(metrics.get(f"timing_s/{part}", 0.0))
        self.tokens = metrics["perf/response_tokens"]

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
        told = self.timed("TRL", lambda: self.others["TRL"].ask("step"))
        self.shares["TRL gen"].append(told["gen"])
        self.shares["TRL tokens"].append(told["tokens"])

    def bare(self, what: str, file: str) -> None:
        told = self.others["bare"].ask(what, file=str(self.directory / file))
        self.note(f"bare {what}", told["seconds"], told["cpu"])

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
            for _ in range(2):
                self.rollout()
                self.bare("generate", "requests.json")
                self.update()
                self.bare("update", "update.pt")


def measure(hall: Trainer, case: Case, directory: Path, told: argparse.Namespace, config: PPOConfig) -> list[Row]:
    section = config.actor_rollout_ref
    optimizer = {"lr": section.actor.optim.lr, "betas": tuple(section.actor.optim.betas)}
    torch.save({"model": section.model, "optimizer": optimizer}, directory / "model.pt")
    torch.save((section.model, section.rollout, 1), directory / "engine.pt")
    setting = {**vars(case), "reward": "", "answers": case.prompts * case.n}
    (directory / "setting.json").write_text(json.dumps(setting))
    with ExitStack() as stack:
        others = {}
        if not told.no_bare:
            bare = [sys.executable, str(HERE / "bare.py"), "--threads", str(told.threads)]
            environment = {"OMP_NUM_THREADS": str(told.threads)}
            others["bare"] = stack.enter_context(Child(bare, directory / "bare.log", environment))
            others["bare"].ask("start_engine", file=str(directory / "engine.pt"))
            others["bare"].ask("start_updates", file=str(directory / "model.pt"))
        if told.peer:
            peer = [told.peer, str(HERE / "trl_peer.py"), str(directory / "setting.json"), "--micro", str(told.micro)]
            environment = {"OMP_NUM_THREADS": str(told.threads)}
            others["TRL"] = stack.enter_context(Child(peer, directory / "trl.log", environment))
        sides = Sides(hall, case, directory, others)
        norms = sides.agree()
        print("gradient norms on the same samples:", norms, flush=True)
        sides.watch()
        for number in range(-1, told.rounds):
            if number == 0:  # the first round filled caches
                sides.found.clear(), sides.cpu.clear(), sides.shares.clear()
            sides.round()
            print(f"round {number}:", {name: round(values[-1], 2) for name, values in sides.found.items()}, flush=True)
        print({name: round(median(values), 3) for name, values in sides.shares.items()}, f"tokens {sides.tokens}")
        return rows_of(sides, told)


def rows_of(sides: Sides, told: argparse.Namespace) -> list[Row]:
    found, shares, case = sides.found, sides.shares, sides.case
    name = f"{told.case}, {told.slots} slots" if told.slots > 1 else f"{told.case}, 1 slot"

    def cell(side: str) -> str:
        least, cpu = min(found[side]), median(sides.cpu[side])
        return f"{median(found[side]):.2f} s (least {least:.2f}, CPU {cpu:.2f})"

    rows = []
    answers, ours = case.prompts * case.n, median(found["step"])
    if found["TRL"]:
        ratio = median(found["TRL"]) / ours
        here = f"{answers / ours:.1f} samples/s; {cell('step')}"
        there = f"{answers / median(found['TRL']):.1f} samples/s; {cell('TRL')}"
        bar = "2, aim 4" if told.case == "25m" else "reported, aim 1"
        rows.append(Row(f"whole step against TRL ({name})", here, there, ratio, bar))
    if found["bare update"]:
        bare = median(found["bare generate"]) + median(found["bare update"])
        cost = ours / bare
        rows.append(
            Row(f"whole step over bare vLLM + torch ({name})", cell("step"), f"{bare:.2f} s", cost, "1.15, aim 1.05")
        )
        share = median(found["bare generate"]) / median(found["rollout"])
        here, there = cell("rollout"), cell("bare generate")
        rows.append(Row(f"rollout against vLLM's generate ({name})", here, there, share, "0.95, aim 0.98"))
        share = median(found["bare update"]) / median(found["update"])
        here, there = cell("update"), cell("bare update")
        rows.append(Row(f"update against bare torch ({name})", here, there, share, "0.90, aim 0.97"))
    outside = median(shares["other"]) / ours
    parts = ", ".join(f"{part} {median(shares[part]):.2f}" for part in (*PARTS, "update_weights", "switch", "other"))
    rows.append(Row(f"share of a step outside its work ({name})", parts + " s", "", outside, "0.05, aim 0.03"))
    return rows


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
    told = parser.parse_args()
    os.environ["PYTHONPATH"] = f"{HERE}:{os.environ.get('PYTHONPATH', '')}"
    with TemporaryDirectory() as place:
        directory = Path(place)
        case, more = CASES[told.case](directory)
        config = configuration(case, directory, told.slots, [*more, *told.overrides])
        rows: list[Row] = []

        class Measured(Trainer):
            def fit(self, done: int, start_up: dict[str, float]) -> None:
                rows.extend(measure(self, case, directory, told, config))

        ppo.Trainer = Measured
        ppo.draw_curves = ppo.summary = lambda directory: ""
        ppo.train(config)
        report(rows, told.json)


if __name__ == "__main__":
    main()
