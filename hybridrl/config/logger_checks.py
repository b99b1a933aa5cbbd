"""Which of the names in trainer.logger are sinks here."""

from collections.abc import Callable

from hybridrl.config.error import Refusals
from hybridrl.config.names import nearest
from hybridrl.config.schema import TrainerConfig
from hybridrl.config.schema_sft import SFTTrainerConfig
from hybridrl.config.values import LOGGERS

Note = Callable[[str], None]

# Sinks of verl, SkyRL and AReaL that are none here.
OTHERS = ("swanlab", "mlflow", "vemlp_wandb", "clearml", "trackio", "rl_insight", "aim")


def settle_loggers(trainer: TrainerConfig | SFTTrainerConfig, note: Note, wrong: Refusals) -> None:
    """Leave out other systems' sinks with a warning; reject what is no sink of any."""
    known = [name for name in trainer.logger if name in LOGGERS]
    others = [name for name in trainer.logger if name in OTHERS]
    for name in trainer.logger:
        if name not in (*LOGGERS, *OTHERS):
            meant = nearest(name, [*LOGGERS], count=1)
            hint = f"; did you mean {meant[0]}?" if meant else ""
            wrong.add(f"trainer.logger={name}: choose among {', '.join(LOGGERS)}{hint}")
    if others:
        taken = known or ["console"]
        note(
            f"trainer.logger: {', '.join(others)} {'are' if others[1:] else 'is'} not supported and left out; metrics "
            f"go to {', '.join(taken)} and metrics.jsonl"
        )
        trainer.logger = taken
