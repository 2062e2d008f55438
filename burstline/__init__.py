"""Burstline fires bursts at LLM inference servers and holds the result against the hardware's roofline."""

__version__ = "0.1.0"
