"""The command line: `minivllm generate`, `minivllm chat`, `minivllm doctor`, `minivllm bench`."""

from __future__ import annotations

import argparse
import json
import sys

from minivllm import __version__
from minivllm.bench import cli as bench_cli
from minivllm.sampling_params import SamplingParams

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "max_tokens")
MODEL_HELP = "'smollm2' (embedded, the default), a model directory, a .gguf file, or a hub name"


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 1 after one line on stderr that says what was wrong (2 for unusable arguments)."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        print(f"minivllm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minivllm", description="A small LLM inference engine with a paged KV cache.")
    parser.add_argument("--version", action="version", version=f"minivllm {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="complete prompts")
    generate.add_argument("prompts", nargs="+", metavar="PROMPT")
    generate.add_argument("--json", action="store_true", help="print one JSON object a prompt, one a line")
    _model_arguments(generate)
    _sampling_arguments(generate, max_tokens=64)
    generate.add_argument("--n", type=int, default=1, help="answers to each prompt (default 1)")
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk to the model; Ctrl-C stops an answer, Ctrl-D ends")
    chat.add_argument("--system", help="the conversation's system message")
    _model_arguments(chat)
    _sampling_arguments(chat, max_tokens=512)
    chat.set_defaults(run=_chat)

    doctor = commands.add_parser("doctor", help="what this machine has, what is used and why, what is missing")
    doctor.add_argument("--model", default="smollm2", help=MODEL_HELP)
    doctor.set_defaults(run=_doctor)

    bench = commands.add_parser("bench", help="measure: throughput, latency, scheduler")
    bench_cli.add_parsers(bench)
    return parser


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help=MODEL_HELP)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs, no torch.compile")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs that share the model (default 1)")


def _sampling_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help=f"tokens to generate at most (default {max_tokens})")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: always the most likely token (default 1.0)")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k most likely tokens (default 0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the most likely tokens that reach p together (default 1.0)")
    parser.add_argument("--min-p", type=float, default=0.0, help="keep tokens at least min-p times as likely as the most likely (default 0: all)")
    parser.add_argument("--presence-penalty", type=float, default=0.0, help="taken once from every token generated before (default 0)")
    parser.add_argument("--frequency-penalty", type=float, default=0.0, help="taken for each time a token was generated before (default 0)")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="weakens tokens of prompt and answer (default 1: not at all)")
    parser.add_argument("--seed", type=int, help="makes the random choices repeatable")


def _make(args: argparse.Namespace):
    from minivllm.llm import LLM

    params = SamplingParams(n=getattr(args, "n", 1), **{name: getattr(args, name) for name in _SAMPLING})
    return LLM(args.model, device=args.device, dtype=args.dtype, enforce_eager=args.enforce_eager,
               tensor_parallel_size=args.tensor_parallel_size), params


def _generate(args: argparse.Namespace) -> int:
    llm, params = _make(args)
    with llm:
        for output in llm.generate(args.prompts, params, use_tqdm=len(args.prompts) > 1 and sys.stderr.isatty()):
            texts = [json.dumps(output.as_dict())] if args.json else [output.prompt + answer.text for answer in output.outputs]
            print("\n".join(texts), flush=True)
    return 0


def _chat(args: argparse.Namespace) -> int:
    llm, params = _make(args)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    with llm:
        while True:
            try:
                text = input("> ")
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print("\n(Ctrl-D ends the chat)")
                continue
            if text.strip():
                messages.append({"role": "user", "content": text})
                _forget_what_does_not_fit(llm, messages)
                messages.append({"role": "assistant", "content": _answer(llm, messages, params)})


def _forget_what_does_not_fit(llm, messages: list[dict[str, str]]) -> None:
    """Drop the oldest question and answer, and say so, until the conversation leaves room for an answer."""
    first = 1 if messages[0]["role"] == "system" else 0
    while len(llm.chat_prompt(messages)) >= llm.config.max_model_len and len(messages) > first + 1:
        del messages[first:first + 2]
        print(f"(the conversation is longer than {llm.config.max_model_len} tokens: its oldest part is forgotten)")


def _answer(llm, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Print the answer as it comes and return it; Ctrl-C ends it where it is."""
    pieces = []
    stream = llm.stream({"prompt_token_ids": llm.chat_prompt(messages)}, params)
    try:
        for piece in stream:
            pieces.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", end="")
    finally:
        stream.close()
    print()
    return "".join(pieces)


def _doctor(args: argparse.Namespace) -> int:
    from minivllm.doctor import report

    for line in report(args.model):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
