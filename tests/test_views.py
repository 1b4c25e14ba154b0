"""The live views: frames against the engine itself, pictures by measure, and widgets, pages and files as a reader has them."""

import io
import json
import random
import re
import shutil
import warnings
import xml.dom.minidom
from functools import lru_cache
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from engine_fakes import make_engine, tiny_config

from minivllm import SamplingParams
from minivllm.engine.events import PoolState, Trace
from minivllm.engine.sequence import SequenceStatus
from minivllm.engine.step import StepResult
from minivllm.teach import BatchView, BlockView, GraphView, MemoryView, RankView, SlotView, TimelineView
from minivllm.teach.views.history import History, letter_name
from minivllm.teach.views.live import Pacer
from minivllm.teach.views.memory_view import human_size, pool_parts
from minivllm.teach.views.scene import DARK, FILLS, Box, Label, Scene, contrast, text_width
from minivllm.teach.views.svg import svg

VIEWS = [BlockView, TimelineView, MemoryView, BatchView]
CHROMIUM = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync"]


def params(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("make", [
    lambda engine: BatchView(engine, window=0), lambda engine: TimelineView(engine, rows=0), lambda engine: GraphView(engine, sizes=[]),
    lambda engine: GraphView(engine, sizes=[1], window=0), lambda engine: BlockView(engine, blocks=(0, 99)), lambda engine: SlotView(engine),
    lambda engine: RankView(engine), lambda engine: RankView(engine, ranks=2, heads=(4, 2)),
])
def test_a_view_that_is_refused_leaves_the_engine_alone(make):
    engine = make_engine(tiny_config(block_size=2, num_blocks=80))
    with pytest.raises(ValueError):
        make(engine)
    assert engine.observers == []


class QuickRunner:
    """Tokens without checks: for pools that FakeRunner would take too long for."""

    def execute(self, plan):
        return StepResult({row.seq_id: (7 * row.context_len + row.seq_id) % 97 for row in plan.rows if row.samples})


def busy_engine(num_blocks, steps, max_num_seqs=8, block_size=16, prompt=(4, 40), answer=40, shared=32, seed=0, quick=True):
    """An engine in the middle of a run with shared prefixes, and all that happened in it."""
    rng = random.Random(seed)
    config = tiny_config(block_size=block_size, num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=2000)
    engine = make_engine(config, vocab=1000, eos=(999,))
    engine.runner = QuickRunner() if quick else engine.runner
    engine.decode = lambda ids: "".join(f" <{i}>" for i in ids)
    engine.scheduler.start_trace()
    prefix = [rng.randrange(900) for _ in range(shared)]
    for _ in range(steps):
        while len(engine.scheduler.waiting) < 3:
            head = prefix if rng.random() < 0.7 else []
            engine.add(head + [rng.randrange(900) for _ in range(rng.randrange(*prompt))], params(rng.randrange(4, answer)))
        engine.step()
    return engine


@lru_cache(maxsize=None)
def engine_of(num_blocks):
    sizes = {8: (20, 2), 16: (40, 4), 64: (60, 8), 512: (150, 80), 5000: (60, 250)}
    steps, max_num_seqs = sizes[num_blocks]
    many = num_blocks > 64
    return busy_engine(num_blocks, steps, max_num_seqs, prompt=(40, 200) if many else (4, 40), answer=120 if many else 40)


# The frames.

def real_state(engine):
    """What the engine says of itself, without its events."""
    return {seq.seq_id: (seq.status, seq.num_computed_tokens, list(seq.token_ids), list(seq.block_table), seq.num_preemptions)
            for seq in engine.scheduler.sequences.values()}


def random_run(seed, steps=60):
    """A run over a tiny pool, with what the engine held after each step: (trace, {step: (pool, sequences, prefill, decode)})."""
    rng = random.Random(seed)
    engine = make_engine(tiny_config(block_size=rng.choice([1, 2, 3]), num_blocks=rng.choice([6, 9, 14]), max_num_seqs=4,
                                     budget=rng.choice([4, 7, 16]), caching=rng.random() < 0.8))
    trace, truth = engine.scheduler.start_trace(), {}
    for _ in range(steps):
        while rng.random() < 0.5 and len(engine.scheduler.waiting) < 6:
            prompt = [1, 2, 3, 4][:rng.randrange(5)] + [rng.randrange(1, 5) for _ in range(rng.randrange(1, 4))]
            engine.add(prompt[:engine.max_model_len - 1], params(rng.randrange(1, 9)))
        if rng.random() < 0.1 and engine.scheduler.sequences:
            engine.abort([rng.choice(list(engine.scheduler.sequences.values()))])
        if rng.random() < 0.03:
            engine.scheduler.abort_all()
        if engine.has_unfinished_requests():
            number, prefill = engine.stats.num_steps, engine.stats.prompt_tokens
            engine.step()
            prefill = engine.stats.prompt_tokens - prefill
            pool = PoolState.of(engine.blocks, list(engine.scheduler.sequences.values()))
            truth[number] = pool, real_state(engine), prefill, engine.runner.plans[-1].num_tokens - prefill
    return engine, trace, truth


def check_frame(frame, pool, sequences, prefill, decode, size):
    assert frame.pool == pool
    assert (frame.prefill_tokens, frame.decode_tokens) == (prefill, decode)
    written = {}
    for seq_id, (status, computed, token_ids, table, preemptions) in sequences.items():
        seq = frame.sequences[seq_id]
        assert seq.computed == computed or status is SequenceStatus.WAITING
        assert (seq.token_ids, seq.block_table) == (token_ids, table)
        waiting = "preempted" if preemptions else "waiting"
        assert seq.status in ([waiting] if status is SequenceStatus.WAITING else ["prefill", "decode"])
        for index, block in enumerate(table):
            written[block] = max(written.get(block, 0), min(size, max(0, computed - index * size)))
    for block, owners in enumerate(pool.owners):
        if owners and pool.hashes[block] is None:
            assert frame.written[block] == written[block]
        else:
            assert frame.written[block] == (size if pool.hashes[block] else 0)
    assert {seq.log.seq_id for seq in frame.sequences.values() if seq.status != "finished"} == set(sequences)


@pytest.mark.parametrize("seed", range(20))
def test_frames_are_what_the_engine_was_after_each_step(seed):
    _, trace, truth = random_run(seed)
    history, order = History(trace), list(truth)
    for number in order:
        check_frame(history.frame(number), *truth[number], trace.block_size)
    random.Random(seed).shuffle(order)  # back and forth
    for number in order:
        check_frame(history.frame(number), *truth[number], trace.block_size)


def test_frames_follow_a_trace_that_grows():
    engine = make_engine(tiny_config(block_size=2, num_blocks=9))
    history = History(engine.scheduler.start_trace())
    assert history.frame().events == []
    for prompt in ([1, 2, 3], [1, 2, 3, 4], [4]):
        engine.add(prompt, params(4))
        assert history.frame().sequences[len(history.sequences) - 1].status == "waiting"
        engine.step()
        frame = history.frame()
        assert frame.pool == PoolState.of(engine.blocks, list(engine.scheduler.sequences.values()))
        assert frame.prefill_tokens + frame.decode_tokens == engine.runner.plans[-1].num_tokens


def test_a_wrong_event_would_be_seen():
    _, trace, truth = random_run(3)
    for kind in ("allocate", "free", "publish", "share", "compute", "preempt"):
        part = Trace(trace.initial, trace.block_size)
        part.events = [event for event in trace.events if event.kind != kind]
        with pytest.raises((AssertionError, ValueError, KeyError)):
            history = History(part)
            for number, held in truth.items():
                check_frame(history.frame(number), *held, trace.block_size)


def test_a_full_hit_writes_nothing():
    engine = make_engine(tiny_config(block_size=2, num_blocks=9))
    history = History(engine.scheduler.start_trace())
    for touched in ({0, 1}, set()):
        engine.add([1, 2, 3, 4], params(1))
        engine.step()
        assert history.frame().touched == touched


def test_far_back_is_found_again_from_kept_states():
    engine = busy_engine(16, 700, 4)
    history = History(engine.scheduler.trace)
    forward = {step: history.frame(step).pool for step in range(0, 700, 7)}
    for step in sorted(forward, reverse=True):
        assert history.frame(step).pool == forward[step]
    assert len(history._kept) <= 33


def test_a_trace_that_begins_late_is_shown_as_far_as_it_is_known():
    engine = busy_engine(16, 15, 4)
    engine.scheduler.start_trace()
    for _ in range(12):
        engine.step()
        for view in VIEWS:
            view(engine).scene()
    frame = BlockView(engine).history.frame()
    assert frame.pool == PoolState.of(engine.blocks, list(engine.scheduler.sequences.values()))


def test_names_go_on_after_z():
    assert [letter_name(i) for i in (0, 25, 26, 51, 52, 701, 702)] == ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]


