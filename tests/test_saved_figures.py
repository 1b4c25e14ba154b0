"""Numbers of an H200 in the notebooks' prose stand in the figures saved beside them: what the text rounds, the cell prints."""

import json
import re
from pathlib import Path

import pytest

from minivllm.teach import decode_speed, sampling_bench, stall, store_bench, swap, two_gpus

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
#: notebook -> what its cell prints, and pairs of what is printed and what the text says.
SAID = {
    "03_slot_mapped_write": (lambda: store_bench.table(store_bench.saved()), [
        ("31.0", "31 us for torch's"), ("38.4", "38 us for our kernel"), ("6.4", "6.4 / 1.4"), ("1.4", "6.4 / 1.4"), ("79.2", "79.2 / 18.0"), ("18.0", "79.2 / 18.0"),
        ("15.7", "15.7 / 18.0"), ("248.7", "torch takes 249 us"), ("1.7", "1.4 and 1.7 us"), ("19.6", "18.0 and 19.6")]),
    "06_scheduler": (stall.saved_lines, [("46.5", "from 46 ms"), ("27.7", "to 28"), ("29.5", "smaller ones no further"), ("33.7", "smaller ones no further"),
                                         ("21.4", "over 20 ms")]),
    "07_preemption": (swap.saved_lines, [("17.7", "17.7 + 18.7"), ("18.7", "= 36.4 ms"), ("41.9", "took 41.9"), ("16.8", "512 tokens took 16.8")]),
    "08_sampling": (sampling_bench.saved_lines, [("0.64", "(0.64 ms against 8.94)"), ("8.94", "(0.64 ms against 8.94)"), ("7.35", "still do: 7.35 ms"),
                                                 ("0.26", "which is 0.26"), ("0.11", "takes 0.11 ms")]),
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


def test_what_the_text_on_the_decode_kernel_says_was_saved():
    prose = (NOTEBOOKS / "04_paged_attention.py").read_text()
    limits = {case["case"]: case["microseconds"] * case["share"] for case in decode_speed.saved()["cases"]}
    more = [case["microseconds"] - limits[case["case"]] for case in decode_speed.saved()["cases"]][1:]
    assert (round(min(more)), round(max(more))) == (4, 8) and "4 to 8 microseconds more" in prose
    assert round(limits["decode 64 x 1,000"]) == 66 and "Beside 66 us" in prose
    assert round(limits["decode 1 x 8,000"]) == 8 and "the 8 us of 33 MB" in prose and more[-1] > limits["decode 1 x 8,000"] / 2


def raw(name):
    return json.loads((NOTEBOOKS.parent / "benchmarks" / "h200" / name).read_text())


def test_the_figures_of_the_readme_are_those_of_the_raw_files():
    readme = " ".join((NOTEBOOKS.parent / "README.md").read_text().split())
    runs = [raw(f"kernels{number}.json")["cases"] for number in ("", "_2", "_3", "_4", "_5")]
    shares = {case["case"]: [round(100 * row["share"]) for run in runs for row in run if row["case"] == case["case"]] for case in runs[0]}
    for case, words in {"decode 64 x 1,000": "64 of them at {} to {}%", "decode 8 x 4,000": "8 of 4,000 tokens at {} to {}%",
                        "decode 1 x 8,000": "a single one of 8,000 at {} to {}%", "store 8,192 tokens": "store kernel reaches {} to {}% of a copy",
                        "prefill 8 x 1,024": "reaches {} to {}% of a matrix product's rate at 8 x 1,024", "prefill 2 x 8,192": "{} to {}% at 2 x 8,192"}.items():
        assert words.format(min(shares[case]), max(shares[case])) in readme, (case, shares[case])
    sampling = sampling_bench.saved()["milliseconds"]
    assert f"{sampling['greedy']:.2f} ms greedy, {sampling['temperature']:.2f} at a temperature, {sampling['top_k + top_p']:.2f} with top_k and top_p" in readme
    assert f"({sampling[sampling_bench.SORTED]:.1f} by a sort)" in readme
    flash = raw("flash_attn.json")["share_of_a_matrix_products_rate"]
    short, long = (flash[f"flash_attn prefill {case}"]["256"] for case in ("8 x 1,024", "2 x 8,192"))
    assert f"FlashAttention-3 in its place, with blocks of 256 tokens, {short:.0%} and {long:.0%}" in readme
    times = [raw(f"throughput{number}.json") for number in ("", "_2", "_3", "_4")]
    took = [sorted(time["seconds"]["minivllm"]) for time in times]
    rates = [f"{round(times[0]['output_tokens'] / seconds, -2):,.0f}" for seconds in (*(runs[1] for runs in took), max(map(max, took)), min(map(min, took)))]
    assert f"{rates[0]} output tokens a second, the median of three runs, {times[0]['limit_seconds'] / took[0][1]:.0%} of the limit" in readme
    assert "Three more times three: {1}, {2} and {3}. Single runs lie between {4} and {5}".format(*rates) in readme
    naive, prefill = (next(row for row in raw("attention.json")["rows"] if (row["way"], row["length"]) == (way, 8192)) for way in ("naive", "triton"))
    assert (f"it takes {1e3 * naive['seconds']:.1f} ms and {naive['extra_bytes'] / 1e9:.1f} GB beside its input, the prefill kernel "
            f"{1e3 * prefill['seconds']:.2f} ms and {prefill['extra_bytes'] / 1e6:.0f} MB") in readme
