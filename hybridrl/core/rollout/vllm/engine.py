"""vLLM as a rollout engine (see RolloutEngine); versions 0.26 to 0.32.

It computes in the process of its rollout server: vLLM is imported once and is in memory once, and no messages are
packed per token. An engine over several devices has a further process for each device, which imports `worker.py`.
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from vllm import EngineArgs, SamplingParams
from vllm.config import StructuredOutputsConfig, WeightTransferConfig
from vllm.exceptions import VLLMValidationError
from vllm.inputs import EngineInput, PromptType
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine

from hybridrl.config.catalog import ENGINE_RANKS
from hybridrl.config.custom_code import import_libraries
from hybridrl.config.files import resolve_model
from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.core import device as devices
from hybridrl.core.carried import Fields
from hybridrl.core.pictures import NO_PIXELS, Pixels, placeholder_ids
from hybridrl.core.rollout.cache import cache_bytes_per_token, cpu_cache_bytes, model_settings
from hybridrl.core.rollout.engine import (
    Completion,
    EngineStats,
    Goal,
    Progress,
    RejectedRequest,
    Request,
    Sampling,
)
from hybridrl.core.rollout.vllm import repairs
from hybridrl.core.rollout.vllm.collector import Collector, EngineLoop, EngineResponse, Observer
from hybridrl.core.rollout.vllm.pictures import PicturePrompts, picture_arguments
from hybridrl.core.rollout.vllm.settings import CPU_BLOCK
from hybridrl.core.rollout.vllm.worker import BACKEND, LIBRARIES, EngineProcess, adapter_request
from hybridrl.core.weights.buckets import Bucket, Handle, bucket_description
from hybridrl.data.tokenizer import read_tokenizer
from hybridrl.required import required

SEGMENTS = ("/dev/shm/psm_", "/dev/shm/vllm_", "/dev/shm/-tp")  # Python's, vLLM 0.32's and 0.26's
PARTS = frozenset({"weights", "kv_cache"})  # the parts that sleep and wake


class Engine(LLMEngine):
    """vLLM's engine, with clean-up after a request that it cannot add."""

    def add_request(self, request_id: str, *args: Any, **options: Any) -> str:
        with ExitStack() as undo:
            undo.callback(lambda: self.engine_core.abort_requests(self.output_processor.forget(request_id)))
            added = super().add_request(request_id, *args, **options)
            undo.pop_all()
        return added


