"""What "the same tokens" means: equal to transformers' greedy choice, except where its two best logits all but tie."""

import torch

TIE = 1e-4


class GreedyReference:
    """Compares generated tokens with transformers', prompt by prompt, and counts the steps where a tie let ours pass.

    transformers reads the prompt and the tokens once: if each of them is its best after those before, they are its greedy answer.
    """

    def __init__(self, model):
        self.model = model
        self.agreed = set()  # (prompt, tokens)
        self.steps = self.ties = 0

    def check(self, prompt, tokens):
        answer = (tuple(prompt), tuple(tokens))
        self.steps += len(tokens)
        if answer not in self.agreed:
            ties = self._ties(prompt, tokens)
            self.ties += ties
            if not ties:
                self.agreed.add(answer)
        assert self.ties <= 0.01 * self.steps, f"{self.ties} ties in {self.steps} steps"

    @torch.no_grad()
    def _ties(self, prompt, tokens):
        """At how many steps another token was as good; an error where one was better."""
        ids = torch.tensor([list(prompt) + list(tokens)], device=next(self.model.parameters()).device)
        logits, ties = self.model(input_ids=ids).logits[0, len(prompt) - 1:-1], 0
        for step, (row, token) in enumerate(zip(logits, tokens, strict=True)):
            best = row.max()
            if row[token] < best:
                assert best - row[token] <= TIE, f"step {step}: token {token} is {best - row[token]:.2e} below transformers' {row.argmax()}"
                ties += 1
        return ties
