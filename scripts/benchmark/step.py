"""A whole step compared with TRL, vLLM and torch: `python scripts/benchmark/step.py [--peer trl/bin/python]`

The case 25m: a random model of 25 M parameters, 16 prompts x 8 responses; quickstart: its warm start and task, 32 x 8;
pictures: 25 M parameters that see, with a picture of 256 x 256 in each of 32 prompts x 8; pretrained: the model of
--model with the questions of recipes/pretrained, 16 x 8 (with Gemma 3 270M, 24 GiB are enough for one other part at a
time: --bare generate, --bare update, or --bare none with --peer). The lengths of responses are imposed (imposed.py) on
all sides. First an update on the same samples from the same weights: gradient norms must agree. Then in turn, --rounds
times each: a whole step of hybridrl, a step of TRL's GRPOTrainer, and separately from steps the rollout and the update
of the same rows, by hybridrl and by bare vLLM and torch. `--peer` names the Python of an environment for trl_peer.py;
without it TRL is left out.
"""

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from cases import CASES, Case
from child import Child
from imposed import SEED
from side_by_side import ROUNDS, Row, Seconds, arguments, cpu_seconds, formatted, report

from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.core.batch import Batch, pack
from hybridrl.core.carried import PICTURE_DIGEST, PICTURE_START, PICTURES
from hybridrl.core.cluster import Group
from hybridrl.core.experience.collector import SynchronousExperience
from hybridrl.core.hybrid_engine import HybridEngine
from hybridrl.core.pictures import Picture, PictureStore
from hybridrl.core.rollout import Completion, Request
from hybridrl.core.rollout.engine import Key
from hybridrl.core.trainer import RLTask, Trainer
from hybridrl.core.training.planning import rank_mini_batches
from hybridrl.core.training.vision import READS
from hybridrl.data.prompt import Prompt
from hybridrl.runs import ppo, setup

HERE = Path(__file__).absolute().parent
PARTS = ("gen", "reward", "old_log_prob", "update_actor")
# What a figure is compared with -> its target by case.
TARGETS = {
    "TRL": {"25m": "at least 5.5 (aim 7)", "quickstart": "at least 1.05", "pretrained": "at least 3"},
    "TRL update": {"pictures": "at least 1.3"},
    "bare": {"25m": "at most 1.0 (aim 0.95)", "quickstart": "at most 1.7", "pretrained": "at most 1.0"},
    "generate": {"25m": "at least 0.95 (aim 0.98)", "pictures": "at least 0.9"},
    "update": {"25m": "at least 0.9 (aim 0.97)"},
    "outside": {"25m": "at most 0.05 (aim 0.03)"},
}


def impose(name: str) -> None:
    """Have the processes of a run import imposed.py, with these lengths."""
    os.environ |= {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}", "IMPOSED": name}


def configuration(case: Case, directory: Path, slots: int, more: list[str]) -> PPOConfig:
    values = {
        "data.train_files": case.rows,
        "data.shuffle": "false",
        "data.train_batch_size": case.responses.prompts,
        "data.max_prompt_length": 64,
        "data.max_response_length": case.responses.longest,
        "actor_rollout_ref.model.path": case.model,
        "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
        "actor_rollout_ref.model.external_lib": "imposed",
        "actor_rollout_ref.rollout.ignore_eos": "true",
        "actor_rollout_ref.rollout.n": case.responses.samples,
        "actor_rollout_ref.actor.ppo_mini_batch_size": case.responses.prompts // case.updates,
        "actor_rollout_ref.actor.optim.lr": case.lr,
        "algorithm.adv_estimator": "grpo",
        "reward.custom_reward_function.path": f"{HERE}/constructed_rewards.py",
        "trainer.seed": SEED,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": slots,
        "trainer.total_training_steps": 1000,
        "trainer.total_epochs": 1000,
        "trainer.save_freq": -1,
        "trainer.logger": "[]",
        "trainer.default_local_dir": directory / f"run-{slots}",
    }
    return load_ppo_config([f"{key}={value}" for key, value in values.items()] + [*case.keys, *more])


