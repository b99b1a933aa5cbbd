"""vLLM as a rollout engine, in a process of its own. The only module that knows vLLM; versions 0.26 to 0.32.

The engine receives weights through vLLM's weight-transfer calls, by an engine registered here, which opens handles to
the trainer's memory on the same device: one path for CUDA and CPU.
"""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from vllm import AsyncEngineArgs, SamplingParams, TokensPrompt
from vllm.config import WeightTransferConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from hybridrl import device as devices
from hybridrl.config import ConfigError
from hybridrl.config.custom_code import import_libraries
from hybridrl.config.model_directory import resolve_model
from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.rollout.types import Completion, Request, Sampling
from hybridrl.rollout.vllm import repairs
from hybridrl.rollout.vllm.adapter import (
    Place,
    adapter_arguments,
    adapter_request,
    load_adapter,
    put_back,
    put_base_layers,
)
from hybridrl.rollout.vllm.cpu_cache import cache_bytes_of_token, cpu_cache_bytes
from hybridrl.runtime.guard import end_with_parent
from hybridrl.weights.handles import Handle, digest, open_buffer
from hybridrl.weights.layout import Bucket, Tensor

BACKEND = "hybridrl"
SEGMENTS = ("/dev/shm/psm_", "/dev/shm/vllm_", "/dev/shm/-tp")  # Python's, vLLM 0.32's and 0.26's
LIBRARIES = "HYBRIDRL_EXTERNAL_LIB"
HEALTH_SECONDS = 1.0
PARTS = frozenset({"weights", "kv_cache"})  # what sleeps and wakes


