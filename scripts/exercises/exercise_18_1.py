"""Exercise 18.1: how long a message of 100 million gradients takes, and a step."""

from exercises.common import compared


def look(exercise, rank, world_size):
    messages = [exercise.message_ms(100e6, nodes, 25.0) for nodes in (1, 2, 4)]
    return messages, exercise.step_ms(345e6, 2, 10.0)


def judge(seen):
    for rank, (messages, step) in enumerate(seen):
        # Source: the bytes that a ring sends, 2 (n - 1) / n of the message.
        right = [2 * (nodes - 1) / nodes * 100e6 * 32 / 25e6 for nodes in (1, 2, 4)]
        holds, words = compared(messages, right)
        text = "ms for 100 million gradients over 25 Gbit/s, on 1, 2 and 4 nodes"
        yield holds, f"rank {rank}: {text}: {words}"
        holds, words = compared([step], [1304.0])
        yield holds, f"rank {rank}: ms for a step on two nodes: {words}"