def test_a_step_that_is_not_there_is_refused():
    view = BlockView(engine_of(16))
    with pytest.raises(ValueError, match="step 9999 is not in this trace: it holds steps 0 to"):
        view.figure(9999)
    with pytest.raises(TypeError, match="an LLM, an Engine or a Trace, got 'text'"):
        BlockView("text")
    with pytest.raises(ValueError, match="it has blocks 0 to 15"):
        BlockView(engine_of(16), blocks=(3, 16))
    with pytest.raises(ValueError, match="steps is empty"):
        view.html(steps=[])


def test_captions_tell_the_block_boundary_the_prefix_hit_and_the_preemption():
    engine = make_engine(tiny_config(block_size=2, num_blocks=5, budget=8))
    view = BlockView(engine)
    engine.add([1, 2, 3, 4], params(6))
    engine.add([2, 2], params(6))
    told = ""
    while engine.has_unfinished_requests():
        engine.step()
        told += view.scene().alt + "\n"
    engine.add([1, 2, 3, 4, 1], params(1))
    engine.step()
    told += view.scene().alt
    for part in ("A starts: its 4 tokens need blocks 0 and 1", "takes block 3 for its 5th token: block 1 is full",
                 "is preempted: A needs a block and none is free",
                 "can be found from now on", "B starts again", "A is finished (it reached its length): it gives 5 blocks back",
                 "C starts: 2 of its 5 tokens are in block 0 already", "used anew: what was cached there is forgotten"):
        assert part in told, f"{part!r} is not in\n{told}"


