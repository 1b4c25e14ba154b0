"""Exercises of notebook 07: when the blocks run out, and whether a waiting request may start.

The answer to the first is asked of the real engine, which runs without a model until it preempts somebody; that to the second of the
package's block manager.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from minivllm.bench.scheduler import NoModel
from minivllm.config import EngineConfig
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.engine import Engine
from minivllm.engine.sequence import Sequence
from minivllm.sampling_params import SamplingParams
from minivllm.teach.exercise import Case, Exercise, Mistake

_VOCAB = 1000


def first_preemption(prompt_lens: list[int], num_blocks: int, block_size: int) -> int:
    """How many tokens of its answer each request has when somebody is preempted for the first time.

    All start in the same step, and no answer ends.
    """
    written = 0
    while sum(-(-(prompt + written) // block_size) for prompt in prompt_lens) <= num_blocks:
        written += 1
    return written


def _asked_of_the_engine(prompt_lens: list[int], num_blocks: int, block_size: int) -> int:
    """The real engine's steps before the one that preempts: each gave every request a token."""
    room = num_blocks * block_size
    config = EngineConfig(block_size=block_size, num_kv_blocks=num_blocks, max_model_len=room, max_num_seqs=64,
                          max_num_batched_tokens=max(64, room), enable_prefix_caching=False)
    engine = Engine(config, NoModel(), _VOCAB)
    for prompt in prompt_lens:
        engine.add([1] * prompt, SamplingParams(max_tokens=None, ignore_eos=True))
    while not engine.stats.num_preemptions:
        engine.step()
        if engine.stats.num_steps == 1 and engine.scheduler.waiting:
            raise RuntimeError(f"{prompt_lens} do not all start at once in {num_blocks} blocks of {block_size}: the case is wrong")
    return engine.stats.num_steps - 1


