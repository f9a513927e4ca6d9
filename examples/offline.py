"""The engine from Python, without HTTP: chat, and tokens with logprobs.  Usage: offline.py [MODEL]"""

import sys

from tokserve import LLM, SamplingParams


def main() -> None:
    if "--help" in sys.argv:
        return print(__doc__)
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
        questions = ["What is 47 + 38?", "Reverse the word hello.", "Sort the letters of apple."]
        chats = [[{"role": "user", "content": question}] for question in questions]
        for question, answer in zip(questions, llm.chat(chats, SamplingParams(temperature=0)), strict=True):
            print(f"{question} -> {answer.outputs[0].text}")
        scored = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, seed=1, logprobs=0, ignore_eos=True))
        print(scored[0].outputs[0].token_ids, scored[0].outputs[0].cumulative_logprob)


if __name__ == "__main__":
    main()
