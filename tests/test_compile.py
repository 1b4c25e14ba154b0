"""Every kernel compiles for a T4, an A100 and an H200, without a GPU: its shared memory fits, and matrix instructions are where they should be.

In a process of its own: the tests' own Triton may be the interpreter, which compiles nothing.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 89: 99 << 10, 90: 227 << 10}  # the most that one program may have
SCRIPT = """
import contextlib, io, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minivllm.kernels import floors, paged_decode, paged_prefill, rms_norm, rope_store, sample, silu_and_mul, store_kvcache

capability = int(sys.argv[1])
F, I32, I64, f32, i32 = "*fp16", "*i32", "*i64", "fp32", "i32"
T4, SHARED = capability < 80, int(sys.argv[2])
H, K, D, S = 16, 8, 128, 16  # Qwen3-0.6B
PARTS, COLUMNS = paged_decode.join_shape(4, D)
EARLY = capability >= 90
KERNELS = {
    "store": (store_kvcache._store_kernel, [F, F, F, F, I64, i32, i32, i32], dict(WIDTH=1024, COLUMNS=1024, TOKENS=4, EARLY=EARLY), dict(num_warps=2)),
    "join": (paged_decode._join_kernel, [F, "*fp32", "*fp32", I32],
             dict(H=H, D=D, WIDTH=COLUMNS, SPLITS=4, PARTS=PARTS, INDEXED=True, EARLY=EARLY), dict(num_warps=1)),
    "norm": (rms_norm._norm_kernel, [F, F, F, F, F, f32, i32], dict(SIZE=1024, COLUMNS=1024, ADD=True), {}),
    "rope": (rope_store._rope_store_kernel, [F, F, F, F, f32, "*fp32", "*fp32", I64, F, F, I64, i32],
             dict(H=H, K=K, D=D, HEADS=32, HALF=64, NORM=True), {}),
    "silu": (silu_and_mul._silu_kernel, [F, F], dict(SIZE=3072, COLUMNS=1024), {}),
    "sample": (sample._best_kernel, ["*fp32", I32, F, "*fp32", I64, I64, "*fp32", i32, i32], dict(COLUMNS=4096, NOISY=True, FLOORED=True), dict(num_warps=8)),
    **{f"floors of {bits} bits": (floors._floor_kernel, ["*fp32", F if bits == 16 else "*fp32", "*fp32", I64, "*fp32", "*fp32", i32, i32],
                                  dict(COLUMNS=8192, BITS=bits), dict(num_warps=32)) for bits in (16, 32)},
    "last": (sample._last_kernel, [I64, "*fp32", I32], dict(NUM=38, PARTS=64), dict(num_warps=1)),
}
for name, T, size, kv_heads in (("decode", F, 2, K), ("decode, a group of 8", F, 2, 2), ("decode of float32", "*fp32", 4, K),
                                ("decode of float32, a group of 8", "*fp32", 4, 2)):
    SPLITS, TILE = paged_decode.launch_shape(64, kv_heads, 132, 32, size * D, SHARED)
    TILES = paged_decode.tile_constants(TILE, size, D, H // kv_heads, not T4)
    KERNELS[name] = (paged_decode._decode_kernel, [T, "*fp32", "*fp32", T, T, T, I32, I32, I32, I32, f32, i32, i32],
                     dict(H=H, K=kv_heads, D=D, S=S, SPLITS=SPLITS, INDEXED=True, EARLY=EARLY, **TILES), paged_decode.OPTIONS)
for name, T, size, kv_heads, width, wide in () if T4 else (
        ("prefill", F, 2, K, D, False), ("prefill, wide", F, 2, K, D, True), ("prefill, a group of 1", F, 2, H, D, False),
        *((f"prefill of float32, {width} wide", "*fp32", 4, K, width, False) for width in ((64, 128, 256) if EARLY else (128,)))):
    CONSTANTS, OPTIONS = paged_prefill.launch_options(size, width, H // kv_heads, SHARED, EARLY)
    KERNELS[name] = (paged_prefill._prefill_kernel, [T, T, T, T, I32, I32, I32, I32, f32, i32, i32],
                     dict(H=H, K=kv_heads, D=width, S=S, WIDE=wide, **CONSTANTS), OPTIONS)
if capability == 89:  # an A100's instructions with less shared memory: only what has tiles can differ
    KERNELS = {name: KERNELS[name] for name in ("decode", "decode of float32", "prefill", "prefill of float32, 128 wide")}
for name, (kernel, types, constants, options) in KERNELS.items():
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else t for n, t in zip(names, [*types, *[None] * len(constants)])}
    source = ASTSource(fn=kernel, signature=signature, constexprs={(names.index(n),): v for n, v in constants.items()},
                       attrs={(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if t.startswith("*") or names[i] == "q_stride"})
    with contextlib.redirect_stdout(io.StringIO()) as remarks:
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    print(json.dumps({"name": name, "shared": built.metadata.shared, "matrix": "mma" in built.asm["ptx"], "remarks": remarks.getvalue(),
                      "limited": ".maxnreg 128" in built.asm["ptx"]}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_compile_for(capability, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    arguments = map(str, (capability, SHARED_BYTES[capability]))
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], cwd=ROOT, capture_output=True, text=True,
                          env={**environment, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DUMP_PTXAS_LOG": "1", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    built = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert len(built) == {75: 13, 80: 17, 89: 4, 90: 19}[capability]
    for name, row in built.items():
        assert row["shared"] <= SHARED_BYTES[capability], f"{name} wants {row['shared']:,} bytes of shared memory on sm_{capability}"
        wanted = capability >= 80 and name.startswith(("decode", "prefill")) and "float32" not in name
        assert row["matrix"] == wanted, f"{name} on sm_{capability}: matrix instructions {row['matrix']}"
        spilled = int(re.search(r"(\d+) bytes spill stores", row["remarks"])[1])
        assert spilled <= (32 if name == "prefill, a group of 1" else 0), f"{name} on sm_{capability} has too few registers: {row['remarks']}"
        if capability == 90 and name.startswith("prefill"):  # two programs a processor, and no product that waits for its parts
            assert "serialized" not in row["remarks"] and row["shared"] <= (228 << 10) // 2 - 1024, row["remarks"]
            assert row["limited"] == ("float32" not in name), f"{name}: maxnreg"
