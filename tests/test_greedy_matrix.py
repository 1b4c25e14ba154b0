"""The embedded model's greedy tokens equal transformers', however the engine is set: one factor at a time, then combinations."""

import pytest
import torch
from reference import GreedyReference

from minivllm import LLM, SamplingParams
from minivllm.config import EngineConfig
from minivllm.engine.engine import Engine

NEW_TOKENS = 16
TEXT = (
    "The capital of France is Paris, and the river that runs through it is the Seine. A river carries water from the hills to the sea. "
    "In the first year of the school, children learn to read, to write and to count; in the second, they learn to ask why. "
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, 2 * i))\n"
    "Water boils at 100 degrees and freezes at 0. Il fait beau aujourd'hui, n'est-ce pas? Once upon a time there was a small engine. "
)
LENGTHS = [1, 2, 5, 15, 16, 17, 33, 48, 64, 100]
BASE = dict(block_size=4, num_kv_blocks=384, max_num_batched_tokens=2048, enable_prefix_caching=True, together=True)
ONE_AT_A_TIME = [
    {}, {"together": False}, {"enable_prefix_caching": False}, {"block_size": 1}, {"block_size": 16}, {"block_size": 64},
    {"max_num_batched_tokens": 16}, {"num_kv_blocks": 30},
]
COMBINATIONS = [
    {"block_size": 1, "num_kv_blocks": 150, "max_num_batched_tokens": 16},
    {"block_size": 1, "num_kv_blocks": 130, "enable_prefix_caching": False},
    {"num_kv_blocks": 40, "max_num_batched_tokens": 16},
    {"num_kv_blocks": 32, "enable_prefix_caching": False},
    {"together": False, "max_num_batched_tokens": 16},
    {"block_size": 64, "num_kv_blocks": 3, "max_num_batched_tokens": 16},
    {"block_size": 64, "num_kv_blocks": 4, "enable_prefix_caching": False},
    {"block_size": 64, "together": False, "enable_prefix_caching": False},
    {"block_size": 16, "num_kv_blocks": 8, "max_num_batched_tokens": 16},
    {"num_kv_blocks": 34, "enable_prefix_caching": False, "max_num_batched_tokens": 16},
    {"block_size": 16, "max_num_batched_tokens": 16, "enable_prefix_caching": False},
    {"block_size": 16, "num_kv_blocks": 12, "max_num_batched_tokens": 61},
]
#: The prompts that run one at a time, which takes a step for every token of each: one token, the ends of a block of 16, two that begin alike.
ALONE = [LENGTHS.index(length) for length in (1, 16, 17, 64, 100)]
#: Pools in which ten sequences that run at once cannot all grow by 16 tokens: rows of these must preempt.
PREEMPTING = [(1, 150), (1, 130), (4, 30), (4, 32), (4, 34), (4, 40)]


class Setup:
    """One loaded model, one reference, ten prompts."""

    def __init__(self, llm, model):
        self.llm = llm
        self.reference = GreedyReference(model)
        ids = llm.tokenizer.encode(TEXT)
        # Different beginnings, but the last two: the longest prompt begins like the one before it.
        starts = [0, 3, 6, 9, 12, 15, 18, 21, 0, 0]
        self.prompts = [ids[start:start + length] for start, length in zip(starts, LENGTHS)]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def setup(request, transformers_model):
    llm = LLM("smollm2", device=request.param, dtype="float32", num_kv_blocks=96, block_size=16, max_model_len=512)
    yield Setup(llm, transformers_model.to(request.param))
    llm.close()
    transformers_model.to("cpu")


def run(setup, together=True, **changes):
    """Generate under changed settings, over the same loaded weights; returns the engine and the tokens of each prompt."""
    settings = {**BASE, **changes}
    settings.pop("together", None)
    config = EngineConfig(max_num_seqs=10, **settings).complete(num_kv_blocks=1, max_positions=min(384, settings["block_size"] * settings["num_kv_blocks"]))
    setup.llm.runner.allocate(config.num_kv_blocks, config.block_size)
    setup.llm.runner.capture(config)  # CUDA graphs, where there is a GPU
    engine = Engine(config, setup.llm.runner, setup.llm.model_config.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    groups = [setup.prompts] if together else [[setup.prompts[index]] for index in ALONE]
    tokens = []
    for group in groups:
        sequences = [engine.add(prompt, params) for prompt in group]
        while engine.has_unfinished_requests():
            engine.step()
        tokens += [seq.generated_token_ids for seq in sequences]
    return engine, tokens


def name_of(changes):
    return "-".join(f"{key.replace('max_num_batched_tokens', 'budget')}={value}" for key, value in changes.items()) or "base"


@pytest.mark.parametrize("changes", ONE_AT_A_TIME + COMBINATIONS, ids=name_of)
def test_greedy_tokens_equal_transformers(setup, changes):
    engine, tokens = run(setup, **changes)
    prompts = setup.prompts if changes.get("together", True) else [setup.prompts[index] for index in ALONE]
    for prompt, generated in zip(prompts, tokens, strict=True):
        setup.reference.check(prompt, generated)
    if (engine.blocks.block_size, len(engine.blocks.blocks)) in PREEMPTING:
        assert engine.stats.num_preemptions > 0 and engine.stats.recomputed_tokens > 0
    assert engine.blocks.num_free_blocks == len(engine.blocks.blocks)


def test_a_second_run_hits_the_cache_and_says_the_same(setup):
    engine, first = run(setup)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    sequences = [engine.add(prompt, params) for prompt in setup.prompts]
    while engine.has_unfinished_requests():
        engine.step()
    assert [seq.generated_token_ids for seq in sequences] == first
    hits = [seq.num_cached_tokens for seq in sequences]
    assert hits == [0, 0, 4, 12, 15, 16, 32, 47, 63, 99]  # whole blocks; of a full hit all but the last token


def test_prompts_of_a_chat_equal_transformers(setup):
    prompt = setup.llm.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
    setup.llm.runner.allocate(96, 16)
    output = setup.llm.generate([prompt], SamplingParams(temperature=0), use_tqdm=False)[0]
    assert (output["text"], output["finish_reason"]) == ("The capital of France is Paris.", "stop")
    setup.reference.check(prompt, output["token_ids"])


def test_golden_text(setup):
    setup.llm.runner.allocate(96, 16)
    output = setup.llm.generate([[504, 3575, 282, 4649, 314]], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0]
    assert output["text"] == " Paris.\n\nThe answer is:"


def test_logits_equal_transformers(setup):
    from test_models import logits_of

    ids = setup.llm.tokenizer.encode(TEXT)[:90]
    setup.llm.runner.allocate(16, 16)
    got = logits_of(setup.llm.runner, ids, [50, 1, 39], block_table=[3, 15, 0, 7, 9, 1])
    with torch.no_grad():
        expected = setup.reference.model(input_ids=torch.tensor([ids], device=got.device)).logits[0]
    # float32 through 30 layers: the largest logits are about 30, whose rounding step is 2e-6; a hundred steps are allowed.
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)
