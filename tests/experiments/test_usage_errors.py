"""Each mistake on the command line gets one line that quotes it and names the way out."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tiny import TINY_GPT, TINY_RESNET, Command

from experiments import compare


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--policy c=bf17", "--policy 'c=bf17': "),
        ("--policy c=bf17", "bf16"),
        ("--policy no.json", "--policy 'no.json' cannot be read (No such file or directory)"),
        ("--loss-scale -2", "auto, none, dynamic or a positive number such as 1024, got '-2'"),
        ("--loss-scale fast", "auto, none, dynamic or a positive number such as 1024, got 'fast'"),
        ("--loss-scale 1e39", "--loss-scale 1e39: "),
        ("--accumulate-steps 3", "--batch-size 4 cannot be cut into --accumulate-steps 3"),
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--lr nan", "--lr must be a positive number such as 3e-3, got nan"),
        ("--model.heads 3", "--model.width 16 cannot be divided among --model.heads 3"),
        ("--model.dropout 1", "--model.dropout must be from 0 to below 1, got 1.0"),
        ("--data.path nowhere.txt", "--data.path 'nowhere.txt' cannot be read"),
        ("--data.validation 0", "--data.validation must be between 0 and 1, got 0.0"),
        ("--model.context 60000", "both parts need at least 60001"),
        ("--resume must", "--resume must: "),
        ("--max-skipped 0", "--max-skipped must be at least 1, got 0"),
        ("--fallback-policy f17", "--fallback-policy 'f17': "),
        (
            "--mesh data=2,rows=2",
            "--mesh data=2,rows=2: 'rows=2' is not understood; expected axes data, fsdp, model",
        ),
        ("--mesh data=0", "'data=0' is not understood"),
        ("--mesh data=2,data=2", "'data=2' is not understood"),
        (
            "--mesh data=8,model=2",
            "asks for 16 devices, there are 8; make its sizes multiply to 8, or try it on a CPU",
        ),
        ("--mesh data=3", "cuts the batch into 3 parts, which --batch-size 4 is no multiple of"),
        ("--mesh data=4 --accumulate-steps 2", "in --accumulate-steps 2 into 8 parts"),
        ("--virtual-devices 3", "--virtual-devices 3 comes too late, as JAX has been used: there are 8"),
        ("--processes 2", "--processes 2 needs --process-id I and --coordinator HOST:PORT as well"),
        ("--processes 2 --process-id 2 --coordinator x:1", "--process-id must be from 0 to 1, got 2"),
    ],
)
def test_a_wrong_value_is_quoted_with_the_way_out(options: str, message: str, command: Command) -> None:
    run = command(*TINY_GPT, *options.split())
    assert run.status == 2
    assert run.error.startswith("error: ")
    assert run.error.count("\n") == 1
    assert message in run.error
    assert not run.directory.exists()


@pytest.mark.parametrize("argv", [TINY_GPT, TINY_RESNET])
def test_a_pattern_that_governs_no_module_is_named(argv: list[str], command: Command, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text('{"decoder.*": "bf16", "*": "f32"}')
    run = command(*argv, "--policy", str(path))
    assert run.status == 2
    assert "Policy pattern 'decoder.*' governs no module" in run.error


def test_a_json_file_that_holds_no_map_is_refused(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    for content, message in (("[1]", "must hold an object"), ("{", "is not valid JSON")):
        path.write_text(content)
        assert message in command(*TINY_GPT, "--policy", str(path)).error


def test_a_directory_that_cannot_be_made_is_refused(command: Command) -> None:
    (command.directory / "file").write_text("")
    run = command(*TINY_RESNET, out="file/run")
    assert run.status == 2
    assert "cannot be written to (Not a directory); give another directory" in run.error


def test_a_file_is_no_output_directory(command: Command) -> None:
    (command.directory / "run").write_text("")
    assert "is a file; give a directory" in command(*TINY_RESNET).error


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        ("speed=1%", "unknown measure 'speed', expected one of loss, rate, bytes"),
        ("loss=1", "expected a percentage such as loss=1%, got '1'"),
        ("loss=x%", "expected a percentage such as loss=1%, got 'x%'"),
    ],
)
def test_a_wrong_gate_is_quoted(gate: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["gpt", "--gate", gate]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    find_spec = importlib.util.find_spec

    def without_rich(name: str, *args: Any) -> Any:
        return None if name == "rich" else find_spec(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", without_rich)
    run = command(*TINY_GPT)
    assert run.status == 2
    assert run.error == "error: the experiments need rich; run pip install -e '.[experiments]'\n"
