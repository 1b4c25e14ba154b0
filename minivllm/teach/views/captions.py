"""What happened in a step, in words, from its events. Knows no drawing."""

from __future__ import annotations

from collections.abc import Iterable

from minivllm.engine.events import Event
from minivllm.teach.views.history import Frame

_ENDS = {"stop": "it said its end token", "length": "it reached its length", "abort": "aborted"}


def caption(frame: Frame) -> list[str]:
    """A sentence for each thing that happened, in the order of a step: who gets which blocks, what is computed, what comes of it."""
    by_kind: dict[str, list[Event]] = {}
    for event in frame.events:
        by_kind.setdefault(event.kind, []).append(event)
    if not by_kind:
        return ["Nothing has run yet."]
    told = [*_preemptions(frame, by_kind.get("preempt", [])), *_admissions(frame, by_kind), *_growth(frame, by_kind), *_evictions(frame),
            _batch(frame, by_kind.get("compute", [])), *_publications(frame, by_kind.get("publish", [])), *_ends(frame, by_kind),
            *_arrivals(frame, by_kind)]
    return [sentence for sentence in told if sentence]


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(words: Iterable[object], most: int = 6) -> str:
    """a; a and b; a, b and c; of many the first, and how many there are."""
    words = [str(word) for word in words]
    if len(words) > most:
        return f"{', '.join(words[:most - 1])} and {len(words) - most + 1} more"
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _names(frame: Frame, events: Iterable[Event]) -> str:
    return listed(frame.sequences[event.seq_id].name for event in events)


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"


def _preemptions(frame: Frame, events: list[Event]) -> list[str]:
    told = []
    for event in events:
        name, needs = frame.sequences[event.seq_id].name, frame.sequences[event.data["for_seq"]].name
        why = "it needs a block itself and none is free" if name == needs else f"{needs} needs a block and none is free"
        told.append(f"{name} is preempted: {why}. It will compute {count(event.data['computed_tokens'], 'token')} again, or find them.")
    return told


def _ends(frame: Frame, by_kind: dict[str, list[Event]]) -> list[str]:
    events, told = by_kind.get("finish", []), []
    if "reset" in by_kind:
        aborted = f"{_names(frame, events)} {'is' if len(events) == 1 else 'are'} aborted: " if events else ""
        return [f"{aborted}{'e' if aborted else 'E'}very block is free."]
    if len(events) > 3:
        freed = len({event.block for event in by_kind.get("free", [])} - set(frame.blocks_that_are("used")))
        return [f"{_names(frame, events)} finish and give {count(freed, 'block')} back."]
    for event in events:
        blocks = [e.block for e in by_kind.get("free", []) if e.seq_id == event.seq_id]
        kept = sum(frame.pool.hashes[block] is not None and not frame.pool.owners[block] for block in blocks)
        still = sum(bool(frame.pool.owners[block]) for block in blocks)
        parts = [f"gives {count(len(blocks), 'block')} back"]
        parts += [f"{kept} of them can still be found"] if kept else []
        parts += [f"{still} {'is' if still == 1 else 'are'} still used by others"] if still else []
        why = _ENDS.get(event.data["reason"], event.data["reason"])
        told.append(f"{frame.sequences[event.seq_id].name} is finished ({why}): it {', '.join(parts)}.")
    return told


def _admissions(frame: Frame, by_kind: dict[str, list[Event]]) -> list[str]:
    events, told = by_kind.get("admit", []), []
    if len(events) > 3:
        cached = sum(event.data["cached_tokens"] for event in events)
        return [f"{_names(frame, events)} start" + (f"; {count(cached, 'token')} come from the prefix cache." if cached else ".")]
    for event in events:
        name, data = frame.sequences[event.seq_id].name, event.data
        taken = [e.block for e in by_kind.get("allocate", []) if e.seq_id == event.seq_id]
        shared = [e.block for e in by_kind.get("share", []) if e.seq_id == event.seq_id]
        start = f"{name} starts{' again' if data['again'] else ''}: "
        if shared:
            new = f", and it takes {_blocks(taken)}" if taken else ""
            told.append(f"{start}{data['cached_tokens']} of its {count(data['tokens'], 'token')} are in {_blocks(shared)} already{new}.")
        else:
            told.append(f"{start}its {count(data['tokens'], 'token')} need {_blocks(taken)}.")
    return told


def _blocks(blocks: list[int]) -> str:
    run = len(blocks) > 3 and blocks == list(range(blocks[0], blocks[0] + len(blocks)))
    return f"block{'' if len(blocks) == 1 else 's'} " + (f"{blocks[0]} to {blocks[-1]}" if run else listed(blocks))


def _growth(frame: Frame, by_kind: dict[str, list[Event]]) -> list[str]:
    admitted = {event.seq_id for event in by_kind.get("admit", [])}
    events = [event for event in by_kind.get("allocate", []) if event.seq_id not in admitted]
    if len(events) > 3:
        return [f"{_names(frame, events)} each take a new block."]
    told = []
    for event in events:
        seq = frame.sequences[event.seq_id]
        index = seq.block_table.index(event.block) if event.block in seq.block_table else 0
        why = f" for its {_ordinal(index * frame.block_size + 1)} token: block {seq.block_table[index - 1]} is full" if index else ""
        told.append(f"{seq.name} takes block {event.block}{why}.")
    return told


def _evictions(frame: Frame) -> list[str]:
    blocks = sorted(frame.evicted)
    if not blocks:
        return []
    return [f"{_blocks(blocks).capitalize()} {'is' if len(blocks) == 1 else 'are'} used anew: what was cached there is forgotten."]


def _publications(frame: Frame, events: list[Event]) -> list[str]:
    if len(events) > 3:
        return [f"{count(len(events), 'block')} are full and can be found from now on."]
    if not events:
        return []
    blocks = [event.block for event in events]
    return [f"{_blocks(blocks).capitalize()} of {listed(dict.fromkeys(frame.sequences[e.seq_id].name for e in events))} "
            f"{'is' if len(blocks) == 1 else 'are'} full and can be found from now on."]


def _arrivals(frame: Frame, by_kind: dict[str, list[Event]]) -> list[str]:
    admitted = {event.seq_id for event in by_kind.get("admit", [])}
    events = [event for event in by_kind.get("add", []) if event.seq_id not in admitted]
    return [f"{_names(frame, events)} {'waits' if len(events) == 1 else 'wait'} in the queue."] if events else []


def _batch(frame: Frame, events: list[Event]) -> str:
    prefills = [e for e in events if frame.sequences[e.seq_id].log.is_prefill(e.step, e.data["start"], e.data["tokens"])]
    decodes = [e for e in events if e not in prefills]
    told = []
    if prefills:
        told.append(f"prefill of {listed(_chunk(frame, e) for e in prefills)}")
    if decodes:
        told.append(f"decode of {_names(frame, decodes)}, {'a token each' if len(decodes) > 1 else 'one token'}")
    sentence = "; ".join(told)
    return f"{sentence[0].upper()}{sentence[1:]}." if sentence else ""


def _chunk(frame: Frame, event: Event) -> str:
    return f"{frame.sequences[event.seq_id].name} ({count(event.data['tokens'], 'token')})"
