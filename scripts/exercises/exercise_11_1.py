"""Exercise 11.1: whether a file is open before the workers start, and what the workers read."""

import pickle

from exercises.common import shared_folder


def look(exercise, rank, world_size):
    import h5py
    from torch.utils.data import DataLoader

    path = shared_folder(rank) / f"rank{rank}.h5"
    exercise.write(path, 32)
    dataset = exercise.Images(path)
    handles = h5py.h5f.get_obj_count(types=h5py.h5f.OBJ_FILE)
    try:
        pickle.loads(pickle.dumps(dataset))
        error = None
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    if handles or error:  # forked workers that share an open file may read anything
        return handles, error, []
    loader = DataLoader(dataset, batch_size=4, num_workers=2)
    return handles, error, [int(image.max()) for batch in loader for image in batch]


def judge(seen):
    for rank, (handles, error, values) in enumerate(seen):
        text = f"rank {rank}: sending the data set to a worker: {error or 'no error'}"
        yield not error, f"{text} (right: no error)"
        if not error:
            text = f"rank {rank}: files that are open before the workers start: {handles}"
            yield handles == 0, f"{text} (right: 0)"
        if not (error or handles):
            right = sum(value == place for place, value in enumerate(values))
            text = f"rank {rank}: images that two workers read as they are: {right}"
            yield right == len(values) == 32, f"{text} (right: 32)"
