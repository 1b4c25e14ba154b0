"""Judges a learner's `policy(running, waiting, budget)`: it schedules requests that come one by one, and each trial looks at one property.

Any policy that serves short prompts first, stalls nobody and starves nobody passes. Knows no particular answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, Optional

from minivllm.engine.sequence import Sequence
from minivllm.teach.arrivals import Arrival, Record, run
from minivllm.teach.compare import a_kind
from minivllm.teach.diagnose import Result, labelled
from minivllm.teach.exercise import one_line
from minivllm.teach.stub import NOT_ATTEMPTED, is_stub, not_attempted, returned_none

#: (what came out, what was wanted, the likely cause), or None where all is well.
Finding = Optional[tuple[str, str, str]]
_NAME_RUNNING = "name what runs as well as what waits, in every step"
_NAME_WAITING = ("name what waits, too, or nobody is ever admitted; a prompt that does not fit into the budget as well: the scheduler "
                 "cuts it")


class PolicyProblem(Exception):
    """What the policy gave cannot be used: `got` in a few words, and the likely `cause`."""

    def __init__(self, got: str, cause: str):
        super().__init__(got)
        self.got, self.cause = got, cause


class Checked:
    """The learner's policy, what it yields checked before the scheduler sees it. `named`: whom it named while somebody ran."""

    def __init__(self, function: Callable):
        self.function = function
        self.forgets_running = False

    def __call__(self, running: tuple[Sequence, ...], waiting: Any, budget: int) -> list[tuple[Sequence, int]]:
        before = list(waiting)
        given = self.function(running, waiting, budget)
        if given is None:
            raise PolicyProblem("None", returned_none(self.function))
        try:
            pairs = list(islice(given, 10_000))
        except TypeError as error:
            if hasattr(given, "__next__"):
                raise
            raise PolicyProblem(a_kind(given), "yield pairs (sequence, most tokens), or return a list of them") from error
        if list(waiting) != before:
            raise PolicyProblem("a queue that has changed", "`waiting` belongs to the scheduler, which takes out what it admits: only look "
                                "at it, as in `for seq in waiting`")
        for pair in pairs:
            _check_pair(pair)
        named = {seq.seq_id for seq, _ in pairs}
        self.forgets_running |= any(seq.seq_id not in named for seq in running)
        return pairs


def _check_pair(pair: Any) -> None:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise PolicyProblem(f"{a_kind(pair)} among what it yields", "yield pairs (sequence, most tokens): `yield seq, budget`")
    if not isinstance(pair[0], Sequence):
        raise PolicyProblem(f"a pair that begins with {a_kind(pair[0])}", "the first of a pair is the sequence itself, not its "
                    "number")
    if isinstance(pair[1], bool) or not isinstance(pair[1], int):
        raise PolicyProblem(f"a pair that ends with {a_kind(pair[1])}", "the most tokens must be a whole number: divide with "
                    "//, or int()")


@dataclass(frozen=True)
class Trial:
    """Requests as they come, the limits, and `judge(record, checked)`, which finds what is wrong."""

    note: str
    arrivals: list[Arrival]
    judge: Callable[[Record, Checked], Finding]
    max_num_seqs: int = 4
    budget: int = 16
    max_steps: int = 2000


def _ends(record: Record, checked: Checked) -> Finding:
    """Everybody is served."""
    if record.finished:
        return None
    return f"after {len(record.plans)} steps requests are left", "every request finished", _NAME_WAITING


def _nobody_stalls(record: Record, checked: Checked) -> Finding:
    if not record.stalled:
        return _ends(record, checked)
    step, request = record.stalled[0]
    cause = (_NAME_RUNNING if checked.forgets_running else
             f"somebody named before it took the whole budget of step {step}: name what runs first, and give each no more than leaves "
             f"one token "
             "for each of the others (as first_come_first_served does)")
    return f"request {request} runs and gets no token in step {step}", "a token for each running request in every step", cause


