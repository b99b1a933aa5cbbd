"""Measures on GPUs: `python scripts/benchmark/gpu.py [--shape 0.5b] [--gpus 1] [--json FILE] [-- key=value]`

One shape with random weights in bfloat16. Each row is printed, and written with --json, as soon as it is measured, in
this order: start-up, weight sync by CUDA IPC, the switch, one update of 16k tokens per GPU as a share of the GPU's
peak, with its idle share and the host's own time, the same with rows that begin alike, memory of log-probs, rollout,
difference of log-probs between engine and trainer, memory that a sleeping engine keeps, the update with each of
--variants (all of VARIANTS by default), and vLLM's own `generate`, with its engine in the caller's process and, as is
vLLM's default, in a process of its own. Rows that are not reached within --seconds are listed as not measured. Status 1
means that a row failed; the workers' logs are then printed. `--device cpu` only tests the script, with few tokens; its
figures have no meaning.
"""

import json
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from child import Child
from gpu_work import GROUP, LOADS, cuts, operations, peak_of, sampled
from kernel_trace import read_trace, record_next_update
from limited import Report, cell, measure
from memory_plan import make_model, overrides
from models import SHAPES
from side_by_side import ROUNDS, Row, arguments, in_turn
from weight_sync import count_calls

from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.core.batch import Batch
from hybridrl.core.cluster import Group, RemoteFailure, gather, kill
from hybridrl.core.hybrid_engine import Mode
from hybridrl.core.rollout.vllm.settings import ENVIRONMENT
from hybridrl.core.rounding import LIMITS, MULTIPLES
from hybridrl.core.training.worker import TrainWorker
from hybridrl.core.training.worker_group import RankPlan, TrainWorkers
from hybridrl.core.weights.sync import WeightSync
from hybridrl.runs.ppo import probe_ids, start_devices
from hybridrl.runs.ranks import build_models, fitting_plan, start_train_workers
from hybridrl.runs.settings import build_algorithm, build_policy_plan, ppo_worker_config
from hybridrl.runs.setup import start_session
from hybridrl.runtime.guard import guarded

GIB = 2**30
# Targets by shape: seconds of a weight sync, and the share of the GPU's peak in an update.
SYNC_SECONDS = {"0.5b": 0.3, "7b": 1.5}
SHARES = {"0.5b": 0.28, "1.5b": 0.50, "7b": 0.48}
BASE = "with recomputation"
# Settings with which the update is also measured, in separate training ranks without an engine on the device.
VARIANTS = {
    "without recomputation": ["actor_rollout_ref.model.enable_gradient_checkpointing=false"],
    "every second layer recomputed": ["actor_rollout_ref.model.enable_gradient_checkpointing=2"],
    "compiled layers": [
        "actor_rollout_ref.actor.fsdp_config.compile_layers=true",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    ],
    "without resharding": ["actor_rollout_ref.actor.fsdp_config.reshard_after_forward=false"],
}


# Where plain vLLM's engine computes -> the value of the variable; hybridrl's computes in the process of its server.
MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
PROCESS_MODES = {"in the caller's process": "0", "in its own process, vLLM's default": "1"}


@dataclass(frozen=True)
class Memory:
    """GiB of a device: a rank's tensors, their peak since it was reset, and everything else."""

    gpu: str
    allocated: float
    peak: float
    others: float


def read_memory(worker: TrainWorker, reset: bool) -> tuple[str, float, float, float]:
    """Return the fields of Memory; runs in a training rank, as any other process would use memory of the device."""
    if worker.config.device != "cuda":
        return "", 0.0, 0.0, 0.0
    torch.cuda.synchronize()
    if reset:
        torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    sizes = (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), others)
    return torch.cuda.get_device_name(), *(size / GIB for size in sizes)


def memory(group: Group, *, reset: bool = False) -> list[Memory]:
    """Return the memory of each rank."""
    memories = gather(
        [actor.__ray_call__.remote(read_memory, reset) for actor in group.actors], "train worker.read_memory", 60
    )
    return [Memory(*rank) for rank in memories]