def _first_preemption_cases() -> list[Case]:
    rng = random.Random(7)
    shown = [([5, 6], 6, 4, "two requests, six blocks of 4"), ([4, 8], 4, 4, "both prompts end at a block's end"),
             ([3, 3, 3], 12, 1, "blocks of one token"), ([1, 1], 3, 16, "short prompts in large blocks"),
             ([7, 2, 12], 9, 4, "three ragged prompts")]
    drawn = []
    for _ in range(5):
        size, count = rng.choice([2, 3, 4, 8, 16]), rng.randrange(2, 7)
        prompts = [rng.randrange(1, 6 * size) for _ in range(count)]
        need = sum(-(-prompt // size) for prompt in prompts) + count - 1  # what the admission rule wants
        drawn.append((prompts, need + rng.randrange(0, 3 * count), size, ""))
    return [Case({"prompt_lens": prompts, "num_blocks": blocks, "block_size": size}, note) for prompts, blocks, size, note in shown + drawn]


def _until(full: Callable, begin: int = 0) -> Callable:
    """A wrong first_preemption: full(prompt_lens, written, num_blocks, block_size) says when the pool is taken to be too small."""
    def function(prompt_lens: list[int], num_blocks: int, block_size: int) -> int:
        written = begin
        while not full(prompt_lens, written, num_blocks, block_size) and written < 10_000:
            written += 1
        return written
    return function


def _blocks(prompt_lens: list[int], written: int, size: int) -> int:
    return sum(-(-(prompt + written) // size) for prompt in prompt_lens)


FIRST_PREEMPTION = Exercise("first_preemption", _first_preemption_cases(), _asked_of_the_engine, kind="int", mistakes=[
    Mistake(_until(lambda p, t, n, s: sum(p) + len(p) * t > n * s), "tokens are compared with slots, as if requests shared blocks: each "
            "has "
            "its own last block, partly empty. Round up for every request, then add"),
    Mistake(lambda p, n, s: (n * s - sum(p)) // len(p), "all free slots are shared out among the requests, as if one could use the rest "
            "of another's "
            "last block: round up for every request, then add, and look for the first t that does not fit"),
    Mistake(_until(lambda p, t, n, s: sum((x + t) // s for x in p) > n), "// rounds down, so a partly filled block counts for nothing: "
            "round "
            "up, -(-tokens // block_size)"),
    Mistake(_until(lambda p, t, n, s: _blocks(p, t, s) >= n), "a pool that is exactly full is enough: somebody is preempted only when one "
            "block more is needed than there are, > and not >="),
    Mistake(lambda p, n, s: first_preemption(p, n, s) - 1, "one too few: either your rounding adds a block when the last one is exactly "
            "full "
            "(`// block_size + 1` does; round up with -(-tokens // block_size)), or you return the last number that still fits, and the "
            "next one "
            "is asked for"),
    Mistake(_until(lambda p, t, n, s: sum(-(-(x + t - 1) // s) for x in p) > n), "one too many: the newest token of each answer needs a "
            "place "
            "too, in the step that computes it. A request with t tokens of answer needs room for prompt + t"),
    Mistake(_until(lambda p, t, n, s: -(-(sum(p) + t) // s) > n), "each request gets a token in every step, not one request: t tokens for "
            "each of them"),
    Mistake(_until(lambda p, t, n, s: _blocks(p[-1:], t, s) > n), "only the newest request is counted: all of them share the pool"),
    Mistake(_until(lambda p, t, n, s: len(p) * -(-(max(p) + t) // s) > n), "the longest prompt stands for all here: count each "
            "request's own "
            "blocks"),
    Mistake(_until(lambda p, t, n, s: len(p) * -(-t // s) > n), "the prompts take blocks too: a request with t tokens of answer holds "
            "prompt + t"),
    Mistake(_until(lambda p, t, n, s: sum(-(-x // s) + -(-t // s) for x in p) > n), "prompt and answer are rounded up apart: an answer "
            "goes on in the prompt's last block, so round up prompt + t"),
    Mistake(_until(lambda p, t, n, s: sum(round((x + t) / s) for x in p) > n), "round() goes to the nearest number: a block that holds "
            "one token is a block, so round up, -(-tokens // block_size)"),
    Mistake(lambda p, n, s: (n - _blocks(p, 0, s)) * s // len(p), "only the blocks that are free at the start are shared out: answers also "
            "fill the prompts' last blocks, and no two requests share a block. Count blocks for prompt + t"),
    Mistake(lambda p, n, s: min(-x % s for x in p) + 1, "that is when the first request needs a further block: nobody is preempted as "
            "long as one is free. Add up the blocks of all requests and compare with num_blocks"),
    Mistake(lambda p, n, s: len(p) * first_preemption(p, n, s), "that is the tokens of all answers together: the question is how many each "
            "request has"),
    Mistake(_until(lambda p, t, n, s: _blocks(p, t, s) + len(p) > n), "a block is kept free for each request: that is the rule for "
            "starting "
            "a request, not for those that run. They use the pool to its last block"),
])


def may_admit(num_free_blocks: int, candidate_tokens: int, num_running: int, block_size: int) -> bool:
    """Whether a waiting request of `candidate_tokens` may start beside `num_running` others: its blocks, and one more for each of them."""
    return -(-candidate_tokens // block_size) + num_running <= num_free_blocks


def _asked_of_the_block_manager(num_free_blocks: int, candidate_tokens: int, num_running: int, block_size: int) -> bool:
    blocks = BlockManager(num_free_blocks, block_size, enable_prefix_caching=False)
    return blocks.can_allocate(Sequence(0, [1] * candidate_tokens, SamplingParams()), [], reserve=num_running)


_ADMISSIONS = [
    (4, 10, 0, 4, "an empty engine, 3 blocks are needed"), (3, 10, 0, 4, "an empty engine, exactly enough"),
    (2, 10, 0, 4, "one block short"),
    (3, 8, 1, 4, "two blocks, and one for the request that runs"), (2, 8, 1, 4, "two blocks, and none is left for the other"),
    (3, 9, 1, 4, "the last block holds one token"), (10, 16, 6, 16, "one block beside six others"), (6, 16, 6, 16, "one block short"),
    (7, 16, 6, 16, "exactly enough"), (40, 640, 3, 16, "a long prompt, the reserve is missing"),
    (43, 640, 3, 16, "a long prompt, exactly enough"),
    (5, 3, 2, 1, "blocks of one token"), (4, 3, 2, 1, "blocks of one token, one short"), (12, 20, 4, 4, "room to spare"),
    (1, 1, 1, 256, "the last block"),
    (0, 5, 2, 4, "a full pool"), (5, 16, 6, 16, "more requests run than blocks are free"), (9, 30, 1, 4, ""), (8, 30, 1, 4, ""),
]


def _wrong_rule(needed: Callable) -> Callable:
    """A wrong may_admit: needed(tokens, running, S) blocks must be free."""
    return lambda free, tokens, running, size: needed(tokens, running, size) <= free


def _rule(function: Callable, hint: str) -> Mistake:
    return Mistake(function, hint, everywhere=True)  # yes or no agrees too often by chance


MAY_ADMIT = Exercise("may_admit", [Case(dict(zip(("num_free_blocks", "candidate_tokens", "num_running", "block_size"), args)), note)
                                   for *args, note in _ADMISSIONS], _asked_of_the_block_manager, kind="bool", mistakes=[
    _rule(_wrong_rule(lambda t, r, s: -(-t // s)), "nothing is kept for those that run: each may need a block in one of the next steps, "
          "so one "
          "for each must stay free"),
    _rule(_wrong_rule(lambda t, r, s: t // s + r), "// rounds down: the tokens of the last, partly filled block need a block too"),
    _rule(_wrong_rule(lambda t, r, s: t // s + 1 + r), "`// block_size + 1` asks for a block too many when the last one is exactly "
          "full, and so "
          "does > in place of >=: round up, -(-candidate_tokens // block_size), and let exactly enough be enough"),
    _rule(lambda f, t, r, s: -(-t // s) + r < f, "one block too many is asked for: what fits exactly may start (<= and not <), and no "
          "block "
          "is kept for the candidate's own growth"),
    _rule(_wrong_rule(lambda t, r, s: -(-(t + r) // s)), "a token is kept for each that runs, and they would have to share a block: "
          "keep one block for "
          "each"),
    _rule(_wrong_rule(lambda t, r, s: -(-t // s) + r * s), "the reserve is counted in tokens and the rest in blocks: one block for each "
          "that runs"),
    _rule(_wrong_rule(lambda t, r, s: -(-t // s) + min(r, 1)), "one block is kept for all that run together: keep one for each, "
          "num_running blocks"),
    _rule(_wrong_rule(lambda t, r, s: -(-t // s) * (r + 1)), "the candidate's blocks are counted once for each that runs: those that run "
          "have theirs already, and need one more each. Add num_running"),
    _rule(_wrong_rule(lambda t, r, s: 1 + r), "one block is not enough to begin with: a request admitted for its first block is "
          "preempted in the "
          "middle of its prompt. All of its tokens must fit"),
    _rule(_wrong_rule(lambda t, r, s: 1), "any free block is enough here: all tokens of the candidate must fit, with a block left for "
          "each that runs"),
    _rule(_wrong_rule(lambda t, r, s: max(-(-t // s), r)), "the larger of both is taken: the candidate's blocks and the reserve are "
          "needed together, so add "
          "them"),
    _rule(lambda f, t, r, s: t <= f, "tokens are compared with blocks: a block holds block_size of them"),
    _rule(lambda f, t, r, s: -(-t // s) + r > f, "the answers are the wrong way round: True means that the request may start"),
    _rule(lambda f, t, r, s: True, "it admits everybody: compare what is needed with num_free_blocks"),
    _rule(lambda f, t, r, s: False, "it admits nobody, so the queue would never move"),
])

EXERCISES = [FIRST_PREEMPTION, MAY_ADMIT]