class Sides:
    """The run's task and the other sides, each of which does one thing per round."""

    def __init__(
        self, task: RLTask, case: Case, directory: Path, others: dict[str, Child], parts: Sequence[str]
    ) -> None:
        self.task, self.case, self.directory, self.others, self.parts = task, case, directory, others, parts
        assert isinstance(task.devices, HybridEngine) and isinstance(task.experience, SynchronousExperience)
        self.engine, self.prompts = task.devices, task.experience.prompts
        self.store = PictureStore() if self.prompts.reader is None else self.prompts.reader.store
        self.pictures, add = list[Picture](), self.store.add

        def keep(*arguments: Any) -> Picture:
            self.pictures.append(add(*arguments))
            return self.pictures[-1]

        self.store.add = keep  # a step's requests are repeated when its prompts are gone
        self.last_requests: dict[Key, Request] = {}
        self.last_batch: Batch | None = None
        self.steps = 0
        self.seconds: dict[str, Seconds] = defaultdict(lambda: Seconds([], []))
        self.shares: dict[str, list[float]] = defaultdict(list)

    def rows(self) -> Batch:
        """Return the first step's prompts with random responses: all fields except the policy's outputs."""
        responses, generator = self.case.responses, torch.Generator().manual_seed(0)
        lengths, repeats = responses.lengths, range(responses.samples)
        drawn = [self.prompts[row] for row in range(responses.prompts)]
        prompts = [prompt.ids for prompt in drawn for _ in repeats]
        sampled = [torch.randint(20, 250, (length,), generator=generator).tolist() for length in lengths]
        prompt_ids, prompt_lengths = pack(prompts, torch.int32)
        response_ids, response_lengths = pack(sampled, torch.int32)
        group = torch.arange(responses.prompts).repeat_interleave(responses.samples)
        rows = Batch(
            prompt_lengths=prompt_lengths,
            response_lengths=response_lengths,
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            group=group,
            position=group,
            sample=torch.arange(responses.samples).repeat(responses.prompts),
            rewards=torch.tensor([float(length % 7) for length in lengths]),
            truncated=torch.zeros(len(lengths), dtype=torch.bool),
            response_mask=torch.ones(len(response_ids), dtype=torch.bool),
            carried=carried_of([prompt for prompt in drawn for _ in repeats]),
        )
        return self.task.algorithm.advantages(rows)[0]

    def agree(self) -> dict[str, float]:
        """Update on the same samples from the same weights on every side. Returns the gradient norm of each."""
        batch, workers = self.rows(), self.task.workers
        if workers.needs_old_log_probs(batch):
            batch = workers.forward_log_probs(batch)
        self.save_update(batch)
        norms = {"hybridrl": workers.update_policy(batch, 1)[1]["actor/grad_norm"]}
        if "update" in self.parts:
            norms["bare"] = self.others["bare"].call("update", file=str(self.directory / "update.pt"))["grad_norm"]
        # TRL shuffles rows before it splits them into several updates.
        if "TRL" in self.others and self.case.updates == 1:
            responses = batch.response_ids.split(batch.response_lengths.tolist())
            norms["TRL"] = self.others["TRL"].call("step", responses=[ids.tolist() for ids in responses])["grad_norm"]
        for name, norm in norms.items():
            if abs(norm / norms["hybridrl"] - 1) > 1e-3:
                raise SystemExit(f"{name} computes a different gradient: norms {norms}")
        return norms

    def save_update(self, batch: Batch) -> None:
        """Write the rows, micro-batches and loss of a step's updates on one rank, for the bare side."""
        policy = self.task.workers.policy
        updates = policy.updates.mini_batches(batch.group, 1)
        (mini_batches,) = rank_mini_batches(batch, 1, updates, policy.updates.budget)
        loss = replace(policy.loss, old_from_update=batch.old_log_probs is None)
        handles = self.store.handles(batch.carried[PICTURE_DIGEST].tolist()) if PICTURES in batch.carried else {}
        pixels = dict(zip(handles, Group.fetch([*handles.values()]), strict=True))
        torch.save((batch.only(*loss.reads, *READS), mini_batches, loss, pixels), self.directory / "update.pt")

    # -- measurements of one side --------------------------------------------------------------------------------

    def record(self, name: str, seconds: float, cpu: float) -> None:
        self.seconds[name].wall.append(seconds)
        self.seconds[name].cpu.append(cpu)

    def timed(self, name: str, work: Any) -> Any:
        cpu, began = cpu_seconds(), time.perf_counter()
        result = work()
        self.record(name, time.perf_counter() - began, cpu_seconds() - cpu)
        return result

    def step(self) -> None:
        self.steps += 1
        metrics = self.timed("step", lambda: self.task.train_step(self.steps))
        metrics |= self.task.take_metrics()
        spent = {part: metrics.get(f"timing_s/{part}", 0.0) for part in PARTS}
        for part, seconds in spent.items():
            self.shares[part].append(seconds)
        self.shares["other"].append(self.seconds["step"].wall[-1] - sum(spent.values()))
        for part in ("update_weights", "switch", "adv"):
            self.shares[part].append(metrics.get(f"timing_s/{part}", 0.0))
        self.tokens = self.checked(metrics["perf/response_tokens"])

    def checked(self, tokens: float) -> float:
        """Return the number of sampled tokens; exit if it is not the imposed one."""
        if tokens != (imposed := sum(self.case.responses.lengths)):
            raise SystemExit(f"{tokens:.0f} tokens were sampled, but {imposed} were imposed")
        return tokens

    def rollout(self) -> None:
        """Repeat the last step's requests, after a weight sync."""
        self.engine.to_rollout(version=-self.steps)
        self.timed("rollout", lambda: self.engine.client.generate_all([*self.last_requests.values()]))
        self.engine.to_training()

    def update(self, batch: Batch) -> None:
        self.timed("update", lambda: self.task.workers.update_policy(batch, self.steps))

    def peer(self) -> None:
        reply = self.timed("TRL", lambda: self.others["TRL"].call("step"))
        self.shares["TRL gen"].append(reply["gen"])
        self.record("TRL update", reply["seconds"] - reply["gen"], 0.0)
        self.shares["TRL tokens"].append(self.checked(reply["tokens"]))

    def bare(self, what: str, file: str) -> None:
        reply = self.others["bare"].call(what, file=str(self.directory / file))
        if what == "generate":
            self.checked(sum(map(len, reply["responses"])))
        self.record(f"bare {what}", reply["seconds"], reply["cpu"])

    # -- a round ---------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Keep a step's requests and its update's rows, to repeat them separately from the step."""
        client, workers = self.engine.client, self.task.workers
        generate, update_policy = client.generate, workers.update_policy

        def recording_generate(request: Request, begun: Completion | None = None) -> Any:
            self.last_requests[request.key] = request
            return generate(request, begun)

        def recording_update(batch: Batch, step: int) -> Any:
            self.last_batch = batch
            return update_policy(batch, step)

        client.generate, workers.update_policy = recording_generate, recording_update

    def round(self) -> None:
        self.step()
        if "TRL" in self.others:
            self.peer()
        assert self.last_batch is not None
        if "generate" in self.parts:
            lengths = self.last_batch.response_lengths.tolist()
            plain = [
                {"prompt": prompt.ids, "images": prompt.columns.get("images", [])}
                | {"seed": request.seed, "max_tokens": length}
                for request, length in zip(self.last_requests.values(), lengths, strict=True)
                for prompt in [self.prompts.without_pixels(request.prompt % len(self.prompts))]
            ]
            (self.directory / "requests.json").write_text(json.dumps(plain))
            self.rollout()
            self.bare("generate", "requests.json")
        if "update" in self.parts:
            self.save_update(self.last_batch)
            self.update(self.last_batch)
            self.bare("update", "update.pt")


