"""lm-evaluation-harness over /v1/completions with local tasks: answers, choices by likelihood, and rolling perplexity.

The tasks' documents are arithmetic that the demo model has learnt.  The server's own tokenizer and transformers' must
score alike, and so must any batch size.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from report import Report

QUESTION = "<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n"
COUNT = 24
TASKS = {
    "add_generate": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["<|im_end|>", "\\n"], max_gen_toks: 6, do_sample: false, temperature: 0.0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "add_choose": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: gold
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "add_perplexity": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}{{answer}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
}


def documents(directory: Path) -> Path:
    """The questions, as a file of JSON lines."""
    path = directory / "documents.jsonl"
    with path.open("w") as file:
        for i in range(COUNT):
            a, b = 11 + 3 * i % 40, 47 - i
            choices = [str(a + b), str(a + b + 1), str(a + b - 10)]
            gold = i % 3
            choices[0], choices[gold] = choices[gold], choices[0]
            question = QUESTION.format(a=a, b=b)
            document = {"question": question, "answer": str(a + b), "choices": choices, "gold": gold}
            file.write(json.dumps(document) + "\n")
    return path


def tasks(directory: Path) -> TaskManager:
    """The tasks as YAML files, which is how lm_eval takes them."""
    path = documents(directory)
    for name, rest in TASKS.items():
        head = (
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: '{path}'}}}}\ntest_split: test\n"
        )
        (directory / f"{name}.yaml").write_text(head + rest + "metadata: {version: 1.0}\n")
    return TaskManager(include_path=str(directory), include_defaults=False)


def evaluate(report: Report, manager: TaskManager, backend: str, batch: int, concurrent: int) -> dict[str, Any]:
    """Scores by task and metric."""
    arguments = {
        "model": "demo",
        "base_url": f"{report.url}/v1/completions",
        "tokenizer_backend": backend,
        "tokenizer": report.model_dir,
        "tokenized_requests": True,
        "max_length": 2048,
        "num_concurrent": concurrent,
        "max_retries": 1,
    }
    if backend == "remote":
        del arguments["tokenizer"]
    actual = simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=list(TASKS),
        task_manager=manager,
        batch_size=batch,
        bootstrap_iters=0,
        cache_requests=False,
    )
    return {
        f"{task} {metric}": value
        for task, row in actual["results"].items()
        for metric, value in row.items()
        if isinstance(value, float) and "stderr" not in metric
    }


def main() -> None:
    report = Report()
    with tempfile.TemporaryDirectory() as place:
        manager = tasks(Path(place))
        first = evaluate(report, manager, "huggingface", 1, 1)
        print(f"  {first}")
        report.check("answers are right", first["add_generate exact_match,none"] >= 0.9)
        report.check("the right choice is likeliest", first["add_choose acc,none"] >= 0.9)
        report.check("perplexity is a number", first["add_perplexity word_perplexity,none"] > 1)
        for backend, batch, concurrent in (("huggingface", 8, 1), ("huggingface", 4, 4), ("remote", 1, 1)):
            again = evaluate(report, manager, backend, batch, concurrent)
            report.check(f"the same scores: {backend} tokenizer, batch {batch}, {concurrent} at once", again == first)
    report.done("lm_eval", "datasets", "transformers", "torch")


if __name__ == "__main__":
    main()
