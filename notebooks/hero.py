"""The picture at the top of README.md, drawn from a real run: python notebooks/hero.py (part of the build).

Two sequences in a pool of eight blocks of four slots; in the steps shown, each crosses into a new block.
"""

from __future__ import annotations

from pathlib import Path

from minivllm import LLM, SamplingParams
from minivllm.teach import BlockView

FILE = Path(__file__).parent / "images" / "boundary.svg"


def main() -> None:
    with LLM("smollm2", device="cpu", block_size=4, num_kv_blocks=8, max_model_len=32) as llm:
        view = BlockView(llm)
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (8, 6)]
        llm.generate(["The capital of France is", "Once upon a time"], params, use_tqdm=False)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(view.animation(seconds_per_step=1.2), encoding="utf-8")


if __name__ == "__main__":
    main()
