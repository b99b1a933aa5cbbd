"""The part of the SGLang engine that runs in SGLang's scheduler processes, next to the model.

`run_scheduler` is the target of these processes. `load_bucket` is the custom weight loader, which SGLang finds by name;
it gets the location of a bucket in the trainer's memory instead of tensors.
"""

from hybridrl.core.rollout.sglang import stand_ins  # noqa: F401  before SGLang

# isort: split

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from sglang.srt.layers import sampler
from sglang.srt.layers.rotary_embedding import base as rotary
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.managers import scheduler as scheduling
from sglang.srt.managers.io_struct import AbortReq, ContinueGenerationReqInput, GetInternalStateReqOutput
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR, FINISH_MATCHED_TOKEN, Req
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from hybridrl.config.custom_code import import_libraries
from hybridrl.core import device as devices
from hybridrl.core.rollout.engine import LARGEST, Goal, Progress
from hybridrl.core.weights.buckets import BucketReader
from hybridrl.runtime.guard import end_with_parent
from hybridrl.runtime.stacks import write_stacks_on_request

LOADER = f"{__name__}.load_bucket"
LIBRARIES, FAILURE = "HYBRIDRL_EXTERNAL_LIB", "HYBRIDRL_ENGINE_FAILURE"
BEGUN = "begun"  # custom parameter of a request: the number of response tokens in its prompt
PROBE = "probe"  # prefix of the names of requests that verify a sync

LOAD_FROM_TENSORS = LoRAManager.load_lora_adapter_from_tensors
BATCH_INFO, UPDATE_FINISH_STATE = SamplingBatchInfo.from_schedule_batch, Req.update_finish_state
GENERATOR, PRIME = torch.Generator(), 1_000_003


def load_bucket(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load a bucket into the model, or keep it if it is an adapter's."""
    info, reader, failure = json.loads(named_tensors[0][0]), Scheduler.reader, ""
    try:
        tensors = reader.read(get_parallel().tp_rank, info)
        if info["adapter"]:
            Scheduler.adapter |= {name: tensor.cpu().clone() for name, tensor in tensors}
        else:
            model.load_weights(tensors)
        devices.synchronize(reader.device.type)  # copies may still read this bucket, which the trainer overwrites next
    except Exception as error:  # a model's own loader may raise anything
        failure = f"{type(error).__name__}: {error}"
    raise_in_all(failure)


def raise_in_all(failure: str) -> None:
    """Raise RuntimeError in all processes of an engine if one has a failure: SGLang checks only the first process."""
    group = get_parallel().tp_group.cpu_group
    failures = [failure] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group)
    if failure := "".join(failures):
        raise RuntimeError(failure)


def load_synced_adapter(manager: LoRAManager, lora_ref: Any, tensors: dict, config_dict: dict, *arguments: Any) -> Any:
    """Replace SGLang's adapter loader: it loads the tensors that have arrived here, for the layers in their names."""
    tensors, Scheduler.adapter = Scheduler.adapter, {}
    layers = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}
    result = LOAD_FROM_TENSORS(manager, lora_ref, tensors, config_dict | {"target_modules": sorted(layers)}, *arguments)
    raise_in_all("" if result.success else result.error_message)
    return result


def returned(update: Callable) -> Callable:
    """Wrap a weight update: it returns its error, as raising it would end SGLang's process."""

    def wrapped(self: WeightUpdater, *arguments: Any, **options: Any) -> tuple[bool, str]:
        try:
            return update(self, *arguments, **options)
        except Exception as error:
            return False, str(error)

    return wrapped


def seeded(batch: Any, vocab_size: int) -> SamplingBatchInfo:
    """Return the sampling info of a batch, with seeds; SGLang itself sets seeds only in its deterministic mode."""
    info = BATCH_INFO(batch, vocab_size)
    seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=info.device)
    return info


