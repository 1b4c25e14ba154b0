"""Random models of a few thousand parameters, made by transformers and saved as it saves them."""

import torch
import transformers

SHAPE = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
             max_position_embeddings=256, initializer_range=0.15, bos_token_id=1, eos_token_id=2)

#: name -> (config class, what differs from SHAPE)
FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama-head-dim": (transformers.LlamaConfig, {"head_dim": 20}),
    "llama-biased": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-no-gqa": (transformers.LlamaConfig, {"num_key_value_heads": 6}),
    "llama-theta": (transformers.LlamaConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama3-rope": (transformers.LlamaConfig, {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 300.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 8}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2-tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "qwen3-tied": (transformers.Qwen3Config, {"head_dim": 24, "tie_word_embeddings": True}),
}


def make(family, seed=0, **shape):
    """A random transformers model in float32; biases and norm weights random too, so that none can be forgotten unseen."""
    config_class, changes = FAMILIES[family]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**{**SHAPE, **changes, **shape})).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
    return model


def save(family, directory, seed=0, **shape):
    """Save one to `directory` and return the transformers model. `shape` has the last word."""
    model = make(family, seed, **shape)
    model.save_pretrained(directory)
    return model
