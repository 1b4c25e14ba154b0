"""What "the same tokens" means: equal to transformers' greedy choice, except where its two best logits all but tie."""

import torch

TIE = 1e-4


@torch.no_grad()
def greedy(model, prompt, num_tokens):
    """transformers' own greedy tokens, one step at a time with its KV cache."""
    device = next(model.parameters()).device
    ids, cache, tokens = torch.tensor([prompt], device=device), None, []
    for _ in range(num_tokens):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        tokens.append(int(out.logits[0, -1].argmax()))
        ids = torch.tensor([tokens[-1:]], device=device)
    return tokens


class GreedyReference:
    """Compares generated tokens with transformers', prompt by prompt, and counts the steps where a tie let ours pass."""

    def __init__(self, model):
        self.model = model
        self.expected = {}
        self.steps = self.ties = 0

    def check(self, prompt, tokens):
        key = (tuple(prompt), len(tokens))
        if key not in self.expected:
            self.expected[key] = greedy(self.model, prompt, len(tokens))
        self.steps += len(tokens)
        if tokens != self.expected[key]:
            self._check_forced(prompt, tokens)
        assert self.ties <= 0.01 * self.steps, f"{self.ties} ties in {self.steps} steps"

    @torch.no_grad()
    def _check_forced(self, prompt, tokens):
        ids = torch.tensor([list(prompt) + list(tokens)], device=next(self.model.parameters()).device)
        logits = self.model(input_ids=ids).logits[0, len(prompt) - 1:-1]
        for step, (row, token) in enumerate(zip(logits, tokens)):
            best = row.max()
            if row[token] == best:
                continue
            assert best - row[token] <= TIE, f"step {step}: token {token} is {best - row[token]:.2e} below transformers' {row.argmax()}"
            self.ties += 1
