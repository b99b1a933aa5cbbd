"""Health of a run while it trains: rules that read its metrics."""

from hybridrl.health.history import Diagnosis, History
from hybridrl.health.rules import HealthMonitor, Unhealthy

__all__ = ["Diagnosis", "HealthMonitor", "History", "Unhealthy"]
