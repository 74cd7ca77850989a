"""Exercise 17.4: what ring_attention() returns, and how many pieces of the keys a rank holds."""

import weakref

from exercises.common import compared


def most_pieces_held(function, query, key, value, pieces):
    """Call the function. Return its result, and how many of the pieces it held at a time."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    marks = [piece[0, 0].item() for piece in pieces]  # all of them are different
    alive = [weakref.ref(key)]
    counts = []

    class Watch(TorchDispatchMode):
        """After each operation, see which pieces are in the tensors that exist."""

        def __torch_dispatch__(self, operation, types, arguments=(), options=None):
            result = operation(*arguments, **(options or {}))
            if "empty" in str(operation):  # its memory holds earlier tensors
                result.zero_()
            alive.extend(weakref.ref(x) for x in tree_leaves(result) if torch.is_tensor(x))
            tensors = [ref() for ref in alive if ref() is not None]
            numbers = {x for tensor in tensors for x in tensor.flatten().tolist()}
            counts.append(sum(mark in numbers for mark in marks))
            alive[:] = map(weakref.ref, tensors)
            return result

    with Watch():
        result = function(query, key, value)
    return result, max(counts, default=1)


def look(exercise, rank, world_size):
    text = exercise.make_text(8 * world_size)
    answers = []
    for larger in (1, 50):  # scores above 100: their exp is infinite
        query, key, value = [text[0] * larger, *text[1:]]
        whole = (query @ key.T / query.shape[1] ** 0.5).softmax(1) @ value
        mine = [tensor.chunk(world_size)[rank].clone() for tensor in (query, key, value)]
        result, held = most_pieces_held(exercise.ring_attention, *mine, key.chunk(world_size))
        right = whole.chunk(world_size)[rank]
        answers.append((result.flatten().tolist(), right.flatten().tolist(), held))
    return answers


def judge(seen):
    for rank, answers in enumerate(seen):
        for scores, (mine, right, _) in zip(("small", "large"), answers):
            holds, words = compared(mine, right)
            yield holds, f"rank {rank}: {scores} scores: {words}"
        held = max(count for *_, count in answers)
        text = f"rank {rank}: pieces of the keys, of {len(seen)}, that it holds at a time: {held}"
        yield held < len(seen), f"{text} (limit {len(seen) - 1})"
