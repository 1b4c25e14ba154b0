"""What the hot path computes below torch's own operators; each with a plain torch version of the same signature."""