def carried_of(prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
    """Return the fields that name the pictures of rows, whose prompts these are; {} for prompts of text."""
    names = [name for name in (PICTURE_DIGEST, PICTURE_START) if prompts[0].pictures]
    joined = {name: torch.from_numpy(np.concatenate([prompt.carried[name] for prompt in prompts])) for name in names}
    return joined and {PICTURES: torch.tensor([len(prompt.pictures) for prompt in prompts]), **joined}


def measure(task: RLTask, case: Case, directory: Path, options: argparse.Namespace, config: PPOConfig) -> list[Row]:
    section = config.actor_rollout_ref
    optimizer = {"lr": section.actor.optim.lr, "betas": tuple(section.actor.optim.betas)}
    settings = {"model": section.model, "optimizer": optimizer, "vision": task.workers.models["actor"].vision}
    torch.save(settings, directory / "model.pt")
    torch.save((section.model, section.rollout, 1), directory / "engine.pt")
    (directory / "setting.json").write_text(json.dumps(case.setting()))
    with ExitStack() as stack:
        others = {}
        if options.bare:
            bare = [sys.executable, str(HERE / "bare.py"), "--threads", str(options.threads)]
            # vLLM is fastest with its engine in the same process.
            environment = {"OMP_NUM_THREADS": str(options.threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            others["bare"] = stack.enter_context(Child(bare, directory / "bare.log", environment))
            for part, call, file in (
                ("generate", "start_engine", "engine.pt"),
                ("update", "start_updates", "model.pt"),
            ):
                if part in options.bare:
                    others["bare"].call(call, file=str(directory / file))
        if options.peer:
            peer = [
                options.peer,
                str(HERE / "trl_peer.py"),
                str(directory / "setting.json"),
                "--micro",
                str(options.micro),
            ]
            environment = {"OMP_NUM_THREADS": str(options.threads)}
            others["TRL"] = stack.enter_context(Child(peer, directory / "trl.log", environment))
        sides = Sides(task, case, directory, others, options.bare)
        norms = sides.agree()
        print("gradient norms on the same samples:", norms, flush=True)
        sides.watch()
        for number in range(-1, options.rounds):
            if number == 0:  # the first round filled caches
                sides.seconds.clear()
                sides.shares.clear()
            sides.round()
            print(
                f"round {number}:",
                {name: round(seconds.wall[-1], 2) for name, seconds in sides.seconds.items()},
                flush=True,
            )
        print({name: round(median(values), 3) for name, values in sides.shares.items()}, f"tokens {sides.tokens}")
        return rows_of(sides, options)


def rows_of(sides: Sides, options: argparse.Namespace) -> list[Row]:
    measured, shares, case, step = sides.seconds, sides.shares, sides.case, sides.seconds["step"]
    name, responses = f"{options.case}, {options.slots} slots", len(case.responses.lengths)
    targets = {figure: by_case.get(options.case, "") for figure, by_case in TARGETS.items()}
    rows = []
    if "TRL" in measured:
        ours, other = (
            f"{responses / side.median:.1f} samples/s; {formatted(side)}" for side in (step, measured["TRL"])
        )
        faster = measured["TRL"].median / step.median
        rows.append(Row(f"whole step against TRL ({name})", ours, other, faster, targets["TRL"]))
        if "update" in measured:
            mine, other = measured["update"], measured["TRL update"]
            cells = f"{mine.median:.2f} s", f"without its generation {other.median:.2f} s"
            faster = other.median / mine.median
            rows.append(Row(f"update against TRL's ({name})", *cells, faster, targets["TRL update"]))
    for part, what, other, figure in (
        ("rollout", "rollout against vLLM's generate", "bare generate", "generate"),
        ("update", "update against bare torch", "bare update", "update"),
    ):
        if other in measured:
            ours, bare = measured[part], measured[other]
            ratio = bare.median / ours.median
            rows.append(Row(f"{what} ({name})", formatted(ours), formatted(bare), ratio, targets[figure]))
    if {"bare generate", "bare update"} <= measured.keys():
        bare = measured["bare generate"].median + measured["bare update"].median
        what = f"whole step over bare vLLM + torch ({name})"
        rows.append(Row(what, formatted(step), f"{bare:.2f} s", step.median / bare, targets["bare"]))
    parts = ", ".join(f"{part} {median(shares[part]):.2f}" for part in (*PARTS, "update_weights", "switch", "other"))
    outside = median(shares["other"]) / step.median
    return [*rows, Row(f"share of a step outside its work ({name})", f"{parts} s", "", outside, targets["outside"])]


def main() -> None:
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--case", choices=CASES, default="25m")
    parser.add_argument("--model", default="", metavar="DIR", help="the model of the case pretrained")
    parser.add_argument("--peer", help="the Python of TRL's environment")
    parser.add_argument("--micro", type=int, default=16, help="rows per micro-batch of TRL")
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="threads of the other sides")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parts = ["generate", "update", "both", "none"]
    parser.add_argument("--bare", choices=parts, default="both", help="what bare vLLM and torch do as well")
    parser.add_argument("overrides", nargs="*", help="key=value of the run")
    options = parser.parse_args()
    options.bare = {"both": ["generate", "update"], "none": []}.get(options.bare, [options.bare])
    impose("tiny" if options.tiny else options.case)
    with TemporaryDirectory() as place:
        directory = Path(place)
        case = CASES[options.case](directory, options.tiny, options.model)
        config = configuration(case, directory, options.slots, options.overrides)
        rows: list[Row] = []

        class Measured(Trainer):
            def fit(self, done: int, start_up: dict[str, float]) -> None:
                assert isinstance(self.task, RLTask)
                rows.extend(measure(self.task, case, directory, options, config))

        setup.Trainer = Measured
        setup.draw_curves = setup.summary = lambda directory: ""
        setup.train(config, ppo.PPOJob, setup.Sessions())
        report(rows, options.json)


if __name__ == "__main__":
    main()