class VllmEngine:
    """A vLLM engine over one tensor-parallel group of devices."""

    def __init__(self, device: str, model: ModelConfig, rollout: RolloutConfig, engines_per_machine: int) -> None:
        os.environ[LIBRARIES] = json.dumps(model.external_lib)  # read by worker.py, also in further processes
        import_libraries(model.external_lib)
        self.device, self.sleeps, self.model = device, rollout.free_cache_engine, model
        self.delivers_routes = device == "cpu" and bool(rollout.enable_rollout_routing_replay)
        self.limit_images = rollout.limit_images or 0
        self.adapted = bool(model.lora_rank) and not model.lora.merge
        self.sync_id = 0
        self.version = -1
        self.asleep: frozenset[str] = frozenset()
        self.observer = Observer()
        self.collector = Collector(self.observer)
        arguments = vllm_arguments(device, model, rollout, engines_per_machine)
        self.loop = EngineLoop(partial(self._build, EngineArgs(**arguments)))

    def _build(self, arguments: EngineArgs) -> LLMEngine:
        settings = arguments.create_engine_config()
        if self.delivers_routes:  # set here, as vLLM rejects the argument
            settings.aux_output_config.enable_return_routed_experts = True
        engine = Engine.from_vllm_config(settings)
        engine.output_processor, engine.logger_manager = self.collector, self.observer
        self.prompts = PicturePrompts(engine, self.limit_images)
        return engine

    async def connect(self) -> None:
        await self.loop.start()
        await self._call_workers("init_weight_transfer_engine", {})
        if self.prompts.placeholders:
            await self._call_workers("mask_tokens", self.prompts.placeholders)
        if self.delivers_routes:
            await self._call_workers("deliver_routes")
        unlink_segments()

    async def generate(self, request: Request, pixels: Mapping[int, Pixels] = NO_PIXELS) -> Completion:
        model, version = required(self.loop.engine).model_config, self.version
        placeholders, places = self.prompts.placeholders, self.prompts.places(request, pixels)
        parameters = checked_params(request, model.get_vocab_size(), model.max_model_len, placeholders, places)
        if parameters.stop:
            self._read_texts()
        self.observer.submitted()
        name = request.new_name()
        if request.begun and parameters.stop:
            self.collector.begun[name] = request.begun
        if request.hear:
            self.collector.hear[name] = request.hear
        response = await self._respond(name, self.prompts.prompt(request, places, pixels), parameters)
        token_ids = np.asarray(response.token_ids, dtype=np.int64)
        ended = response.truncated, version, response.interrupted
        return Completion(token_ids, response.log_probs, *ended, response.carried)

    async def _respond(self, name: str, prompt: PromptType | EngineInput, parameters: SamplingParams) -> EngineResponse:
        adapter = adapter_request(self.sync_id) if self.adapted else None
        response = await self.loop.generate(name, prompt, parameters, lora_request=adapter)
        if response.failure:
            raise RuntimeError(f"vLLM ended the request after {len(response.token_ids)} tokens: {response.failure}")
        return response

    def _read_texts(self) -> None:
        """Load the tokenizer, which the engine starts without: few runs end responses by texts."""
        if self.collector.tokenizer is None:
            place = self.model.tokenizer_path or str(resolve_model(self.model.path))
            trusted = self.model.trust_remote_code
            self.collector.tokenizer = read_tokenizer(place, trusted=trusted)

    async def score(
        self, token_ids: list[int], carried: Fields | None = None, pixels: Mapping[int, Pixels] = NO_PIXELS
    ) -> list[float]:
        parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        request = Request(0, 0, token_ids, 0, Sampling(1, ()), carried=carried or {})
        prompt = self.prompts.prompt(request, self.prompts.places(request, pixels), pixels)
        probe = await self._respond(f"probe-{os.urandom(4).hex()}", prompt, parameters)
        return probe.carried["prompt_log_probs"][1:, 0, 1].tolist()

    async def hold(self) -> None:
        if not self.loop.responses:  # an episode's later turn comes while others run, and continues a cached prefix
            await self._empty_cache()
        self.loop.hold()

    async def release(self, goal: Goal | None = None) -> None:
        self.loop.enough = Progress(goal, self.loop.responses) if goal else None
        self.loop.release()

    async def interrupt(self) -> None:
        await self.loop.interrupt()

    async def check(self) -> int:
        self.loop.check()
        return self.collector.tokens()

    async def take_stats(self) -> EngineStats:
        return self.observer.take()

    async def sleep(self) -> None:
        """On CUDA free the memory of the cache and of the weights. Weights come back from the trainer; the base model
        of an adapter waits in host memory. On CPU free the memory of sampling."""
        if self.device == "cpu":
            devices.release_cached_memory(self.device)
        if not self.sleeps:
            return
        if self.asleep and self.asleep != PARTS:
            for part in self.asleep:  # in vLLM 0.26 an engine that is partly asleep would stay so
                await self.wake(part)
        await self.loop.call(lambda engine: engine.sleep(level=1 if self.adapted else 2))
        self.asleep = PARTS

    async def wake(self, part: str) -> None:
        if self.sleeps:
            await self.loop.call(lambda engine: engine.wake_up(tags=[part]))
            self.asleep -= {part}

    async def begin_weights(self) -> None:
        await self._call_workers("start_weight_update")

    async def join_trainer(self, address: str, first_rank: int, size: int, seconds: float) -> None:
        await self._call_workers("join_trainer", address, first_rank, size, seconds)

    async def load_bucket(
        self, bucket: Bucket, handles: list[Handle | None], digests: list[int], adapter: bool
    ) -> None:
        method = "load_adapter_bucket" if adapter else "update_weights"
        await self._call_workers(method, bucket_description(bucket, handles, digests))

    async def finish_weights(self) -> None:
        await self._call_workers("finish_weights")

    async def finish_sync(self, sync_id: int, version: int) -> None:
        if self.adapted:
            model = self.model
            settings = {"r": model.lora_rank, "lora_alpha": model.lora_alpha, "target_modules": model.target_modules}
            await self._call_workers("finish_adapter", sync_id, settings)
        await self._empty_cache()
        self.sync_id, self.version = sync_id, version

    async def held_sync(self) -> int:
        return self.sync_id

    async def _empty_cache(self) -> None:
        """Drop all cached prefixes and features of pictures: they belong to earlier weights. vLLM keeps prefixes while
        a request has blocks."""
        await self.loop.call(finish_iterations)
        if not await self.loop.call(lambda engine: engine.reset_prefix_cache()):
            raise RuntimeError("vLLM has not emptied its prefix cache: a request still has blocks of it")
        if self.prompts.placeholders:
            await self.loop.call(lambda engine: engine.reset_encoder_cache())

    async def _call_workers(self, method: str, *args: Any) -> None:
        """Call a method of `worker.py` next to the model, on every device."""
        await self.loop.call(lambda engine: engine.collective_rpc(method, args=args))