class Bench:
    """A run of one shape without data, and the rows that are measured with it."""

    def __init__(self, options: Namespace, directory: Path, stack: ExitStack) -> None:
        self.options, self.directory, self.stack = options, directory, stack
        self.name, self.shape, self.load = options.shape, SHAPES[options.shape], LOADS[options.device]
        self.number, self.calls = 0, Counter()

    def tasks(self) -> dict[str, Callable[[], list[Row]]]:
        tasks = {
            "start-up": self.start,
            "weight sync and switch": self.sync_and_switch,
            f"update, {BASE}": lambda: self.update(BASE),
            "update, rows that begin alike": self.beginnings,
            "log-probs": self.log_probs,
            "rollout": self.rollout,
            "difference of log-probs": self.agreement,
            "memory of a sleeping engine": self.asleep,
        }
        for name in self.options.variants:
            tasks[f"update, {name}"] = lambda name=name: self.variant(name)
        return tasks | {"rollout against vLLM's generate": self.bare}

    def start(self) -> list[Row]:
        began = time.monotonic()
        self.parameters = make_model(self.shape, self.directory / "model")
        written, self.config = time.monotonic(), self.configured()
        self.session = start_session(self.config.trainer, self.config.ray_kwargs.ray_init)
        self.stack.callback(self.session.close)
        count_calls(self.calls)
        self.algorithm = build_algorithm(self.config)
        worker = ppo_worker_config(self.config, self.algorithm, self.directory, 1)
        probe = probe_ids(list(range(5, 12)))
        self.group, self.engine = start_devices(self.config, self.session, worker, self.directory, probe)
        self.workers, self.gpu = self.with_plans(self.config), memory(self.group)[0].gpu
        devices = f"{len(self.group)} x {self.gpu or 'CPU'}"
        took = f"{time.monotonic() - written:.1f} s, model written in {written - began:.1f} s; {devices}"
        return [Row(f"start-up, {self.name}", took, "")]

    def configured(self, *more: str, tokens: int | None = None) -> PPOConfig:
        """Return the configuration: one update of all rows, in one micro-batch unless `tokens` is smaller."""
        load, prompts = self.load, self.load.rows * self.options.gpus // GROUP
        options = [
            f"trainer.device={self.options.device}",
            f"trainer.n_gpus_per_node={self.options.gpus}",
            "trainer.save_freq=-1",
            f"data.train_batch_size={prompts}",
            f"data.max_response_length={load.width}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens or load.rows * load.width}",
            "actor_rollout_ref.actor.fsdp_config.compile_layers=false",
            "actor_rollout_ref.rollout.max_num_seqs=256",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        ]
        command = [*options, *self.options.overrides, *more]
        return load_ppo_config(overrides(self.directory / "model", self.directory, False, command))

    def with_plans(self, config: PPOConfig) -> TrainWorkers:
        timeout = config.trainer.step_timeout
        models = ppo_worker_config(config, self.algorithm, self.directory, 1).models
        plan = fitting_plan(self.group, RankPlan(models, build_policy_plan(config)), timeout)
        return TrainWorkers(self.group, plan, config.actor_rollout_ref.rollout.dtype, timeout)

    def to_rollout(self) -> None:
        self.number += 1
        try:
            self.engine.to_rollout(version=self.number)
        except Exception:
            self.engine.mode = Mode.ROLLOUT  # the engine may be awake, and other rows need the device
            self.engine.to_training()
            raise

    def sync_and_switch(self) -> list[Row]:
        rounds = []
        for number in range(ROUNDS + 1):
            if number == 1:  # the first round warms up
                self.calls.clear()
            self.to_rollout()
            self.engine.to_training()
            rounds.append(self.engine.watch.take())
        sync, switch = ([one[f"timing_s/{name}"] for one in rounds[1:]] for name in ("update_weights", "switch"))
        parts = {call: value / ROUNDS for call, value in self.calls.most_common()}
        listed = ", ".join(f"{call} {1e3 * value:.1f}" for call, value in parts.items())
        target = f"at most {SYNC_SECONDS[self.name]}" if self.name in SYNC_SECONDS else ""
        asleep = parts["rollout.sleep"] + parts["rollout.wake"]
        return [
            Row(f"weight sync, seconds, {self.name}", f"{cell(sync)}; {listed} ms", "", median(sync), target),
            Row(f"switch there and back, seconds, {self.name}", cell(switch), "", median(switch)),
            Row(f"sleep and wake, seconds, {self.name}", "", "", asleep, "at most 0.2"),
        ]

    def batch(self, **changes: int) -> Batch:
        return self.algorithm.advantages(replace(self.load, **changes).batch(self.options.gpus))[0]

    def update(self, variant: str) -> list[Row]:
        batch = self.batch()
        memory(self.group, reset=True)
        seconds = in_turn({"update": lambda: self.workers.update_policy(batch, 1)})["update"]
        peak = max(rank.peak for rank in memory(self.group))
        updates, micro_batches = cuts(self.workers, batch)
        tokens, gpus = int(batch.lengths.sum()), len(self.group)
        speed = operations(self.shape, self.parameters, tokens, self.load.width) / seconds.median / gpus
        most = peak_of(self.gpu)
        size = tokens // gpus // micro_batches
        cut = f"{updates} update in {micro_batches} micro-batch(es) of {size:,} tokens per rank"
        row = Row(
            f"update, share of the peak, {variant}, {self.name}",
            f"{cell(seconds.wall)}; {cut}; {speed / 1e12:.3g} TFLOP/s per rank; peak {peak:.1f} GiB",
            "",
            speed / most if most else None,
            f"at least {SHARES[self.name]}" if self.name in SHARES else "",
        )
        return [row, *self.kernels(batch, variant), self.floor(variant)]

    def beginnings(self) -> list[Row]:
        """Compare an update of eight responses per prompt, each an eighth of its length, with as many tokens in rows
        that differ from their first token on."""
        prompt = 2 * self.load.width
        rows = {"prompt": prompt, "width": prompt + self.load.width // 4}
        batches = {"trees": self.batch(**rows, alike=8), "alone": self.batch(**rows)}
        updates = {side: partial(self.workers.update_policy, batch, 1) for side, batch in batches.items()}
        seconds = in_turn(updates)
        what = f"update, rows that begin alike against rows alone, prompts of {prompt:,}, {self.name}"
        ours, theirs = seconds["trees"], seconds["alone"]
        return [Row(what, cell(ours.wall), cell(theirs.wall), theirs.median / ours.median, "at least 3")]

    def floor(self, variant: str) -> Row:
        """Measure the host's own time: an update with one response token per row."""
        batch = self.batch(width=2)
        seconds = in_turn({"floor": lambda: self.workers.update_policy(batch, 1)})["floor"]
        what = f"update, floor, seconds with one response token per row, {variant}, {self.name}"
        return Row(what, cell(seconds.wall), "", seconds.median)

    def kernels(self, batch: Batch, variant: str) -> list[Row]:
        """Record one more update of the first rank, which takes longer than the others as it is recorded."""
        file = self.directory / "update.json"
        gather([self.group.actors[0].__ray_call__.remote(record_next_update, str(file))], "train worker.record", 60)
        self.workers.update_policy(batch, 1)
        found = read_trace(file)
        if found is None:
            return []
        what = f"update, idle share of the device, {variant}, {self.name}"
        return [Row(what, str(found), "", 1 - found.busy / found.span, "at most 0.05")]

    def log_probs(self) -> list[Row]:
        batch, before = self.batch(), memory(self.group, reset=True)
        seconds = in_turn({"log-probs": lambda: self.workers.forward_log_probs(batch)})["log-probs"]
        peak = max(after.peak - rank.allocated for after, rank in zip(memory(self.group), before, strict=True))
        plain = 2 * 4 * self.load.rows * (self.load.width - 1) * self.shape["vocab_size"] / GIB
        what = f"log-probs, peak beyond kept memory, relative to that of full logits, {self.name}"
        ours, other = f"{peak:.2f} GiB; {cell(seconds.wall)}", f"float32 logits and their softmax {plain:.2f} GiB"
        return [Row(what, ours, other, peak / plain if self.gpu else None, "at most 0.1")]

    def rollout(self) -> list[Row]:
        """Each round follows a weight sync, which is not counted, as in a run."""
        requests = self.load.requests(self.options.gpus)

        def generate() -> None:
            self.responses = self.engine.client.generate_all(requests)

        sides = {"to rollout": self.to_rollout, "generate": generate, "to training": self.engine.to_training}
        self.generated = in_turn(sides, rounds=3)["generate"]
        return [Row(f"rollout, {self.name}", self.speed(self.generated.median), "")]

    def speed(self, seconds: float) -> str:
        return f"{self.load.responses * self.load.tokens / seconds:,.0f} tokens/s per GPU; {seconds:.2f} s"

    def agreement(self) -> list[Row]:
        rows = self.workers.forward_log_probs(sampled(self.responses, self.load.requests(self.options.gpus)))
        gaps = (rows.old_log_probs - rows.rollout_log_probs).abs()
        assert isinstance(self.engine.sync, WeightSync)
        rounding = MULTIPLES[0] * float(self.engine.sync.rounding.abs().mean())
        most = f"at most {max(LIMITS[self.engine.sync.rounded][0], rounding):.3g}"
        of = f"largest {float(gaps.max()):.3g}, of {len(gaps):,} tokens"
        return [Row(f"difference of log-probs, mean, {self.name}", of, "", float(gaps.mean()), most)]

    def asleep(self) -> list[Row]:
        """Compare the devices' memory, minus the trainers' tensors, with and without engines: ends the engines."""
        before = memory(self.group)
        self.end(self.engine.fleet.servers)
        after = memory(self.group)
        kept = max(one.others - other.others for one, other in zip(before, after, strict=True))
        with_engine, without = before[0].others, after[0].others
        sizes = f"{with_engine:.2f} GiB in addition to the trainer's tensors, {without:.2f} GiB without the engine"
        value = kept if self.gpu else None
        return [Row(f"sleeping engine, GiB on the device, {self.name}", sizes, "", value, "at most 1.5")]

    def variant(self, name: str) -> list[Row]:
        """Measure the update in new training ranks; in smaller micro-batches if one of all rows does not fit."""
        tokens = self.load.rows * self.load.width
        while True:
            self.end(self.group)
            try:
                self.build(self.configured(*VARIANTS.get(name, name.split()), tokens=tokens))
                return self.update(name)
            except RemoteFailure as error:
                if "out of memory" not in str(error) or tokens <= self.load.width:
                    raise
                tokens //= 2

    def build(self, config: PPOConfig) -> None:
        self.group = start_train_workers(self.session, self.directory)
        worker = ppo_worker_config(config, self.algorithm, self.directory, 1)
        build_models(self.group, worker, config.trainer.startup_timeout)
        self.workers = self.with_plans(config)

    def end(self, group: Group) -> None:
        for actor in group.actors:
            kill(actor)
        time.sleep(5 if self.gpu else 0)  # the device's memory is free once the processes are gone

    def bare(self) -> list[Row]:
        """Measure plain vLLM on one device, with one GPU's share of the responses, in both of its process modes."""
        self.end(self.group)
        section = self.config.actor_rollout_ref
        engine, file = self.directory / "engine.pt", self.directory / "requests.json"
        torch.save((section.model, section.rollout, 1), engine)
        tokens, requests = self.load.tokens, self.load.requests(1)
        plain = [{"prompt": one.prompt_ids, "seed": one.seed, "max_tokens": tokens} for one in requests]
        file.write_text(json.dumps(plain))
        return [self.bare_in(mode, engine, file) for mode in PROCESS_MODES]

    def bare_in(self, mode: str, engine: Path, file: Path) -> Row:
        command = [sys.executable, str(Path(__file__).with_name("bare.py")), "--device", self.options.device]
        log = self.directory / f"bare-{PROCESS_MODES[mode]}.log"
        with Child(command, log, ENVIRONMENT | {MULTIPROCESSING: PROCESS_MODES[mode]}) as side:
            side.call("start_engine", file=str(engine))
            seconds = median([side.call("generate", file=str(file))["seconds"] for _ in range(4)][1:])
        if self.gpu:
            time.sleep(5)  # the device's memory is free once the processes are gone
        ours = self.generated.median
        what = f"rollout against vLLM's generate, its engine {mode}, {self.name}"
        return Row(what, self.speed(ours), self.speed(seconds), seconds / ours, "at least 0.98")


def parse() -> Namespace:
    parser = arguments(__doc__, shape="tiny", device="cpu", variants=list(VARIANTS)[:1])
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--device", choices=LOADS, default="cuda")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), help='names in VARIANTS, or "key=value ..."')
    parser.add_argument("--seconds", type=float, default=520.0, help="time after which no further row is measured")
    parser.add_argument("overrides", nargs="*", help="key=value of the run, after --")
    return parser.parse_args()


def main(options: Namespace) -> int:
    with TemporaryDirectory() as place, ExitStack() as stack:
        bench = Bench(options, Path(place), stack)
        failed = measure(bench.tasks(), Report(options.json), options.seconds)
        for log in sorted(Path(place).glob("*.log")) if failed else ():
            print(f"-- the end of {log.name}", *log.read_text(errors="replace").splitlines()[-40:], sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    chosen = parse()  # --help needs no process of its own
    sys.exit(guarded(lambda: main(chosen)))
