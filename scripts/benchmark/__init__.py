"""The cases of benchmark.py, and what they compare the lessons with."""
