"""The section of the models that teach the policy."""

from typing import Annotated, Literal, get_args

from hybridrl.config import values
from hybridrl.config.catalog import Divergence
from hybridrl.config.files import ModelPath
from hybridrl.config.judge import address
from hybridrl.config.values import Section

*EXACT_FORMS, TOP_FORM = get_args(Divergence.__annotations__["kind"])
DistillationForm = Literal[
    "forward_kl", "reverse_kl", "jsd", "forward_kl_topk", "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip


class TeacherConfig(Section):
    key: str | None
    model_path: ModelPath | None
    base_url: Annotated[str, address] | None
    served_name: str | None
    api_key_env: str | None


class DistillationLossConfig(Section):
    loss_mode: DistillationForm | None
    beta: Annotated[float, values.Range(above=0, below=1)]
    topk: values.Positive
    log_prob_min_clamp: Annotated[float, values.Range(below=0)] | None
    use_task_rewards: bool
    distillation_loss_coef: values.AboveZero
    loss_max_clamp: values.AboveZero | None
    use_policy_gradient: bool
    clip_ratio_low: values.NonNegative
    clip_ratio_high: values.NonNegative


class DistillationConfig(Section):
    enabled: bool
    teacher_key: str
    teacher_models: dict[str, TeacherConfig]
    distillation_loss: DistillationLossConfig

    @property
    def teachers(self) -> dict[str, TeacherConfig]:
        """Return the teachers that have a model, by name, if there are any in this run."""
        named = self.teacher_models.items()
        return {name: each for name, each in named if self.enabled and (each.model_path or each.base_url)}

    @property
    def endpoints(self) -> dict[str, TeacherConfig]:
        """Return those of them that are behind an endpoint."""
        return {name: teacher for name, teacher in self.teachers.items() if teacher.base_url}

    @property
    def chooses(self) -> bool:
        """Return whether rows name their teachers."""
        return self.enabled and any(teacher.key is not None for teacher in self.teacher_models.values())

    @property
    def leaves_out(self) -> bool:
        """Return whether there may be rows without a teacher."""
        return self.chooses and len(self.teachers) < len(self.teacher_models)

    @property
    def rewarded(self) -> bool:
        """Return whether the policy learns from rewards."""
        return not self.enabled or self.distillation_loss.use_task_rewards
