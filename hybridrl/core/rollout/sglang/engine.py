"""SGLang as a rollout engine (see RolloutEngine); version 0.5.23.

Its front end runs in the process of the server, and its scheduler with the model in a further one for each device.
"""

from hybridrl.core.rollout.sglang import stand_ins  # noqa: F401  before SGLang

# isort: split

import asyncio
import json
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import AsyncIterator, Awaitable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers import io_struct

from hybridrl.config.custom_code import import_libraries
from hybridrl.config.files import resolve_model
from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.core.rollout.cache import cache_bytes_per_token, cpu_cache_bytes
from hybridrl.core.rollout.engine import REAL, Completion, EngineStats, Goal, RejectedRequest, Request
from hybridrl.core.rollout.sglang.worker import BEGUN, FAILURE, LIBRARIES, LOADER, PROBE, run_scheduler
from hybridrl.core.weights.buckets import Bucket, bucket_description

CHECK_SECONDS, ABORT_SECONDS = 0.5, 0.1  # between two looks at SGLang's processes, and attempts to end all requests
ADAPTER, SPARE = "adapter", 8  # tokens: SGLang rejects a prompt that leaves fewer than six of the longest sequence


class SchedulerEngine(Engine):
    """SGLang's engine with schedulers as in `worker.py`, and without a process that decodes tokens."""

    run_scheduler_process_func = staticmethod(run_scheduler)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list, list]:
        return [], []


