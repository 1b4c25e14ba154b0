"""Several ranks compute what one does: layers and loading, the wire, the life of the processes, and what happens when one of them fails."""

import gc
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
import rank_probes
import tiny_models
import torch
from rank_processes import children
from reference import GreedyReference
from thread_ranks import GlooThreads

from minivllm import LLM, SamplingParams
from minivllm.bench import parallel
from minivllm.config import EngineConfig
from minivllm.engine.engine import Engine
from minivllm.engine.step import StepResult
from minivllm.layers.parallel import Ranks, building_for, share, share_kv
from minivllm.weights.hub import open_model
from minivllm.worker import parallel_runner
from minivllm.worker.crew import RankError
from minivllm.worker.distributed import Group
from minivllm.worker.rank import RankRunner
from minivllm.worker.wire import PlanReader, PlanWriter

SHAPE = dict(hidden_size=64, num_attention_heads=8, intermediate_size=80)  # 97 tokens: a vocabulary that does not divide
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SHARED = list(range(3, 24))
PROMPTS = [SHARED, SHARED + [50, 51], [5, 6, 7], SHARED[:9] + [90], list(range(60, 96))]
SETTINGS = dict(block_size=4, num_kv_blocks=15, max_num_batched_tokens=14, max_num_seqs=4)
OVER_WITHIN = 10  # seconds, after a fault


def shape_of(family):
    return {**SHAPE, "num_key_value_heads": 8 if "no-gqa" in family else 2}


def run(engine, prompts=PROMPTS, params=GREEDY):
    sequences = [engine.add(prompt, params) for prompt in prompts]
    while engine.has_unfinished_requests():
        engine.step()
    return [seq.generated_token_ids for seq in sequences]


@pytest.mark.filterwarnings("ignore:max_model_len is 60")
@pytest.mark.parametrize("family, size", [*((family, 2) for family in tiny_models.FAMILIES),  # with 4, each kv head is held by two ranks
                                          *((family, 4) for family in ("llama-biased", "llama-no-gqa", "qwen2-tied", "qwen3"))])
def test_greedy_tokens_are_those_of_transformers_with_hits_chunks_and_preemptions(family, size, tmp_path):
    reference = GreedyReference(tiny_models.save(family, tmp_path, **shape_of(family)))
    runner = GlooThreads(tmp_path, size, overlap_chunk_size=3 if size == 4 else None)
    try:
        engine = runner.engine(**SETTINGS)
        for prompt, tokens in zip(PROMPTS, run(engine)):
            reference.check(prompt, tokens)
        stats = engine.stats
        assert stats.num_preemptions > 0 and stats.recomputed_tokens > 0 and stats.prefix_cache_hits > 0
    finally:
        runner.close()


def test_every_option_and_noise_is_that_of_one_rank(tmp_path):
    tiny_models.save("qwen3", tmp_path, **shape_of("qwen3"))
    params = [SamplingParams(temperature=0.9, seed=3, max_tokens=9), SamplingParams(temperature=0.7, top_k=9, top_p=0.9, seed=4, n=2),
              SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=3, prompt_logprobs=2, max_tokens=9),
              SamplingParams(temperature=0, logit_bias={7: 5.0}, min_tokens=4, stop_token_ids=[9])]
    with LLM(tmp_path, device="cpu", **SETTINGS) as llm:
        want = [run(llm.engine, [PROMPTS[0]], some) for some in params]
        [alone] = llm.generate([PROMPTS[0]], params[2], use_tqdm=False)
    runner = GlooThreads(tmp_path, 2)
    try:
        engine = runner.engine(**SETTINGS)
        assert [run(engine, [PROMPTS[0]], some) for some in params] == want
        seq = engine.add(PROMPTS[0], params[2])
        while engine.has_unfinished_requests():
            engine.step()
        for ours, theirs in zip(seq.options.logprobs, alone.outputs[0].logprobs):
            assert ours[1][0] == pytest.approx(theirs[ours[0][0]].logprob, abs=1e-4)
        assert len(seq.options.prompt_logprobs) == len(PROMPTS[0])
    finally:
        runner.close()


def ranks(rank, size):
    some = Ranks()
    some.rank, some.size = rank, size
    return some