class VllmEngine:
    """A vLLM engine over one tensor-parallel group of devices: what a rollout server asks of any engine."""

    def __init__(self, device: str, model: ModelConfig, rollout: RolloutConfig, slots: int) -> None:
        os.environ[LIBRARIES] = json.dumps(model.external_lib)  # read where this module is imported by an engine
        import_libraries(model.external_lib)
        repairs.prepare_for(resolve_model(model.path))
        arguments = engine_arguments(device, model, rollout, slots)
        self.sleeps, self.model = rollout.free_cache_engine, model
        self.adapted = bool(model.lora_rank) and not model.lora.merge
        self.number = 0  # of the last hand-over
        self.asleep: frozenset[str] = frozenset()
        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def connect(self) -> None:
        """Make ready for weights."""
        await self._call(self.engine.collective_rpc("init_weight_transfer_engine", args=({},)))
        forget_segments()

    async def generate(self, request: Request, sampling: Sampling) -> Completion:
        prompt = TokensPrompt(prompt_token_ids=request.prompt_ids)
        name = f"{request.prompt}-{request.sample}-{os.urandom(4).hex()}"
        parameters, adapter = sampling_params(request, sampling), self._adapter()
        async for output in self.engine.generate(prompt, parameters, name, lora_request=adapter):
            answer = output.outputs[0]
        return Completion(
            request.prompt,
            request.sample,
            np.asarray(answer.token_ids, dtype=np.int64),
            np.asarray(answer.logprobs.logprobs, dtype=np.float32),
            answer.finish_reason == "length",
        )

    async def score(self, token_ids: list[int]) -> list[float]:
        """Log-probs of the tokens of a sequence after its first, without sampling."""
        parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        prompt, adapter = TokensPrompt(prompt_token_ids=token_ids), self._adapter()
        async for output in self.engine.generate(prompt, parameters, "probe", lora_request=adapter):
            found = output.prompt_logprobs
        return [place[token].logprob for token, place in zip(token_ids[1:], found[1:], strict=True)]

    async def hold(self) -> None:
        """Let requests queue up, with an empty cache."""
        await self._call(self.engine.pause_generation(mode="keep", clear_cache=True))

    async def release(self) -> None:
        """Begin with all that has queued up."""
        await self._call(self.engine.resume_generation())

    @property
    def requests(self) -> int:
        """Requests that the engine has and has not finished."""
        return self.engine.output_processor.get_num_unfinished_requests()

    async def check(self) -> None:
        await self.engine.check_health()

    async def _call(self, call: Awaitable[Any]) -> None:
        """Wait for a control call. vLLM leaves those unanswered for ever that an engine had when it died."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([task], timeout=HEALTH_SECONDS))[0]:
                await self.check()
            await task
        finally:
            task.cancel()

    async def sleep(self) -> None:
        """Stop, forget the cache, and on CUDA give memory back: the cache's, and that of weights, which come back from
        the trainer; the base of an adapter waits in host memory."""
        if not self.sleeps:
            return
        if self.asleep and self.asleep != PARTS:
            for part in self.asleep:  # in vLLM 0.26 an engine that is partly asleep would stay so
                await self.wake(part)
        await self._call(self.engine.sleep(level=1 if self.adapted else 2))
        self.asleep = PARTS

    async def wake(self, part: str) -> None:
        """Take memory for `weights` or `kv_cache` again; the engine runs when it has both."""
        if self.sleeps:
            await self._call(self.engine.wake_up(tags=[part]))
            self.asleep -= {part}

    async def begin_weights(self) -> None:
        await self._call(self.engine.collective_rpc("start_weight_update"))

    async def load_bucket(self, bucket: Bucket, handles: list[Handle], digests: list[int], adapter: bool) -> None:
        """Read one bucket of the model, or of an adapter, from the trainers' memory; one handle and one digest a device
        of this engine."""
        tensors = [asdict(tensor) for tensor in bucket.tensors]
        room = {"start": bucket.start, "size": bucket.bytes}
        info = {"tensors": tensors, **room, "handles": handles, "digests": digests}
        method = "load_adapter_bucket" if adapter else "update_weights"
        await self._call(self.engine.collective_rpc(method, args=(info,)))

    async def finish_weights(self) -> None:
        await self._call(self.engine.collective_rpc("finish_weight_update"))

    async def finish_hand_over(self, number: int) -> None:
        """Compute with what was handed over from now on; `number` counts hand-overs and is returned by `held`."""
        if self.adapted:
            model = self.model
            settings = {"r": model.lora_rank, "lora_alpha": model.lora_alpha, "target_modules": model.target_modules}
            await self._call(self.engine.collective_rpc("finish_adapter", args=(number, settings)))
        await self._call(self.engine.reset_prefix_cache())
        self.number = number

    def _adapter(self) -> LoRARequest | None:
        return adapter_request(self.number) if self.adapted else None


def sampling_params(request: Request, sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        stop_token_ids=[] if sampling.ignore_eos else list(sampling.stop_ids),
        ignore_eos=sampling.ignore_eos,
        seed=request.seed if sampling.temperature > 0 else None,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def engine_arguments(device: str, model: ModelConfig, rollout: RolloutConfig, slots: int) -> dict[str, Any]:
    """vLLM's arguments. `slots` is the number of engines that share this machine's memory."""
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
        "seed": rollout.seed,
        "cudagraph_capture_sizes": rollout.cudagraph_capture_sizes or None,
        "disable_log_stats": True,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": f"{__name__}.EngineProcess",
    }
    if device == "cpu":
        arguments |= {
            "enforce_eager": True,
            "enable_sleep_mode": False,
            # vLLM's CPU generator cannot go on in the middle of a prompt that was cut into pieces.
            "enable_chunked_prefill": False,
            "kv_cache_memory_bytes": cpu_cache_bytes(cache_bytes_of_token(model, rollout), rollout, slots),
        }
    if rollout.tensor_model_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"
    if model.lora_rank and not model.lora.merge:
        arguments |= adapter_arguments(model)
    further = {name: value for name, value in rollout.engine_kwargs.vllm.items() if value is not None}
    unknown = further.keys() - {field.name for field in fields(AsyncEngineArgs)}
    if unknown:
        raise ConfigError(
            f"actor_rollout_ref.rollout.engine_kwargs.vllm: this vLLM has no argument {', '.join(sorted(unknown))}; "
            "leave it out"
        )
    return arguments | further


def forget_segments() -> None:
    """Take away the names of the shared memory that the engine's processes have open: so it ends with them."""
    for process in psutil.Process().children(recursive=True):
        for mapping in process.memory_maps():
            if mapping.path.startswith(SEGMENTS):
                Path(mapping.path).unlink(missing_ok=True)


