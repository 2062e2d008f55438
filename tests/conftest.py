"""Hypothesis for all tests: nothing is judged by how long it took, neighbours may be noisy."""

from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
