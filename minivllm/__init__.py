"""minivllm: a small, complete LLM inference engine in the line of vLLM, and the notebooks that build it.

    from minivllm import LLM, SamplingParams
    llm = LLM()                                     # the embedded model; or a directory, or a .gguf file
    outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0))
    print(outputs[0].outputs[0].text)

Dimension letters, used wherever a line changes a shape:
B sequences, T tokens in the batch, H query heads, K kv heads, D head dim, N blocks, S block size, L layers, V vocabulary.
"""

from minivllm.engine.engine import QueueFullError
from minivllm.llm import LLM, close_all
from minivllm.outputs import CompletionOutput, RequestOutput
from minivllm.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "QueueFullError", "RequestOutput", "SamplingParams", "__version__", "close_all"]