def _spends(record: Record, checked: Checked) -> Finding:
    begin = next((step for step, plan in enumerate(record.plans) if 1 in plan), None)
    computed = list(accumulate(plan.get(1, 0) for plan in record.plans[begin:])) if begin is not None else []
    needed = next((number for number, tokens in enumerate(computed, start=1) if tokens >= 60), None)
    if needed is None or needed <= 5:
        return _ends(record, checked)
    cause = ("what is left of the budget, when each running request has its token, belongs to the prompts that are not computed yet: "
             "allow a "
             "sequence as many tokens as it still lacks (seq.num_uncomputed_tokens)")
    return f"the prompt of 60 tokens is computed in {needed} steps", "4 steps: the budget is 16, and the other request needs 1", cause


def _starts_all(record: Record, checked: Checked) -> Finding:
    """Requests that fit into the first step together are computed in it."""
    first = record.plans[0] if record.plans else {}
    if first == dict.fromkeys(range(4), 3):
        return _ends(record, checked)
    cause = ("name all that wait, not the best one alone: the scheduler stops by itself when the budget, the rows or the blocks are used "
             "up" if len(first) < 4 else "name what waits with the budget, or with what it lacks, and not with one token: else the budget "
             "is not used")
    got = f"step 0 computes {sum(first.values())} tokens, of {len(first)} {'request' if len(first) == 1 else 'requests'}"
    return got, "12 tokens, 3 of each of the 4: there are 4 rows, and the budget is 16", cause


def _order(wanted: list[int], causes: dict[tuple[int, ...], str], otherwise: str) -> Callable[[Record, Checked], Finding]:
    def judge(record: Record, checked: Checked) -> Finding:
        if not record.finished:
            return _ends(record, checked)
        if record.order == wanted:
            return None
        return f"they start in the order {record.order}", f"{wanted}", causes.get(tuple(record.order), otherwise)
    return judge


def _nobody_starves(record: Record, checked: Checked) -> Finding:
    if not record.finished:
        return _ends(record, checked)
    before = record.order.index(1) - 1
    if before <= _STREAM // 2:
        return None
    cause = ("a long prompt must not wait for as long as short ones come: its rank must get better while it waits, or, which is the "
             "same, that of later ones worse: let each step of seq.arrival_time count for 1 to 10 tokens")
    got = f"request 1 starts in step {record.first_step(1)}, after {before} later ones"
    return got, f"its turn after at most {_STREAM // 2} of {_STREAM}", cause


def _all_ends(record: Record, checked: Checked) -> Finding:
    return _nobody_stalls(record, checked)


def _random_arrivals() -> list[Arrival]:
    rng = random.Random(11)
    return sorted((rng.randrange(60), rng.randint(1, 40), rng.randint(1, 9)) for _ in range(40))


_STREAM = 120
_LATER_FIRST = ("the one that came later goes first: what waits longer must get a better rank, so a later seq.arrival_time must make it "
                "worse")
TRIALS = [
    Trial("one request alone", [(0, 5, 3)], _ends),
    Trial("two requests decode when a prompt of 60 tokens comes", [(0, 4, 9), (0, 4, 9), (2, 60, 2)], _nobody_stalls),
    Trial("one request decodes while a prompt of 60 tokens is computed", [(0, 4, 20), (1, 60, 2)], _spends),
    Trial("three prompts wait: 30, 10 and 20 tokens, come together", [(0, 4, 6), (1, 30, 2), (1, 10, 2), (1, 20, 2)],
          _order([0, 2, 3, 1], {(0, 1, 2, 3): "that is the order in which they came: sort what waits, by seq.num_prompt_tokens or len(seq)",
                                (0, 1, 3, 2): "the longest prompt goes first: sort from small to large"},
                 "among requests that came together the shorter prompt goes first"), max_num_seqs=1),
    Trial("four equal prompts, come together", [(0, 4, 6), *[(1, 12, 2)] * 4],
          _order([0, 1, 2, 3, 4], {}, "equal ranks keep the order in which they came: sorted() does that by itself, if the key is the "
                                      "rank alone, and reads no clock"),
          max_num_seqs=1),
    Trial("two equal prompts, one step apart", [(0, 4, 6), (1, 12, 2), (2, 12, 2)],
          _order([0, 1, 2], {(0, 2, 1): _LATER_FIRST}, "first come, first served among equal ones"), max_num_seqs=1),
    Trial("a prompt of 60 tokens, and 3 steps later one of 4", [(0, 4, 9), (1, 60, 2), (4, 4, 2)],
          _order([0, 2, 1], {(0, 1, 2): "a step of waiting is worth so much that this is first come, first served: let it count for 1 "
                                        "to 10 tokens"},
                 "the short prompt goes first"), max_num_seqs=1),
    Trial(f"a prompt of 60 tokens, and a prompt of 4 in each of the next {_STREAM} steps", [(0, 4, 2), (0, 60, 2),
          *[(step, 4, 1) for step in range(1, _STREAM + 1)]], _nobody_starves, max_num_seqs=1),
    Trial("four prompts of 3 tokens, come together", [(0, 3, 2)] * 4, _starts_all),
    Trial("40 requests at random steps", _random_arrivals(), _all_ends, max_num_seqs=5, budget=12),
]


