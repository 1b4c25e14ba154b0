"""The step player: scenes as one piece of HTML with buttons, no network and no kernel needed.

What frames have in common is shipped once: a frame is runs of indices into the list of all strings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from minivllm.teach.views.scene import Scene
from minivllm.teach.views.svg import PAGE_COLOUR, content_name, definitions, items_of, opening, style

_MAX_BYTES_WITH_TIPS = 100_000  # a long run is kept small: it goes without what a pointer would be told
_BUTTONS = [("first", "|◀", "First step"), ("back", "◀", "One step back"), ("play", "Play", "Play or stop"),
            ("forward", "▶", "One step forward"), ("last", "▶|", "Last step")]
_STYLE = ("{root}{{color:%s;max-width:%dpx;font:14px system-ui,sans-serif}}"
          "{root}:focus-visible{{outline:2px solid #56B4E9;outline-offset:4px}}"
          "{root} .bar{{display:flex;gap:6px;align-items:center;margin:0 0 10px}}"
          "{root} button{{font:14px system-ui,sans-serif;min-width:38px;padding:4px 8px;color:inherit;background:transparent;"
          "border:1px solid #868686;border-radius:4px;cursor:pointer}}{root} button:hover{{background:#8883}}"
          "{root} [name=play]{{min-width:54px}}{root} input{{flex:1;accent-color:#56B4E9}}"
          "{root} output{{min-width:6.5em;text-align:right;font-variant-numeric:tabular-nums}}")
_SCRIPT = """(function(){
var root=document.querySelector('[data-player="NAME"]:not([data-on])');if(!root)return;root.setAttribute('data-on','');
var data=DATA,at=data.frames.length-1,timer=null,last=at;
var find=function(s){return root.querySelector(s)},svg=find('svg'),body=find('svg>g'),range=find('input'),out=find('output');
var play=find('[name=play]');
function show(i){at=Math.max(0,Math.min(last,i));var runs=data.frames[at],parts=[];
for(var k=0;k<runs.length;k+=2)parts.push(data.items.slice(runs[k],runs[k]+runs[k+1]).join(''));body.innerHTML=parts.join('');
svg.setAttribute('aria-label',data.alts[at]);range.value=at;out.textContent='step '+data.steps[at];
range.setAttribute('aria-valuetext',out.textContent)}
function stop(){clearInterval(timer);timer=null;play.setAttribute('aria-pressed','false');play.textContent='Play'}
function start(){if(at===last)show(0);play.setAttribute('aria-pressed','true');play.textContent='Stop';
timer=setInterval(function(){show(at+1);if(at===last)stop()},900)}
var act={first:function(){stop();show(0)},back:function(){stop();show(at-1)},play:function(){timer?stop():start()},
forward:function(){stop();show(at+1)},last:function(){stop();show(last)}};
root.addEventListener('click',function(e){var b=e.target.closest('button');if(b)act[b.name]()});
range.addEventListener('input',function(){stop();show(+range.value)});
root.addEventListener('keydown',function(e){var name={ArrowLeft:'back',ArrowRight:'forward',Home:'first',End:'last',' ':'play'}[e.key];
if(!name||e.ctrlKey||e.altKey||e.metaKey||(e.key===' '&&e.target.tagName==='BUTTON'))return;
e.preventDefault();e.stopPropagation();act[name]()});
show(at)})()"""


class Page(str):
    """HTML as a string, which a notebook shows as the page that it is."""

    def _repr_html_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"a step player, {len(self.encode()) / 1000:.0f} KB of HTML"

    def _repr_pretty_(self, printer: object, cycle: bool) -> None:
        printer.text(repr(self))


def page(scenes: Sequence[tuple[int, Scene]]) -> Page:
    """The player of these (step, scene). The same scenes make the same text."""
    whole = _page(scenes, tips=True)
    return whole if len(whole.encode()) <= _MAX_BYTES_WITH_TIPS else _page(scenes, tips=False)


def _runs(numbers: Iterable[int]) -> list[int]:
    """start, count, start, count, ...: what does not change from frame to frame makes long runs."""
    runs: list[int] = []
    for number in numbers:
        if runs and number == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += [number, 1]
    return runs


def _page(scenes: Sequence[tuple[int, Scene]], tips: bool) -> Page:
    items: dict[str, int] = {}
    frames = [_runs(items.setdefault(item, len(items)) for item in items_of(scene, tips)) for _, scene in scenes]
    data = {"items": list(items), "frames": frames, "steps": [step for step, _ in scenes], "alts": [scene.alt for _, scene in scenes]}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":  # no token's text may end the script
        text = text.replace(char, f"\\u{ord(char):04x}")
    name = content_name(text)
    whole = Scene(max(s.width for _, s in scenes), max(s.height for _, s in scenes), alt=scenes[-1][1].alt)
    root = f'[data-player="{name}"]'
    buttons = "".join(f'<button type="button" name="{key}" title="{title}" aria-label="{title}">{sign}</button>'
                      for key, sign, title in _BUTTONS)
    bar = (f'<div class="bar">{buttons}<input type="range" min="0" max="{len(scenes) - 1}" value="{len(scenes) - 1}" aria-label="step">'
           f"<output>step {scenes[-1][0]}</output></div>")
    picture = f"{opening(whole, name)}{definitions(name)}<g>{''.join(items_of(scenes[-1][1], tips))}</g></svg>"
    rules = (_STYLE % (PAGE_COLOUR, whole.width)).format(root=root) + style("#" + name, name)
    script = _SCRIPT.replace("NAME", name).replace("DATA", text)
    return Page(f'<div data-player="{name}" tabindex="0" role="group" aria-label="Step player"><style>{rules}</style>{bar}{picture}'
                f"<script>{script}</script></div>")
