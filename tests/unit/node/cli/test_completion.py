"""Shell completion: the script in a real bash."""

import subprocess

import pytest

from node.cli.main import main


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("thinwire resu", ["resume"]),
        ("thinwire join --max-b", ["--max-bandwidth"]),
        ("thinwire config in", ["init"]),
        ("thinwire set runs/a pipeline.wi", ["pipeline.window=", "pipeline.window_gb="]),
        ("thinwire join nothing-begins-so", []),
    ],
)
def test_bash_completes_commands_options_and_keys(
    line: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    words = line.split(" ")
    ask = (
        f"{script}\nCOMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _thinwire; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert [word for word in done.stdout.split("\n") if word] == expected
