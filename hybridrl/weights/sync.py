"""The interface of weight synchronisation, and what it expects of the two sides."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hybridrl.batch import Batch
from hybridrl.weights.handles import Handle
from hybridrl.weights.layout import Bucket, SyncPlan


class StaleWeights(RuntimeError):
    """An engine does not hold the trainer's weights, so nothing may be sampled from it."""


class WeightSync(Protocol):
    """Brings the trainers' weights to the rollout engines and proves that they have arrived."""

    def publish(self, version: int) -> None:
        """Send the present weights to all servers; from then on they sample tokens with this version."""

    def restore(self, index: int) -> None:
        """Send the weights of the last `publish` to a server that was rebuilt since."""

    def verify(self, index: int | None = None) -> None:
        """Raise StaleWeights unless all servers, or this one, compute with the weights of the last `publish`."""

    def abort(self, dead: Sequence[int]) -> None:
        """Leave a `publish` that failed because these servers died, which have been killed, so that the others can
        sleep."""

    def take_metrics(self) -> dict[str, float]:
        """Return what was measured since the last call."""


class WeightSource(Protocol):
    """A training rank, as it is called here; the calls are collective."""

    def plan_weights(self, dtype: str, limit: int) -> SyncPlan: ...
    def fill_bucket(self, bucket: Bucket) -> tuple[Handle, int]: ...
    def release_buckets(self, reader_died: bool = False) -> None: ...
    def log_probs(self, batch: Batch, micro_batches: list[list[int]], temperature: float) -> list[Any]: ...


class WeightTarget(Protocol):
    """A rollout server, as it is called here: see rollout.engine.RolloutEngine."""

    async def begin_weights(self) -> None: ...
    async def load_bucket(self, bucket: Bucket, handles: list[Handle], digests: list[int], adapter: bool) -> None: ...
    async def finish_weights(self) -> None: ...
    async def finish_sync(self, sync_id: int, version: int) -> None: ...
    async def held_sync(self) -> int: ...
    async def score(self, token_ids: list[int]) -> list[float]: ...


class Workers(Protocol):
    """Remote workers in rank order, such as cluster.Group. A call names a method of one of the Protocols above."""

    actors: list[Any]

    def __len__(self) -> int: ...
    def only(self, ranks: Sequence[int]) -> "Workers": ...
    def broadcast(self, method: Callable[..., Any], *args: Any, timeout: float) -> list[Any]: ...
    def scatter(self, method: Callable[..., Any], parts: Sequence[tuple], *, timeout: float) -> list[Any]: ...
    def start_each(self, method: Callable[..., Any], parts: Sequence[tuple]) -> list[Any]: ...
    def finish(self, refs: Sequence[Any], method: Callable[..., Any], *, timeout: float) -> list[Any]: ...
    def failures(self, method: Callable[..., Any], *args: Any, timeout: float) -> dict[int, str]: ...
