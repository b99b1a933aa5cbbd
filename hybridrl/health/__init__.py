"""Health of a run while it trains: rules that read its metrics."""

from hybridrl.health.monitor import HealthMonitor, Unhealthy

__all__ = ["HealthMonitor", "Unhealthy"]
