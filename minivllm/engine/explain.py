"""One request's life in sentences, from its events."""

from __future__ import annotations

from minivllm.engine.events import Event, Trace


def explain(trace: Trace, seq_id: int) -> str:
    """What happened to sequence `seq_id`, a sentence a line. Raises ValueError when the trace knows nothing of it."""
    events = trace.of_sequence(seq_id)
    if not events:
        raise ValueError(f"the trace knows no request {seq_id}: it was made before the trace was started, or never")
    begin = events[0].time
    lines, decodes = [], 0
    for event in events:
        if event.kind == "compute" and event.data["tokens"] == 1 and event.data["token"] is not None and lines:
            decodes += 1
            continue
        if (sentence := _sentence(event, trace)) is not None:
            if decodes:
                lines.append(f"decoded {_count(decodes, 'token')} one step at a time.")
                decodes = 0
            lines.append(f"step {event.step}, {1e3 * (event.time - begin):.1f} ms: {sentence}")
    if decodes:
        lines.append(f"decoded {_count(decodes, 'token')} one step at a time, so far.")
    return "\n".join([f"request {seq_id}", *(f"  {line}" for line in lines)])


def _sentence(event: Event, trace: Trace) -> str | None:
    data = event.data
    if event.kind == "add":
        return f"queued with a prompt of {_count(data['prompt_tokens'], 'token')}."
    if event.kind == "admit":
        hit = f"{data['cached_tokens']} of its {data['tokens']} tokens were in the prefix cache" if data["cached_tokens"] else "nothing was in the prefix cache"
        return f"admitted {'again' if data['again'] else ''}; {hit}.".replace(" ;", ";")
    if event.kind == "compute":
        sampled = data["token"] is not None
        what = "all that it lacked" if sampled else "a chunk of what it lacked"
        return f"computed {_count(data['tokens'], 'token')} from position {data['start']} on, {what}{', and got a token' if sampled else ''}."
    if event.kind == "preempt":
        who = "it needed a block itself" if data["for_seq"] == event.seq_id else f"request {data['for_seq']}, older, needed a block"
        return f"preempted: no block was free and {who}. {_count(data['computed_tokens'], 'computed token')} must be found again or computed again."
    if event.kind == "finish":
        return f"finished with {data['reason']!r} after {_count(data['generated_tokens'], 'token')}."
    return None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
