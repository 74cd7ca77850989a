"""The checks of the exercises: checks/lesson_6.py checks those of lesson 6.

check_6_2(exercise, rank, world_size, report) runs on every rank: it gets the exercise as a module,
calls what is in it, and reports what this rank saw. What only all ranks together show, it yields,
as plain numbers, texts and lists: seen = yield value. Rank 0 alone goes on from there: seen is what
all ranks have yielded, in the order of the ranks. report is a common.Report: report(right, text)
is a line that the learner reads. It says what was measured, then what is allowed: "right:" or
"limit". It never says why: causes are in the hints and in the field consequence of hints.toml.
A learner sees only the first symptom, so one that would give the cause away comes after the others.

A new exercise needs its check here, and its table in the hints.toml beside its solution; check.py
finds both by id.
"""
