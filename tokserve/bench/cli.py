"""`tokserve bench serve` and `tokserve bench offline`: their flags, and the report that they print.

The benchmarks (`bench/`) are imported when one runs: they need packages that serving does not.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from typing import Any

from tokserve.base.errors import StartError
from tokserve.cli.command import Command, no_model
from tokserve.cli.options import add_flags

BACKENDS = ("tokens", "openai", "openai-chat")
DATASETS = ("random", "shared-prefix", "jsonl")


def add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure a server or the engine",
        description="Measure throughput and latency.",
        epilog="Begin with `tokserve bench serve`, beside a running server; KIND --help lists its options.",
    )
    bench.set_defaults(parser=bench)
    kinds = bench.add_subparsers(dest="kind", metavar="KIND")
    served = kinds.add_parser(
        "serve",
        help="load on a running server",
        usage="tokserve bench serve [OPTION ...]",
        description="Send requests to a running server and report rates and latencies. Works on any server that "
        "speaks one of the routes.",
    )
    _add_server(served)
    _add_prompts(served, seed="--seed")
    served.add_argument("--turns", type=int, default=1, metavar="T", help="turns of a conversation: each prompt is "
                        "the previous one, its output and new tokens. Default: 1.")  # fmt: skip
    served.add_argument("--turn-len", type=int, metavar="N", help="new tokens of later turns. Default: --input-len.")
    _add_sampling(served)
    served.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True,
                        help="stream; without it only end-to-end latency is measured. Default: true.")  # fmt: skip
    _add_load(served)
    served.add_argument("--check-speculation", action="store_true", help="instead of a measurement, send every request "
                        "twice, without speculation and with it, and compare the replies.")  # fmt: skip
    _add_output(served, plot=True)
    served.set_defaults(parser=served)
    offline = kinds.add_parser(
        "offline",
        help="the engine without HTTP",
        usage="tokserve bench offline MODEL [OPTION ...]",
        description="Start an engine, without HTTP, and measure throughput (all prompts at once) and latency (one "
        "batch at a time).",
    )
    offline.add_argument("model", nargs="?", default=None, help="as for `tokserve serve`")
    bench_flags = offline.add_argument_group("benchmark")
    _add_prompts(bench_flags, seed="--prompt-seed")
    _add_sampling(bench_flags)
    bench_flags.add_argument("--warmup", type=int, default=1, metavar="N", help="prompts before the run. Default: 1.")
    bench_flags.add_argument("--batch-size", type=int, default=1, metavar="N", help="prompts of a latency batch. "
                             "Default: 1.")  # fmt: skip
    bench_flags.add_argument("--latency-iters", type=int, default=5, metavar="N", help="latency batches. Default: 5.")
    _add_output(bench_flags, plot=False)
    add_flags(offline, skip=("model",))
    offline.set_defaults(parser=offline)


def _add_server(parser: Any) -> None:
    add = parser.add_argument
    add(
        "--base-url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="with or without /v1 at its end. Default: http://127.0.0.1:8000.",
    )
    add(
        "--backend",
        choices=BACKENDS,
        default="tokens",
        help="tokens: /inference/v1/generate. openai: "
        "/v1/completions with token ids, or texts of a jsonl dataset. openai-chat: /v1/chat/completions with text. "
        "Default: tokens.",
    )
    add("--model", default="", help="Default: the first of /v1/models.")
    add("--api-key", metavar="KEY", help="sent as a bearer token.")
    add("--request-timeout", type=float, default=3600.0, metavar="S", help="seconds a request may take. Default: 3600.")


def _add_prompts(parser: Any, *, seed: str) -> None:
    add = parser.add_argument
    add("--dataset", choices=DATASETS, help="Default: shared-prefix with --shared-prefix-len, else random.")
    add("--num-prompts", type=int, default=100, metavar="N", help="prompts, or conversations. Default: 100.")
    add(
        "--input-len",
        type=int,
        default=128,
        metavar="N",
        help="tokens of a prompt (words with openai-chat). Default: 128.",
    )
    add("--output-len", type=int, default=64, metavar="N", help="tokens to generate. Default: 64.")
    add(
        "--shared-prefix-len",
        type=int,
        metavar="N",
        help="shared-prefix: tokens before those of --input-len, "
        "the same in all prompts (and cached after the warm-up).",
    )
    add(
        "--group-size",
        type=int,
        metavar="N",
        help="shared-prefix: so many prompts in a row share a prefix, the next ones another. Default: all share one.",
    )
    add(
        "--range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="draw lengths from [len*(1-R), len*(1+R)]. Default: 0.",
    )
    add("--dataset-path", metavar="FILE", help='jsonl: rows {"prompt": text or ids, "output_len"?: N}.')
    add(
        "--vocab-size",
        type=int,
        default=256,
        metavar="N",
        help="random ids are below this. Default: 256, which every model has.",
    )
    add(
        seed,
        dest="prompt_seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of prompts and arrivals; in a second run with the same seed the prompts are cached. Default: 0.",
    )


def _add_sampling(parser: Any) -> None:
    add = parser.add_argument
    add("--n", type=int, default=1, metavar="N", help="samples of each prompt. Default: 1.")
    add("--temperature", type=float, metavar="X", help="Default: 0, with --n above 1: 1.")
    add("--logprobs", type=int, metavar="K", help="ask for logprobs and the K most probable. Default: none.")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="do not stop at an end-of-sequence token. Default: true.",
    )


def _add_load(parser: Any) -> None:
    add = parser.add_argument
    add(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="conversations started per second, as a "
        "Poisson process; TTFT counts from when a request is due. Default: inf, all at once.",
    )
    add(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="most conversations in flight; without a rate this is a closed loop. Default: no limit.",
    )
    add("--warmup", type=int, default=1, metavar="N", help="requests before the measurement. Default: 1.")
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="count requests within these limits, e.g. ttft:200 tpot:50 e2el:5000.",
    )


def _add_output(parser: Any, *, plot: bool) -> None:
    add = parser.add_argument
    add("--percentiles", default="50,90,95,99", metavar="LIST", help="Default: 50,90,95,99.")
    add("--result-json", metavar="FILE", help="write the result, with vLLM's names.")
    add("--progress", action=argparse.BooleanOptionalAction, default=True, help="a progress bar. Default: true.")
    if plot:
        add("--save-detailed", action="store_true", help="lengths, times and errors per request in --result-json.")
        add("--plot", metavar="FILE.png", help="draw latencies and requests in flight (needs matplotlib).")


def bench(parser: argparse.ArgumentParser, values: dict[str, Any]) -> int:
    """Run a benchmark; returns the exit code (1: no request was served).  Raises StartError."""
    kind = values.pop("kind")
    if kind is None:
        parser.print_help()
        return 2
    if kind == "offline" and not values["model"]:
        no_model(parser)
    try:
        return (_serve if kind == "serve" else _offline)(values)
    except KeyboardInterrupt:
        print("tokserve: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the table (`| head`) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _take_dataset(values: dict[str, Any], *, text: bool) -> Any:
    from tokserve.bench.datasets import DatasetSpec

    names = {"kind": "dataset", "count": "num_prompts", "path": "dataset_path", "seed": "prompt_seed"}
    same = ("input_len", "output_len", "turn_len", "turns", "shared_prefix_len", "group_size", "range_ratio")
    names |= {name: name for name in (*same, "vocab_size")}
    if values["dataset"] is None:
        values["dataset"] = "random" if values["shared_prefix_len"] is None else "shared-prefix"
    return DatasetSpec(**{to: values.pop(name) for to, name in names.items() if name in values}, text=text)


def _temperature(values: dict[str, Any]) -> float:
    temperature: float | None = values.pop("temperature")
    return temperature if temperature is not None else (1.0 if values["n"] > 1 else 0.0)


def _serve(v: dict[str, Any]) -> int:
    from tokserve.bench import report

    try:
        from tokserve.bench.clients import RequestShape
        from tokserve.bench.serve import Load, serve
        from tokserve.bench.speculation import check
    except ImportError as error:
        raise StartError(f"bench serve needs {error.name}: pip install 'tokserve[bench]'") from None
    draw = _plotter() if v["plot"] else None
    report.check_path(v["result_json"], "--result-json")
    report.check_path(v["plot"], "--plot")
    if v["save_detailed"] and v["result_json"] is None:
        raise StartError("--save-detailed needs --result-json")
    percentiles = report.parse_percentiles(v["percentiles"])
    shape = RequestShape(
        backend=v["backend"],
        model=v["model"],
        stream=v["stream"],
        n=v["n"],
        temperature=_temperature(v),
        ignore_eos=v["ignore_eos"],
        logprobs=v["logprobs"],
        return_token_ids=v["turns"] > 1,
    )
    load = Load(
        base_url=v["base_url"],
        shape=shape,
        dataset=_take_dataset(v, text=v["backend"] == "openai-chat"),
        request_rate=v["request_rate"],
        max_concurrency=v["max_concurrency"],
        warmup=v["warmup"],
        goodput=report.parse_goodput(v["goodput"]),
        percentiles=percentiles,
        api_key=v["api_key"],
        timeout=v["request_timeout"],
        save_detailed=v["save_detailed"],
        progress=v["progress"],
    )
    if v["check_speculation"]:
        checked = check(load)
        print(checked.summary())
        return 1 if checked.different else 0
    row, outcomes = serve(load)
    if v["result_json"]:
        report.write_row(row, v["result_json"])
    if draw:
        draw(outcomes, v["plot"], f"{row['model_id']}, {row['backend']}, {row['output_throughput']:.0f} output tok/s")
    print(report.table(row, percentiles))
    if load.dataset.kind == "random" and load.dataset.turns == 1 and row["repeated_prompts"]:
        print(
            f"note: {row['repeated_prompts']} prompts were in the server's prefix cache already, as after a run with "
            "the same seed; try another --seed"
        )
    return 0 if row["completed"] else 1


def _plotter() -> Any:
    try:
        from tokserve.bench.plot import draw
    except ImportError as error:
        raise StartError(f"--plot needs {error.name}: pip install 'tokserve[plot]'") from None
    return draw


def _offline(v: dict[str, Any]) -> int:
    from tokserve.bench import report
    from tokserve.bench.offline import Offline, offline

    percentiles = report.parse_percentiles(v.pop("percentiles"))
    path = v.pop("result_json")
    report.check_path(path, "--result-json")
    dataset = _take_dataset(v, text=False)
    names = ("model", "n", "ignore_eos", "logprobs", "warmup", "batch_size", "latency_iters", "progress")
    temperature = _temperature(v)
    taken = {name: v.pop(name) for name in names}
    options = {name: value for name, value in v.items() if value is not None}
    row = offline(Offline(**taken, temperature=temperature, options=options, dataset=dataset, percentiles=percentiles))
    if path:
        report.write_row(row, path)
    print(report.table(row, percentiles))
    return 0 if row["completed"] else 1


COMMANDS = (Command("bench", add_bench, bench),)
