"""Shoal measured beside what people use instead, in the same run: ``python -m bench`` lists the scenarios."""