# -- in the engine's own process ---------------------------------------------------------------------------------------


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Nothing needs to be agreed on beforehand."""


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """A bucket in the trainers' memory: which tensors lie where, one handle and one digest a device."""

    tensors: list[dict[str, Any]] = field(default_factory=list)
    start: int = 0
    size: int = 0
    handles: list[Handle] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)


class HandleTransfer(WeightTransferEngine[NoInitInfo, BucketInfo]):
    """Loads weights out of memory that a trainer on the same device shares."""

    init_info_cls = NoInitInfo
    update_info_cls = BucketInfo

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        end_with_parent(os.getppid(), signal.SIGKILL)
        self.opened: tuple[Handle, torch.Tensor] | None = None
        self.adapted: list[Place] = []  # layers with LoRA that are out of the model while its base is loaded

    def start_weight_update(self) -> None:
        self.adapted += put_base_layers(self.model)
        if self.device.type == "cpu":
            self._forget_experts()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: BucketInfo) -> None:
        self.model.load_weights(self.opened_bucket(update_info))
        devices.synchronize(self.device.type)  # copies may still read this bucket, which the trainer writes over next

    def opened_bucket(self, update_info: BucketInfo) -> list[tuple[str, torch.Tensor]]:
        """Its tensors in the trainer's memory, where other buckets will lie too; RuntimeError for other bytes."""
        rank = get_tensor_model_parallel_rank()
        handle = update_info.handles[rank]
        if self.opened is None or self.opened[0] != handle:
            self.opened = (handle, open_buffer(handle, self.device))
        buffer = self.opened[1][update_info.start : update_info.start + update_info.size]
        if digest(buffer) != update_info.digests[rank]:
            raise RuntimeError("the weights that arrived are not those that were sent: the bucket's digests differ")
        places = [Tensor(**item) for item in update_info.tensors]
        return [(place.name, place.view(buffer)) for place in places]

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._refresh_tied_heads()
        put_back(self.adapted)
        self.close_bucket()

    def close_bucket(self) -> None:
        """Let go of the trainer's memory, which it frees on CUDA; on CPU both keep it for the next time."""
        if self.device.type != "cpu":
            self.opened = None

    def _forget_experts(self) -> None:
        """On CPU experts compute with packed weights, which are packed anew only where their kernel is made anew."""
        for module in self.model.modules():
            if isinstance(module, UnquantizedFusedMoEMethod):
                module.moe_kernel = None

    def _refresh_tied_heads(self) -> None:
        """On CPU a head that shares the embedding's weight computes with a packed copy, which a reload leaves stale."""
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        self.opened = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Asked for by vLLM 0.26; the sending side here is the train worker's."""
        raise NotImplementedError("weights are sent by TrainWorker.fill_bucket")


class EngineProcess:
    """Imported by vLLM in each engine process before the model is built, and with it the registration below; its
    methods become those of vLLM's worker, which has `weight_transfer_engine` and `model_runner`."""

    adapter: dict[str, torch.Tensor] | None = None  # what has come of the next one

    def load_adapter_bucket(self, info: dict[str, Any]) -> None:
        arrived = self.weight_transfer_engine.opened_bucket(BucketInfo(**info))
        self.adapter = (self.adapter or {}) | {name: tensor.cpu().clone() for name, tensor in arrived}

    def finish_adapter(self, number: int, settings: dict[str, Any]) -> None:
        arrived, self.adapter = self.adapter or {}, None
        self.weight_transfer_engine.close_bucket()
        load_adapter(self.model_runner.lora_manager, arrived, number, settings)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, HandleTransfer)
import_libraries(json.loads(os.environ.get(LIBRARIES, "[]")))
