"""Settings: who wins, what is refused and how, what reaches the compile cache's key, what is printed."""

from __future__ import annotations

import dataclasses
import math
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from remat import cli, settings, torch_internals
from remat.errors import RematError, SettingError
from remat.settings import TABLE, Settings, resolve


def shortly(value: Any) -> str:
    return repr(value)[:24]


ROOT = Path(__file__).resolve().parent.parent
# One allowed value beside the default for each setting, as an option and as the text of a variable.
OTHER: dict[str, tuple[Any, str, Any]] = {
    "budget": (0.5, "0.5", 0.5),
    "exact": (False, "0", False),
    "partitioner": ("torch", "torch", "torch"),
    "plan_seed": (3, "3", 3),
    "cost": ("learned", "learned", "learned"),
    "cache_dir": ("folder", "folder", "folder"),
    "tune": (3, "3", 3),
    "inner": ("eager", "eager", "eager"),
    "strict": (True, "1", True),
    "check": (True, "yes", True),
    "check_tolerance": (0.01, "1e-2", 0.01),
    "log": ("plan", "plan", "plan"),
    "dump": ("folder", "folder", "folder"),
    "save_ops": (["aten.mm", "aten.exp.default"], "aten.mm,aten.exp.default", ("aten.exp.default", "aten.mm")),
    "recompute_ops": ("mylib.norm", "mylib::norm", ("mylib.norm",)),
    "user_checkpoints": ("hint", "hint", "hint"),
    "memory_weight": (2, "2", 2.0),
    "recompute_weight": (0.5, "0.5", 0.5),
    "contraction_weight": (0, "0", 0.0),
    "launch_overhead": (4.5, "4.5", 4.5),
    "memory_price": (1e-3, "0.001", 1e-3),
}
NOT_A_WEIGHT: list[Any] = [-1, -0.5, math.nan, math.inf, "much", True, None, "", [1], 10**400]
BAD: dict[str, list[Any]] = {
    "budget": [
        0, -0.5, 1.5, 2.0, -7, math.nan, math.inf, -math.inf, True, False, "half", "", "50%", [0.5], "nan", "inf",
        "8 bananas", "0GiB", "-1GiB", "GiB", "1.5", "8 Gi", "1e400GiB",
    ],
    "exact": ["maybe", 2, -1, None, "", 0.5],
    "partitioner": ["Torch", "xla", None, 1, ""],
    "plan_seed": [True, 1.5, "one", "", math.nan, math.inf, [1]],
    "cost": ["Roofline", "measured", "", None, 1],
    "cache_dir": ["", 3, b"bytes"],
    "tune": [-1, 1.5, True, None, "", "many", math.nan, math.inf, [1]],
    "inner": ["aot_eager", "", None, 0],
    "strict": ["maybe", 2, -1, None, "", 0.5],
    "check": ["maybe", 2, -1, None, "", [True]],
    "check_tolerance": [-1e-3, math.nan, math.inf, True, "small"],
    "log": ["verbose", "", None, True, "debug"],
    "dump": ["", 3, b"bytes"],
    "save_ops": ["mm", [1], 3, None, "aten.mm,exp", True],
    "recompute_ops": ["norm", [None], 3, None, "a.b.c.d"],
    "user_checkpoints": ["follow", 1, None, True],
    "memory_weight": NOT_A_WEIGHT,
    "recompute_weight": NOT_A_WEIGHT,
    "contraction_weight": NOT_A_WEIGHT,
    "launch_overhead": [value for value in NOT_A_WEIGHT if value is not None],
    "memory_price": NOT_A_WEIGHT,
}
NAMES = [row.name for row in TABLE]


def resolved(options: dict[str, Any] | None = None, environment: dict[str, str] | None = None) -> Settings:
    return resolve(options, environment or {})[0]


def test_every_row_of_the_table_is_tried_here():
    assert list(OTHER) == NAMES
    assert list(BAD) == NAMES


def test_without_options_and_variables_every_setting_has_its_default():
    assert resolved() == Settings()
    assert all(getattr(Settings(), row.name) == row.default for row in TABLE)


