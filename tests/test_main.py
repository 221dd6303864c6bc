"""`python -m mpjax`: what it prints, and the exit status that a CI sees."""

import json
import os
import subprocess
import sys

import pytest

from mpjax.__main__ import main

HERE = "planted.targets"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(argv)
    out = capsys.readouterr()
    return status, out.out, out.err


def test_a_clean_program_ends_with_status_0(capsys):
    status, out, err = run(capsys, "audit", f"{HERE}:clean")
    assert (status, err) == (0, "")
    assert "audit of <lambda>: no findings" in out
    assert "bf16" in out


def test_an_error_ends_with_status_1(capsys):
    status, out, _ = run(capsys, "audit", f"{HERE}:masked")
    assert status == 1
    assert "error: mask-overflow\n  (model), forward, " in out


def test_an_error_that_is_ignored_does_not(capsys):
    status, out, _ = run(capsys, "audit", f"{HERE}:masked", "--ignore", ".*:mask-overflow")
    assert (status, "mask-overflow" in out) == (0, False)


def test_a_policy_is_compared_with(capsys):
    status, out, _ = run(capsys, "audit", f"{HERE}:clean", "--policy", "float32")
    assert status == 1
    assert "where the policy says float32" in out


def test_a_policy_map_may_come_from_a_file(capsys, tmp_path):
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"*": "p=f32,c=bf16,o=f32"}))
    assert run(capsys, "audit", f"{HERE}:clean", "--policy", str(file))[0] == 0


def test_another_platform_is_lowered_for(capsys):
    _, out, _ = run(capsys, "audit", f"{HERE}:clean", "--platform", "tpu")
    assert "matmuls in the StableHLO for tpu: 1 of bfloat16 × bfloat16" in out


def test_it_prints_json(capsys):
    _, out, _ = run(capsys, "audit", f"{HERE}:clean", "--json")
    assert json.loads(out)["matmuls"][0]["flops"] == 2 * 4 * 8 * 2


def test_explain_prints_the_policy_table(capsys):
    status, out, _ = run(capsys, "explain", f"{HERE}:model", "--policy", "p=f32,c=bf16,o=f32")
    assert status == 0
    assert out.splitlines()[0].split()[:2] == ["module", "class"]
    assert "layers_0" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["audit", "planted.targets"], "the target must read PACKAGE.MODULE:FUNCTION"),
        (
            ["audit", "no_such_module:f"],
            "'no_such_module' of 'no_such_module:f' does not import: No module named",
        ),
        (["audit", f"{HERE}:missing"], "'planted.targets' has no function 'missing'; it has alone, broken,"),
        (["audit", f"{HERE}:VALUE"], "'planted.targets' has no function 'VALUE'"),
        (
            ["audit", f"{HERE}:no_pair"],
            "must return (fn, args), the function to audit and a tuple of its arguments",
        ),
        (["audit", f"{HERE}:text"], "holds 'text' of type str"),
        (["audit", f"{HERE}:clean", "--platform", "tpus"], "Unknown platform 'tpus'; did you mean 'tpu'?"),
        (["audit", f"{HERE}:clean", "--policy", "bf17"], "Unknown dtype 'bf17'; did you mean 'bf16'?"),
        (["audit", f"{HERE}:clean", "--policy", "no.json"], "--policy no.json: cannot be read"),
        (["audit", f"{HERE}:clean", "--ignore", "x"], "--ignore must read PATTERN:KIND"),
        (
            ["audit", f"{HERE}:clean", "--ignore", ".*:maks"],
            "Unknown kind of finding 'maks'. It must be * or one of",
        ),
        (
            ["explain", f"{HERE}:no_pair", "--policy", "bf16"],
            "must return a model of flax.linen, flax.nnx, equinox, haiku, or (model, example inputs…)",
        ),
        (
            ["explain", f"{HERE}:alone", "--policy", "bf16"],
            "return (model, example inputs…), of which shapes",
        ),
        (["audit", f"{HERE}:leaves"], "'planted.targets:leaves' ended the program (status 0)"),
        (["explain", f"{HERE}:model", "--policy", '{"a": 1}'], "policy"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(capsys, argv, message):
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_script_that_ends_when_it_is_imported_is_no_clean_audit(capsys, tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text("import sys\n\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    status, out, err = run(capsys, "audit", "script:program")
    assert (status, out) == (2, "")
    assert "'script' of 'script:program' ends the program when it is imported (status 0)" in err


def test_the_error_of_a_program_that_does_not_trace_is_shown_as_its_own(capsys):
    status, out, err = run(capsys, "audit", f"{HERE}:broken")
    assert (status, out) == (2, "")
    assert "targets.py" in err
    assert "TypeError: dot_general" in err
    assert "mpjax.audit: this is the error of 'fails' itself, traced with (float32[4,8])." in err


def test_it_runs_as_a_module_in_the_directory_of_the_target(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import jax.numpy as jnp\n\ndef program():\n    return (lambda x: x + 1e6), (jnp.ones(3, jnp.float16),)\n"
    )
    command = [sys.executable, "-m", "mpjax", "audit", "mine:program"]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert (
        "error: mask-overflow\n  (model), forward, mine.py:4: A constant is outside of float16"
        in ended.stdout
    )