# The pictures, by measure.

@lru_cache(maxsize=None)
def measured_width(text, size, bold):
    """With a real font, which text_width does not know."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    path = TextPath((0, 0), text.replace("$", r"\$"), size=size, prop=FontProperties(weight="bold" if bold else "normal"))
    return path.get_extents().width if len(path.vertices) else 0.0


def extent(label):
    width = measured_width(label.text, label.size, label.bold)
    left = label.x - {"start": 0, "middle": width / 2, "end": width}[label.anchor]
    return left, left + width


def labels_of(scene):
    boxed = [Label(box.x + box.w / 2, box.y + box.h / 2 + box.size * 0.36, box.text, box.size, "middle", True, box.fill)
             for box in scene.items if isinstance(box, Box) and box.text]
    return boxed + [item for item in scene.items if isinstance(item, Label)]


def every_scene():
    for num_blocks in (8, 16, 64, 512, 5000):
        for view in VIEWS if num_blocks < 5000 else [BlockView]:
            yield pytest.param(num_blocks, view, id=f"{view.__name__}-{num_blocks}")


@pytest.mark.parametrize("num_blocks, view", list(every_scene()))
def test_pictures_stay_within_bounds_and_texts_within_their_boxes(num_blocks, view):
    shown = view(engine_of(num_blocks))
    first, last = shown.steps
    for step in (first, (first + last) // 2, last):
        scene = shown.scene(step)
        for item in scene.items:
            if isinstance(item, Box):
                assert item.x >= 0 and item.y >= 0 and item.x + item.w <= scene.width + 1 and item.y + item.h <= scene.height + 1, item
                assert not item.text or measured_width(item.text, item.size, True) <= item.w, item
        for label in labels_of(scene):
            left, right = extent(label)
            assert left >= -2 and right <= scene.width + 2 and 0 <= label.y <= scene.height + 1, label


@pytest.mark.parametrize("num_blocks, view", list(every_scene()))
def test_no_text_runs_into_another_and_none_out_of_its_cell(num_blocks, view):
    scene = view(engine_of(num_blocks)).scene()
    lines = {}
    for label in labels_of(scene):
        lines.setdefault(round(label.y / 4), []).append((*extent(label), label.text))
    for line in lines.values():
        line.sort()
        for (_, right, one), (left, _, other) in zip(line, line[1:]):
            assert left > right, f"{one!r} runs into {other!r}"
    cells = [box for box in scene.items if isinstance(box, Box) and box.border != "none" and box.w > 20]
    for label in scene.items:
        if isinstance(label, Label) and label.on:
            left, right = extent(label)
            assert any(box.x <= left and right <= box.x + box.w and box.y < label.y < box.y + box.h for box in cells), label


@pytest.mark.parametrize("num_blocks, view", list(every_scene()))
def test_text_on_a_fill_can_be_read(num_blocks, view):
    scene = view(engine_of(num_blocks)).scene()
    boxes = [item for item in scene.items if isinstance(item, Box) and item.fill]
    for label in labels_of(scene):
        under = [box.fill for box in boxes if box.x < label.x < box.x + box.w and box.y < label.y - 4 < box.y + box.h]
        if label.on:
            assert under, f"{label} says it stands on {label.on}"
        for fill in under:
            assert label.on, f"{label} has the page's colour and stands on {fill}"
            assert contrast(DARK, FILLS[fill]) >= 4.5


def test_contrast_is_what_the_standard_says():
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21) and contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.01)
    assert all(contrast(DARK, colour) >= 4.5 for colour in FILLS.values())


@pytest.mark.parametrize("num_blocks", [8, 16, 64])
def test_text_is_large_enough_for_a_room(num_blocks):
    for view in VIEWS:
        assert min(label.size for label in labels_of(view(engine_of(num_blocks)).scene())) >= (13 if view is BlockView else 11)


@pytest.mark.parametrize("view", [*VIEWS, lambda engine: GraphView(engine, [1, 2, 4, 8])])
def test_every_pattern_of_a_picture_is_defined_in_its_file(view):
    patterned = {(item.fill, item.pattern): item for item in view(engine_of(16)).scene().items if isinstance(item, Box) and item.pattern}
    assert patterned
    for look, box in patterned.items():
        text = svg(Scene(900, 300, [box]), "name")
        kind = re.search('<path class="([a-z0-9]+)[ "][^>]*d="M', text.partition("</defs>")[2])[1]
        assert f".{kind}{{fill:url(#name-{kind})}}" in text and f'<pattern id="name-{kind}"' in text, look


def test_every_state_of_a_block_is_told_without_colour():
    engine = make_engine(tiny_config(block_size=2, num_blocks=8, budget=16))
    view = BlockView(engine)
    engine.add([1, 2, 3, 4], params(1))  # leaves two cached blocks
    engine.step()
    engine.add([1, 2, 1], params(3))
    engine.add([1, 2, 4], params(3))     # shares the first block
    engine.step()
    scene, looks = view.scene(), {}
    boxes = [item for item in scene.items if isinstance(item, Box) and item.w > 90 and item.border != "none"]
    cells, rings = [box for box in boxes if box.border == "thin"], [box for box in boxes if box.border != "thin"]
    assert len(cells) == 8
    frame = view.history.frame()
    for block, box in enumerate(cells):
        texts = [label.text for label in labels_of(scene) if box.x <= label.x <= box.x + box.w and box.y <= label.y <= box.y + box.h]
        texts = sorted(re.sub(r"[A-Z]", "A", text) for text in texts if not text.isdigit())
        kind = next(kind for kind in ("shared", "cached", "free", "used") if block in frame.blocks_that_are(kind))
        ringed = any(abs(ring.x - box.x) < 5 and abs(ring.y - box.y) < 5 for ring in rings)
        looks.setdefault((kind, block in frame.touched), set()).add((box.pattern, ringed, *texts))
    assert {kind for kind, _ in looks} == {"shared", "cached", "free", "used"}
    looks = [look for found in looks.values() for look in found]
    assert len(set(looks)) == len(looks)
    engine.add([4] * 12, params(1))  # needs what is cached
    for _ in range(9):
        if view.history.frame().evicted:
            break
        engine.step()
    assert any(isinstance(item, Box) and item.border == "dashed" and item.w > 90 for item in view.scene().items)


@pytest.mark.parametrize("num_blocks", [8, 16, 64, 512, 5000])
def test_counts_add_up_and_are_told(num_blocks):
    engine = engine_of(num_blocks)
    frame = History(engine.scheduler.trace).frame()
    used, cached, free = (len(frame.blocks_that_are(kind)) for kind in ("used", "cached", "free"))
    assert used + cached + free == num_blocks and used == engine.blocks.num_used_blocks
    assert cached == sum(block.ref_count == 0 and block.hash is not None for block in engine.blocks.blocks)
    assert sum(size for _, size, _, _ in pool_parts(frame)) == num_blocks * engine.blocks.block_size
    told = BlockView(engine).scene().alt
    assert f"used {used:,}" in told and f"cached {cached:,}, free {free:,} of {num_blocks:,} blocks" in told


def test_a_large_pool_is_drawn_in_groups_that_say_so():
    scene = BlockView(engine_of(5000)).scene()
    cells = [item for item in scene.items if isinstance(item, Box) and item.border != "none" and item.w < 25]
    assert len(cells) == 500
    assert any("a cell is 10 blocks" in label.text for label in labels_of(scene))
    part = BlockView(engine_of(5000), blocks=(100, 163)).scene()
    assert len([item for item in part.items if isinstance(item, Box) and item.w == 49]) == 64


@pytest.mark.parametrize("num_blocks", [8, 16, 64, 512, 5000])
@pytest.mark.parametrize("view", VIEWS)
def test_an_update_is_at_most_50_kilobytes_and_well_formed(num_blocks, view):
    text = view(engine_of(num_blocks)).svg()
    assert len(text.encode()) <= 50_000
    assert 'role="img"' in text and re.search(r'aria-label="[^"]{10,}', text)
    xml.dom.minidom.parseString(text)


def test_the_views_of_an_engine_have_the_same_heading():
    engine = engine_of(8)
    tops = [[item for item in view(engine).scene().items if isinstance(item, Label) and item.y < 76 and item.size in (17, 15, 14)]
            for view in (BlockView, lambda engine: TimelineView(engine, rows=2))]
    ours, theirs = ([label for label in top if label.anchor == "start"] for top in tops)
    assert ours == theirs and len(ours) >= 2
    asides = [[(label.x, label.y, label.size) for label in top if label.anchor == "end"] for top in tops]
    assert asides[0] == asides[1] == [(900, 18, 14)]


def test_any_token_text_is_escaped():
    items = [Label(1, 20, "</script><b>\"'&\x00\ud800"), Box(1, 1, 50, 20, "s0", text="<i>", tip='"<title>')]
    scene = Scene(100, 50, items, alt='"><script>')
    assert not re.search(r"<(script|b|i)>", svg(scene))
    xml.dom.minidom.parseString(svg(scene))


def test_text_width_never_promises_too_much():
    for text in ("used 5 (2 shared), cached 3, free 8 of 16 blocks", "MW @ 100%", "the quick brown fox", "×43", "ABR", "16 of 16"):
        for bold in (False, True):
            assert measured_width(text, 13, bold) <= text_width(text, 13, bold) * 1.03


# Live: the budget, the slider, the end.

class Clock:
    """Time that passes only when told to, and by `cost` whenever a view draws."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def live_view(cost=0.0, view=BlockView, **options):
    """An engine on a clock of its own, with a displayed view; every redraw takes `cost` seconds. `drawn` holds when each began."""
    clock, drawn = Clock(), []
    engine = make_engine(tiny_config(block_size=2, num_blocks=40, budget=40))
    shown = view(engine, clock=clock, **options)
    original = shown.refresh

    def refresh():
        drawn.append(clock.now)
        original()
        clock.now += cost

    shown.refresh = refresh
    shown._repr_mimebundle_()
    return engine, shown, clock, drawn


