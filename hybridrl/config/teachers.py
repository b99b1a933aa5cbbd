"""The section of the models that teach the policy."""

from typing import Annotated, Literal, get_args

from hybridrl.config import values
from hybridrl.config.catalog import Divergence
from hybridrl.config.files import model_path
from hybridrl.config.judge import FIELD, address
from hybridrl.config.values import Section, ValueFault

*EXACT_FORMS, TOP_FORM = get_args(Divergence.__annotations__["kind"])
DistillationForm = Literal[
    "forward_kl", "reverse_kl", "jsd", "forward_kl_topk", "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip


POLICY, BASE = "policy", "base"  # as a path: the weights in training, and those at the start
OWN = "own"  # prompts as the teacher's own template renders them
CONTEXT_FIELDS = ("prompt", "context")


def teacher_path(value: str) -> ValueFault | None:
    """A rule: the path of a model, or a word for the policy's weights."""
    return None if value in (POLICY, BASE) else model_path(value)


def sources(value: list[str]) -> ValueFault | None:
    """A rule: the sources of a teacher's context, in the order in which they are tried."""
    unknown = [name for name in value if name not in ("sibling", "feedback") and not name.partition("column:")[2]]
    return (
        ValueFault(f"has the unknown source {unknown[0]}", "name sibling, feedback, column:NAME") if unknown else None
    )


def context_template(value: str) -> ValueFault | None:
    """A rule: a text that shows a prompt and its context."""
    fields = FIELD.findall(value)
    if unknown := [name for name in fields if name not in CONTEXT_FIELDS]:
        return ValueFault(f"has the unknown field {unknown[0]}", "write {{prompt}} and {{context}}")
    return None if "context" in fields else ValueFault("does not show the context", "add {{context}} to it")


class TeacherConfig(Section):
    key: str | None
    model_path: Annotated[str, teacher_path] | None
    ema: Annotated[float, values.Range(above=0, below=1)] | None
    prompt: Literal["policy", "own"] | None
    context: Annotated[list[str], sources] | None
    template: Annotated[str, context_template] | None
    threshold: float | None
    base_url: Annotated[str, address] | None
    served_name: str | None
    api_key_env: str | None

    @property
    def reads_other(self) -> bool:
        """Return whether it reads something other than the policy's prompt."""
        return bool(self.context) or self.prompt == OWN


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
        left_out = self.chooses and len(self.teachers) < len(self.teacher_models)
        return self.reads_contexts or left_out

    @property
    def reads_contexts(self) -> bool:
        """Return whether a teacher reads something else than the policy: a row without that has no teacher."""
        return any(teacher.reads_other for teacher in self.teachers.values())

    @property
    def rewarded(self) -> bool:
        """Return whether the policy learns from rewards."""
        return not self.enabled or self.distillation_loss.use_task_rewards