def vllm_arguments(device: str, model: ModelConfig, rollout: RolloutConfig, engines_per_machine: int) -> dict[str, Any]:
    """Return vLLM's arguments. Those in `engine_kwargs` were checked with the configuration."""
    arguments: dict[str, Any] = {
        "model": str(resolve_model(model.path)),
        "skip_tokenizer_init": True,
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": model.override_config,
        "dtype": rollout.dtype,
        "load_format": "dummy",
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, rollout.max_model_len or 0),
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enforce_eager": rollout.enforce_eager,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enable_sleep_mode": rollout.free_cache_engine,
        # Log-probs of the distribution that was sampled from: the trainer divides by the same temperature.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 128,  # the most probable tokens that a client of a served model may request
        "seed": rollout.seed,
        "cudagraph_capture_sizes": rollout.cudagraph_capture_sizes or None,
        "disable_log_stats": False,  # the observer's; vLLM's own log shows them at its level INFO only
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        # Small models would not end white space that a JSON schema allows.
        "structured_outputs_config": StructuredOutputsConfig(backend="xgrammar", disable_any_whitespace=True),
        "worker_extension_cls": f"{EngineProcess.__module__}.{EngineProcess.__name__}",
    }
    if placeholder_ids(model_settings(model)):
        arguments |= picture_arguments(rollout.limit_images or 0, device)
    if device == "cpu":
        token_bytes = cache_bytes_per_token(model, rollout)
        arguments |= {
            "enforce_eager": True,
            "enable_sleep_mode": False,
            # vLLM's generator on CPU cannot continue in the middle of a prompt that was cut into chunks.
            "enable_chunked_prefill": False,
            "kv_cache_memory_bytes": cpu_cache_bytes(token_bytes, rollout, engines_per_machine, CPU_BLOCK),
            **repairs.CPU_ATTENTION,
        }
    elif rollout.enable_rollout_routing_replay:
        arguments["enable_return_routed_experts"] = True
    if rollout.tensor_model_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"
    if model.lora_rank and not model.lora.merge:  # one adapter at a time
        rank = next(rank for rank in ENGINE_RANKS if rank >= model.lora_rank)
        arguments |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1, "max_cpu_loras": 1}
    return arguments | {name: value for name, value in rollout.engine_kwargs.vllm.items() if value is not None}


def finish_iterations(engine: LLMEngine) -> None:
    """Finish iterations that the asynchronous scheduler has begun, although their responses have ended: the routes of
    an iteration in flight would be counted to the next cache."""
    while engine.engine_core.engine_core.batch_queue:
        engine.step()


def unlink_segments() -> None:
    """Unlink the open shared memory of the engine's processes, so that it is freed when they end."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended, for example a compiler
            for mapping in process.memory_maps():
                if mapping.path.startswith(SEGMENTS):
                    Path(mapping.path).unlink(missing_ok=True)


def checked_params(
    request: Request, vocabulary: int, context: int, placeholders: Collection[int] = (), places: Sequence[range] = ()
) -> SamplingParams:
    """Return the sampling parameters of a request; RejectedRequest if the engine cannot sample it."""
    request.check(vocabulary, context, placeholders, places)
    try:
        return _params(request, sees=bool(placeholders))
    except (ValueError, TypeError, VLLMValidationError) as error:
        raise RejectedRequest(str(error)) from error


def _params(request: Request, *, sees: bool) -> SamplingParams:
    """Return vLLM's parameters. The engine of a model that sees has a tokenizer, whose end of a text is none of the
    request's `stop_ids` by itself."""
    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        structured_outputs=sampling.json_schema and StructuredOutputsParams(json=sampling.json_schema),
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        stop_token_ids=[] if sampling.ignore_eos else list(sampling.stop_ids),
        ignore_eos=sampling.ignore_eos or sees,
        seed=request.seed if sampling.temperature > 0 else None,
        logprobs=0,
        prompt_logprobs=request.prompt_log_probs,
        flat_logprobs=True,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
