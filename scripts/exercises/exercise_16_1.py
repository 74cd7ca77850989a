"""Exercise 16.1: what largest() sends and keeps in 6 steps, and where train() ends."""

from exercises.common import compared


def look(exercise, rank, world_size):
    import torch

    gradient, rest = torch.tensor([8.0, -4.0, 2.0]), torch.zeros(3)
    sent = [exercise.largest(gradient.clone(), rest).tolist() for _ in range(6)]
    return sent, rest.tolist(), exercise.train(300, rank)


def judge(seen):
    right = [48.0, -24.0, 12.0]
    for rank, (sent, rest, gap) in enumerate(seen):
        most = max(sum(x != 0 for x in step) for step in sent)
        yield most == 1, f"rank {rank}: sends at most {most} numbers in a step (limit 1)"
        total = [sum(column) for column in zip(*sent, rest)]
        holds, words = compared(total, right)
        yield holds, f"rank {rank}: sent and kept in 6 steps: {words}"
        yield gap < 0.3, f"rank {rank}: ends {gap:.2f} from the best numbers (limit 0.3)"