class SglangEngine:
    """An SGLang engine over one tensor-parallel group of devices."""

    def __init__(self, device: str, model: ModelConfig, rollout: RolloutConfig, engines_per_machine: int) -> None:
        os.environ[LIBRARIES] = json.dumps(model.external_lib)  # read by worker.py
        os.environ[FAILURE] = f"{tempfile.gettempdir()}/sglang-{os.getpid()}"
        import_libraries(model.external_lib)
        self.model, self.tp_size = model, rollout.tensor_model_parallel_size
        self.parts = {"kv_cache", "weights"} if rollout.free_cache_engine and device == "cuda" else set()
        self.adapted = bool(model.lora_rank) and not model.lora.merge
        self.arguments = sglang_arguments(device, model, rollout, engines_per_machine)
        self.version, self.context, self.updating = -1, rollout.max_model_len or 0, False
        self.calling, self.holding = asyncio.Lock(), asyncio.Lock()
        self.running: dict[str, asyncio.Task] = {}
        self.asleep, self.stats = set[str](), EngineStats()

    async def connect(self) -> None:
        others = multiprocessing.active_children()
        try:
            self.engine = SchedulerEngine(**self.arguments)
        except RuntimeError as error:
            raise RuntimeError(f"SGLang did not start: {self._reason() or error}") from error
        self.front = self.engine.tokenizer_manager
        self.processes = [process for process in multiprocessing.active_children() if process not in others]
        self.front._subprocess_watchdog.stop()  # it would end this process as well
        if self.front.max_req_input_len < self.context:
            raise RuntimeError(f"rollout.max_model_len={self.context} is larger than the available KV cache of SGLang")
        self.death: asyncio.Future = asyncio.get_running_loop().create_future()
        self.watching = asyncio.create_task(self._watch())
        self.front.auto_create_handle_loop()

    def _reason(self) -> str:
        """Return the reason of the first SGLang process that ended with one; empty if there is none."""
        file = Path(os.environ[FAILURE])
        return file.read_text(encoding="utf-8").partition("\n")[0] if file.exists() else ""

    async def _watch(self) -> None:
        """Note the death of a process: nothing else ends the calls that wait for it."""
        while all(process.is_alive() for process in self.processes):
            await asyncio.sleep(CHECK_SECONDS)
        self.death.set_result(f"the engine is dead: {self._reason() or 'a process of its devices ended'}")

    async def _alive(self, call: Awaitable[Any]) -> Any:
        """Return the result of a call; RuntimeError if an SGLang process ends before."""
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task, self.death}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return await task
            raise RuntimeError(self.death.result())
        finally:
            task.cancel()

    async def _call_processes(self, method: str, **arguments: Any) -> None:
        """Call a method of `worker.Scheduler` in every process."""
        async with self.calling:  # one answer at a time
            try:
                await self._alive(asyncio.to_thread(self.engine.collective_rpc, method, **arguments))
            except AssertionError as error:
                raise RuntimeError(str(error)) from error

    async def _flush(self) -> None:
        """Drop all cached prefixes, once ended requests have left the cache."""
        result = await self._alive(self.front.flush_cache(timeout_s=60))
        if not result.success:
            raise RuntimeError(f"SGLang has not emptied its prefix cache: {result.message}")

    async def _observe(self) -> dict[str, Any]:
        """Return the state of the first process, whose iterations are added to the statistics."""
        (state,) = await self._alive(self.front.get_internal_state())
        for seconds, running, waiting, cache, prefilled, sampled in state["iterations"]:
            self.stats.observe(seconds, running, waiting, cache, prefilled)
            self.stats.tokens += sampled
        self.stats.preemptions += state["retracted"]
        return state

    async def generate(self, request: Request) -> Completion:
        vocabulary = self.front.model_config.vocab_size
        request.check(vocabulary, self.context)
        if request.pictures:
            raise RejectedRequest("the prompt has pictures, and SGLang is not given pictures yet")
        if request.prompt_log_probs is not None:
            raise RejectedRequest("prompt_logprobs: SGLang's engine has none")
        name, version, params = request.new_name(), self.version, sampling_params(request, vocabulary, self.context)
        self.running[name] = task = asyncio.ensure_future(self._respond(name, request.prompt_ids, params))
        task.add_done_callback(lambda _: self.running.pop(name))
        response = await task
        about = response["meta_info"]
        ended, interrupted = about["finish_reason"], about["finish_reason"]["type"] == "abort"
        if interrupted and ended.get("status_code"):  # and not by `interrupt`
            raise RuntimeError(f"SGLang ended the request: {ended.get('message')}")
        self.stats.prefix_queries += len(request.prompt_ids)
        self.stats.prefix_hits += about.get("cached_tokens", 0)
        ids, log_probs = response.get("output_ids") or [], about.get("output_token_logprobs") or []
        if len(ids) != len(log_probs) and not interrupted:
            raise RuntimeError(f"SGLang returned {len(ids)} tokens and {len(log_probs)} log-probs")
        count = min(len(ids), len(log_probs))
        token_ids, sampled = np.array(ids, np.int64), np.array([triple[0] for triple in log_probs], np.float32)
        return Completion(token_ids[:count], sampled[:count], ended["type"] == "length", version, interrupted)

    async def _respond(self, name: str, prompt_ids: Any, params: dict[str, Any], **options: Any) -> dict[str, Any]:
        adapter = {"lora_path": ADAPTER} if self.adapted else {}
        ids = np.asarray(prompt_ids).tolist()
        options |= {"rid": name, "input_ids": ids, "sampling_params": params, "return_logprob": True, **adapter}
        request = io_struct.GenerateReqInput(**options)
        try:
            return await self._alive(_last(self.front.generate_request(request)))
        except (ValueError, TypeError) as error:
            if "Aborted by AbortReq" in str(error):  # before its grammar was ready
                return {"meta_info": {"finish_reason": {"type": "abort"}}}
            raise RejectedRequest(str(error)) from error

    async def score(self, token_ids: list[int]) -> list[float]:
        name, params = f"{PROBE}-{os.urandom(4).hex()}", {"max_new_tokens": 1, "temperature": 1.0}
        response = await self._respond(name, token_ids, params, logprob_start_len=0)
        return [triple[0] for triple in response["meta_info"]["input_token_logprobs"][1:]]

    async def hold(self) -> None:
        await self.holding.acquire()
        with ExitStack() as if_it_fails:
            if_it_fails.callback(self.holding.release)
            if not self.running:  # an episode's later turn comes while others run, and continues a cached prefix
                await self._flush()
            await self._alive(
                self.front._async_dispatch_to_scheduler(io_struct.PauseGenerationReqInput(mode="in_place"))
            )
            self.before, self.queued = set(self.running), (await self._observe())["queued"]
            if_it_fails.pop_all()

    async def release(self, goal: Goal | None = None) -> None:
        with ExitStack() as at_the_end:
            at_the_end.callback(self.holding.release)
            while (await self._observe())["queued"] < self.queued + len(self.running.keys() - self.before):
                await asyncio.sleep(0)  # until all held requests are queued
            needs = [(list(prompts), count) for prompts, count in goal.needs] if goal else []
            await self._call_processes("release", needs=needs, names=list(self.running))

    async def interrupt(self) -> None:
        async with self.holding:  # not between `hold` and `release`
            pending = set(self.running.values())
            while pending:  # an abort misses requests on their way to SGLang's process
                self.front.abort_request(abort_all=True)
                _, pending = await asyncio.wait(pending, timeout=ABORT_SECONDS)

    async def check(self) -> int:
        return (await self._observe())["sampled"]

    async def take_stats(self) -> EngineStats:
        await self._observe()
        taken, self.stats = self.stats, EngineStats()
        return taken

    async def sleep(self) -> None:
        """On CUDA free memory; weights come back from the trainer, and the base of an adapter from host memory."""
        await self.interrupt()  # requests whose callers have given up
        await self._flush()
        if awake := sorted(self.parts - self.asleep):
            parts = io_struct.ReleaseMemoryOccupationReqInput(tags=awake)
            await self._alive(self.front.release_memory_occupation(parts))
            self.asleep |= self.parts

    async def wake(self, part: str) -> None:
        if part in self.asleep:  # SGLang's process would end otherwise
            parts = io_struct.ResumeMemoryOccupationReqInput(tags=[part])
            await self._alive(self.front.resume_memory_occupation(parts))
            self.asleep.discard(part)

    async def join_trainer(self, address: str, first_rank: int, size: int, seconds: float) -> None:
        await self._call_processes("join_trainer", address=address, first_rank=first_rank, size=size, seconds=seconds)

    async def begin_weights(self) -> None:
        await self.interrupt()  # as before `sleep`
        if self.updating:
            await self.finish_weights()
        if hasattr(self.front, "begin_weight_update"):  # not in earlier versions, which need no preparation
            await self._update(self.front.begin_weight_update(io_struct.BeginWeightUpdateReqInput()))
        self.updating = True

    async def load_bucket(self, bucket: Bucket, handles: list, digests: list[int], adapter: bool) -> None:
        if adapter and not self.updating:
            await self.begin_weights()
        # SGLang moves this dummy tensor to the device; the tensor's name carries the location of the bucket.
        info = bucket_description(bucket, handles, digests) | {"adapter": adapter}
        payload = pickle.dumps([(json.dumps(info), torch.zeros(1))])
        each = {"serialized_named_tensors": [payload] * self.tp_size, "load_format": LOADER, "flush_cache": False}
        await self._update(self.front.update_weights_from_tensor(io_struct.UpdateWeightsFromTensorReqInput(**each)))

    async def finish_weights(self) -> None:
        self.updating = False
        if hasattr(self.front, "end_weight_update"):
            await self._update(self.front.end_weight_update(io_struct.EndWeightUpdateReqInput()))

    async def finish_sync(self, sync_id: int, version: int) -> None:
        if self.updating:  # by the buckets of an adapter
            await self.finish_weights()
        if self.adapted:
            await self._load_adapter()
        await self._flush()
        await self._call_processes("finish_sync", sync_id=sync_id)
        self.version = version

    async def held_sync(self) -> int:
        return (await self._observe())["sync_id"]

    async def _load_adapter(self) -> None:
        """Replace the adapter by the one that has arrived in the processes."""
        model = self.model
        if ADAPTER in self.front.lora_registry.get_all_adapters() or ADAPTER in self.front.pending_lora_unloads:
            unload = io_struct.UnloadLoRAAdapterReqInput(lora_name=ADAPTER)
            await self._update(self.front.unload_lora_adapter(unload))
        load = io_struct.LoadLoRAAdapterFromTensorsReqInput(
            lora_name=ADAPTER,
            config_dict={"r": model.lora_rank, "lora_alpha": model.lora_alpha, "peft_type": "LORA", "bias": "none"},
            serialized_named_tensors=[pickle.dumps({})] * self.tp_size,
        )
        await self._update(self.front.load_lora_adapter_from_tensors(load))

    async def _update(self, call: Awaitable[Any]) -> None:
        """Make a call of an update of weights. SGLang does not raise where one fails."""
        result = await self._alive(call)
        updated, message = result if isinstance(result, tuple) else (result.success, result.error_message)
        if not updated:
            raise RuntimeError(f"SGLang has not updated its weights: {message}")


