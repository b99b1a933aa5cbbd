"""All training ranks as one group: assigns rows to ranks and micro-batches, and puts results back in order.

Runs on the driver. A step calls `old_log_probs`, `fill` and `update`; each fills fields of the batch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.catalog import SAMPLED_KL
from hybridrl.config.schema import CriticConfig
from hybridrl.core.algorithms import Algorithm
from hybridrl.core.algorithms.algorithm import ForwardSpec, Signal, bind, imported
from hybridrl.core.algorithms.batch_metrics import Agreement
from hybridrl.core.algorithms.rollout_correction import RolloutCorrection
from hybridrl.core.batch import Batch, spans
from hybridrl.core.carried import PICTURE_DIGEST
from hybridrl.core.cluster import Group, OutOfMemory, Pending
from hybridrl.core.cluster.group import control_limit
from hybridrl.core.pictures import PictureStore
from hybridrl.core.training.learner import RankModel
from hybridrl.core.training.losses import LossConfig, kl_of_teachers
from hybridrl.core.training.packing import as_read, computed_tokens
from hybridrl.core.training.planning import (
    Forest,
    MicroBatchBudget,
    MicroBatches,
    MiniBatch,
    Outputs,
    Pieces,
    UpdatePlan,
    in_row_order,
    plan_trees,
    rank_mini_batches,
    training_seed,
)
from hybridrl.core.training.vision import computed_share, work_of
from hybridrl.core.training.worker import TrainWorker
from hybridrl.required import required
from hybridrl.tracking.sink import Stopwatch

SKIPPED_UPDATES = "skipped_updates"  # directory in which training ranks write the rows of skipped updates
# The policy's outputs before the updates, in the order of `TokenOutputs`.
OLD_FIELDS = ("old_log_probs", "entropies", "sum_pi_squared", "reference_kl")
OLD = Signal(OLD_FIELDS, "actor", ForwardSpec(entropies=True), timing="old_log_prob")
CRITIC_FIELDS = ("response_mask", "values", "returns", "episode_tokens")

Metrics = dict[str, float]


@dataclass(frozen=True)
class PolicyPlan:
    """The training of the policy, and its outputs before the updates."""

    loss: LossConfig
    updates: UpdatePlan
    old: Signal = OLD
    stochastic: bool = False  # dropout is active in updates
    first_update: int = 1  # before this step only the critic is trained
    correction: RolloutCorrection | None = None  # weights tokens if an update's own log-probs are the old ones
    agreement: Agreement | None = None  # checks that engine and trainer agree about tokens; None: their settings differ


@dataclass(frozen=True)
class CriticPlan:
    """The training of the critic."""

    section: CriticConfig
    updates: UpdatePlan


@dataclass(frozen=True)
class RankPlan:
    """The models of the training ranks, and the updates of those that are trained."""

    models: Mapping[str, RankModel]
    policy: PolicyPlan
    critic: CriticPlan | None = None


class BrokenUpdates(RuntimeError):
    """Several updates in a row had a loss or gradient that is not finite."""

    code = "broken-updates"


class SplitEpisodes(RuntimeError):
    """A loss of whole responses would be computed on parts of episodes."""

    code = "split-episodes"


class TrainWorkers:
    """The models of a run over all training ranks."""

    def __init__(
        self,
        group: Group,
        plan: RankPlan,
        export_dtype: str,
        timeout: float,
        handles: Callable[[Iterable[int]], Mapping[int, Pending]] | None = None,
    ) -> None:
        """`handles` returns those of the pixels of pictures, by their digests (see `PictureStore`)."""
        self.group, self.models, self.policy, self.critic = group, plan.models, plan.policy, plan.critic
        self.export_dtype, self.timeout, self.handles = export_dtype, timeout, handles or PictureStore().handles
        self._seen = frozenset[int]()  # digests of the pictures whose handles the ranks have
        self.watch = Stopwatch()
        self.skipped_in_a_row = {"actor": 0, "critic": 0}
        self.most_skipped_in_a_row = 0
        self.updates_begun = 0  # over all models; while this is constant, so are the weights

    # -- forward passes --------------------------------------------------------------------------------------------

    def old_log_probs(self, batch: Batch, algorithm: Algorithm, step: int) -> Batch:
        """Fill `old_log_probs` if the step needs them before its updates; raise Disagreement if they show that engine
        and trainer differ. In bypass mode the rollout engine's log-probs are the old ones."""
        updates = step >= self.policy.first_update and not algorithm.bypass
        if algorithm.needs_old_log_probs or (updates and self.needs_old_log_probs(batch)):
            batch = self.forward_log_probs(batch)
            if self.policy.agreement is not None:
                self.policy.agreement.check(batch)
        return replace(batch, old_log_probs=batch.rollout_log_probs) if algorithm.bypass else batch

    def needs_old_log_probs(self, batch: Batch) -> bool:
        """Return whether old log-probs need a separate forward pass. The log-probs of a single update per step are the
        old ones, with three exceptions: dropout is active; the loss selects tokens by them; an episode's weights are
        computed from several rows, which may be in different micro-batches."""
        updates, correction = self.policy.updates.updates(len(batch.group.unique())), self.policy.correction
        split = batch.episode is not None and correction is not None and not correction.by_token
        return updates > 1 or self.policy.stochastic or self.policy.loss.entry.token_selector is not None or split

    def forward_log_probs(self, batch: Batch) -> Batch:
        """Fill `old_log_probs` and the other outputs of the current policy."""
        return self.fill(batch, self.policy.old)

    def fill(self, batch: Batch, signal: Signal) -> Batch:
        """Fill the fields of a signal by a forward pass of its model, in all rows or in those of the signal."""
        with self.watch(timing := signal.timing or signal.fields[0]):
            rows, part, outputs = None, batch, []
            if signal.rows is not None:
                name, value = signal.rows
                rows = (required(batch.value(name)) == value).nonzero().flatten()
                part = batch.select(rows)
            sent = part.only(*self.models[signal.model].reads)
            if len(part):
                outputs, computed = self._forward(signal.model, sent, signal.spec)
                self._count(timing, computed, int(sent.in_context().lengths.sum()))
        return _with_outputs(batch, signal.fields, outputs, rows)

    def _forward(self, name: str, batch: Batch, spec: ForwardSpec) -> tuple[Outputs, int]:
        """Compute a model's outputs on every rank's share of these rows. Returns them in the batch's row order, and how
        many tokens the ranks computed."""
        budget = self.models[name].budget
        # A teacher reads longer rows than the policy: its context replaces the prompt.
        lengths, work = batch.in_context().lengths.numpy(), work_of(self.models[name].vision, batch)
        forest = self._forest([name, *filter(None, [spec.against])], batch)
        shares = plan_trees(Pieces.single(lengths, work=work), forest, len(self.group), budget)
        rows = self._share(batch)
        parts = [(name, rows, micro_batches, spec) for micro_batches in shares]
        results = self._scatter(TrainWorker.forward, parts, shares, batch, name)
        tokens = sum(computed for _, computed in results[:: budget.devices])
        return in_row_order([columns for columns, _ in results], shares, batch.response_lengths, budget), tokens

    def _forest(self, names: Sequence[str], batch: Batch, size: int = 1) -> Forest | None:
        """Return what rows of a batch share in each of these models with the same micro-batches; None if it is nothing.
        `size` neighbouring rows stay together."""
        computing = [self.models[name] for name in names]
        if not all(model.budget.shares for model in computing):
            return None
        readings = [as_read(batch, reads) for reads in dict.fromkeys(model.reads for model in computing)]
        return Forest.of(readings, size, lambda first: required(work_of(computing[0].vision, batch, first)))

    def _share(self, batch: Batch) -> Pending:
        """Share rows with all ranks, which keep the handles of the rows' pictures until other rows are shared."""
        digests = batch.carried.get(PICTURE_DIGEST)
        seen = frozenset(() if digests is None else digests.tolist())
        self._see(seen)
        return self.group.share(batch)

    def _see(self, digests: frozenset[int]) -> None:
        """Give all ranks the handles of these pictures in place of those that they have."""
        if digests != self._seen:
            self.group.broadcast(TrainWorker.see, self.handles(digests), timeout=control_limit(self.timeout))
            self._seen = digests

    def _scatter(
        self, method: Callable[..., Any], parts: list[tuple], shares: list[MicroBatches], batch: Batch, model: str
    ) -> list[Any]:
        """Call every rank; an out-of-memory error is raised with the model and the tokens of the largest
        micro-batch."""
        try:
            return self.group.scatter(method, parts, timeout=self.timeout)
        except OutOfMemory as error:
            read, together = as_read(batch, self.models[model].reads), self.models[model].budget.shares
            planned = [rows for share in shares for rows in share if rows]
            tokens, rows = max((computed_tokens(read.select(part), together), len(part)) for part in planned)
            error.tokens, error.model = tokens if rows > 1 else None, model
            raise

    # -- updates ---------------------------------------------------------------------------------------------------

    def update(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        """Run the step's updates of the critic, if there is one, and of the policy, from its first step on. Returns the
        batch with old log-probs, and metrics. Raises Disagreement if the update's log-probs show that engine and
        trainer differ."""
        metrics = {} if self.critic is None else self.update_critic(batch, step)
        if step < self.policy.first_update:
            return batch, metrics
        batch, policy_metrics = self.update_policy(batch, step)
        self._see(frozenset())
        if self.policy.agreement is not None:
            self.policy.agreement.check(batch)
        return batch, metrics | policy_metrics

    def update_policy(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        """Run the step's updates of the policy. Returns the batch with old log-probs, and the updates' mean metrics."""
        entry, correction = self.policy.loss.entry, self.policy.loss.correction
        in_loss = correction is not None and not correction.by_token
        if batch.episode is not None and (in_loss or not entry.by_token):
            cause, fix = f"actor_rollout_ref.actor.policy_loss.loss_mode={entry.name}", "loss_mode=vanilla"
            if in_loss:
                cause, fix = "algorithm.rollout_correction with bypass_mode=true", "bypass_mode=false"
            raise SplitEpisodes(
                f"{cause} compares whole responses, and an episode of this step has several rows, as its context was "
                f"replaced; set {fix}, or "
                "actor_rollout_ref.rollout.multi_turn.history_reasoning=keep if that is what replaced it"
            )
        with self.watch("update_actor"):
            own = batch.old_log_probs is None
            loss = replace(self.policy.loss, old_from_update=own, log_entropy=not own and batch.entropies is None)
            if own and self.policy.correction is not None:
                loss = replace(loss, correction=self.policy.correction)
            mini_batches = self.policy.updates.mini_batches(batch.group, step)
            if entry.token_selector is not None:
                # The tokens that the loss treats differently, selected within each mini-batch of the first epoch.
                select = bind(imported(entry.token_selector), loss.parameters, rows=2)
                generator = torch.Generator().manual_seed(training_seed(self.policy.updates.seed, step))
                chosen = torch.zeros_like(required(batch.response_mask))
                for rows in mini_batches[: len(mini_batches) // self.policy.updates.epochs]:
                    places = spans(batch.response_lengths, torch.as_tensor(rows))
                    chosen[places] = select(batch.select(rows), generator)
                batch = replace(batch, chosen=chosen)
            metrics, outputs = self.update_mini_batches(batch, mini_batches, loss, step)
            if own:
                batch = _with_outputs(batch, OLD_FIELDS, outputs)
                if self.policy.correction is not None:
                    batch, of_correction = self.policy.correction.apply(batch)
                    metrics |= of_correction
        weights = {term.name: term.weight for term in loss.terms}
        kl_weight = {"actor/kl_coef": weights[SAMPLED_KL.name]} if SAMPLED_KL.name in weights else {}
        return batch, metrics | kl_weight | self.watch.take()

    def update_mini_batches(
        self, batch: Batch, mini_batches: Sequence[Sequence[int]], loss: LossConfig, step: int
    ) -> tuple[Metrics, Outputs]:
        """Run one policy update per mini-batch. Returns mean metrics, and the outputs if they are the old policy's."""
        budget = self.policy.updates.budget
        self.updates_begun += 1
        models = [name for name in ("actor", loss.against, *loss.teachers) if name]
        fields = (*loss.reads, *(name for model in models for name in self.models[model].reads))
        shares, parts, tokens = self._mini_batches(
            models, batch, fields, mini_batches, budget, loss.masks, loss.teachers
        )
        parts = [(*part, loss, step) for part in parts]
        results = self._scatter(TrainWorker.update_policy, parts, shares, batch, "actor")
        metrics = self._mean_metrics([share for share, _ in results[:: budget.devices]], "actor", tokens)
        metrics |= kl_of_teachers(metrics) | computed_share(batch, shares)
        if not loss.old_from_update:
            return metrics, []
        columns = [columns for _, columns in results]
        return metrics, in_row_order(columns, shares, batch.response_lengths, budget)

    def update_critic(self, batch: Batch, step: int) -> Metrics:
        """Run the step's updates of the critic. Returns the updates' mean metrics."""
        assert self.critic is not None
        self.updates_begun += 1
        with self.watch("update_critic"):
            mini_batches, budget = self.critic.updates.mini_batches(batch.group, step), self.critic.updates.budget
            shares, parts, tokens = self._mini_batches(["critic"], batch, CRITIC_FIELDS, mini_batches, budget)
            parts = [(*part, self.critic.section, step) for part in parts]
            metrics = self._scatter(TrainWorker.update_critic, parts, shares, batch, "critic")
        return self._mean_metrics(metrics[:: budget.devices], "critic", tokens) | self.watch.take()

    def update_pairs(self, batch: Batch, center: float, step: int) -> Metrics:
        """Run one update of a reward model on pairs of rows. Returns its metrics."""
        self.updates_begun += 1
        budget, clip = self.policy.updates.budget, self.policy.loss.grad_clip
        fields = ("response_mask", "rewards")
        shares, parts, tokens = self._mini_batches(["actor"], batch, fields, [range(len(batch))], budget, size=2)
        parts = [(*part, center, clip, step) for part in parts]
        metrics = self._scatter(TrainWorker.update_pairs, parts, shares, batch, "actor")
        return self._mean_metrics(metrics[:: budget.devices], "actor", tokens)

    def _mini_batches(
        self,
        names: Sequence[str],
        batch: Batch,
        fields: Sequence[str],
        mini_batches: Sequence[Sequence[int]],
        budget: MicroBatchBudget,
        masks: Sequence[str] = (),
        teachers: Sequence[str] = (),
        size: int = 1,
    ) -> tuple[list[MicroBatches], list[tuple[Pending, list[MiniBatch]]], int]:
        """Return each rank's micro-batches of all mini-batches, flat; the shared rows with its mini-batches; and the
        tokens of all their rows. The models of these names compute them, the trained one first."""
        work, forest = work_of(self.models[names[0]].vision, batch), self._forest(names, batch, size)
        options = {"masks": masks, "teachers": teachers, "size": size, "work": work, "forest": forest}
        of_ranks = rank_mini_batches(batch, len(self.group), mini_batches, budget, **options)
        shared = self._share(batch.with_episode_tokens(masks).only(*fields))
        flat = [[rows for part in of_rank for rows in part.micro_batches] for of_rank in of_ranks]
        tokens = sum(int(batch.lengths[[*rows]].sum()) for rows in mini_batches)
        return flat, [(shared, of_rank) for of_rank in of_ranks], tokens

    def _count(self, timing: str, computed: float, tokens: int) -> None:
        """Log how many tokens a model computed for rows with this many."""
        self.watch.log({f"perf/computed_tokens/{timing}": computed, f"perf/computed_share/{timing}": computed / tokens})

    def _mean_metrics(self, shares: Sequence[list[Metrics]], model: str, tokens: int) -> Metrics:
        """Return the mean of each metric over the updates that have it, all shares added up; the learning rate of the
        last update; and the number of skipped updates, which have no losses. Counts the skipped ones in a row, and the
        tokens computed for rows that have this many."""
        values: dict[str, list[float]] = {}
        for of_update in zip(*shares, strict=True):
            for name in {name for of_rank in of_update for name in of_rank}:
                values.setdefault(name, []).append(sum(share.get(name, 0.0) for share in of_update))
        skipped = [share > 0.5 for share in values.get("skipped_updates", [])]
        for each in skipped:
            self.skipped_in_a_row[model] = self.skipped_in_a_row[model] + 1 if each else 0
            self.most_skipped_in_a_row = max(self.most_skipped_in_a_row, self.skipped_in_a_row[model])
        self._count(f"update_{model}", sum(values.pop("computed_tokens", [])), tokens)
        means = {
            name if "/" in name else f"{model}/{name}": sum(values[name]) / len(values[name]) for name in sorted(values)
        }
        last = {f"{model}/lr": rates[-1]} if (rates := values.get("lr")) else {}
        return means | last | {f"{model}/skipped_updates": sum(skipped)}

    def stop_if_broken(self, most: int, directory: Path, last_checkpoint: Callable[[], object]) -> None:
        """Raise BrokenUpdates if at least `most` updates of one model were skipped in a row. The message names the
        checkpoint to resume from, if there is one, and the run's directory of skipped updates."""
        if self.most_skipped_in_a_row >= most:
            last = last_checkpoint()
            start = (
                f"resume from {last}, the last good checkpoint," if last else "there is no good checkpoint: start again"
            )
            raise BrokenUpdates(
                f"{self.most_skipped_in_a_row} updates in a row had a loss or gradient that is not finite and were "
                f"skipped (trainer.max_skipped_updates={most}); their rows, with the module at fault, are in "
                f"{directory / SKIPPED_UPDATES} on the machine of each rank; {start} with a lower learning rate "
                "(optim.lr), or in float32 (fsdp_config.dtype=fp32)"
            )

    def problem(self) -> str:
        """Return the reason why the models are not healthy after the step, or an empty string."""
        skipped = [name for name, count in self.skipped_in_a_row.items() if count]
        return f"the last update of {' and '.join(skipped)} was not finite" if skipped else ""

    def refresh(self, name: str, share: float) -> None:
        """Move a copy's weights towards those of the current policy by this share."""
        self.group.broadcast(TrainWorker.refresh, name, share, timeout=self.timeout)

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the driver's part of the state; `start_save` writes the models' part."""
        return {"skipped_in_a_row": dict(self.skipped_in_a_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Older checkpoints of supervised runs may lack it.
        self.skipped_in_a_row |= state.get("skipped_in_a_row", {})

    def start_save(self, directory: Path, contents: dict[str, list[str]]) -> None:
        """Write parts of each model's state in the background; returns once they are copied to host memory."""
        limit = control_limit(self.timeout)
        self.group.broadcast(TrainWorker.start_save, str(directory), contents, timeout=limit)

    def finished_save(self) -> bool:
        """Return whether every rank has written everything. Raises RemoteFailure, once, if one could not."""
        return all(self.group.broadcast(TrainWorker.finished_save, timeout=control_limit(self.timeout)))

    def load(self, directory: Path, contents: dict[str, list[str]]) -> dict[str, int]:
        """Read parts of each model's state, on any number of ranks. Returns each model's number of updates."""
        return self.group.broadcast(TrainWorker.load, str(directory), contents, timeout=self.timeout)[0]

    def export(self, directory: Path, name: str = "actor") -> None:
        """Write a complete model as a Hugging Face directory."""
        self.group.broadcast(TrainWorker.export, str(directory), self.export_dtype, name, timeout=self.timeout)


def _with_outputs(batch: Batch, fields: Sequence[str], outputs: Outputs, rows: Tensor | None = None) -> Batch:
    """Return the rows with a model's outputs for them, or for some of them; a field without an output is emptied."""
    for name, values in zip(fields, outputs, strict=False):
        batch = batch.put(name, values, rows)
    return batch
