"""Prefill and decode on servers of their own, with a proxy that does what llm-d's sidecar does.

python examples/disaggregated.py [MODEL]

It starts a prefill server, a decode server (connector tcp, a key made for the run) and the proxy, asks a question
through the proxy, and shows that the reply is that of one server alone.  To send requests of your own, keep the proxy
with --serve.
"""

import argparse
import json
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def post(url: str, body: dict[str, Any]) -> Any:
    """The open response of a JSON body."""
    headers = {"Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=300)


def start(model: str, role: str, key_file: Path) -> tuple[subprocess.Popen[str], str]:
    """A server with this role, once it serves, and its address."""
    config = {
        "kv_connector": "tcp",
        "kv_role": role,
        "kv_port": 0,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"key_file": str(key_file)},
    }
    command = [sys.executable, "-m", "tokserve", "serve", model, "--port", "0", "--kv-transfer-config"]
    process = subprocess.Popen([*command, json.dumps(config)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if match := re.search(r"serving on (\S+),", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()  # its log must not fill the pipe
            return process, match[1]
    raise SystemExit(f"the {role} did not start")


def proxy(prefill: str, decode: str) -> ThreadingHTTPServer:
    """Listens at a free port: computes each request's prompt at one server, and has the other go on."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            first = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
            if "sampling_params" in body or self.path.endswith("/generate"):
                first["sampling_params"] = body.get("sampling_params", {}) | {"max_tokens": 1, "n": 1}
            else:
                first |= {"max_tokens": 1, "n": 1}
                first.pop("max_completion_tokens", None)
            with post(prefill + self.path, first | {"kv_transfer_params": ASK}) as reply:
                params = json.load(reply)["kv_transfer_params"]
            with post(decode + self.path, body | {"kv_transfer_params": params}) as reply:
                self.send_response(reply.status)
                self.send_header("Content-Type", reply.headers["Content-Type"])
                self.end_headers()
                while piece := reply.read1(65536):
                    self.wfile.write(piece)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--serve", action="store_true", help="keep the proxy until Ctrl-C")
    args = parser.parse_args()
    processes = []
    with tempfile.TemporaryDirectory() as directory:
        key_file = Path(directory) / "key"
        key_file.write_text(secrets.token_hex(32))
        try:
            urls = []
            for role in ("kv_producer", "kv_consumer"):
                process, url = start(args.model, role, key_file)
                processes.append(process)
                urls.append(url)
                print(f"{role}: {url}")
            server = proxy(*urls)
            address = f"http://127.0.0.1:{server.server_port}"
            question = {"role": "user", "content": "Reverse the word apple. " * 5}
            body = {"messages": [question], "seed": 1, "max_tokens": 16}
            with post(f"{address}/v1/chat/completions", body) as reply:
                split = json.load(reply)
            with post(f"{urls[0]}/v1/chat/completions", body) as reply:
                alone = json.load(reply)
            print(f"answer: {split['choices'][0]['message']['content']}")
            cached = split["usage"]["prompt_tokens_details"]["cached_tokens"]
            print(f"prompt tokens: {split['usage']['prompt_tokens']}, of which computed elsewhere: {cached}")
            same = split["choices"][0]["message"] == alone["choices"][0]["message"]
            print(f"the same as one server's: {same}")
            if args.serve:
                print(f"proxy: {address} (Ctrl-C ends)", flush=True)
                threading.Event().wait()
        except KeyboardInterrupt:
            pass
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(60)


main()