@pytest.mark.parametrize("cost", [0.0001, 0.003, 0.02, 0.5])
def test_redraws_are_at_most_ten_a_second_and_five_percent_of_the_time(cost):
    engine, _, clock, drawn = live_view(cost)
    begin, steps = clock.now, 0
    while clock.now < begin + 20:
        if len(engine.scheduler.sequences) < 2:
            engine.add([1, 2, 3], params(25))
        clock.now += 0.004
        engine.step()
        steps += 1
    assert 2 <= len(drawn) <= 200 and len(drawn) * cost <= 0.05 * (clock.now - begin) + cost
    gaps = [later - earlier for earlier, later in zip(drawn, drawn[1:])]
    assert min(gaps) >= cost + max(0.1, 19 * cost) - 1e-6 and max(gaps) <= 2 * cost + max(0.1, 19 * cost) + 0.01
    clock.now, before = drawn[-1] + cost, len(drawn)
    while engine.has_unfinished_requests():
        assert len(drawn) == before
        engine.step()  # in no time at all, yet the end is drawn
    assert len(drawn) == before + 1


def test_between_redraws_nothing_but_the_clock_is_read():
    calls = []
    engine = SimpleNamespace(scheduler=SimpleNamespace(sequences={1: None}, trace=None), observers=[])
    pacer = Pacer(engine, lambda: calls.append(1) or 5.0)
    pacer.next_time = 6.0
    pacer.views = [SimpleNamespace(refresh=lambda: pytest.fail("drawn too early"))]
    for _ in range(10):
        pacer()
    assert len(calls) == 10


