"""Runs the checks of the exercises: day1/exercises/checks/lesson_6.py has those of lesson 6.

check_6_2(exercise, rank, world_size) runs on every rank, first with the solution, then with what a
learner has written: it gets a module, calls what is in it, and yields what this rank saw, as a
common.Fact. It says nothing of causes, which are in hints.toml: hints have the keys of the facts.
What the exercise says of itself it doesn't believe, but counts and notes. A learner sees only the
first thing that is wrong: that should be the point of the exercise, and no cause.

A new exercise needs its check here, and its table in the hints.toml beside its solution; check.py
finds both by id.
"""
