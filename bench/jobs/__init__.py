"""What the sides of a scenario run: training scripts, the naive server, a bare copy."""
