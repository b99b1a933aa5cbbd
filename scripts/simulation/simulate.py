"""Predicts the wall time of synchronous and asynchronous rollout by simulation: lengths in, seconds per step out.

Nothing is generated or trained, and nothing of a model is known: an engine with `b` running responses takes a given
time per token of each, so the simulation moves from one completed response to the next. What it leaves out: whatever
else takes time, differences between engines, faults, and what training on older samples does to learning.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np


@dataclass(frozen=True)
class Cluster:
    """Engines and the seconds of all that they do; training uses the devices of all engines unless pools are separate.

    `speed` has pairs (running responses, seconds per token of each), linear in between and constant outside.
    """

    engines: int = 1
    slots: int = 256  # responses that an engine decodes at once
    speed: tuple[tuple[int, float], ...] = ((1, 0.02),)
    prefill_rate: float = math.inf  # tokens per second and engine, which decodes nothing meanwhile
    train: float = 0.0  # seconds per step, on all devices
    sync: float = 0.0  # seconds per weight sync, shared devices
    switch: float = 0.0  # seconds per step from rollout to training and back, shared devices
    pause: float = 0.0  # seconds per weight sync, separate pools: neither side works


@dataclass(frozen=True)
class Work:
    """What a run generates: `groups` per step, their lengths in the order of the prompts (reused if they run out)."""

    groups: int
    lengths: np.ndarray  # [groups of the run, responses per group] sampled tokens
    prompt_tokens: float = 0.0
    steps: int = 40
    warmup: int = 10  # steps that are left out of the means


@dataclass(frozen=True)
class Mode:
    """When groups are started and trained on.

    `bound` is the largest difference between the policy version of a step and the version that sampled the first token
    of an episode in it: at version v, `(v + 1 + bound) * groups` groups may have been started, and a step waits for
    open groups with which a later step would exceed the bound. 0 is synchronous. `over_sampling` limits the groups that
    may have been started to `(v + 1 + over_sampling) * groups`: their mean staleness is hardly more than that. With
    `training_engines`, training has these devices to itself.
    """

    name: str
    bound: int | None = 0
    over_sampling: float | None = None
    training_engines: int = 0
    # Beyond what a step needs, a group is started while fewer responses are open than `1 + queued` times those that a
    # synchronous step runs at once; None: however many are open.
    queued: float | None = None


@dataclass(frozen=True)
class Prediction:
    """Means per step after the warm-up; `staleness` is of episodes, as `Mode.bound`."""

    mode: Mode
    seconds: float
    samples_per_second: float
    rollout_busy: float  # share of the slots, while engines may generate
    training_busy: float  # share of the time
    staleness: float
    max_staleness: int
    reprefill_tokens: float
    submits: float  # messages to engines, one for all that an engine is given at a moment
    takes: float  # moments at which groups complete


def log_normal_lengths(count: int, mean: float, sigma: float, cap: int, seed: int = 0) -> np.ndarray:
    """Sample lengths; `mean` and `sigma` (of the logarithm) describe the distribution without the cap."""
    lengths = np.random.default_rng(seed).lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(lengths.round(), 1, cap)


def simulate(work: Work, cluster: Cluster, mode: Mode) -> Prediction:
    """Simulate a run; 500,000 responses take some three seconds."""
    return _Run(work, cluster, mode).predict()


def best_split(work: Work, cluster: Cluster, bound: int, queued: float | None = None) -> Prediction:
    """Return the fastest separate pools: both sides busy is estimated, and simulated with its two neighbours."""
    assert cluster.engines > 1, "one engine cannot be split"
    tokens = work.groups * work.lengths.shape[1] * work.lengths.mean()
    generate = tokens * _seconds_by_batch(cluster)[-1] / (cluster.engines * cluster.slots)
    share = cluster.train / (cluster.train + generate)
    middle = min(max(round(share * cluster.engines), 1), cluster.engines - 1)
    splits = [count for count in (middle - 1, middle, middle + 1) if 0 < count < cluster.engines]
    modes = [Mode("separate", bound, None, count, queued) for count in splits]
    return min((simulate(work, cluster, mode) for mode in modes), key=lambda prediction: prediction.seconds)


def _seconds_by_batch(cluster: Cluster) -> list[float]:
    batches, seconds = zip(*sorted(cluster.speed), strict=True)
    return np.interp(np.arange(cluster.slots + 1), batches, seconds).tolist()


class _Engine:
    """All responses of an engine advance together, so one clock of tokens serves them: a response that is placed at
    token t completes at t + length, however the speed changes meanwhile."""

    def __init__(self, seconds_by_batch: list[float]) -> None:
        self.seconds = seconds_by_batch
        self.tokens = 0.0  # the clock
        self.updated = 0.0  # time up to which the clock is right
        self.ready = 0.0  # until then nothing is decoded: prefill, training, a sync
        self.running: list[tuple[float, float, int]] = []  # heap of (token of completion, token of start, group)
        self.busy = 0.0  # slot-seconds of decoding

    def advance(self, now: float) -> None:
        elapsed = now - max(self.updated, self.ready)
        if elapsed > 0:
            self.tokens += elapsed / self.seconds[len(self.running)]
            self.busy += elapsed * len(self.running)
        self.updated = now

    def next_completion(self) -> float:
        if not self.running:
            return math.inf
        return max(self.updated, self.ready) + (self.running[0][0] - self.tokens) * self.seconds[len(self.running)]

    def place(self, now: float, length: float, group: int, prefill: float) -> None:
        self.advance(now)
        self.wait(now, prefill)
        heappush(self.running, (self.tokens + length, self.tokens, group))

    def complete(self, now: float) -> int:
        """Remove the response that is complete now; return its group."""
        self.advance(now)
        self.tokens, _, group = heappop(self.running)
        return group

    def wait(self, now: float, seconds: float) -> None:
        self.ready = max(self.ready, now) + seconds

    def open_tokens(self) -> float:
        return sum(self.tokens - start for _, start, _ in self.running)

    def restart_clock(self) -> None:
        """Subtract the clock from all: floating point stays exact over long runs."""
        self.running = [(end - self.tokens, start - self.tokens, group) for end, start, group in self.running]
        heapify(self.running)
        self.tokens = 0.0


class _Group:
    __slots__ = ("first_version", "remaining", "versions")

    def __init__(self, size: int) -> None:
        self.remaining = size
        self.first_version = -1  # of the first token; -1: still queued
        self.versions = 0  # sum of the first versions of its episodes


class _Run:
    """The state of a run: groups are queued, open, ready for training, and trained on."""

    def __init__(self, work: Work, cluster: Cluster, mode: Mode) -> None:
        self.work, self.cluster, self.mode = work, cluster, mode
        count = cluster.engines - mode.training_engines
        assert count > 0, "no engine is left for rollout"
        seconds = _seconds_by_batch(cluster)
        self.engines = [_Engine(seconds) for _ in range(count)]
        self.loads = np.zeros(count, dtype=int)
        self.completions = np.full(count, math.inf)  # time of the next one, per engine
        self.size = work.lengths.shape[1]
        at_once = min(count * cluster.slots, work.groups * self.size)
        self.full = None if mode.queued is None else at_once * (1 + mode.queued)  # open responses
        self.prefill = work.prompt_tokens / cluster.prefill_rate  # seconds
        ahead = min(limit for limit in (mode.bound, mode.over_sampling) if limit is not None)
        self.limit = math.ceil((1 + ahead) * work.groups)
        self.queue: deque[tuple[float, int]] = deque()  # (length, group)
        self.groups: dict[int, _Group] = {}  # open
        self.open_versions: Counter[int] = Counter()  # open groups by the version of their first token
        self.ready_versions: Counter[int] = Counter()
        self.ready: list[tuple[int, int, int]] = []  # heap of (version of the first token, when complete, sum)
        self.now = self.generating = self.training = self.reprefilled = 0.0
        self.version = self.admitted = self.accepted = self.submits = self.takes = 0
        self.last_take = -1.0
        self.staleness: list[float] = []
        self.max_staleness = 0

    def predict(self) -> Prediction:
        history = [self.totals()]
        for _ in range(self.work.steps):
            self.step()
            history.append(self.totals())
        work, measured = self.work, self.work.steps - self.work.warmup
        per_step = (np.array(history[-1]) - np.array(history[work.warmup])) / measured
        seconds, busy, generating, training, reprefilled, submits, takes = per_step.tolist()
        return Prediction(
            self.mode,
            seconds,
            work.groups * self.size / seconds,
            busy / (generating * len(self.engines) * self.cluster.slots),
            training / seconds,
            float(np.mean(self.staleness[work.warmup :])),
            self.max_staleness,
            reprefilled,
            submits,
            takes,
        )

    def totals(self) -> tuple[float, ...]:
        busy = sum(engine.busy for engine in self.engines)
        return self.now, busy, self.generating, self.training, self.reprefilled, self.submits, self.takes

    def step(self) -> None:
        began = self.now
        while not self.can_train():
            self.start_groups()
            self.complete_next()
        self.generating += self.now - began
        self.take_batch()
        if self.mode.training_engines:
            self.train_meanwhile()
        else:
            self.train_instead()
        self.version += 1

    def start_groups(self) -> None:
        """Admit the groups that may start, and fill free slots from the queue."""
        capacity = self.version * self.work.groups + self.limit - self.admitted
        if self.full is not None:
            load = int(self.loads.sum()) + len(self.queue)
            needed = (self.version + 1) * self.work.groups - self.admitted
            capacity = min(capacity, max(needed, math.ceil((self.full - load) / self.size)))
        for _ in range(capacity):
            self.groups[self.admitted] = _Group(self.size)
            lengths = self.work.lengths[self.admitted % len(self.work.lengths)].tolist()
            self.queue.extend((length, self.admitted) for length in lengths)
            self.admitted += 1
        touched = set()
        while self.queue and self.loads[index := int(self.loads.argmin())] < self.cluster.slots:
            self.place(index, *self.queue.popleft())
            touched.add(index)
        for index in touched:
            self.completions[index] = self.engines[index].next_completion()
        self.submits += len(touched)

    def place(self, index: int, length: float, number: int) -> None:
        self.engines[index].place(self.now, length, number, self.prefill)
        self.loads[index] += 1
        group = self.groups[number]
        group.versions += self.version
        if group.first_version < 0:
            group.first_version = self.version
            self.open_versions[self.version] += 1

    def complete_next(self) -> None:
        """Move to the next completed response."""
        index = int(self.completions.argmin())
        engine = self.engines[index]
        assert engine.running, "nothing runs, yet the step is not complete"
        self.now = max(self.now, float(self.completions[index]))
        number = engine.complete(self.now)
        self.completions[index] = engine.next_completion()
        self.loads[index] -= 1
        group = self.groups[number]
        group.remaining -= 1
        if not group.remaining:
            del self.groups[number]
            self.open_versions[group.first_version] -= 1
            self.ready_versions[group.first_version] += 1
            heappush(self.ready, (group.first_version, self.accepted, group.versions))
            self.accepted += 1
            self.takes += self.now > self.last_take
            self.last_take = self.now

    def can_train(self) -> bool:
        """Whether the batch is complete, and what it leaves behind can be trained on within the bound.

        Limiting the groups that are started is not enough: a slow one would be overtaken for any number of steps. Those
        of version u or older have u + bound - version steps left after this one, of a batch each. Waiting for the
        oldest always ends: there are enough steps for all that were started, and each takes the oldest batch.
        """
        if len(self.ready) < self.work.groups:
            return False
        bound = self.mode.bound or 0
        open_groups = ready = 0
        for steps_left in range(max(bound - self.version, 0), bound):
            version = self.version + steps_left - bound
            open_groups += self.open_versions[version]
            ready += self.ready_versions[version]
            if open_groups + max(ready - self.work.groups, 0) > steps_left * self.work.groups:
                return False
        return True

    def take_batch(self) -> None:
        batch = [heappop(self.ready) for _ in range(self.work.groups)]
        self.ready_versions.subtract(first_version for first_version, _, _ in batch)
        versions = sum(versions for _, _, versions in batch)
        self.staleness.append(self.version - versions / (self.work.groups * self.size))
        self.max_staleness = max(self.max_staleness, self.version - batch[0][0])

    def train_instead(self) -> None:
        """Train on the devices of the engines."""
        seconds = self.cluster.train + self.cluster.sync + self.cluster.switch
        self.interrupt(seconds)
        self.now += seconds
        self.training += self.cluster.train

    def train_meanwhile(self) -> None:
        """Train on other devices while the engines generate; both stop for the weight sync."""
        began = self.now
        seconds = self.cluster.train * self.cluster.engines / self.mode.training_engines
        self.start_groups()
        while self.completions.min() <= began + seconds:
            self.complete_next()
            self.start_groups()
        self.now = began + seconds
        self.training += seconds
        self.interrupt(self.cluster.pause)
        self.now += self.cluster.pause
        self.generating += self.now - began

    def interrupt(self, seconds: float) -> None:
        """Stop the engines for so long; afterwards open responses are prefilled again, with the new weights."""
        for index, engine in enumerate(self.engines):
            engine.advance(self.now)
            tokens = engine.open_tokens() + len(engine.running) * self.work.prompt_tokens
            self.reprefilled += tokens
            engine.restart_clock()
            engine.ready = self.now + seconds + tokens / self.cluster.prefill_rate
            self.completions[index] = engine.next_completion()
