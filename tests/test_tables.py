"""How audits and their differences are laid out in wide and narrow terminals."""

from typing import Any

import jax
import pytest

import mpjax
from experiments import config, loop, tasks
from mpjax import _tables as tables
from mpjax._audit import report
from mpjax._audit.result import Audit, Casts, Matmuls, Saved

HEADER = ("module", "matmuls", "casts write", "saved for backward")
ROWS = [
    ("blocks/*/attention (×12)", "36", "1.25 MB", "f32 1.05 MB, other 5.12 kB"),
    ("blocks/*/norm (×12)", "", "18 B", "bf16 4 kB"),
    ("head", "3", "", ""),
]
TOTAL = ("total", "39", "1.25 MB", "f32 1.05 MB, bf16 4 kB, other 5.12 kB")


def lines(columns: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    right, breaks = {"matmuls", "casts write"}, {"saved for backward": ", "}
    return "\n".join(tables.table(HEADER, ROWS, [TOTAL], right=right, breaks=breaks)).splitlines()


def test_a_table_that_fits_has_a_line_for_each_row(monkeypatch):
    assert lines(100, monkeypatch) == [
        "module                    matmuls  casts write  saved for backward",
        "─" * 85,
        "blocks/*/attention (×12)       36      1.25 MB  f32 1.05 MB, other 5.12 kB",
        "blocks/*/norm (×12)                       18 B  bf16 4 kB",
        "head                            3",
        "─" * 85,
        "total                          39      1.25 MB  f32 1.05 MB, bf16 4 kB, other 5.12 kB",
    ]


def test_lists_give_way_before_headers_and_names(monkeypatch):
    assert lines(67, monkeypatch) == [
        "module                    matmuls  casts write  saved for backward",
        "─" * 67,
        "blocks/*/attention (×12)       36      1.25 MB  f32 1.05 MB,",
        "                                                other 5.12 kB",
        "blocks/*/norm (×12)                       18 B  bf16 4 kB",
        "head                            3",
        "─" * 67,
        "total                          39      1.25 MB  f32 1.05 MB,",
        "                                                bf16 4 kB,",
        "                                                other 5.12 kB",
    ]


def test_names_spill_over_empty_cells_or_have_a_line_of_their_own_but_are_never_broken(monkeypatch):
    assert lines(41, monkeypatch) == [
        "                   casts  saved for",
        "module  matmuls    write  backward",
        "─" * 41,
        "blocks/*/attention (×12)",
        "             36  1.25 MB  f32 1.05 MB,",
        "                          other 5.12 kB",
        "blocks/*/norm (×12)",
        "                    18 B  bf16 4 kB",
        "head          3",
        "─" * 41,
        "total        39  1.25 MB  f32 1.05 MB,",
        "                          bf16 4 kB,",
        "                          other 5.12 kB",
    ]


def test_paths_lose_their_beginning_where_they_may(monkeypatch):
    monkeypatch.setenv("COLUMNS", "32")
    rows = [("blocks/0/attention/query", "Linear", "1,024"), ("head", "Linear", "4")]
    shown = tables.table(
        ("module", "class", "parameters"), rows, right={"parameters"}, breaks={}, shorten={"module"}
    )
    assert "\n".join(shown).splitlines() == [
        "module        class   parameters",
        "─" * 32,
        "…ntion/query  Linear       1,024",
        "head          Linear           4",
    ]


def test_a_notebook_gets_the_table_as_html_with_markup_escaped():
    assert tables.html(("a", "b"), [("<x>", "1")]) == (
        "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>&lt;x&gt;</td><td>1</td></tr></tbody></table>"
    )


def test_a_table_without_rows_is_its_header(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert tables.table(HEADER, [], breaks={}) == (
        "module  matmuls  casts write  saved for backward",
        "─" * 48,
    )


@pytest.mark.parametrize("model", ["gpt", "resnet"])
def test_the_audit_of_the_experiments_fits_80_columns_with_whole_names(model, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    policies = mpjax.as_policy_map("p=f32,c=bf16,o=f32")
    options = config.GPTTraining() if model == "gpt" else config.ResNetTraining()
    task = tasks.make_task(options, policies)
    scale, optimizer = mpjax.loss_scale_for(policies), tasks.make_optimizer(options)
    state = jax.eval_shape(lambda: loop.create_state(task, optimizer, scale, 0))
    step = mpjax.make_train_step(task.loss, has_model_state=True)
    found = mpjax.audit(step, state, task.batch(0, 0), jax.random.key(0))
    shown = str(found).splitlines()
    assert max(map(len, shown)) <= 80
    for row in report.rows(found):
        assert any(line.startswith(row[0]) for line in shown)


# ------------------------------------------------------------------------------------------ differences


def made(**modules: int) -> Audit:
    """An audit of modules that have a matmul, a cast and a saved value of so many bytes."""
    return Audit(
        "f",
        tuple(Matmuls(m, "forward", "float32", 1, n) for m, n in modules.items()),
        tuple(Casts(m, "forward", "float32", "bfloat16", 1, n) for m, n in modules.items()),
        tuple(Saved(m, "float32", n) for m, n in modules.items()),
        tuple((m, "forward", 1) for m in modules),
        (),
    )


def names(diff: Any) -> list[str]:
    return [line.partition(" ")[0] for line in str(diff).splitlines()]


def test_the_rows_of_the_total_end_a_difference_whichever_audit_has_more_modules():
    few, many = made(a=100), made(a=100, b=200, c=300)
    for diff in (few.diff(many), many.diff(few)):
        header, rule, *body = names(diff)
        assert header == "module"
        assert body == [*["b"] * 4, *["c"] * 4, rule, *["total"] * 3]


def test_a_difference_in_one_row_has_it_above_and_the_total_below_the_rule():
    body = names(made(a=100).diff(made(a=200)))[2:]
    assert [name for name in body if not name.startswith("─")] == ["a"] * 3 + ["total"] * 3
