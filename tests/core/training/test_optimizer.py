from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from hybridrl.config import ConfigError
from hybridrl.config.schema import OptimizerConfig
from hybridrl.core.training.optimizer import Optimizers, build_optimizers, schedule
from hybridrl.runs.trials import try_schedule
from tests.sections import section_of

OPTIMIZER = "actor_rollout_ref.actor.optim"


def config(**changes: object) -> OptimizerConfig:
    return section_of(OptimizerConfig, OPTIMIZER, **{"lr": 0.1, "betas": [0.9, 0.99]} | changes)


def factors(steps: int, **changes: object) -> list[float]:
    return [schedule(step, steps, config(**changes)) for step in range(steps)]


class Tiny(nn.Module):
    """The shape of a language model: an embedding, layers with matrices and vectors, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)


def names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name for name, p in model.named_parameters() if id(p) in held}


def fill_gradients(model: nn.Module) -> None:
    for number, parameter in enumerate(model.parameters()):
        torch.manual_seed(number)
        parameter.grad = torch.randn_like(parameter)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1, 1, 1]),
        ({"lr_warmup_steps": 2}, [0.5, 1, 1, 1]),
        ({"lr_warmup_steps_ratio": 0.5}, [0.5, 1, 1, 1]),
        ({"lr_warmup_steps": 4, "lr_warmup_steps_ratio": 0.5}, [0.25, 0.5, 0.75, 1]),
        ({"lr_warmup_steps": 0, "lr_warmup_steps_ratio": 0.5}, [0.5, 1, 1, 1]),
        ({"lr_warmup_steps": None, "lr_warmup_steps_ratio": 0.5}, [0.5, 1, 1, 1]),
        ({"lr_scheduler_type": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"lr_scheduler_type": "linear", "lr_warmup_steps": 2}, [0.5, 1, 1, 0.5]),
        ({"lr_scheduler_type": "linear", "min_lr_ratio": 0.2}, [1, 0.8, 0.6, 0.4]),
        ({"lr_scheduler_type": "cosine"}, [1, 0.853553, 0.5, 0.146447]),
        ({"lr_scheduler_type": "cosine", "lr_warmup_steps": 2}, [0.5, 1, 1, 0.5]),
        ({"lr_scheduler_type": "cosine", "min_lr_ratio": 0.2}, [1, 0.882843, 0.6, 0.317157]),
        ({"lr_scheduler_type": "cosine", "num_cycles": 1.0}, [1, 0.5, 0, 0.5]),
        ({"lr_scheduler_type": "wsd", "stable_ratio": 0.5}, [1, 1, 1, 0.5]),
        ({"lr_scheduler_type": "wsd", "stable_ratio": 0.5, "min_lr_ratio": 0.2}, [1, 1, 1, 0.6]),
        ({"lr_scheduler_type": "wsd", "stable_ratio": 0.5, "lr_warmup_steps": 2}, [0.5, 1, 1, 1]),
        ({"lr_scheduler_type": "wsd", "stable_ratio": 0}, [1, 0.853553, 0.5, 0.146447]),
        ({"lr_scheduler_type": "wsd", "stable_ratio": 1}, [1, 1, 1, 1]),
        ({"lr_scheduler_type": "inverse_sqrt"}, [1, 0.707107, 0.577350, 0.5]),
        ({"lr_scheduler_type": "inverse_sqrt", "lr_warmup_steps": 2}, [0.5, 1, 0.816497, 0.707107]),
        ({"lr_scheduler_type": "inverse_sqrt", "min_lr_ratio": 0.6}, [1, 0.707107, 0.6, 0.6]),
    ],
)
def test_the_factor_of_each_of_four_updates(settings, expected):
    assert factors(4, **settings) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(2, [1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8, 1, 1]), (0.5, [1 / 2, *[1] * 8]), (0, [1] * 9)],
)
def test_a_warm_up_lasts_for_steps_of_the_trainer_and_rises_at_each_of_their_updates(steps, expected):
    settings = config(lr_warmup_steps=steps)
    assert [schedule(update, 40, settings, updates_per_step=4) for update in range(9)] == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_after_the_last_update_the_rate_stays_at_its_least(kind):
    settings = config(lr_scheduler_type=kind, min_lr_ratio=0.1)
    assert [schedule(step, 4, settings) for step in (4, 9)] == pytest.approx([0.1, 0.1])


def test_a_custom_schedule_counts_the_updates_after_the_warm_up_and_gets_keys_by_name(tmp_path):
    code = (
        "def halves(update, total_updates, *, min_lr_ratio): return max(1 - update / total_updates / 2, min_lr_ratio)"
    )
    (tmp_path / "mine.py").write_text(code)
    kind = f"{tmp_path}/mine.py:halves"
    assert factors(4, lr_scheduler_type=kind) == [1, 0.875, 0.75, 0.625]
    assert factors(4, lr_scheduler_type=kind, lr_warmup_steps=2, min_lr_ratio=0.8) == [0.5, 1, 1, 0.8]


UNUSABLE = ("None", "True", "'1'", "float('inf')", "float('nan')")


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("def mine(update): return 1.0", "has other parameters: too many positional arguments"),
        ("def mine(update, total, a, b): return 1.0", "has other parameters: missing a required argument: 'b'"),
        ("def mine(update, total): return 1 / (5 - update)", r"fails at update 5 of 10: ZeroDivisionError.*mine.py:1"),
        ("def mine(update, total): return 1 - update / 8", r"at update 9 of 10 it returns -0.125; return the factor"),
        *(
            (f"def mine(update, total): return {value}", r"at update 0 of 10 it returns .*; return")
            for value in UNUSABLE
        ),
    ],
)
def test_a_custom_schedule_that_no_update_could_use_is_rejected(tmp_path, code, cause):
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ConfigError, match=f"^optim.lr_scheduler_type=.*mine.py:mine.*{cause}"):
        try_schedule("optim.lr_scheduler_type", config(lr_scheduler_type=f"{tmp_path}/mine.py:mine"))


def test_adamw_gets_every_trainable_parameter():
    model = Tiny()
    model.embedding.requires_grad_(False)
    (optimizer,) = build_optimizers(model, config())
    assert names_of(model, optimizer) == {name for name, _ in model.named_parameters()} - {"embedding.weight"}
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.1, (0.9, 0.99), 0.01)


def test_muon_gets_the_matrices_of_the_layers_and_adamw_the_rest():
    model = Tiny()
    rest, matrices = build_optimizers(model, config(optimizer="Muon"))
    assert isinstance(rest, AdamW)
    assert names_of(model, matrices) == {"layers.0.weight", "layers.1.weight"}
    everything = {name for name, _ in model.named_parameters()}
    assert names_of(model, rest) == everything - names_of(model, matrices)
    assert [optimizer.param_groups[0]["lr"] for optimizer in (rest, matrices)] == [0.1, 0.02]


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_a_step_moves_every_parameter_and_every_rate(name):
    model = Tiny()
    optimizers = Optimizers(model, config(optimizer=name, lr_scheduler_type="linear"), total_updates=4)
    before = {key: value.clone() for key, value in model.named_parameters()}
    assert optimizers.lr == 0.1
    fill_gradients(model)
    optimizers.step()
    assert all(not torch.equal(value, before[key]) for key, value in model.named_parameters())
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers.optimizers]
    assert rates == pytest.approx([0.075, 0.015][: len(rates)])
    assert optimizers.lr == pytest.approx(0.075)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_skipped_update_keeps_the_model_while_the_schedule_advances():
    model = Tiny()
    optimizers = Optimizers(model, config(lr_scheduler_type="linear"), total_updates=4)
    before = {key: value.clone() for key, value in model.named_parameters()}
    fill_gradients(model)
    optimizers.skip()
    assert all(torch.equal(value, before[key]) for key, value in model.named_parameters())
    assert optimizers.lr == pytest.approx(0.075)


def test_gradients_are_dropped_and_not_only_set_to_zero():
    model = Tiny()
    optimizers = Optimizers(model, config(optimizer="Muon"), total_updates=4)
    fill_gradients(model)
    optimizers.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def two_alike() -> tuple[Tiny, Tiny]:
    torch.manual_seed(0)
    models = Tiny(), Tiny()
    models[1].load_state_dict(models[0].state_dict())
    return models


def assert_same_steps(models: tuple[Tiny, Tiny], *optimizers: Sequence[Optimizers | torch.optim.Optimizer]) -> None:
    """Two steps with equal gradients, by the optimizers of each model, leave the two equal."""
    for _ in range(2):
        for model, own in zip(models, optimizers, strict=True):
            fill_gradients(model)
            for optimizer in own:
                optimizer.step()
    torch.testing.assert_close(*(list(model.parameters()) for model in models), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_offloaded_moments_stay_in_one_allocation_per_optimizer_and_change_no_step(name):
    models, settings = two_alike(), config(optimizer=name)
    offloaded, kept = (Optimizers(models[not where], settings, 4, offloaded=where) for where in (True, False))
    places = [value.data_ptr() for value in moments(offloaded)]
    assert_same_steps(models, [offloaded], [kept])
    assert [value.data_ptr() for value in moments(offloaded)] == places
    assert len({value.untyped_storage().data_ptr() for value in moments(offloaded)}) == len(offloaded.optimizers)


def moments(optimizers: Optimizers) -> list[Tensor]:
    states = [state for item in optimizers.optimizers for state in item.state.values()]
    return [value for state in states for name, value in state.items() if name != "step"]


@pytest.mark.parametrize(("more", "where"), [({}, "meta"), ({"fused": True}, "meta"), ({"foreach": True}, "cpu")])
def test_the_fused_kernel_s_count_of_steps_is_on_the_device_of_its_parameters(more, where):
    (adamw,) = build_optimizers(Tiny().to("meta"), config(override_optimizer_config=more))
    assert {state["step"].device.type for state in adamw.state.values()} == {where}


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_moments_that_exist_from_the_start_change_no_step(name):
    models = two_alike()
    kept, late = (build_optimizers(model, config(optimizer=name)) for model in models)
    for optimizer in late:
        optimizer.state.clear()  # which the first step fills
    assert_same_steps(models, kept, late)


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
@pytest.mark.parametrize("updates", [0, 1, 3])
def test_schedules_resume_after_any_update_with_the_same_rates(name, updates):
    settings = config(optimizer=name, lr_scheduler_type="cosine", lr_warmup_steps=2, weight_decay=0.0)
    ran, started = (Optimizers(Tiny(), settings, total_updates=6) for _ in range(2))
    for _ in range(updates):
        ran.step()
    started.resume_after(updates)
    for _ in range(3):
        assert started.updates == ran.updates
        rates = [[item.param_groups[0]["lr"] for item in each.optimizers] for each in (started, ran)]
        assert rates[0] == rates[1] and started.lr == rates[0][0]
        for each in (started, ran):
            each.step()


def test_schedules_can_also_go_back():
    optimizers = Optimizers(Tiny(), config(lr_scheduler_type="linear"), total_updates=4)
    optimizers.step()
    optimizers.resume_after(0)
    assert (optimizers.updates, optimizers.lr) == (0, 0.1)


def test_further_arguments_reach_adamw() -> None:
    (adamw,) = build_optimizers(Tiny(), config(override_optimizer_config={"eps": 1e-6}))
    assert adamw.param_groups[0]["eps"] == 1e-6


@pytest.mark.parametrize("kernel", [{}, {"foreach": True}, {"fused": False}])
def test_adamw_takes_the_same_steps_with_every_kernel(kernel):
    ours, plain = Tiny(), Tiny()
    plain.load_state_dict(ours.state_dict())
    (optimizer,) = build_optimizers(ours, config(override_optimizer_config=kernel))
    reference = AdamW(plain.parameters(), lr=0.1, betas=(0.9, 0.99), weight_decay=0.01, foreach=False, fused=False)
    for number in range(3):
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            one.grad = torch.full_like(one, 0.5 - number)
            other.grad = one.grad.clone()
        optimizer.step()
        reference.step()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