def draw(log_probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Sample an index of each row [rows, 1] of log-probs [rows, vocabulary], as SGLang's `multinomial_with_seed`, whose
    kernel is for CUDA: the largest sum with Gumbel noise, which follows from the row's seed and position alone."""
    noise = torch.empty_like(log_probs)
    for row, seed, position in zip(noise, seeds.tolist(), positions.tolist(), strict=True):
        row.exponential_(generator=GENERATOR.manual_seed((seed * PRIME + position) % LARGEST))
    return (log_probs - noise.log()).argmax(dim=1, keepdim=True)


def finish_request(request: Req, new_tokens: int = 1) -> None:
    """Set the finish reason of a response that has ended, like `Req.update_finish_state`. If it is interrupted, the
    last sampled token is checked first: SGLang would skip this check."""
    interrupted, request.to_finish = request.to_finish, None
    if not (interrupted and interrupted.status_code):
        UPDATE_FINISH_STATE(request, new_tokens)
    if interrupted and not request.finished():
        request.finished_reason = interrupted


def ends(request: Req, new_tokens: int = 1) -> bool:
    """Return whether a stop token (of the request, not the model) or a stop text ends a response, with the token that
    completes it; like `Req._check_str_based_finish`. The prompt has the beginning of an interrupted response."""
    params, sampled = request.sampling_params, request.output_ids
    stops, texts = () if params.ignore_eos else params.stop_token_ids or (), params.stop_strs or ()
    longest = 4 * max(map(len, texts), default=0) + 4  # tokens of a text: a character has up to four bytes
    begun = min((params.custom_params or {}).get(BEGUN, 0), longest)
    earlier = request.origin_input_ids[len(request.origin_input_ids) - begun :]
    for end in range(len(sampled) - new_tokens + 1, len(sampled) + 1):
        reason: Any = FINISH_MATCHED_TOKEN(matched=sampled[end - 1]) if sampled[end - 1] in stops else None
        if texts and reason is None:
            written = request.tokenizer.decode([*earlier, *sampled[max(end - longest, 0) : end]][-longest:])
            reason = next((FINISH_MATCHED_STR(matched=text) for text in texts if text in written), None)
        if reason is not None:
            request.finished_reason, request.finished_len = reason, end
            return True
    return False


def unpinned(make: Callable) -> Callable:
    """Wrap a tensor factory of torch so that it ignores `pin_memory`: pinned memory needs CUDA."""
    return lambda *arguments, pin_memory=False, **options: make(*arguments, **options)


class Scheduler(scheduling.Scheduler):
    """SGLang's scheduler, which also reports statistics of its iterations. It gives token ids to the server directly,
    although it has a tokenizer, which stop texts and JSON schemas need."""

    reader: ClassVar[BucketReader]
    adapter: ClassVar[dict[str, torch.Tensor]] = {}  # tensors of the next adapter that have arrived

    def __init__(self, *arguments: Any) -> None:
        self.sync_id = self.sampled = self.retracted = 0
        self.iterations: list[tuple] = []  # seconds, running, waiting, share of the cache, prefilled, sampled
        self.enough: Progress | None = None  # decides when the requests that were released are interrupted
        self.since = 0.0  # the end of the last iteration, or the first request after a pause
        with ended_by_failure():
            super().__init__(*arguments)
            Scheduler.reader = BucketReader(next(self.tp_worker.model_runner.model.parameters()).device)

    def init_ipc_channels(self, port_args: Any) -> None:
        self.skip_tokenizer_init = True
        super().init_ipc_channels(port_args)
        self.skip_tokenizer_init = False

    def run_event_loop(self) -> None:
        with ended_by_failure():
            super().run_event_loop()

    def run_batch(self, batch: Any, *arguments: Any, **options: Any) -> Any:
        self.since = self.since or time.monotonic()
        return super().run_batch(batch, *arguments, **options)

    def process_batch_result(self, batch: Any, result: Any) -> None:
        running, before = [req for req in batch.reqs if not req.finished()], len(self.running_batch.reqs)
        probes, tokens = all(req.rid.startswith(PROBE) for req in running), [len(req.output_ids) for req in running]
        super().process_batch_result(batch, result)
        if not probes:
            now, pool = time.monotonic(), self.token_to_kv_pool_allocator
            sampled = sum(len(req.output_ids) for req in running) - sum(tokens)
            free = (pool.available_size() + self.tree_cache.evictable_size()) / self.max_total_num_tokens
            computed = batch.extend_num_tokens if batch.forward_mode.is_extend() else 0
            had = max(before, len(running)), len(self.waiting_queue), 1 - free, computed, sampled
            self.iterations.append((now - self.since, *had))
            self.sampled, self.since = self.sampled + sampled, now
        if self.enough and any([self.enough(req.rid) for req in running if req.finished()]):
            self.enough = None
            self.abort_request(AbortReq(abort_all=True))

    def on_idle(self) -> None:
        self.since = 0.0
        super().on_idle()

    def _add_request_to_queue(self, request: Req, is_retracted: bool = False) -> None:
        self.retracted += is_retracted
        super()._add_request_to_queue(request, is_retracted)

    def get_internal_state(self, recv_req: Any) -> GetInternalStateReqOutput:
        """Return the statistics of this process since the last call, in place of SGLang's own report."""
        iterations, self.iterations, retracted, self.retracted = self.iterations, [], self.retracted, 0
        queued = len(self.waiting_queue) + len(self.grammar_manager)
        state = {"iterations": iterations, "retracted": retracted, "sampled": self.sampled, "sync_id": self.sync_id}
        return GetInternalStateReqOutput(internal_state=state | {"queued": queued})

    # The engine calls the following methods by name, in each of its processes.

    def join_trainer(self, address: str, first_rank: int, size: int, seconds: float) -> None:
        self.reader.join(address, first_rank + get_parallel().tp_rank, size, seconds)

    def finish_sync(self, sync_id: int) -> None:
        self.reader.close()
        self.sync_id = sync_id

    def release(self, needs: list[tuple[list[int], int]], names: list[str]) -> None:
        """Start the held requests, and interrupt them once the goal is reached, always after the same iteration."""
        self.enough = Progress(Goal(needs), names) if needs else None
        self.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))


@contextmanager
def ended_by_failure() -> Iterator[None]:
    """End only this process if the block fails, with the reason in a file; SGLang would end the server as well."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        with open(os.environ[FAILURE], "a", encoding="utf-8") as file:
            file.write(f"{type(error).__name__}: {error}\n")
        os._exit(1)


def run_scheduler(*arguments: Any) -> None:
    """Run a scheduler process of an engine."""
    end_with_parent(os.getppid(), signal.SIGKILL)
    write_stacks_on_request()
    import_libraries(json.loads(os.environ[LIBRARIES]))
    scheduling.Scheduler = Scheduler
    SamplingBatchInfo.from_schedule_batch = seeded
    Req.update_finish_state, Req._check_str_based_finish = finish_request, ends
    Req._check_token_based_finish = lambda *_: False
    LoRAManager.load_lora_adapter_from_tensors = load_synced_adapter
    WeightUpdater.update_weights_from_tensor = returned(WeightUpdater.update_weights_from_tensor)
    if arguments[0].device == "cpu":
        rotary._is_cpu = True  # otherwise it looks for a kernel of vLLM's, which it does not use
        sampler.multinomial_with_seed = draw
        if arguments[0].enable_lora:
            torch.Tensor.pin_memory = lambda self, device=None: self
            torch.empty, torch.tensor, torch.zeros = map(unpinned, (torch.empty, torch.tensor, torch.zeros))
    scheduling.run_scheduler_process(*arguments)
