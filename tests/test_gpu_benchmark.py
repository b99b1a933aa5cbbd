"""The GPU benchmark measures what its rows state, and writes them even if its time runs out."""

import json
import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridrl.config import PPOConfig
from hybridrl.core.cluster import Group, RemoteFailure
from hybridrl.core.rollout.engine import RolloutEngine
from hybridrl.core.training.planning import UpdatePlan

SCRIPTS = Path(__file__).parents[1] / "scripts" / "benchmark"


@pytest.fixture(autouse=True)
def scripts(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.mark.parametrize(("gpus", "tokens", "expected"), [(1, None, (1, 1)), (2, None, (1, 1)), (2, 256, (1, 2))])
def test_an_update_has_a_single_micro_batch_unless_fewer_tokens_are_allowed(tmp_path, gpus, tokens, expected):
    from gpu import Bench, cuts
    from memory_plan import make_model
    from models import SHAPES

    make_model(SHAPES["tiny"], tmp_path / "model")
    bench = Bench(Namespace(shape="tiny", device="cpu", gpus=gpus, overrides=[]), tmp_path, ExitStack())
    updates = UpdatePlan.of(bench.configured(tokens=tokens).actor_rollout_ref)
    workers = SimpleNamespace(policy=SimpleNamespace(updates=updates), group=range(gpus))
    assert cuts(workers, bench.load.batch(gpus)) == expected  # 512 tokens per GPU


def test_a_variant_that_does_not_fit_in_memory_is_measured_in_smaller_micro_batches(tmp_path):
    from gpu import Bench
    from memory_plan import make_model
    from models import SHAPES

    tried, options = [], Namespace(shape="tiny", device="cpu", gpus=1, overrides=[])

    class Small(Bench):
        """On a device with room for 128 tokens."""

        def end(self, group: object) -> None: ...

        def build(self, config: PPOConfig) -> None:
            tried.append(config.actor_rollout_ref)

        def update(self, name: str) -> list[str]:
            if tried[-1].actor.ppo_max_token_len_per_gpu > 128:
                raise RemoteFailure("train worker.update_policy: rank 0 failed: CUDA out of memory. Tried to allocate")
            return [name]

    make_model(SHAPES["tiny"], tmp_path / "model")
    bench = Small(options, tmp_path, ExitStack())
    bench.group = None
    assert bench.variant("without recomputation") == ["without recomputation"]
    assert [section.actor.ppo_max_token_len_per_gpu for section in tried] == [512, 256, 128]
    assert not any(section.model.enable_gradient_checkpointing for section in tried)


def test_rollout_is_compared_with_vllms_generate_in_both_of_its_process_modes(tmp_path, monkeypatch):
    import gpu
    from memory_plan import make_model
    from models import SHAPES

    seconds = {"0": 2.0, "1": 0.5}

    class Child:
        def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
            self.seconds = seconds[environment["VLLM_ENABLE_V1_MULTIPROCESSING"]]

        def __enter__(self) -> "Child":
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def call(self, name: str, file: str) -> dict[str, float]:
            return {"seconds": self.seconds}

    make_model(SHAPES["tiny"], tmp_path / "model")
    bench = gpu.Bench(Namespace(shape="tiny", device="cpu", gpus=1, overrides=[]), tmp_path, ExitStack())
    bench.config, bench.group, bench.gpu = bench.configured(), Group([], "", []), ""
    bench.generated = SimpleNamespace(median=1.0)
    monkeypatch.setattr(gpu, "Child", Child)
    assert {row.what: row.value for row in bench.bare()} == {
        "rollout against vLLM's generate, its engine in the caller's process, tiny": 2.0,
        "rollout against vLLM's generate, its engine in its own process, vLLM's default, tiny": 0.5,
    }


def test_the_kernels_of_a_trace_are_added_by_kind_and_overlapping_ones_count_once_as_busy(tmp_path):
    from kernel_trace import read_trace

    def event(name: str, begin: int, microseconds: int, category: str = "kernel") -> dict:
        return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": microseconds}

    events = [
        event("aten::mm", 0, 900, "cpu_op"),
        event("nvjet_sm90_tst", 100, 200),
        event("void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>", 250, 100),  # 50 with the product
        event("Memcpy DtoD", 500, 100, "gpu_memcpy"),
        event("void at::native::silu_kernel", 600, 50),
        {"ph": "M", "name": "process_name"},
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    found = read_trace(tmp_path / "trace.json")
    assert found is not None
    assert (found.span, found.busy, found.launches) == pytest.approx((550e-6, 400e-6, 4))
    assert found.kinds == pytest.approx(
        {
            "matrix products": 200e-6,
            "attention": 100e-6,
            "copies": 100e-6,
            "elementwise operations and reductions": 50e-6,
        }
    )
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events[:1]}))
    assert read_trace(tmp_path / "trace.json") is None  # of a CPU


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<c10::BFloat16, float, 2, 1, 1>>", "copies"),
        ("split_with_sizes_copy_out_contiguous_no_cast_kernel", "copies"),
        ("multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>", "optimizer"),
    ],
)
def test_copies_of_many_tensors_at_once_are_not_the_optimizers(kernel, kind):
    from kernel_trace import kind_of

    assert kind_of(kernel) == kind


def test_the_sleep_of_engines_is_counted_as_a_call(monkeypatch):
    from weight_sync import count_calls

    for name in ("finish", "failures"):  # what count_calls replaces
        monkeypatch.setattr(Group, name, lambda group, method, timeout: time.sleep(0.01))
    seconds = {"rollout.sleep": 0.0}
    count_calls(seconds)
    Group([], "rollout server", []).failures(RolloutEngine.sleep, timeout=1)
    assert seconds["rollout.sleep"] >= 0.01


def test_operations_include_the_embedding_only_if_it_is_the_head():
    from gpu_work import operations

    shape = {"hidden_size": 4, "num_hidden_layers": 2, "vocab_size": 10}
    assert operations(shape, parameters=100, tokens=3, width=5) == 6 * 3 * (100 + 2 * 4 * 5)
    assert operations(shape | {"tie_word_embeddings": False}, 100, 3, 5) == 6 * 3 * (100 - 10 * 4 + 2 * 4 * 5)


def test_rows_are_written_one_by_one_and_the_rest_listed_when_the_time_is_over(tmp_path):
    from limited import Report, measure
    from side_by_side import Row

    file, written = tmp_path / "rows.json", []

    def rows() -> list[str]:
        return [f"{row['what']}: {row['ours']}" for row in json.loads(file.read_text())["rows"]]

    def too_long() -> list[Row]:
        written.extend(rows())
        time.sleep(60)

    tasks = {"quick": lambda: [Row("quick", "1 ms", "")], "broken": lambda: 1 / 0, "too long": too_long, "last": list}
    began = time.monotonic()
    assert measure(tasks, Report(file), 1.0) == ["broken"]
    assert time.monotonic() - began < 30
    assert written == ["quick: 1 ms", "broken: failed: ZeroDivisionError: division by zero"]
    assert rows() == [*written, "too long: not measured", "last: not measured"]


def test_nothing_is_measured_after_a_failed_start(tmp_path):
    from limited import Report, measure

    report = Report(None)
    assert measure({"start": lambda: 1 / 0, "next": list}, report, 5) == ["start"]
    assert [row.ours for row in report.rows] == ["failed: ZeroDivisionError: division by zero", "not measured"]
