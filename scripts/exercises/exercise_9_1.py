"""Exercise 9.1: the labels that each rank gets from load_labels(), and which ranks read them."""

from exercises.common import attempt, short


def look(exercise, rank, world_size):
    within = exercise.make_nodes(2)
    original, reads = exercise.read, []

    def read():
        reads.append(rank)
        return original()

    exercise.read = read
    labels, error = attempt(exercise.load_labels, within)
    return error, error or labels.tolist(), len(reads)


def judge(seen):
    for rank, (error, labels, _) in enumerate(seen):
        text = error or f"labels {short(labels)}"
        right = not error and labels == [5, 0, 4, 1]
        yield right, f"rank {rank}, node {rank // 2}: {text} (right: labels 5, 0, 4, 1)"
    for node in range(len(seen) // 2):
        reads = sum(mine[2] for mine in seen[2 * node : 2 * node + 2])
        yield reads == 1, f"node {node}: ranks that have read the labels: {reads} (right: 1)"
