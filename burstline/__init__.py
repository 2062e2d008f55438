"""Burstline benchmarks LLM inference servers and compares the result with the hardware's roofline."""

__version__ = "0.1.0"