async def _last(responses: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    """Return the last of a request's outputs. All are read: until then a request counts as unfinished."""
    return [response async for response in responses][-1]


def sglang_arguments(device: str, model: ModelConfig, rollout: RolloutConfig, engines: int) -> dict[str, Any]:
    """Return SGLang's arguments. Those in `engine_kwargs` were checked with the configuration."""
    path, longest = str(resolve_model(model.path)), rollout.max_model_len or 0
    arguments: dict[str, Any] = {
        "model_path": path,
        "tokenizer_path": model.tokenizer_path or path,
        "trust_remote_code": model.trust_remote_code,
        "json_model_override_args": json.dumps(model.override_config),
        "device": device,
        "dtype": rollout.dtype,
        "load_format": "dummy",
        "custom_weight_loader": [LOADER],
        "tp_size": rollout.tensor_model_parallel_size,
        "context_length": longest + SPARE,
        "max_running_requests": rollout.max_num_seqs,
        "max_prefill_tokens": rollout.max_num_batched_tokens,
        "chunked_prefill_size": rollout.max_num_batched_tokens if rollout.enable_chunked_prefill else -1,
        "disable_radix_cache": not rollout.enable_prefix_caching,
        "cuda_graph_bs_decode": rollout.cudagraph_capture_sizes or None,
        "disable_cuda_graph": rollout.enforce_eager or device == "cpu",
        "mem_fraction_static": rollout.gpu_memory_utilization,
        "enable_memory_saver": rollout.free_cache_engine and device == "cuda",
        "random_seed": rollout.seed,
        "sleep_on_idle": True,  # the trainer needs the cores
        "sampling_backend": "pytorch",  # the one that uses the seeds of requests
        "constrained_json_disable_any_whitespace": True,  # small models would not end it
    }
    if device == "cpu":
        token_bytes = cache_bytes_per_token(model, rollout)
        cache = cpu_cache_bytes(token_bytes, rollout, engines, 1) * rollout.tensor_model_parallel_size
        arguments |= {
            "attention_backend": "torch_native",
            "disable_overlap_schedule": True,
            "max_total_tokens": cache // token_bytes + SPARE,
            "mem_fraction_static": 0.05,  # SGLang only checks that it is large enough
        }
    if model.lora_rank and not model.lora.merge:  # one adapter at a time
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": model.lora_rank,
            "lora_target_modules": ["all"],
            "max_loras_per_batch": 1,
            "enable_weights_cpu_backup": device == "cuda",  # the base is sent only once
            "lora_backend": "torch_native" if device == "cpu" else "csgmv",
        }
    return arguments | {name: value for name, value in rollout.engine_kwargs.sglang.items() if value is not None}


def sampling_params(request: Request, vocabulary: int, context: int) -> dict[str, Any]:
    """Return SGLang's sampling parameters; RejectedRequest for parameters that it does not support."""
    sampling = request.sampling
    if sampling.min_p:
        raise RejectedRequest(f"min_p={sampling.min_p}: SGLang does not sample with it where requests have seeds")
    return {
        **{name: getattr(sampling, name) for name in REAL},
        "min_new_tokens": sampling.min_tokens,
        "top_k": min(sampling.top_k, vocabulary),
        "max_new_tokens": min(sampling.max_tokens, context - len(request.prompt_ids)),
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": sampling.ignore_eos,
        "json_schema": sampling.json_schema,
        "sampling_seed": request.seed,
        "custom_params": {BEGUN: request.begun},
    }
