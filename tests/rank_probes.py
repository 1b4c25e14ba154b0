"""What tests have the ranks run: `runner.everywhere(probe)`. Imported by the ranks too."""

import os


def weight_bytes(runner):
    return runner.weight_bytes


def pid(runner):
    return os.getpid()


def pool_shape(runner):
    return tuple(runner.pool.cache.shape)


def fail(runner, rank):
    if runner.ranks.rank == rank:
        raise ValueError(f"planted in rank {rank}")
    runner.ranks.all_reduce(runner.model.model.norm.weight.clone())  # waits for the one that failed


def fail_in_the_next_step(runner, rank):
    if runner.ranks.rank == rank:
        runner.model.forward = lambda *args: 1 / 0


def num_replays(runner):
    return runner.graphs.num_replays if runner.graphs else 0
