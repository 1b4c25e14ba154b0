"""LLM as its users hold it: generate, chat, stream, outputs, errors at the door, interrupts, close."""

import re
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch

from minivllm import LLM, RequestOutput, SamplingParams
from minivllm.engine.invariants import check_scheduler

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PARIS = " Paris.\n\nThe answer is:"


def generate(llm, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.fixture
def whole(embedded):
    """The shared LLM, and after the test: nothing runs, no block is owned, and it answers as ever."""
    yield embedded
    check_scheduler(embedded.engine.scheduler)
    assert embedded.engine.blocks.num_used_blocks == 0 and not embedded.engine.has_unfinished_requests()
    assert generate(embedded, "The capital of France is", SamplingParams(temperature=0, max_tokens=2))[0]["text"] == " Paris."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    tiny_models.save("llama", directory)
    with LLM(directory, device="cpu", num_kv_blocks=32, block_size=4, max_model_len=64) as llm:
        yield llm


def test_the_published_quick_start_runs():
    """nano-vLLM's, as articles give it, but for the import and the length (128), which only takes time."""
    llm = LLM("smollm2", enforce_eager=True, tensor_parallel_size=1)
    sampling_params = SamplingParams(temperature=0.7, top_k=50, max_tokens=16, stop_token_ids=[2])
    prompt = "The capital of France is"
    output = llm.generate([prompt], sampling_params)
    assert isinstance(output[0]["text"], str) and output[0]["text"] == output[0].outputs[0].text
    assert 1 <= len(output[0]["token_ids"]) <= 16
    llm.close()


def test_the_readmes_examples_run(tmp_path, monkeypatch, capsys):
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    for long, short in (("max_tokens=128", "max_tokens=16"), ("seed=1)", "seed=1, max_tokens=16)")):  # long answers only take time
        assert long in readme
        readme = readme.replace(long, short)
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "The capital of France is Paris." in shown and "queued with a prompt of 5 tokens" in shown and "KV cache" in shown
    names["llm"].close()


def test_an_output_answers_both_ways(whole):
    [output] = generate(whole, ["The capital of France is"])
    assert isinstance(output, RequestOutput)
    assert output["text"] == output.outputs[0].text == PARIS
    assert output["token_ids"] == output.outputs[0].token_ids and len(output["token_ids"]) == 8
    assert output.prompt == "The capital of France is" and output.prompt_token_ids == [504, 3575, 282, 4649, 314]
    assert output["finish_reason"] == "length"
    assert 0 <= output.metrics.queue <= output.metrics.ttft <= output.metrics.total and output.metrics.tpot > 0
    with pytest.raises(KeyError, match="'text'"):
        output["txt"]


def test_every_form_of_prompt_means_the_same(whole):
    ids = [504, 3575, 282, 4649, 314]
    forms = ["The capital of France is", ids, tuple(ids), np.array(ids), torch.tensor(ids), {"prompt": "The capital of France is"}, {"prompt_token_ids": ids},
             {"prompt_token_ids": np.array(ids)}]
    two = SamplingParams(temperature=0, max_tokens=2)  # enough to tell this prompt from others
    for form in forms:
        assert [out["text"] for out in generate(whole, [form], two)] == [" Paris."]
    assert [out["text"] for out in generate(whole, forms)] == [PARIS] * len(forms)
    for alone in ("The capital of France is", ids, {"prompt_token_ids": ids}):
        assert [out["text"] for out in generate(whole, alone, two)] == [" Paris."]
    assert generate(whole, []) == []


def test_outputs_keep_the_prompts_order_and_each_its_parameters(whole):
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (5, 1, 3)]
    outputs = generate(whole, ["One", "Two", "Three"], params)
    assert [out.prompt for out in outputs] == ["One", "Two", "Three"]
    assert [len(out["token_ids"]) for out in outputs] == [5, 1, 3]
    assert outputs[1].metrics.tpot is None


