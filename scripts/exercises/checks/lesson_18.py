def check_18_1(exercise, rank, world_size, report):
    nodes = (1, 2, 4)
    messages = [exercise.message_ms(100e6, number, 25.0) for number in nodes]
    # Source: the bytes that a ring sends, 2 (n - 1) / n of the message.
    right = [2 * (number - 1) / number * 100e6 * 32 / 25e6 for number in nodes]
    text = "ms for 100 million gradients over 25 Gbit/s, on 1, 2 and 4 nodes:"
    report.numbers(text, messages, right)
    report.numbers("ms for a step on two nodes:", [exercise.step_ms(345e6, 2, 10.0)], [1304.0])