def test_views_of_one_engine_share_one_budget():
    engine = make_engine(tiny_config())
    views = [view(engine) for view in VIEWS]
    assert len(engine.observers) == 1 and engine.observers[0].views == views
    for view in views:
        view.close()
        view.close()
    assert engine.observers == []


def test_what_was_not_displayed_is_not_drawn():
    engine = make_engine(tiny_config())
    view = BlockView(engine)
    view.draw = lambda frame: pytest.fail("drawn though nobody looks")
    engine.add([1, 2], params(2))
    engine.step()
    assert engine.observers


def run(engine, clock, max_tokens=5):
    engine.add([1, 2, 3], params(max_tokens))
    while engine.has_unfinished_requests():
        clock.now += 1
        engine.step()


def test_the_slider_follows_the_newest_step_until_it_is_moved_back():
    engine, view, clock, _ = live_view()
    run(engine, clock)
    slider, picture = view._panel.slider, view._panel.picture
    assert slider.value == slider.max == view.steps[1] == 4 and "Step 4</text>" in picture.value
    slider.value = 1
    assert "Step 1</text>" in picture.value
    run(engine, clock)
    assert (slider.value, slider.max) == (1, 9) and "Step 1</text>" in picture.value
    slider.value = 9
    assert "Step 9</text>" in picture.value
    run(engine, clock)
    assert slider.value == slider.max == view._panel.play.value == 14 and "Step 14</text>" in picture.value


