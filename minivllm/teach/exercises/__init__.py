"""The exercises, one module per notebook. EXERCISES holds them all by name."""

from minivllm.teach.exercise import Exercise
from minivllm.teach.exercises import attention, batching, graphs, kv_cache, paged, parallel, preemption, prefix_cache, sampling, sharding, store, tour

_MODULES = (tour, attention, kv_cache, store, paged, batching, preemption, graphs, sampling, sharding)
EXERCISES: dict[str, Exercise] = {exercise.name: exercise for module in _MODULES for exercise in module.EXERCISES}

#: Checkers of their own, for exercises that many results may solve: name -> function(learner's function) -> Result.
CHECKERS = {**prefix_cache.CHECKERS, **batching.CHECKERS, **parallel.CHECKERS}
