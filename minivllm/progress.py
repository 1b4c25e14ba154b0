"""The progress bar of `LLM.generate` (tqdm's): finished requests (each of n answers counts), and tokens a second of either kind."""

from __future__ import annotations

from minivllm.engine.stats import Stats


class ProgressBar:
    """Finished requests, and tokens a second of either kind since the start."""

    def __init__(self, total: int, stats: Stats, shown: bool):
        self.stats = stats
        self.bar = None
        if shown:
            from tqdm.auto import tqdm

            self.bar = tqdm(total=total, desc="Generating", unit="request", dynamic_ncols=True)
            self.before = (stats.prompt_tokens, stats.generation_tokens)

    def __enter__(self) -> ProgressBar:
        return self

    def update(self, finished: int) -> None:
        if self.bar is not None:
            seconds = max(self.bar.format_dict["elapsed"], 1e-9)
            prefill, decode = self.stats.prompt_tokens - self.before[0], self.stats.generation_tokens - self.before[1]
            self.bar.set_postfix_str(f"prefill {prefill / seconds:.0f} tok/s, decode {decode / seconds:.0f} tok/s", refresh=False)
            self.bar.update(finished)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()
