"""The command line as a newcomer gets it wrong."""

import pytest

from tokserve.cli.main import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve demo --tokens-onlly", "serve: error: unknown option --tokens-onlly; did you mean --tokens-only?"),
        ("serve demo --max_model_len=5", "unknown option --max_model_len; did you mean --max-model-len?"),
        ("serve demo --no-tokens-onli", "did you mean --no-tokens-only?"),
        ("serve --model demo", "the model is named without a flag: tokserve serve MODEL"),
        ("serve --modle demo", "unknown option --modle; the model is named without a flag: tokserve serve MODEL"),
        ("bench serve --modle demo", "did you mean --model?"),
        ("serve --xyzzy", "unknown option --xyzzy; see tokserve serve --help"),
        ("serve one two", "tokserve serve: error: unexpected argument 'two'"),
        ("serve --port x", "tokserve serve: error: argument --port: invalid int value: 'x'"),
        ("bench serve --num-promts 3", "bench serve: error: unknown option --num-promts; did you mean --num-prompts?"),
        ("bench offline demo --max-num-sequences 3", "did you mean --max-num-seqs?"),
        ("--verzion", "tokserve: error: unknown option --verzion; did you mean --version?"),
        ("sevre demo", "invalid choice: 'sevre' (choose from "),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_told_by_its_command_in_two_lines(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert message in told.err and told.err.count("\n") == 2 and not told.out
