"""transformers on the same weights: `generate` over static padded batches, and its own continuous batching."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from minivllm.bench.workload import Workload
from minivllm.llm import LLM
from minivllm.weights.load import parameter_slots


def transformers_model(llm: LLM, config: dict[str, Any]) -> Any:
    """transformers' class for the same architecture, filled with the engine's own weights, in its dtype and on its device."""
    import transformers

    cls = getattr(transformers, llm.model_config.architecture)
    hf_config = cls.config_class(**config)
    hf_config.rope_parameters = {"rope_type": "default", "rope_theta": llm.model_config.rope_theta, **(getattr(hf_config, "rope_parameters", None) or {})}
    with torch.device("meta"):
        model = cls(hf_config)
    model = model.to(llm.runner.dtype).to_empty(device=llm.runner.device)
    model.load_state_dict({name: slot for name, slot in parameter_slots(llm.runner.model).items()}, strict=False)
    model.tie_weights()
    fresh = type(model.model.rotary_emb)(hf_config)  # computed, not loaded: an empty one would turn by garbage
    model.model.rotary_emb = fresh.to(llm.runner.device)
    return model.eval()


@torch.no_grad()
def generate_static(model: Any, workload: Workload, batch_size: int, temperature: float) -> list[list[int]]:
    """Batches in order, padded on the left; each runs until its longest answer is done. Returns the tokens that were asked for."""
    answers: list[list[int]] = []
    device = next(model.parameters()).device
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    for first in range(0, len(workload.prompts), batch_size):
        prompts, lens = workload.prompts[first:first + batch_size], workload.output_lens[first:first + batch_size]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max(lens), min_new_tokens=max(lens), pad_token_id=0, **sampling)
        answers += [row[width:width + n].tolist() for row, n in zip(out, lens)]
    return answers


def _sizes(fields: dict[str, Any], workload: Workload, batch_size: int, device: str) -> dict[str, int]:
    """What to say of sizes, of the `fields` that this transformers has."""
    sizes = {"max_batch_size": batch_size} if "max_batch_size" in fields else {}
    if device == "cpu" and {"num_blocks", "page_size"} <= fields.keys():
        # Left to itself it takes most of the machine's memory and writes zeros all over it, which takes longer than the answers.
        page = fields["page_size"].default
        pages = sorted(-(-(len(ids) + n) // page) for ids, n in zip(workload.prompts, workload.output_lens))
        sizes["num_blocks"] = sum(pages[-batch_size:])
    return sizes


def generate_continuous(model: Any, workload: Workload, batch_size: int, temperature: float, timeout: float = 600.0) -> list[list[int]]:
    """transformers' continuous batching, each request with its own length. Raises RuntimeError where it does not run."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    config = GenerationConfig(max_new_tokens=max(workload.output_lens), eos_token_id=-1, pad_token_id=0, **sampling)
    results: dict[str, list[int]] = {}
    options = _sizes(ContinuousBatchingConfig.__dataclass_fields__, workload, batch_size, next(model.parameters()).device.type)
    with model.continuous_batching_context_manager(generation_config=config, continuous_batching_config=ContinuousBatchingConfig(**options),
                                                   block=True, timeout=10) as manager:
        feeder = threading.Thread(target=lambda: [manager.add_request(ids, request_id=str(i), max_new_tokens=n)
                                                  for i, (ids, n) in enumerate(zip(workload.prompts, workload.output_lens))], daemon=True)
        feeder.start()
        deadline = time.monotonic() + timeout
        while len(results) < len(workload.prompts):
            if time.monotonic() > deadline or not (manager.is_running() or feeder.is_alive()):
                raise RuntimeError(f"{len(results)} of {len(workload.prompts)} requests came back")
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(result.error)
                results[result.request_id] = result.generated_tokens
    return [results[str(i)] for i in range(len(workload.prompts))]
