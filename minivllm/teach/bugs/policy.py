"""A planted fault in a policy: whoever fits goes first, and whoever is large waits. Knows no scheduler's inside."""

from __future__ import annotations

from typing import Any

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.policies import Policy, first_come_first_served
from minivllm.teach.arrivals import Arrival, Record, run
from minivllm.teach.views.captions import count
from minivllm.teach.bugs.fault import Comparison, Fault
from minivllm.teach.trial import BadInput, require_int

#: So many later requests before an earlier one, and it counts as starved: the next one that comes would be served before it as well.
OVERTAKEN = 8
_MOST_ARRIVALS, _MOST_STEP, _MAX_NUM_SEQS, _BUDGET = 64, 500, 4, 64


def whoever_fits(blocks: BlockManager) -> Policy:
    """First come, first served among those whose prompts fit into the free blocks, so that no block lies idle."""
    def policy(running, waiting, budget):
        fits = lambda seq: blocks.num_blocks_for(len(seq)) + len(running) <= blocks.num_free_blocks
        return first_come_first_served(running, [seq for seq in waiting if fits(seq)], budget)

    return policy


def in_order(blocks: BlockManager) -> Policy:
    """First come, first served."""
    return first_come_first_served


def overtaken(record: Record, arrivals: list[Arrival]) -> tuple[int, int]:
    """(request, how many that came in a later step were admitted before it) of the one that most overtook; (0, 0) if none did."""
    place = {request: at for at, request in enumerate(record.order)}
    counts = {request: sum(arrivals[other][0] > arrivals[request][0] for other in record.order[:at]) for request, at in place.items()}
    worst = max(counts, key=lambda request: (counts[request], -request), default=0)
    return worst, counts.get(worst, 0)


def _compare(fault: Fault, arrivals: Any, num_kv_blocks: Any, block_size: Any) -> Comparison:
    require_int("num_kv_blocks", num_kv_blocks, 1, 256)
    require_int("block_size", block_size, 1, 64)
    given = _read(arrivals, num_kv_blocks * block_size)
    right, faulty = (run(given, policy, _MAX_NUM_SEQS, _BUDGET, num_kv_blocks, block_size, max_steps=100_000, of_blocks=True)
                     for policy in (fault.right, fault.faulty))
    for record in (right, faulty):
        if record.error is not None:
            raise RuntimeError("an engine failed, which is a fault of the package") from record.error
    request, many = overtaken(faulty, given)
    if many >= OVERTAKEN:
        begins = [record.first_step(request) for record in (right, faulty)]
        return Comparison(True, f"first come, first served starts request {request} in step {begins[0]}, before all that come later,",
                          f"the faulty one in step {begins[1]}: {many} requests that came after it were served before it")
    tokens = sum(answer for _, _, answer in given)
    served = f"{count(len(given), 'request')} the {count(tokens, 'token')} that they asked for"
    return Comparison(False, served, served, _hint(given, faulty, request, many))


def _hint(arrivals: list[Arrival], faulty: Record, request: int, many: int) -> str:
    if many:
        return (f"with the faulty one request {request} was overtaken by {many}, and {OVERTAKEN} are wanted: later requests must keep "
                f"coming, so often that the "
                "blocks that become free are taken before there are enough for it")
    place = {number: at for at, number in enumerate(faulty.order)}
    together = [(number, later) for later in place for number in range(later) if arrivals[number][0] == arrivals[later][0]]
    if any(place[later] < place[number] for number, later in together):
        return "only requests of the same step went first, and they do not count: let the short ones come in later steps than the long one"
    waited = [number for number, (step, *_) in enumerate(arrivals) if (first := faulty.first_step(number)) is not None and first > step]
    if not waited:
        return "nobody ever waited: let a long prompt come while others hold most of the blocks"
    after = [number for number in waited if any(step > arrivals[number][0] for step, *_ in arrivals)]
    if not after:
        return f"request {waited[0]} waited, but nobody came after it: only who comes later can overtake"
    return ("requests waited, but none was overtaken: whoever came later fitted no sooner. Let the one that waits have a long prompt, "
            "and the "
            "later ones short prompts that fit beside those that run")


def _read(arrivals: Any, room: int) -> list[Arrival]:
    if not isinstance(arrivals, list) or not arrivals or len(arrivals) > _MOST_ARRIVALS:
        raise BadInput(f"arrivals must be a list of 1 to {_MOST_ARRIVALS} (step, prompt tokens, answer tokens), got {arrivals!r:.60}")
    read = []
    for arrival in arrivals:
        if not isinstance(arrival, tuple) or len(arrival) != 3:
            raise BadInput(f"an arrival is (step, prompt tokens, answer tokens), such as (0, 4, 8), got {arrival!r:.60}")
        step, prompt, answer = arrival
        read.append((require_int("a step", step, 0, _MOST_STEP), require_int("prompt tokens", prompt, 1, 512),
                     require_int("answer tokens", answer, 1, 512)))
        if prompt + answer > room:
            raise BadInput(f"a prompt of {prompt} tokens and an answer of {answer} do not fit into the pool of {room} slots")
    if [step for step, *_ in read] != sorted(step for step, *_ in read):
        raise BadInput("the arrivals must be in the order of their steps")
    return read


FAULTS = [
    Fault("whoever_fits", "a long prompt that never fits",
          "A request whose prompt does not fit into the free blocks is passed over, and a shorter one behind it is started, so that no "
          "memory lies idle. Schedulers have done so to raise their throughput; while short requests keep coming, a long one waits.",
          whoever_fits, in_order, _compare, {"arrivals": ..., "num_kv_blocks": 8, "block_size": 4},
          exposing={"arrivals": [(0, 4, 8), (0, 4, 8), (1, 24, 4), *((2 + 3 * i, 4, 8) for i in range(12))]},
          harmless={"arrivals": [(0, 4, 8), (0, 4, 8), (1, 24, 4), (2, 4, 8)]}, hint=_hint),
]
