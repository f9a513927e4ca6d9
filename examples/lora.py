"""An adapter in PEFT's format written by hand, loaded, asked for, unloaded.  Usage: lora.py [BASE_URL]

`lora.py --write DIRECTORY` only writes one.

The server must serve the demo model, from this machine, with --enable-lora.
"""

import json
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

DEMO = Path(__file__).parents[1] / "tokserve" / "demo_model" / "model.safetensors"
RANK, TARGETS = 4, ("q_proj", "v_proj", "down_proj")


def write_adapter(directory: Path, gain: float) -> None:
    """Random A; B of this size (PEFT begins with 0)."""
    tensors = {}
    with safe_open(DEMO, "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - not a mapping
            module = name.removesuffix(".weight")
            if module.endswith(TARGETS):
                outputs, inputs = weights.get_slice(name).get_shape()
                tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(RANK, inputs) / inputs**0.5
                tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, RANK) * gain
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": TARGETS}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def main() -> None:
    if "--help" in sys.argv:
        return print(__doc__)
    if sys.argv[1:2] == ["--write"]:
        return write_adapter(Path(sys.argv[2]), 0.5)
    base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"

    def post(path: str, body: Any) -> Any:
        request = urllib.request.Request(base + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{path}: {json.load(error)['error']['message']}") from None

    def ask(model: str | None) -> Any:
        params = {"max_tokens": 12, "temperature": 0, "logprobs": 0, "ignore_eos": True}
        body = {"token_ids": list(range(40, 60)), "model": model, "sampling_params": params}
        choice = post("/inference/v1/generate", body)["choices"][0]
        print(f"{model}: {choice['token_ids']} made by {choice['weight_versions'][0]['version']}")
        return choice["token_ids"], choice["logprobs"]

    with tempfile.TemporaryDirectory() as directory:
        for version, gain in enumerate((0.0, 0.5)):
            write_adapter(Path(directory) / str(version), gain)
            post("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": f"{directory}/{version}"})
            print(f"with B of {gain} it changes nothing: {ask('mine') == ask(None)}")
        post("/v1/unload_lora_adapter", {"lora_name": "mine"})


if __name__ == "__main__":
    main()
