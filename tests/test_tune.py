"""Tuning: the clock's choice is taken and remembered, and nothing of the user's is touched on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat import partitioner, tune
from remat.plans import Planner
from remat.rules import why_invalid
from remat.settings import Settings
from tests import graphs

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
# At it the model below has several plans of nearly the same predicted time.
BUDGET = 0.95


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))]
    return nn.Sequential(*layers)


def example() -> Tensor:
    return torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1))


def compiled(built: Any, folder: Path, **options: Any) -> Any:
    given = {"inner": "eager", "tune": 3, "cache_dir": str(folder), "budget": BUDGET, **options}
    return torch.compile(built, backend="remat", options=given)


def gradients(step: Any, built: nn.Module, x: Tensor) -> list[Tensor]:
    built.zero_grad()
    step(x).sum().backward()
    return [value.grad.clone() for value in built.parameters() if value.grad is not None]


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which plan each call of `decide` was asked for."""
    asked: list[int] = []
    original = partitioner.decide

    def decide(*arguments: Any) -> Any:
        asked.append(arguments[4])
        return original(*arguments)

    monkeypatch.setattr(partitioner, "decide", decide)
    return asked


def prefer(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    def measure(steps: Any, device: Any) -> list[float]:
        return [0.5 if at == place else 1.0 for at in range(len(steps))]

    monkeypatch.setattr(tune, "measure", measure)


def said(caught: Any) -> list[str]:
    return [str(warning.message) for warning in caught if issubclass(warning.category, remat.RematWarning)]


# --- what is promising --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("name", ["bottleneck", "chain", "convnet", "counter", "embedding", "mlp", "residual", "views"])
@pytest.mark.parametrize("budget", [None, 0.8])
def test_promising_plans_are_distinct_valid_and_keep_the_promises(name: str, inner: str, budget: Any) -> None:
    planner = graphs.planner(name, replace(Settings(), inner=inner, budget=budget))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.RematWarning)  # of `chain` no plan is as small
        first, torchs = planner.choose()
    found = planner.promising(6, planner.choose()[0])
    assert found[0] is first
    assert len({candidate.runs for candidate in found}) == len(found) <= 6
    seconds = [candidate.estimate.step_seconds for candidate in found[1:]]
    assert seconds == sorted(seconds)
    for candidate in found:
        assert why_invalid(candidate.plan, planner.rules) is None
    for candidate in found[1:]:
        if budget is None:
            assert candidate.saved_bytes <= max(torchs.saved_bytes, first.saved_bytes)
            assert candidate.fused_peak_bytes <= max(torchs.fused_peak_bytes, first.fused_peak_bytes)
        else:
            assert candidate.certificate is not None and first.certificate is not None
            assert candidate.peak_bytes <= first.certificate.budget_bytes == candidate.certificate.budget_bytes


def test_some_graphs_have_several_promising_plans() -> None:
    def count(name: str, **values: Any) -> int:
        planner = graphs.planner(name, replace(Settings(), inner="eager", **values))
        return len(planner.promising(4, planner.choose()[0]))

    assert count("residual", budget=0.9) >= 3
    assert count("residual") >= 2


@pytest.mark.parametrize(
    "values", [{"plan_seed": 1}, {"partitioner": "torch"}, {"budget": "min"}, {"memory_weight": 2.0}, {"budget": 1}]
)
@pytest.mark.filterwarnings("ignore::remat.errors.RematWarning")
def test_where_nothing_is_left_to_choose_one_plan_is_promising(values: dict[str, Any]) -> None:
    planner = graphs.planner("residual", replace(Settings(), inner="eager", **values))
    assert planner.promising(4, planner.choose()[0]) == [planner.choose()[0]]


