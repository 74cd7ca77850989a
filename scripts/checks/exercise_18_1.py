"""Exercise 18.1: how long a message of 100 million gradients takes, and a step."""

from checks.common import close


def look(exercise, rank, world_size):
    messages = [exercise.message_ms(100e6, nodes, 25.0) for nodes in (1, 2, 4)]
    return messages, exercise.step_ms(345e6, 2, 10.0)


def judge(seen):
    for rank, (messages, step) in enumerate(seen):
        # Source: the bytes that a ring sends, 2 (n - 1) / n of the message.
        right = [2 * (nodes - 1) / nodes * 100e6 * 32 / 25e6 for nodes in (1, 2, 4)]
        words = " and ".join(f"{ms:.0f}" for ms in messages[1:])
        text = (
            f"100 million gradients over 25 Gbit/s, 2 and 4 nodes: {words} ms; right: 128 and 192"
        )
        yield close(messages, right), f"rank {rank}: {text}"
        yield (
            close([step], [1304.0]),
            f"rank {rank}: a step on two nodes: {step:.0f} ms; right: 1304",
        )
