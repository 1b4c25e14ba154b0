"""A GPU that is not there: the real engine, scheduler and block manager over a runner that computes nothing.

    from minivllm.simulate import poisson_requests, simulate
    result = simulate(poisson_requests(1000, rate=8), device="T4", mode="mixed")
    print(result.summary())

Each step advances a simulated clock by what its bytes and FLOPs take on a named device; nothing sleeps, so an hour of traffic takes
seconds. What is decided, who runs, who waits, which blocks are whose, is decided by the code that also serves real requests.
Used in notebook 06.
"""

from minivllm.simulate.devices import DEVICES, QWEN3_0_6B, Device, StepWork, step_seconds
from minivllm.simulate.modes import MODES
from minivllm.simulate.requests import Request, measured_lengths, poisson_requests
from minivllm.simulate.results import Simulation, StepRecord
from minivllm.simulate.run import simulate

__all__ = ["DEVICES", "MODES", "QWEN3_0_6B", "Device", "Request", "Simulation", "StepRecord", "StepWork", "measured_lengths",
           "poisson_requests", "simulate", "step_seconds"]
