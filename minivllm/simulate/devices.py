"""What a step takes on a named device, from the bytes it moves and the FLOPs it computes. Knows no engine and no clock.

A step takes max(bytes / bandwidth, FLOPs / rate), both times an efficiency, plus what launching it costs, plus what the host pays for
each row. Weights are read once a step, and the K/V of every context once.
Simplified: bytes and FLOPs overlap perfectly; activations, K/V writes and a graph's padded rows cost nothing; and a step with prompts
in it, which no CUDA graph replays, is launched as fast as one without.
"""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.models.config import ModelConfig

BYTES_PER_ELEMENT = 2  # float16 and bfloat16

#: The model of the measured figures.
QWEN3_0_6B = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16,
    num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6, rope_theta=1e6, rope_scaling=None, max_positions=40_960, tie_word_embeddings=True,
    attention_bias=False, mlp_bias=False, eos_token_ids=frozenset(), dtype="bfloat16")


@dataclass(frozen=True)
class Device:
    """A GPU by its datasheet, and how much of it a step gets.

    bandwidth: bytes/s. flops: dense 16-bit tensor-core FLOP/s. memory: bytes.
    read_efficiency, flops_efficiency: the shares of these two that are reached.
    step_overhead: seconds a step takes beside them (launches, small kernels), decodes in CUDA graphs. row_overhead: seconds of the host
    for each row of it.
    calibrated: whether these four come from measurements of this device (flops_efficiency excepted). If not, all it yields is predicted.
    """

    name: str
    bandwidth: float
    flops: float
    memory: float
    read_efficiency: float
    flops_efficiency: float
    step_overhead: float
    row_overhead: float
    calibrated: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} ({'calibrated' if self.calibrated else 'predicted'})"


#: The H200's, and assumed for the others: that they reach the same shares of their datasheets beside a host as fast. Reading: the
#: bandwidth measured there, 4.23 TB/s. FLOPs: assumed; the measured figures do not depend on it. The overheads: fitted (calibration.py).
_FITTED = {"read_efficiency": 0.88, "flops_efficiency": 0.5, "step_overhead": 1.2e-3, "row_overhead": 6.5e-6}

# Bandwidth, FLOP/s and memory: NVIDIA's datasheets "T4 Tensor Core GPU", "L4 Tensor Core GPU" and "H200 Tensor Core GPU" (the last two
# print FLOP/s with sparsity: halved here), and "A100 Tensor Core GPU" (40 GB, PCIe).
DEVICES = {device.name: device for device in (
    Device("T4", 320e9, 65e12, 16e9, **_FITTED),
    Device("L4", 300e9, 121e12, 24e9, **_FITTED),
    Device("A100", 1555e9, 312e12, 40e9, **_FITTED),
    Device("H200", 4800e9, 989e12, 141e9, **_FITTED, calibrated=True),
)}


def find_device(device: str | Device) -> Device:
    """A device by its name in DEVICES, or one's own as it is."""
    if isinstance(device, Device):
        return device
    if device not in DEVICES:
        raise ValueError(f"device {device!r} is not known: use one of {', '.join(DEVICES)}, or a Device of your own")
    return DEVICES[device]


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes, summed over its rows.

    tokens: through the layers. kv_tokens: whose K/V is read. attended: (query, key) pairs. samples: rows that get logits.
    rows: sequences in the batch.
    """

    tokens: int
    kv_tokens: int
    attended: int
    samples: int
    rows: int


class Cost:
    """The seconds of steps of `model` on `device`."""

    def __init__(self, device: Device, model: ModelConfig = QWEN3_0_6B):
        self.device, self.model = device, model
        heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        layer = model.hidden_size * (2 * heads + 2 * kv_heads + 3 * model.intermediate_size)
        self.layer_weights = model.num_layers * layer
        self.head_weights = model.vocab_size * model.hidden_size
        self.weight_bytes = BYTES_PER_ELEMENT * (self.layer_weights + self.head_weights)  # an embedding look-up reads a few rows only
        self.kv_bytes_per_token = BYTES_PER_ELEMENT * 2 * model.num_layers * kv_heads
        self.flops_per_pair = 4 * model.num_layers * heads  # two for q @ k, two for p @ v
        self._bandwidth = device.bandwidth * device.read_efficiency
        self._flops = device.flops * device.flops_efficiency

    def num_bytes(self, work: StepWork) -> int:
        return self.weight_bytes + work.kv_tokens * self.kv_bytes_per_token

    def num_flops(self, work: StepWork) -> int:
        """Two for each weight and token; the output layer only for the rows that sample."""
        return 2 * (self.layer_weights * work.tokens + self.head_weights * work.samples) + self.flops_per_pair * work.attended

    def seconds(self, work: StepWork) -> float:
        device = self.device
        busy = max(self.num_bytes(work) / self._bandwidth, self.num_flops(work) / self._flops)
        return busy + device.step_overhead + device.row_overhead * work.rows

    def num_kv_blocks(self, block_size: int, utilization: float = 0.9) -> int:
        """Blocks that the device's memory holds beside the weights, a second embedding matrix where there is one, and 1 GB to work in."""
        spare = 0 if self.model.tie_word_embeddings else BYTES_PER_ELEMENT * self.head_weights
        left = self.device.memory * utilization - self.weight_bytes - spare - 1e9
        blocks = int(left // (block_size * self.kv_bytes_per_token))
        if blocks < 1:
            raise ValueError(f"the model's weights ({self.weight_bytes / 1e9:.1f} GB) leave no room for a KV cache in the "
                             f"{self.device.name}'s {self.device.memory / 1e9:.0f} GB: choose a smaller model or another device")
        return blocks


def step_seconds(device: str | Device, work: StepWork, model: ModelConfig = QWEN3_0_6B) -> float:
    """Seconds of one step."""
    return Cost(find_device(device), model).seconds(work)
