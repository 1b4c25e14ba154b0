"""Numbers of an H200 in the notebooks' prose stand in the figures saved beside them: what the text rounds, the cell prints."""

import re
from pathlib import Path

import pytest

from minivllm.teach import sampling_bench, stall, swap, two_gpus

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
#: notebook -> what its cell prints, and pairs of what is printed and what the text says.
SAID = {
    "06_scheduler": (stall.saved_lines, [("46.5", "from 46 ms"), ("27.7", "to 28"), ("29.5", "smaller ones no further"), ("33.7", "smaller ones no further"),
                                         ("21.4", "over 20 ms")]),
    "07_preemption": (swap.saved_lines, [("17.7", "17.7 + 18.7"), ("18.7", "= 36.4 ms"), ("41.9", "took 41.9"), ("16.8", "512 tokens took 16.8")]),
    "08_sampling": (sampling_bench.saved_lines, [("0.64", "(0.64 ms against 8.94)"), ("8.94", "(0.64 ms against 8.94)"), ("7.35", "still do: 7.35 ms"),
                                                 ("0.26", "0.26 ms, and greedy"), ("0.11", "without it, 0.11")]),
    "10_tensor_parallelism": (lambda: two_gpus.lines(two_gpus.saved()), [
        ("1.46 ms a step", "from 1.46 to 2.18 ms"), ("2.18 ms a step", "from 1.46 to 2.18 ms"), ("1.18 times one GPU", "1.18 times"),
        ("smallest all-reduce 11.6 us", "11.6 us"), ("0.37 ms together", "0.37 ms"), ("10.74 ms a step", "10.96 instead of 10.74 ms"),
        ("10.96 ms a step", "10.96 instead of 10.74 ms"), ("37.0 us, 73 a step:  2.70 ms", "37 us each, are 2.70 ms"), ("115.9 ms on 2 GPUs", "116 ms"),
        ("190.0 ms on 1 GPU", "instead of 190")]),
}


@pytest.mark.parametrize("name", SAID)
def test_what_the_text_says_was_saved(name):
    lines, pairs = SAID[name]
    printed = "\n".join(lines())
    prose = " ".join(line[2:] for line in (NOTEBOOKS / f"{name}.py").read_text().splitlines() if line.startswith("# "))
    for number, words in pairs:
        assert re.search(rf"(?<![\d.,]){re.escape(number)}(?!\d)", printed), f"{number} is not among the saved figures"
        assert words in prose, f"the text no longer says {words!r}"