def shares(function, size):
    found = []
    for rank in range(size):
        with building_for(ranks(rank, size)):
            found.append(function())
    return found


def test_shares_cover_the_whole_once():
    for whole in (1, 2, 96, 97, 100):
        for size in (1, 2, 3, 4, 7):
            covered = [i for part in shares(lambda: share(whole), size) for i in range(part.start, part.start + part.size)]
            assert covered == list(range(whole))
    assert [part.start for part in shares(lambda: share_kv(4, 10), 2)] == [0, 20]
    assert [(part.start, part.size) for part in shares(lambda: share_kv(2, 10), 4)] == [(0, 10), (0, 10), (10, 10), (10, 10)]


@pytest.mark.parametrize("size, family", [(2, "qwen3"), (4, "llama-biased"), (2, "qwen2-tied")])
def test_random_weights_are_the_same_numbers_however_many_ranks(size, family, tmp_path):
    tiny_models.save(family, tmp_path, **shape_of(family))
    config, checkpoint = EngineConfig(device="cpu", load_format="dummy"), open_model(str(tmp_path))
    whole = RankRunner(config, checkpoint).model
    parts = [RankRunner(config, checkpoint, ranks(rank, size)).model for rank in range(size)]
    down = torch.cat([part.model.layers[1].mlp.down_proj.weight for part in parts], dim=1)
    assert torch.equal(down, whole.model.layers[1].mlp.down_proj.weight)
    embedding = torch.cat([part.model.embed_tokens.weight for part in parts])
    assert torch.equal(embedding[:97], whole.model.embed_tokens.weight) and not embedding[97:].any()
    gate = whole.model.layers[0].mlp.gate_up_proj.weight[:80]
    assert torch.equal(torch.cat([part.model.layers[0].mlp.gate_up_proj.weight[:80 // size] for part in parts]), gate)


@pytest.mark.parametrize("shape, size, valid", [(dict(num_attention_heads=6, num_key_value_heads=2), 4, "1, 2, 6$"),
                                                (dict(num_attention_heads=6, num_key_value_heads=3), 2, "1, 3, 6$"),
                                                (dict(num_attention_heads=8, num_key_value_heads=2), 3, "1, 2, 4, 8$"),
                                                (dict(num_attention_heads=8, num_key_value_heads=2, intermediate_size=82), 4, "1, 2$")])
def test_what_does_not_divide_is_refused_with_what_does(shape, size, valid, tmp_path):
    tiny_models.save("llama", tmp_path, **{**SHAPE, "hidden_size": 48, "intermediate_size": 48, **shape})
    with pytest.raises(ValueError, match=f"tensor_parallel_size {size} does not divide .*use one of {valid}"):
        LLM(tmp_path, device="cpu", tensor_parallel_size=size)
    assert not children()


# The wire


class Roundtrip:
    """A runner without a model: what arrives must be what was sent."""

    def __init__(self):
        self.writer, self.reader, self.random = PlanWriter(), PlanReader(), random.Random(0)
        self.sizes, self.pickled, self.whole_again = [], [], 0
        self.seen = set()

    def execute(self, plan):
        data = self.writer.encode(plan)
        assert self.reader.decode(data) == plan
        self.sizes.append(len(data))
        self.pickled.append(len(pickle.dumps(plan)))
        self.whole_again += sum(row.start == 0 and row.seq_id in self.seen for row in plan.rows)
        self.seen.update(row.seq_id for row in plan.rows)
        return StepResult({row.seq_id: self.random.randrange(90) for row in plan.rows if row.samples})


def test_what_arrives_is_what_was_sent_through_chunks_hits_preemptions_and_options():
    runner, rng = Roundtrip(), random.Random(1)
    config = EngineConfig(block_size=4, num_kv_blocks=40, max_num_batched_tokens=20, max_num_seqs=6, enable_prefix_caching=False)
    engine = Engine(config.complete(num_kv_blocks=1, max_positions=200), runner, 97, [2])
    options = [dict(), dict(temperature=0.5, seed=1), dict(n=3, top_k=4), dict(repetition_penalty=1.2, max_tokens=30), dict(logprobs=2, prompt_logprobs=1),
               dict(min_tokens=8, logit_bias={5: 1.0})]
    for number in range(400):
        if number % 3 == 0 and number < 300:
            params = SamplingParams(**{"temperature": 1.0, "max_tokens": rng.randrange(8, 60), **rng.choice(options)})
            engine.add([rng.randrange(3, 97) for _ in range(rng.randrange(1, 50))], params)
        if number % 50 == 49:
            engine.abort(engine.scheduler.running[:1])
        engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.stats.num_preemptions > 20 and runner.whole_again > 10
    assert sum(runner.sizes) < sum(runner.pickled)


def test_a_decode_of_256_is_a_few_bytes_each_and_its_cost_is_said(capsys):
    from minivllm.bench.communication import wire_cost

    cost = wire_cost(256, steps=32)
    with capsys.disabled():
        print(f"\n  256 decodes: {cost['bytes']:.0f} bytes, {cost['encode_us']:.0f} us to write, {cost['decode_us']:.0f} us to read; "
              f"pickled whole {cost['pickle_bytes']:.0f} bytes, {cost['pickle_us']:.0f} and {cost['unpickle_us']:.0f} us")
    assert cost["bytes"] < 10 * 256 < 256 * 64 < cost["pickle_bytes"]


# Processes


def left_behind():
    gc.collect()
    process = psutil.Process()
    return [child.pid for child in process.children(recursive=True)], process.num_fds(), len(process.net_connections()), threading.active_count()


def test_the_embedded_model_on_three_ranks(transformers_model):
    with LLM("smollm2", device="cpu", num_kv_blocks=24, block_size=16, max_num_batched_tokens=24, tensor_parallel_size=3) as llm:
        reference = GreedyReference(transformers_model)
        ids = llm.tokenizer.encode("The capital of France is")
        prompts = [ids, ids + llm.tokenizer.encode(" Paris, and the river that runs through it is the Seine. A river carries water from the"), ids[:2]]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
        for prompt, output in zip(prompts, outputs):
            reference.check(prompt, output["token_ids"])
        assert outputs[0]["text"] == " Paris.\n\nThe answer is:"
        sizes = llm.runner.everywhere(rank_probes.weight_bytes)
        whole = 4 * sum(parameter.numel() for parameter in transformers_model.parameters())
        norms = 4 * 576 * 61
        assert sizes == [(whole - norms) // 3 + norms] * 3
        assert llm.runner.everywhere(rank_probes.pool_shape) == [(2, 30, 24, 16, 1, 64)] * 3
        account = llm.memory
        assert len(account.other_ranks) == 2 and account.other_ranks[0].weights == account.weights == sizes[0]
        assert "rank 2" in str(account)


def test_a_rank_never_holds_more_than_its_share_while_it_loads(embedded):
    """In a process of its own; loading needs no other rank. Pages of the mapped file are not counted: they are the file's."""
    code = """
        import threading, time
        from minivllm.config import EngineConfig
        from minivllm.weights.hub import open_model
        from minivllm.worker.distributed import Group
        from minivllm.worker.rank import RankRunner
        def anonymous():
            return 1024 * int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon")))
        checkpoint, group = open_model("smollm2"), Group(1, 3)
        before, peak, over = anonymous(), [0], threading.Event()
        def watch():
            while not over.wait(0.002):
                peak[0] = max(peak[0], anonymous())
        thread = threading.Thread(target=watch); thread.start()
        runner = RankRunner(EngineConfig(device="cpu"), checkpoint, group)
        over.set(); thread.join()
        print(peak[0] - before, runner.weight_bytes)
    """
    done = python(code)
    grown, share_bytes = map(int, done.stdout.split())
    whole = embedded.runner.weight_bytes
    assert share_bytes < 0.34 * whole and share_bytes * 0.9 < grown < 0.5 * whole


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_models.save("qwen3", path, **shape_of("qwen3"))
    return path


def make(directory, **settings):
    return LLM(directory, device="cpu", tensor_parallel_size=2, **{"num_kv_blocks": 64, "max_model_len": 250, **settings})


def tokens(llm):
    return [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def fails_in_time(llm, match):
    begin = time.monotonic()
    with pytest.raises(RankError, match=match) as caught:
        while time.monotonic() - begin < OVER_WITHIN:
            llm.generate([[5, 6, 7]] * 4, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True), use_tqdm=False)
    assert time.monotonic() - begin < OVER_WITHIN
    with pytest.raises((RankError, RuntimeError), match=match):
        tokens(llm)  # again, and at once
    llm.close()
    assert not children()
    return str(caught.value)


def test_faults_of_a_rank_reach_the_user_and_a_new_llm_works(directory, monkeypatch):
    with LLM(directory, device="cpu", num_kv_blocks=64, max_model_len=250) as llm:
        want = tokens(llm)
    llm = make(directory)
    assert tokens(llm) == want
    llm.runner.everywhere(rank_probes.fail_in_the_next_step, 1)
    assert "rank_probes.py" in fails_in_time(llm, "rank 1 failed:[^$]*ZeroDivisionError")
    before = left_behind()

    llm = make(directory)  # killed while it computes
    assert tokens(llm) == want
    [child] = children()
    threading.Timer(0.5, child.kill).start()
    fails_in_time(llm, "rank 1 ended while it was needed: killed by SIGKILL")

    monkeypatch.setattr(parallel_runner, "_STEP_TIMEOUT", 1.0)
    llm = make(directory)  # stuck
    assert tokens(llm) == want
    children()[0].suspend()
    fails_in_time(llm, "did not finish in time: one of them is stuck")
    assert left_behind() == before


def test_an_error_while_the_ranks_are_made_leaves_none(directory):
    before = left_behind()[0]
    with pytest.raises(ValueError, match="max_model_len 200 does not fit"):
        make(directory, num_kv_blocks=1, max_model_len=200)
    with pytest.raises(ValueError, match="max_model_len 1000 is above the 256 positions"):
        make(directory, max_model_len=1000)
    assert left_behind()[0] == before


def python(code, *command, timeout=120, **options):
    """Run `code` as a script would be."""
    done = subprocess.run([sys.executable, *(command or ["-c"]), textwrap.dedent(code)], capture_output=True, text=True, timeout=timeout, env=environment(), **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def environment():
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}


SCRIPT = """
import sys
from minivllm import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", num_kv_blocks=64, max_model_len=250, tensor_parallel_size=2)  # no guard on purpose
ids = lambda count: llm.generate([[5, 6, 7]] * 4, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True), use_tqdm=False)[0]["token_ids"]
print(ids(4), flush=True)
try:
    while True:
        ids(200)
except KeyboardInterrupt:
    print("interrupted", llm.engine.blocks.num_used_blocks, ids(4), flush=True)
while True:
    ids(200)
"""


def test_ctrl_c_leaves_a_script_its_llm_and_its_death_takes_the_ranks_along(directory, tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, str(file), str(directory)], stdout=subprocess.PIPE, text=True, env=environment(), start_new_session=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # tests in the background ignore it
    try:
        first = process.stdout.readline()
        [rank] = psutil.Process(process.pid).children()
        time.sleep(0.5)
        begin = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
        assert process.stdout.readline() == f"interrupted 0 {first}" and time.monotonic() - begin < OVER_WITHIN
        assert rank.is_running()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    gone, alive = psutil.wait_procs([rank], timeout=OVER_WITHIN)
    assert not alive


def torchrun_script(directory, tmp_path, times):
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(f"""
        import os
        from minivllm import LLM, SamplingParams
        for _ in range({times}):
            with LLM({str(directory)!r}, device="cpu", num_kv_blocks=64, max_model_len=250, tensor_parallel_size=2) as llm:
                outputs = llm.generate({PROMPTS}, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
                print(os.environ["RANK"], [output["token_ids"] for output in outputs], flush=True)
    """))
    with LLM(directory, device="cpu", num_kv_blocks=64, max_model_len=250) as llm:
        return str(file), f"0 {tokens(llm)}"


def test_torchrun_starts_the_ranks_instead_and_an_llm_can_be_made_again(directory, tmp_path):
    file, want = torchrun_script(directory, tmp_path, 2)
    done = python(file, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert done.stdout.splitlines() == [want, want]


def test_two_launchers_as_on_two_machines_make_one_llm(directory, tmp_path):
    file, want = torchrun_script(directory, tmp_path, 1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1",
               "--master-port", str(port), "--node-rank"]
    nodes = [subprocess.Popen([*command, node, file], stdout=subprocess.PIPE, text=True, env=environment()) for node in ("0", "1")]
    try:
        said = [node.communicate(timeout=120)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert said == [want + "\n", ""] and [node.returncode for node in nodes] == [0, 0]


def test_the_benchmark_measures_prefill_throughput_and_the_ranks_life():
    """On the CPU, where its figures mean nothing."""
    with parallel.model_directory("tiny") as directory:
        found = {"prefill": parallel.prefill(directory, 2, "cpu", 1), "life": [parallel.life(directory, 2, "cpu")],
                 **parallel.throughput(directory, 2, [1], "cpu", False, 1)}
    assert [row["overlap_chunk_size"] for row in found["prefill"]] == [None, 256, 128, 64] and all(row["ms"] > 0 for row in found["prefill"])
    assert "killed by SIGKILL" in found["life"][0]["error"] and found["throughput"][0]["sequences"] == 1 and not children()
    told = {part: [parallel._told(part, row) for row in rows] for part, rows in found.items()}
    assert "chunks of 64: " in told["prefill"][-1] and "tokens/s" in told["throughput"][0] and "all-reduce of    1 rows" in told["all_reduce"][0]


def test_one_device_needs_none_of_it(directory):
    python(f"""
        import sys
        from minivllm import LLM
        LLM({str(directory)!r}, device="cpu", num_kv_blocks=64, max_model_len=250).close()
        loaded = [name for name in ("distributed", "crew", "parallel_runner", "torchrun", "rank", "wire") if f"minivllm.worker.{{name}}" in sys.modules]
        import torch.distributed
        assert not loaded and not torch.distributed.is_initialized(), loaded
    """)


def test_a_group_in_bfloat16_and_float16_adds_and_gathers(directory):
    runner = GlooThreads(directory, 2)
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert all(x.tolist() == [[3.0, 3.0]] for x in runner.all(lambda rank: runner.groups[rank].all_reduce(torch.full((1, 2), rank + 1.0, dtype=dtype))))
            gathered = runner.all(lambda rank: runner.groups[rank].all_gather(torch.full((2, 1), float(rank), dtype=dtype)))
            assert all(x.tolist() == [[0.0, 1.0], [0.0, 1.0]] for x in gathered)
    finally:
        runner.close()


def test_sums_in_chunks_start_before_the_product_has_ended_and_equal_the_whole(directory):
    runner = GlooThreads(directory, 2, overlap_chunk_size=4)
    seen = [[], []]

    def on_rank(rank):
        group, x = runner.groups[rank], torch.arange(22.0).view(11, 2)
        start = group._start_all_reduce

        def product(rows):
            seen[rank].append(f"product of {len(rows)}")
            return rows * (rank + 1)

        def started(part):
            seen[rank].append(f"sum of {len(part)}")
            return start(part)

        group._start_all_reduce = started
        return group.sum_of(product, x), group.sum_of(product, x[:4]), group.sum_of(product, x[:0])

    try:
        for some, few, none in runner.all(on_rank):
            assert torch.equal(some, 3 * torch.arange(22.0).view(11, 2)) and torch.equal(few, some[:4]) and none.shape == (0, 2)
        for events in seen:
            assert events[:6] == ["product of 4", "sum of 4", "product of 4", "sum of 4", "product of 3", "sum of 3"] and events[6] == "product of 4"
    finally:
        runner.close()


def test_a_class_that_other_processes_cannot_import_is_refused(directory, monkeypatch):
    from minivllm import models
    from minivllm.models.qwen3 import Qwen3ForCausalLM

    class Mine(Qwen3ForCausalLM):
        pass

    monkeypatch.setitem(models._MODELS, "Qwen3ForCausalLM", Mine)
    with pytest.raises(ValueError, match="put it in a module of its own"):
        make(directory)
    assert isinstance(Group(0, 2), Ranks) and not children()