@pytest.mark.parametrize("name", NAMES)
def test_variable_wins_over_default_and_option_over_variable(name: str):
    option, text, value = OTHER[name]
    default = getattr(Settings(), name)
    assert value != default
    variable = "REMAT_" + name.upper()
    assert getattr(resolved(environment={variable: text}), name) == value
    assert getattr(resolved({name: option}), name) == value
    as_option = default if default != () else ""
    assert getattr(resolved({name: as_option}, {variable: text}), name) == default
    # and nothing else moves
    assert dataclasses.replace(resolved({name: option}), **{name: default}) == Settings()


@pytest.mark.parametrize("name", NAMES)
def test_option_with_a_dash_is_the_same_option(name: str):
    option, _, value = OTHER[name]
    assert getattr(resolved({name.replace("_", "-"): option}), name) == value


@pytest.mark.parametrize(("name", "bad"), [(name, bad) for name, values in BAD.items() for bad in values], ids=shortly)
def test_bad_option_is_an_error_that_names_it_its_value_and_what_is_allowed(name: str, bad: Any):
    (row,) = (row for row in TABLE if row.name == name)
    with pytest.raises(SettingError) as caught:
        resolved({name: bad})
    message = str(caught.value)
    assert name in message
    assert repr(bad) in message
    assert row.allowed in message


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        (name, bad)
        for name, values in BAD.items()
        for bad in values
        if isinstance(bad, str) and name not in ("dump", "cache_dir")
    ],
    ids=shortly,
)
def test_bad_variable_is_an_error_that_names_it_its_value_and_what_is_allowed(name: str, bad: str):
    variable = "REMAT_" + name.upper()
    with pytest.raises(SettingError) as caught:
        resolved(environment={variable: bad})
    assert all(part in str(caught.value) for part in (variable, repr(bad), "not allowed"))


def test_setting_error_is_a_value_error_and_a_remat_error():
    with pytest.raises(ValueError, match="budget"):
        resolved({"budget": 2.5})
    with pytest.raises(RematError):
        resolved({"budget": 2.5})


@pytest.mark.parametrize("value", ["min", "MIN", " min ", "0.25", 1, 1.0, 1e-9, "none", None])
def test_budget_accepts_fractions_min_and_none(value: Any):
    budget = resolved({"budget": value}).budget
    assert budget is None if value in (None, "none") else budget == "min" or 0 < float(budget) <= 1


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ("8GiB", 2**33), ("500MB", 5 * 10**8), ("1.5 kib", 1536), (" 2 TB ", 2 * 10**12), (123456, 123456),
        ("123456", 123456), ("64b", 64), (2, 2),
    ],
)  # fmt: skip
def test_budget_accepts_bytes_in_units_and_as_integers(value: Any, count: int):
    budget = resolved({"budget": value}).budget
    assert budget == count
    assert type(budget) is int, "a fraction is a float, bytes are an int"


@pytest.mark.parametrize("text", ["1", "true", "YES", "on", True, 1])
def test_flag_is_true_in_all_usual_spellings(text: Any):
    assert resolved({"strict": text}).strict is True


@pytest.mark.parametrize("text", ["0", "False", "no", "off", False, 0])
def test_flag_is_false_in_all_usual_spellings(text: Any):
    assert resolved({"strict": text}).strict is False


def test_operators_are_the_same_in_every_spelling_and_order():
    texts = ["aten.mm, aten.exp", "torch.ops.aten.exp,aten::mm", "aten.mm,aten.exp,,"]
    spellings: list[Any] = [*texts, ["aten.exp", "aten.mm"]]
    assert {resolved({"save_ops": spelling}).save_ops for spelling in spellings} == {("aten.exp", "aten.mm")}


@pytest.mark.parametrize(
    ("given", "meant"), [("budgt", "budget"), ("plan_sed", "plan_seed"), ("memory_wieght", "memory_weight")]
)
def test_unknown_option_is_answered_with_the_nearest_known_one(given: str, meant: str):
    with pytest.raises(SettingError) as caught:
        resolve({given: 0.5}, {}, torch_internals.inductor_options())
    assert repr(given) in str(caught.value)
    assert f"did you mean {meant!r}" in str(caught.value)


def test_misspelt_option_of_inductor_is_answered_with_inductors():
    with pytest.raises(SettingError, match="did you mean 'max_autotune'"):
        resolve({"max_autotun": True}, {}, torch_internals.inductor_options())


