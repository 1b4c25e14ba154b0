"""Measures a real mix of request lengths and writes minivllm/teach/lengths.json: python notebooks/lengths.py

The requests are questions as people ask them and Python functions to be explained, from the standard library: real texts of very different
lengths. The embedded model answers greedily until it ends by itself, or at 512 tokens. Notebook 02 reads the file.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from pathlib import Path

from minivllm import LLM, SamplingParams

MAX_TOKENS, MAX_PROMPT = 512, 1200
QUESTIONS = """What is the capital of France?
Who wrote Romeo and Juliet?
How many legs does a spider have?
Name three primary colours.
What is 17 plus 25?
Why is the sky blue?
Explain photosynthesis to a ten-year-old.
Write a short poem about the sea.
Give me a recipe for pancakes.
What is the difference between a list and a tuple in Python?
Translate "good morning" into French, German and Spanish.
How does a refrigerator work?
Write an email to my manager asking for two days off next week.
What should I pack for a week of hiking in the mountains?
Tell me a story about a robot who learns to paint.
Summarise the causes of the First World War.
How do I remove a coffee stain from a white shirt?
List the planets of the solar system in order.
What is a black hole?
Give me five tips for better sleep.
Write a haiku about autumn.
What does HTTP status code 404 mean?
Explain the difference between TCP and UDP.
How do vaccines work?
Plan a two-day trip to Rome for a family with small children.
What is inflation and why does it matter?
Write a product description for a wooden chess set.
Is a tomato a fruit or a vegetable?
How can I learn to play the guitar?
Write a thank-you note to a teacher.
What is machine learning?
Describe the water cycle.""".splitlines()
MODULES = "textwrap statistics shutil bisect heapq functools random fnmatch string tempfile inspect calendar colorsys glob".split()


def functions_to_explain(count: int) -> list[str]:
    """Questions about functions of the standard library, each with the function's source in it."""
    found = []
    for name in MODULES:
        for _, function in inspect.getmembers(__import__(name), inspect.isfunction):
            if function.__module__ == name and len(source := inspect.getsource(function)) < 3500:
                found.append(f"Explain what this Python function does.\n\n{textwrap.dedent(source)}")
    return found[::max(1, len(found) // count)][:count]


def main() -> None:
    messages = [[{"role": "user", "content": text}] for text in [*QUESTIONS, *functions_to_explain(32)]]
    with LLM("smollm2", max_num_seqs=16, num_kv_blocks=1200, block_size=16, max_model_len=2048) as llm:
        prompts = [ids for ids in map(llm.chat_prompt, messages) if len(ids) <= MAX_PROMPT]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    rows = [{"prompt": len(out.prompt_token_ids), "answer": len(out["token_ids"]), "ended": out.outputs[0].finish_reason} for out in outputs]
    file = Path(__file__).parent.parent / "minivllm" / "teach" / "lengths.json"
    file.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