@pytest.mark.parametrize("count", [0, 1])
def test_without_tuning_nothing_is_tried(
    count: int, tmp_path: Path, choices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("not to be called")

    monkeypatch.setattr(Planner, "promising", never)
    monkeypatch.setattr(tune, "_trials", never)
    built = model()
    gradients(compiled(built, tmp_path, tune=count, strict=True), built, example())
    assert choices == [0]
    assert not list(tmp_path.iterdir())


# --- the choice ---------------------------------------------------------------------------------------------------


def test_the_fastest_is_taken_and_a_tie_goes_to_the_first() -> None:
    assert tune.fastest([1.0]) == 0
    assert tune.fastest([1.0, 0.9, 0.8]) == 2
    assert tune.fastest([1.0, 0.995, 1.2]) == 0
    assert tune.fastest([1.0, 0.903, 0.9]) == 1


def test_the_median_of_paired_times_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Fake:
        def __init__(self, name: str, times: list[float]) -> None:
            self.name, self.times = name, times

        def prepare(self) -> None:
            order.append(self.name)

    steps: Any = [Fake("a", [1, 2, 4, 1, 1]), Fake("b", [2, 4, 8, 0.1, 9])]
    monkeypatch.setattr(tune, "seconds_of", lambda step, device: step.times.pop(0))
    monkeypatch.setattr(tune, "TIMED_SECONDS", 0.0)
    assert tune.measure(steps, CPU) == [1.0, 2.0]
    assert order[:4] == ["a", "b", "b", "a"]


def test_the_plan_that_the_clock_prefers_is_taken_and_its_gradients_are_eagers(
    tmp_path: Path, choices: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prefer(monkeypatch, 2)
    built, x = model(), example()
    expected = gradients(built, built, x)
    before = len(remat.summaries())
    mine = gradients(compiled(built, tmp_path, strict=True, log="plan"), built, x)
    for got, wanted in zip(mine, expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert choices[:3] == [0, 1, 2] and choices[-1] == 2
    (summary,) = remat.summaries()[before:]
    assert summary.origin == "planned" and summary.budget_bytes >= summary.predicted_peak_bytes
    printed = capsys.readouterr().err.splitlines()
    assert [line for line in printed if "tuned: plan 3 of 3, 0.50 of the first's time" in line]
    assert len([line for line in printed if line.startswith("remat: ")]) == 2


def test_the_choice_is_remembered(tmp_path: Path, choices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, 1)
    built, x = model(), example()
    gradients(compiled(built, tmp_path, strict=True), built, x)
    (path,) = tmp_path.glob("tuned-*.json")
    (entry,) = json.loads(path.read_text())["choices"].values()
    assert entry == {"choice": 1, "ratios": [1.0, 0.5, 1.0]}
    choices.clear()
    torch._dynamo.reset()
    prefer(monkeypatch, 0)
    gradients(compiled(built, tmp_path, strict=True), built, x)
    assert choices == [1], "a trial was made again"
    # Another graph is tuned anew.
    torch._dynamo.reset()
    gradients(compiled(built, tmp_path, strict=True), built, example()[:2])
    assert len(json.loads(path.read_text())["choices"]) == 2


@pytest.mark.parametrize(
    "text",
    ["{", '{"format": 1, "choices": 3}', '{"format": 1, "choices": {"KEY": {"choice": 9, "ratios": [1.0]}}}'],
)
def test_a_broken_document_is_as_good_as_none(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, 1)
    built, x = model(), example()
    gradients(compiled(built, tmp_path, tune=2), built, x)
    (path,) = tmp_path.glob("tuned-*.json")
    (graph,) = json.loads(path.read_text())["choices"]
    path.write_text(text.replace("KEY", graph))
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.RematWarning)  # the store's: the document is ignored
        gradients(compiled(built, tmp_path, tune=2), built, x)
    assert json.loads(path.read_text())["choices"][graph]["choice"] == 1


def test_where_nothing_can_be_kept_the_choice_holds_all_the_same(
    tmp_path: Path, choices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(monkeypatch, 1)
    blocked = tmp_path / "file"
    blocked.write_text("no folder")  # root may write into a read-only folder, nobody below a file
    built = model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradients(compiled(built, blocked / "cache"), built, example())
    assert choices[-1] == 1
    assert all("cache" in text for text in said(caught)), "only the store warns"


# --- what is left as it was ---------------------------------------------------------------------------------------


def test_random_state_gradients_and_buffers_stay_as_they_were(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm = model(), nn.BatchNorm1d(8)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return torch.dropout(self.norm(self.body(x).flatten(0, 1)), 0.5, True)

    built, x = Net(), example()
    for value in built.parameters():
        value.grad = torch.ones_like(value)
    held = [value.grad for value in built.parameters()]
    step = compiled(built, tmp_path, strict=True)
    before = torch.get_rng_state()
    out = step(x)
    after = torch.get_rng_state()
    assert [value.grad for value in built.parameters()] == held
    assert all(bool((value == 1).all()) for value in held if value is not None)
    assert torch.is_grad_enabled()
    assert int(built.calls) == 1 and int(built.norm.num_batches_tracked) == 1
    out.sum().backward()

    torch._dynamo.reset()
    torch.set_rng_state(before)
    plain = compiled(Net(), tmp_path, tune=0, strict=True)
    plain(x)
    assert torch.equal(torch.get_rng_state(), after), "tuning drew random numbers"


def test_inputs_are_made_with_the_examples_layout() -> None:
    leaf = torch.zeros(3, 4).requires_grad_()
    given = [
        torch.zeros(2, 3, dtype=torch.int64), torch.zeros(4, 4).t()[1:], torch.zeros(3, 1).expand(3, 5), leaf,
        leaf * 2, torch.zeros(2, dtype=torch.bool), torch.zeros(0, 3), torch.zeros(()),
        torch.zeros(2, dtype=torch.cfloat),
    ]  # fmt: skip
    for wanted, made in zip(given, tune.made_up(given, CPU), strict=True):
        value = made.given()
        assert (value.shape, value.stride(), value.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
        assert (value.requires_grad, value.is_leaf) == (wanted.requires_grad, wanted.is_leaf)
        assert (made.leaf is not None) == wanted.requires_grad
    assert tune.made_up([3, None, True], CPU) == [tune.Input(3), tune.Input(None), tune.Input(True)]


def test_symbolic_sizes_are_those_at_hand(tmp_path: Path, choices: list[int]) -> None:
    built = model()
    step = torch.compile(
        built, backend="remat", dynamic=True,
        options={"inner": "eager", "tune": 2, "cache_dir": str(tmp_path), "budget": BUDGET, "strict": True},
    )  # fmt: skip
    for rows in (3, 5):
        x = torch.randn(rows, 8, 8)
        expected = gradients(built, built, x)
        for got, wanted in zip(gradients(step, built, x), expected, strict=True):
            torch.testing.assert_close(got, wanted)
    assert choices[0] == 0 and len(choices) == 3, "the second size needs no other code"


def test_inputs_that_are_no_leaves_and_written_inputs_can_be_run_again(tmp_path: Path) -> None:
    built = model()

    def run(x: Tensor, buffer: Tensor, count: Tensor) -> Tensor:
        x.mul_(2)
        count.add_(1)
        y = built(x)
        buffer.copy_(y.mean((0, 1)))
        return y

    weight = torch.ones(8, requires_grad=True)
    step = compiled(run, tmp_path, strict=True)
    buffer, count = torch.zeros(8), torch.zeros(1, dtype=torch.int64)
    step(example() * weight, buffer, count).sum().backward()
    again = torch.ones(8, requires_grad=True)
    run(example() * again, torch.zeros(8), torch.zeros(1, dtype=torch.int64)).sum().backward()
    torch.testing.assert_close(weight.grad, again.grad)
    assert int(count) == 1


# --- where there is no tuning -------------------------------------------------------------------------------------


def refuses(x: Tensor, rows: Tensor) -> Tensor:
    """Rows from 9 on are legal, made-up zeros are not."""
    return torch.tanh(x)[rows - 9].tanh().sum()


def test_a_graph_that_made_up_inputs_break_is_trained_all_the_same(tmp_path: Path, choices: list[int]) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(refuses, tmp_path, budget=None)(x, torch.tensor([9, 10])).backward()
    (text,) = said(caught)
    assert "is not tuned (IndexError" in text
    assert choices == [0, 0] and x.grad is not None
    assert not list(tmp_path.glob("*.json"))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="out of"):
        compiled(refuses, tmp_path, budget=None, strict=True)(x, torch.tensor([9, 10]))


def test_inputs_that_would_not_fit_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "free_bytes", lambda device: 1000)
    built = model()
    with pytest.warns(remat.RematWarning, match="more than half of the free memory"):
        gradients(compiled(built, tmp_path), built, example())


def test_ranks_choose_alike(tmp_path: Path, choices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    built = model()
    with pytest.warns(remat.RematWarning, match="ranks"):
        gradients(compiled(built, tmp_path), built, example())
    assert choices == [0]


def test_inference_and_plans_that_fail_are_not_tuned_and_say_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = model()
    with torch.no_grad():
        compiled(built, tmp_path, strict=True)(example())

    def broken(*_: Any) -> Any:
        raise remat.UnsupportedGraph("broken on purpose")

    monkeypatch.setattr(partitioner, "decide", broken)
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradients(compiled(built, tmp_path), built, example())
    (text,) = said(caught)
    assert "PyTorch's partitioner did" in text


def test_check_and_dump_see_the_plan_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, 1)
    built, folder = model(), tmp_path / "dump"
    gradients(compiled(built, tmp_path, strict=True, check=True, dump=str(folder)), built, example())
    (plan,) = folder.glob("*_plan.json")
    assert json.loads(plan.read_text())["saved_bytes"] == remat.summaries()[-1].saved_bytes


# --- under Inductor, in processes of their own --------------------------------------------------------------------

SCRIPT = """
import json, sys
import torch
import remat
from torch._dynamo.utils import counters
from tests.test_tune import example, gradients, model
torch.set_num_threads(1)
from remat import partitioner, tune
asked, inner = [], partitioner.decide
partitioner.decide = lambda *a: (asked.append(a[4]), inner(*a))[1]
timed, measure = [], tune.measure
def prefer(steps, device):
    timed.append(measure(steps, device))
    return [0.5 if place == 1 else 1.0 for place in range(len(steps))]
tune.measure = prefer
built, x = model(), example()
options = {"tune": 2, "cache_dir": sys.argv[1], "strict": True}
mine = gradients(torch.compile(built, backend="remat", options=options), built, x)
wrong = max(float((a - b).abs().max()) for a, b in zip(mine, gradients(built, built, x)))
print(json.dumps({"asked": asked, "timed": timed, "wrong": wrong, "hits": counters["inductor"]["fxgraph_cache_hit"],
    "summaries": [summary.origin for summary in remat.summaries()]}))
"""


def run(folder: Path) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("REMAT_", "TORCHINDUCTOR_"))}
    environment.update(TORCHINDUCTOR_CACHE_DIR=str(folder / "code"), PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    command = [sys.executable, "-P", "-c", SCRIPT, str(folder / "kept")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.inductor
def test_a_second_process_pays_nothing_and_the_winners_code_is_used_again(tmp_path: Path) -> None:
    cold, warm = run(tmp_path), run(tmp_path)
    assert cold["asked"] == [0, 1, 1], "two trials, and the plan that counts"
    assert cold["hits"] == 2, "its forward and backward come from the trial"
    ((first, second),) = cold["timed"]
    assert first == 1 and second > 0
    assert warm["asked"] == [] and warm["timed"] == []
    assert cold["summaries"] == ["planned"] and warm["summaries"] == ["cached"]
    assert cold["wrong"] < 1e-5 and warm["wrong"] < 1e-5