def test_option_like_nothing_known_is_answered_with_the_whole_list():
    with pytest.raises(SettingError) as caught:
        resolved({"qqqqqqqq": 1})
    assert all(name in str(caught.value) for name in NAMES)


def test_unknown_variable_is_an_error_with_the_nearest_known_one():
    with pytest.raises(SettingError, match=r"unknown variable REMAT_BUDGT; did you mean 'REMAT_BUDGET'"):
        resolved(environment={"REMAT_BUDGT": "0.5"})


def test_variables_of_others_are_none_of_our_business():
    assert resolved(environment={"TORCH_LOGS": "x", "BUDGET": "7", "XREMAT_BUDGET": "7"}) == Settings()


def test_options_of_inductor_pass_through_untouched():
    value = object()
    options = {"budget": 0.5, "max_autotune": True, "triton.cudagraphs": False, "joint_custom_pre_pass": value}
    mine, rest = resolve(options, {}, torch_internals.inductor_options())
    assert mine == Settings(budget=0.5)
    assert rest == {"max_autotune": True, "triton.cudagraphs": False, "joint_custom_pre_pass": value}


def test_no_name_of_ours_hides_one_of_inductors():
    assert not set(NAMES) & torch_internals.inductor_options()


def test_environment_of_the_process_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REMAT_BUDGET", "0.75")
    assert resolve()[0].budget == 0.75


@pytest.mark.parametrize("name", NAMES)
def test_cache_key_changes_with_every_setting_that_changes_the_code(name: str):
    (row,) = (row for row in TABLE if row.name == name)
    key, other = Settings().cache_key(), resolved({name: OTHER[name][0]}).cache_key()
    assert (name in dict(key)) == row.in_cache_key
    assert (key != other) == row.in_cache_key


def test_only_logging_and_the_folder_of_documents_stay_out_of_the_cache_key():
    assert [row.name for row in TABLE if not row.in_cache_key] == ["cache_dir", "log"]


def test_settings_are_hashable_and_survive_pickling():
    value = resolved({name: option for name, (option, _, _) in OTHER.items()})
    assert pickle.loads(pickle.dumps(value)) == value
    assert hash(pickle.loads(pickle.dumps(value))) == hash(value)


def test_weights_are_default_until_one_of_them_moves():
    assert Settings().weights_are_default()
    for name in NAMES:
        moved = not resolved({name: OTHER[name][0]}).weights_are_default()
        assert moved == name.endswith(("_weight", "_price", "_overhead"))


@pytest.mark.parametrize("bad", [{"budget": 7.5}, {"budgt": 0.5}])
def test_bad_option_stops_torch_compile_before_anything_is_compiled(bad: dict[str, Any]):
    import remat

    def run(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    torch.compiler.reset()
    with pytest.raises(Exception, match="budget") as caught:
        torch.compile(run, backend=remat.remat, options=bad)(torch.randn(3, requires_grad=True))
    torch.compiler.reset()
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), SettingError)


def test_flags_command_prints_every_setting_with_variable_default_allowed_and_meaning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "300")
    assert cli.main(["flags"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for row in settings.rows():
        assert all(cell in printed for cell in row)


def test_flags_command_keeps_names_whole_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["flags"]) == 0
    printed = capsys.readouterr().out
    assert [row.variable for row in TABLE if row.variable not in printed] == []
    assert [row.name for row in TABLE if row.name not in printed] == []


def test_flags_command_prints_the_markdown_of_the_readme(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["flags", "--markdown"]) == 0
    assert capsys.readouterr().out.strip() == settings.markdown()


def test_module_runs_as_a_program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["remat", "flags", "--markdown"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("remat", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == settings.markdown()


def test_unknown_command_exits_with_an_error(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        cli.main(["flogs"])
    assert caught.value.code == 2
    assert "flags" in capsys.readouterr().err


def test_markdown_has_a_row_for_each_setting_and_no_broken_cell():
    lines = settings.markdown().splitlines()
    assert len(lines) == 2 + len(TABLE)
    assert {line.count("|") for line in lines} == {6}
    for row, line in zip(TABLE, lines[2:], strict=True):
        assert line.startswith(f"| `{row.name}` | `{row.variable}` |")


def test_readme_holds_exactly_the_table_of_settings():
    readme = (ROOT / "README.md").read_text()
    assert settings.markdown() in readme