def judge(function: Any) -> Result:
    """What `check.policy(function)` finds. Never raises for what the learner's function does."""
    if function is None or function is ... or is_stub(function):
        return Result("not attempted", NOT_ATTEMPTED)
    if not callable(function):
        return Result("failed", f"give the function itself: check.policy(policy); this is {a_kind(function)}")
    for number, trial in enumerate(TRIALS, start=1):
        checked = Checked(function)
        record = run(trial.arrivals, checked, trial.max_num_seqs, trial.budget, max_steps=trial.max_steps)
        if isinstance(record.error, NotImplementedError):
            return Result("not attempted", not_attempted(function))
        found = _error(record, checked) or trial.judge(record, checked)
        if found:
            got, want, cause = found
            given = f"(step, prompt, answer) = {_shown(trial.arrivals)}; max_num_seqs {trial.max_num_seqs}, budget {trial.budget}"
            parts = (("input", given), ("got", got), ("want", want), ("likely cause", cause))
            lines = [line for label, text in parts for line in labelled(label, text)]
            return Result("failed", "\n".join([f"check {number} of {len(TRIALS)} failed: {trial.note}", *lines]), number, cause)
    return Result("passed", f"{len(TRIALS)} checks passed")


def _shown(arrivals: list[Arrival]) -> str:
    return ", ".join(map(str, arrivals[:4])) + (", ..." if len(arrivals) > 4 else "")


_ADVICE = {
    "'<' not supported": "two ranks are equal, so sorting compares the sequences themselves: sort sequences with key=, not pairs of "
                         "rank and "
                         "sequence",
    "pop from an empty": "`waiting` belongs to the scheduler, and is empty in some steps: only look at it, as in `for seq in waiting`",
    "index out of range": "`running` or `waiting` is empty in some steps, so it has no first element then: loop over it instead",
    "empty": "`running` or `waiting` is empty in some steps, and has no smallest or largest then: give min() and max() a default",
    "not 'slice'": "`waiting` is a queue and cannot be sliced: [*waiting] makes a list of it",
    "can only concatenate": "`running` is a tuple and `waiting` a queue: [*running, *waiting] joins them",
    "no attribute 'sort'": "`waiting` is a queue of the scheduler's: sorted(waiting, key=...) makes a new list",
}


def _error(record: Record, checked: Checked) -> Finding:
    error, want = record.error, "pairs (sequence, most tokens), one for each sequence that may get tokens"
    if error is None:
        return None
    if isinstance(error, PolicyProblem):
        return error.got, want, error.cause
    if "chose nothing" in str(error):
        cause = _NAME_RUNNING if checked.forgets_running else _NAME_WAITING
        return "nothing: requests wait, and the step is empty", want, cause
    known = next((text for words, text in _ADVICE.items() if words in str(error)), None)
    return f"raised {one_line(error, 120)}", want, known or ("running is a tuple of sequences, waiting a queue of them, budget a "
                "number; a sequence "
                                                             "has num_prompt_tokens, num_uncomputed_tokens, arrival_time and a len()")
