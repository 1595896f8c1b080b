"""What can go wrong with a measurement."""

from __future__ import annotations


class BenchError(Exception):
    """A measurement that could not be made; the text says why, and what to do."""
