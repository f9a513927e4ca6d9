"""What `make test-wheel` runs in a fresh environment: the installed package answers with its compiled kernels.

Not a pytest file: that environment has the package and its dependencies only.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tokserve
from tokserve import _C, LLM, SamplingParams, ops

QUESTION = [{"role": "user", "content": "What is 47 + 38?"}]


def main() -> None:
    home = Path(tokserve.__file__).parent
    assert home.is_relative_to(sys.prefix), f"{home} is not what was installed"
    assert Path(_C.__file__).parent == home
    print(f"tokserve {tokserve.__version__}: {', '.join(_C.instruction_sets())}")
    compiled = ops.choose("cpu", {})
    assert compiled["linear"] == compiled["paged_attention"] == "cpp"
    for options in ({}, {"quantization": "int8"}):
        with LLM("demo", **options) as llm:
            assert llm.ready.facts["ops"] == compiled
            text = llm.chat(QUESTION, SamplingParams(temperature=0), use_tqdm=False)[0].outputs[0].text
            assert text == "85", text
    print("the demo model answers, in its own type and in int8")


if __name__ == "__main__":
    main()
