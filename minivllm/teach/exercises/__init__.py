"""The exercises, one module per notebook. EXERCISES holds them all by name."""

from minivllm.teach.exercise import Exercise
from minivllm.teach.exercises import attention, kv_cache, tour

EXERCISES: dict[str, Exercise] = {exercise.name: exercise for module in (tour, attention, kv_cache) for exercise in module.EXERCISES}