def test_chat_ends_with_the_models_own_end_token(whole):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    [output] = whole.chat(messages, SamplingParams(temperature=0), use_tqdm=False)
    assert output["text"] == "The capital of France is Paris."
    assert output["finish_reason"] == "stop" and output["token_ids"][-1] == whole.tokenizer.eos_token_id
    both = whole.chat([messages, [{"role": "user", "content": "Hi"}]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert len(both) == 2 and both[0]["text"] == "The capital of France"


def test_ignore_eos_goes_on_to_the_limit(whole):
    prompt = whole.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
    [output] = generate(whole, [prompt], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert len(output["token_ids"]) == 20 and output["finish_reason"] == "length"


def test_a_stop_token_ends_the_answer_and_is_not_in_its_text(whole):
    paris = whole.tokenizer.encode(" Paris")[0]
    period = whole.tokenizer.encode(".")[0]
    [output] = generate(whole, "The capital of France is", SamplingParams(temperature=0, stop_token_ids=[period]))
    assert (output["text"], output["token_ids"]) == (" Paris", [paris, period])
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", period)


@pytest.mark.parametrize("stop, text", [("\n\n", " Paris."), (["answer", "is:"], " Paris.\n\nThe "), ("aris.\n", " P"), ("Paris", " ")])
def test_a_stop_string_ends_the_text_just_before_it(whole, stop, text):
    [output] = generate(whole, "The capital of France is", SamplingParams(temperature=0, max_tokens=8, stop=stop))
    assert (output["text"], output["finish_reason"]) == (text, "stop")
    assert output["stop_reason"] in ([stop] if isinstance(stop, str) else stop)
    assert "".join(whole.stream("The capital of France is", SamplingParams(temperature=0, max_tokens=8, stop=stop))) == text


def test_a_stream_says_what_generate_says_in_whole_characters(whole):
    for prompt, params in [("The capital of France is", GREEDY), ("Once upon a time", SamplingParams(temperature=1.5, seed=3, max_tokens=20)),
                           ("\U0001f389 \u65e5\u672c", SamplingParams(temperature=2.0, seed=4, max_tokens=24))]:
        pieces = list(whole.stream(prompt, params))
        assert "".join(pieces) == generate(whole, prompt, params)[0]["text"]
        assert all(pieces) and len(pieces) > 1


def test_closing_a_stream_aborts_its_request_alone(whole):
    first, second = whole.stream("One", SamplingParams(temperature=0, max_tokens=30)), whole.stream("Two", GREEDY)
    assert next(first) and next(second)
    first.close()
    assert len(whole.engine.scheduler.sequences) == 1
    assert len("".join(second)) > 0


def test_a_stream_loses_nothing_when_other_calls_take_its_steps(whole):
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = generate(whole, "The capital of France is", params)[0]["text"]
    first, second = (whole.stream("The capital of France is", params) for _ in range(2))
    start = next(first)
    generate(whole, "Hello", SamplingParams(temperature=0, max_tokens=20))
    assert start + "".join(first) == expected
    start = next(second)
    assert "".join(whole.stream("The capital of France is", params)) == expected and start + "".join(second) == expected


def test_a_stream_cut_by_an_error_elsewhere_says_so(whole, monkeypatch):
    stream = whole.stream("One", SamplingParams(temperature=0, max_tokens=30))
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(whole.runner, "execute", lambda plan: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(whole, "Two")
    with pytest.warns(UserWarning, match="aborted: a step that it was part of failed"):
        list(stream)


def test_an_interrupt_while_requests_are_queued_leaves_none_behind(whole, monkeypatch):
    add, calls = whole.engine.add, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return add(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(whole.engine, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(whole, ["One", "Two", "Three"])
    assert not whole.engine.has_unfinished_requests()


def test_a_second_interrupt_during_the_clean_up_leaves_the_pool_whole(whole, monkeypatch):
    def once(*_):
        raise KeyboardInterrupt

    stream = whole.stream("One", SamplingParams(temperature=0, max_tokens=30))
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(whole.engine.blocks, "free", once)
        with pytest.raises(KeyboardInterrupt):
            stream.close()


def test_a_refused_constructor_keeps_no_weights(tmp_path):
    import gc
    import weakref

    from minivllm.worker import model_runner

    tiny_models.save("llama", tmp_path)
    made = []

    class Watched(model_runner.ModelRunner):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(weakref.ref(self.model))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "ModelRunner", Watched)
        with pytest.raises(ValueError, match="does not fit") as kept:
            LLM(tmp_path, device="cpu", num_kv_blocks=2, max_model_len=200)
    gc.collect()
    assert made[0]() is None and kept.value is not None


def test_a_stream_that_is_never_read_queues_nothing(whole):
    whole.stream("One", GREEDY)
    assert not whole.engine.has_unfinished_requests()


def test_a_seed_fixes_the_answer_whatever_else_is_in_the_batch(whole):
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=12)
    alone = generate(whole, "Once upon a time", params)[0]["token_ids"]
    others = SamplingParams(temperature=1.0, max_tokens=20)
    together = generate(whole, ["Hello", "Once upon a time", "A long " * 40], [others, params, others])[1]["token_ids"]
    assert together == alone
    assert generate(whole, "Once upon a time", SamplingParams(temperature=1.0, seed=12, max_tokens=12))[0]["token_ids"] != alone


def test_without_a_seed_the_engines_seed_decides(tmp_path):
    tiny_models.save("llama", tmp_path)
    params = SamplingParams(max_tokens=10, ignore_eos=True)

    def answers(seed):
        with LLM(tmp_path, device="cpu", num_kv_blocks=16, max_model_len=64, seed=seed) as llm:
            return [out["token_ids"] for out in generate(llm, [[1, 2], [1, 2]], params)]

    first = answers(0)
    assert first == answers(0) != answers(1)
    assert first[0] != first[1]  # two requests are two draws


def test_a_prefix_hit_is_reported(tiny):
    prompt = list(range(3, 23))
    generate(tiny, [prompt])
    [output] = generate(tiny, [prompt])
    assert output.num_cached_tokens == 19  # five full blocks hit; the last token is computed for its logits
    assert tiny.stats.prefix_cache_hits >= 19 and 0 < tiny.stats.prefix_cache_hit_rate < 1


def test_max_model_len_ends_with_length(tiny):
    [output] = generate(tiny, [[5] * 60], SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(output["token_ids"]) == 4 and output["finish_reason"] == "length"
    [output] = generate(tiny, [[5] * 60], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output["token_ids"]) == 4


def test_a_model_without_tokenizer_takes_and_gives_token_ids(tiny):
    [output] = generate(tiny, [[1, 2, 3]])
    assert output["text"] == "" and output["token_ids"]
    for call in (lambda: generate(tiny, "text"), lambda: tiny.chat([{"role": "user", "content": "hi"}]), lambda: next(tiny.stream([1], GREEDY)),
                 lambda: generate(tiny, [[1]], SamplingParams(stop="x"))):
        with pytest.raises(ValueError, match="tokenizer"):
            call()


BAD_PROMPTS = [
    ("", ValueError, "empty"), ([""], ValueError, "empty"), ([[]], ValueError, "empty"), ([[1, 50000]], ValueError, "50000.*49152"),
    ([[-1]], ValueError, "-1"), ([[1, "a"]], TypeError, "ints only"), ([[1.5]], TypeError, "ints only"), ([[True, False]], TypeError, "ints only"),
    ([b"bytes"], TypeError, "text or a list"), (b"bytes", TypeError, "text or a list"), ([None], TypeError, "text or a list"), (None, TypeError, "prompts must be"),
    (7, TypeError, "prompts must be"), ([[1] * 5000], ValueError, "5000 tokens and max_model_len is 4096"), (["\ud800"], ValueError, "surrogate"),
    ([10**30], ValueError, "outside the vocabulary"), ([{}], ValueError, "empty"), ([{"text": "hi"}], TypeError, "keyword 'text'"), ([{"promt": "hi"}], TypeError, "did you mean 'prompt'"), ([object()], TypeError, "text or a list"),
]


@pytest.mark.parametrize("prompts, error, match", BAD_PROMPTS, ids=[f"{number}-{match}" for number, (_, _, match) in enumerate(BAD_PROMPTS)])
def test_a_bad_prompt_is_refused_at_the_door(whole, prompts, error, match):
    with pytest.raises(error, match=match):
        generate(whole, prompts)
    with pytest.raises(error, match=match):  # a good one beside it is not queued either
        generate(whole, ["good", *prompts] if isinstance(prompts, list) and not isinstance(prompts[0], int) else prompts)


def test_parameters_must_match_the_prompts(whole):
    with pytest.raises(ValueError, match="2 prompts but 1"):
        generate(whole, ["a", "b"], [GREEDY])
    with pytest.raises(TypeError, match="SamplingParams"):
        generate(whole, ["a"], {"temperature": 0})


@pytest.mark.parametrize("messages, error", [([], TypeError), ("hi", TypeError), ([{"role": "user"}], TypeError), ([["hi"]], TypeError),
                                             ([{"role": "user", "content": None}], TypeError), ([[]], ValueError), (None, TypeError)])
def test_bad_messages_are_refused(whole, messages, error):
    with pytest.raises(error, match="message"):
        whole.chat(messages)


@pytest.mark.parametrize("settings, error, match", [
    ({"tensor_paralel_size": 1}, TypeError, "did you mean 'tensor_parallel_size'"), ({"tensor_parallel_size": 2}, ValueError, "tensor_parallel_size 2 does not divide .*use one of 1, 3$"),
    ({"device": "tpu"}, ValueError, "tpu"), ({"device": "cuda:99"}, ValueError, "cuda:99"), ({"dtype": "int8"}, ValueError, "int8"),
    ({"attention_backend": "magic"}, ValueError, "magic"), ({"kvcache_block_size": 4, "block_size": 4}, TypeError, "both"),
    ({"max_model_len": 100_000}, ValueError, "100000.*8192"), ({"max_model_len": 600, "num_kv_blocks": 8}, ValueError, "does not fit"),
])
def test_a_bad_setting_is_refused_by_name(settings, error, match):
    with pytest.raises(error, match=match):
        LLM("smollm2", **settings)


def test_nano_vllms_names_are_aliases(tmp_path):
    tiny_models.save("llama", tmp_path)
    with LLM(tmp_path, device="cpu", kvcache_block_size=8, num_kvcache_blocks=32) as llm:
        assert (llm.config.block_size, llm.config.num_kv_blocks) == (8, 32)
    with LLM(tmp_path, device="cpu", num_kvcache_blocks=-1) as llm:
        assert llm.config.num_kv_blocks > 32


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_leaves_the_engine_usable(whole, monkeypatch, raised):
    execute, calls = whole.runner.execute, []

    def interrupted(plan):
        calls.append(plan)
        if len(calls) == 3:
            raise raised("now")
        return execute(plan)

    with monkeypatch.context() as patch:
        patch.setattr(whole.runner, "execute", interrupted)
        with pytest.raises(raised):
            generate(whole, ["The capital of France is", "Hello"])
    assert not whole.engine.has_unfinished_requests()
    assert generate(whole, "The capital of France is")[0]["text"] == PARIS


def test_a_real_interrupt_too(whole):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" has it ignored
    timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            generate(whole, ["Tell me everything"] * 4, SamplingParams(max_tokens=300, ignore_eos=True))
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)


def test_output_that_is_not_finite_ends_that_request_alone(tmp_path):
    tiny_models.save("llama", tmp_path)
    with LLM(tmp_path, device="cpu", num_kv_blocks=32, block_size=4) as llm:
        expected = generate(llm, [[1, 2, 3]])[0]["token_ids"]
        llm.runner.model.model.embed_tokens.weight[95] = float("nan")
        assert 95 not in expected
        with pytest.warns(UserWarning, match="not finite"):
            good, bad = generate(llm, [[1, 2, 3], [4, 95, 6, 7, 8]])
        assert bad["finish_reason"] == "abort" and good["token_ids"] == expected
        with pytest.warns(UserWarning, match="not finite"):
            assert generate(llm, [[4, 95, 6, 7, 8]])[0].num_cached_tokens == 0  # its blocks were not published


def test_a_closed_llm_says_so_and_closing_twice_is_fine(tmp_path):
    tiny_models.save("llama", tmp_path)
    llm = LLM(tmp_path, device="cpu", num_kv_blocks=16)
    llm.close()
    llm.close()
    for call in (lambda: generate(llm, [[1]]), lambda: llm.stats):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_the_progress_bar_counts_requests_and_tokens(whole, capsys):
    whole.generate(["One", "Two"], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown and "prefill" in shown and "decode" in shown


@pytest.mark.gpu
def test_close_gives_the_gpus_memory_back():
    before, held = torch.cuda.memory_allocated(), []
    for _ in range(3):
        llm = LLM("smollm2", device="cuda", gpu_memory_utilization=0.5)
        assert generate(llm, "The capital of France is", SamplingParams(temperature=0, max_tokens=2))[0]["text"] == " Paris."
        llm.close()
        held.append(torch.cuda.memory_allocated())
    assert held[0] - before < 200 << 20, held  # cuBLAS's workspaces, 32 MiB a stream; the weights are 270 MB
    assert held[1] - held[0] < 1 << 20 and held[2] - held[1] < 1 << 20, held
