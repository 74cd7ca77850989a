"""The checks of the exercises: exercise_6_3.py checks exercise 6.3.

Each has two functions. look(exercise, rank, world_size) runs on every rank: it gets the exercise as
a module, calls what is in it, and returns what it saw, as plain numbers, texts and lists.
judge(seen) runs once, where check.py was started: it gets the list of what the ranks saw, in their
order, and yields (right, sentence) for each line that the learner reads. A sentence says what was
measured, then what is allowed: "right:" or "limit". It never says why: causes are in the hints and
in the field consequence of exercises.toml. A measurement that would give the cause away comes only
after the one that shows the symptom is right.

check.py itself needs no PyTorch, which takes seconds to import, so look imports it.
A new exercise needs its check here and its table in ../exercises.toml; check.py finds both by id.
"""