def test_a_closed_view_and_a_view_of_a_closed_engine_still_scrub():
    engine, view, clock, _ = live_view()
    run(engine, clock)
    view.close()
    run(engine, clock)
    view._panel.slider.value = 2
    assert "Step 2</text>" in view._panel.picture.value and engine.observers == []


def test_a_new_trace_takes_the_old_ones_place():
    engine, view, clock, _ = live_view()
    run(engine, clock, 9)
    view._panel.slider.value = 3
    engine.scheduler.start_trace()
    run(engine, clock)
    slider = view._panel.slider
    assert view.steps == (0, 4) and (slider.value, slider.max) == (4, 4) and "A is finished" in view._panel.picture.value
    run(engine, clock)
    assert slider.value == slider.max == 9


def test_a_view_that_fails_is_dropped_and_no_request_with_it():
    engine, view, clock, _ = live_view()
    other = TimelineView(engine)
    view.draw = lambda frame: 1 / 0
    with pytest.warns(UserWarning, match="BlockView: 40 blocks.*detached.*division"):
        run(engine, clock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(engine, clock)
    assert engine.observers[0].views == [other]


def test_after_a_cell_an_interrupted_run_is_shown_as_it_is():
    engine, view, clock, _ = live_view()
    engine.add([1, 2, 3], params(9))
    engine.step()
    engine.runner.interrupt = "after"
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert "decode" in view._panel.picture.value or "prefill" in view._panel.picture.value
    view._after_cell()
    assert "A is aborted: every block is free" in view._panel.picture.value


@pytest.mark.parametrize("view", VIEWS)
def test_what_a_notebook_is_given_is_short_and_the_same_each_time(view):
    bundles = [view(busy_engine(16, 5))._repr_mimebundle_() for _ in range(2)]
    assert [set(bundle) for bundle in bundles] == [{"text/plain", "application/vnd.jupyter.widget-view+json"}] * 2
    assert bundles[0]["text/plain"] == bundles[1]["text/plain"] and len(bundles[0]["text/plain"]) < 80
    assert BlockView(engine_of(16)).name == "BlockView: 16 blocks of 16 tokens"


def test_without_ipywidgets_the_picture_is_shown(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    bundle = BlockView(engine_of(16))._repr_mimebundle_()
    assert bundle["text/html"].startswith("<svg") and bundle["text/plain"].startswith("BlockView")


@pytest.mark.parametrize("view", VIEWS)
def test_a_trace_from_a_file_shows_the_same(view, tmp_path):
    engine = engine_of(16)
    engine.scheduler.trace.save(tmp_path / "trace")
    live, loaded = view(engine), view(Trace.load(tmp_path / "trace"), decode=engine.decode)
    assert loaded.svg(7) == live.svg(7) and loaded.steps == live.steps
    loaded._repr_mimebundle_()
    loaded._panel.slider.value = 3
    if view is not MemoryView:
        assert "Step 3</text>" in loaded._panel.picture.value


def test_an_llm_shows_its_memory_and_its_text(tmp_path):
    import tiny_models

    from minivllm import LLM

    tiny_models.save("llama", tmp_path)
    with LLM(tmp_path, device="cpu", num_kv_blocks=16, block_size=4, max_model_len=64) as llm:
        views = [view(llm) for view in VIEWS]
        llm.generate([[1, 2, 3]], params(4), use_tqdm=False)
        memory = views[2].scene().alt
        assert f"weights {human_size(llm.memory.weights)}" in memory and "64 slots of" in memory
    for view in views:
        assert view.scene().alt
        view.refresh()
        view.close()


@pytest.mark.parametrize("window", [1, 2, 7, 60])
def test_a_window_ends_with_the_step_and_is_never_too_long(window):
    engine = engine_of(512)
    for view in (TimelineView(engine, window=window), BatchView(engine, window=window)):
        starts = [view.window_start(step, window) for step in range(150)]
        assert all(0 <= step - start < window for step, start in enumerate(starts))
        assert starts == sorted(starts) and len(set(starts)) <= 1 + 150 / max(1, window // 6)
        assert f">{149 // 5 * 5}</text>" in view.svg(149 // 5 * 5)


def test_sizes_are_told_in_the_unit_that_fits():
    assert [human_size(n) for n in (0, 1023, 2048, 150 * 1024, 5 * 2**20, 3 * 2**30, 200 * 2**30)] == [
        "0 bytes", "1,023 bytes", "2.0 KiB", "150 KiB", "5.0 MiB", "3.00 GiB", "200 GiB"]


# As a reader has them: figures, the animation, the step player.

@pytest.mark.parametrize("view", VIEWS)
def test_a_figure_is_a_picture_on_white_and_shown_once(view):
    from PIL import Image

    shown = view(engine_of(16))
    for figure in (shown.figure(), shown.figure(3), shown.figure(steps=[3, 4, 5], columns=2)):
        image = Image.open(io.BytesIO(figure._repr_png_())).convert("RGB")
        assert image.width > 1000 and image.getpixel((1, 1)) == (255, 255, 255)
        assert len(image.getcolors(1 << 20)) > 50
    with pytest.raises(ValueError, match="not both"):
        shown.figure(3, steps=[1])
    import matplotlib

    assert matplotlib.get_backend() and "matplotlib.pyplot" not in vars(figure)


def test_the_animation_is_one_file_that_needs_nothing():
    view = BlockView(engine_of(16))
    text = view.animation(range(3, 9), seconds_per_step=0.5)
    xml.dom.minidom.parseString(text)
    assert text == view.animation(range(3, 9), seconds_per_step=0.5)
    assert text.count("<g class=") == 12 and "3s infinite" in text and "prefers-color-scheme:dark" in text
    assert "<script" not in text and "href" not in text and len(text.encode()) < 60_000
    assert all(f">Step {step}</text>" in text for step in range(3, 9))


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen, self.references = [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.references += [name for name, _ in attributes if name in ("src", "href", "xlink:href")]
        if tag != "input":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_player_is_whole_refers_to_nothing_and_holds_any_text():
    engine = busy_engine(16, 10, 4)
    engine.decode = lambda ids: "</script><script>alert('\"')</script> & \u2028"
    view = BlockView(engine)
    page = view.html()
    assert page == BlockView(engine).html() and repr(page).startswith("a step player")
    tags = Tags()
    tags.feed(page)
    assert tags.open == [] and tags.seen.count("script") == 1 and tags.seen.count("button") == 5 and tags.references == []
    assert "http:" not in page and "https:" not in page and "src=" not in page and "@import" not in page and "url(//" not in page
    assert len(view.html(max_steps=3)) < len(page)
    data = json.loads(re.search(r"var data=(\{.*?\}),at=", page, re.S)[1])
    assert data["steps"] == list(range(10)) and len(data["items"]) == len(set(data["items"]))


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path, "this test needs chromium on PATH: install Debian's package chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM)
        yield browser
        browser.close()


def test_the_player_plays_in_a_browser(browser):
    view = BlockView(engine_of(16))
    one, other = view.html(steps=range(5, 10)), view.html(steps=range(20, 23))
    page, errors, requests = browser.new_page(), [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.set_content(f"<body>{one}{other}{one}</body>")
    players = page.locator("[data-player]")
    outputs = players.locator("output")
    assert outputs.all_inner_texts() == ["step 9", "step 22", "step 9"]
    first, second = players.nth(0), players.nth(1)
    first.locator("[name=first]").click()
    first.locator("[name=forward]").click()
    assert outputs.all_inner_texts() == ["step 6", "step 22", "step 9"]
    assert "Step 6" in first.locator("svg").text_content() and first.locator("svg").get_attribute("aria-label").startswith("Step 6.")
    first.locator("[name=back]").click()
    second.focus()
    for key, step in (("ArrowLeft", 21), ("Home", 20), ("ArrowRight", 21), ("End", 22)):
        second.press(key)
        assert outputs.all_inner_texts() == ["step 5", f"step {step}", "step 9"]
    first.locator("input").fill("3")
    assert outputs.nth(0).inner_text() == "step 8"
    first.locator("[name=play]").click()
    page.wait_for_function("document.querySelector('output').textContent === 'step 9'")
    assert errors == [] and requests == []


def test_pictures_take_the_pages_colour(browser):
    text = BlockView(engine_of(16)).svg()
    page = browser.new_page()
    for style, wanted in (("color:rgb(1, 2, 3)", "rgb(1, 2, 3)"), ("--jp-ui-font-color1:rgb(9, 8, 7)", "rgb(9, 8, 7)")):
        page.set_content(f'<body style="{style}">{text}</body>')
        colours = page.evaluate("[...document.querySelectorAll('text.u')].map(t => getComputedStyle(t).fill)")
        assert set(colours) == {wanted}
        assert page.evaluate("getComputedStyle(document.querySelector('svg')).backgroundColor") == "rgba(0, 0, 0, 0)"
