"""Simulated traffic: when requests come and how many tokens each has. Lengths only; the tokens themselves do not matter here."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple


class Request(NamedTuple):
    """Arrives `arrival` seconds after the start with `prompt_tokens`, and gets exactly `output_tokens`."""

    arrival: float
    prompt_tokens: int
    output_tokens: int


def poisson_requests(num: int, rate: float, seed: int = 0, prompt: tuple[int, int] = (64, 512), output: tuple[int, int] = (16, 192),
                     lengths: Sequence[tuple[int, int]] | None = None) -> list[Request]:
    """`num` requests, `rate` a second on average, independent of each other: the gaps between them are exponential.

    rate=math.inf: all at time 0. prompt, output: ranges of lengths, ends included, drawn evenly; or `lengths`, pairs of (prompt,
    output) to draw from, such as `measured_lengths()`. The same arguments give the same requests.
    """
    if num < 1 or not rate > 0:
        raise ValueError(f"num ({num}) must be at least 1 and rate ({rate}) above 0; math.inf lets all requests arrive at once")
    for name, (low, high) in (("prompt", prompt), ("output", output)):
        if not 1 <= low <= high:
            raise ValueError(f"{name} ({low}, {high}) must be a range from at least 1 upwards")
    rng = random.Random(seed)
    requests, now = [], 0.0
    for _ in range(num):
        now += 0.0 if math.isinf(rate) else rng.expovariate(rate)
        requests.append(Request(now, *(rng.choice(lengths) if lengths else (rng.randint(*prompt), rng.randint(*output)))))
    return requests


def measured_lengths() -> list[tuple[int, int]]:
    """(prompt, answer) lengths of the embedded model's answers to real questions: many short answers, a few very long ones."""
    rows = json.loads(resources.files("minivllm").joinpath("teach", "lengths.json").read_text(encoding="utf-8"))
    return [(row["prompt"], row["answer"]) for row in rows]
