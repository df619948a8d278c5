"""The backend as users meet it: options, modes, inference, strictness, fallback, check, dump."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat import partitioner
from remat.errors import UnsupportedGraph

ROOT = Path(__file__).resolve().parents[1]


class Net(nn.Module):
    """Two layers, dropout, a buffer that counts."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.second(self.dropout(torch.nn.functional.gelu(self.first(x)))).sum()


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="remat", options={"inner": "eager", "strict": True, **options})


def test_a_script_that_never_imports_remat_finds_the_backend() -> None:
    script = (
        "import torch, sys\n"
        "model = torch.nn.Linear(4, 4)\n"
        "step = torch.compile(model, backend='remat', options={'inner': 'eager', 'strict': True})\n"
        "step(torch.ones(2, 4)).sum().backward()\n"
        "import remat\n"
        "assert remat.summaries()[0].origin == 'planned'\n"
        "print(float(model.weight.grad.sum()))\n"
    )
    from importlib.metadata import entry_points

    if "remat" not in entry_points(group="torch_dynamo_backends").names:
        pytest.skip("remat is not installed here: the entry point cannot be found")
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd="/", check=False)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) == 32.0


def test_unknown_option_names_the_nearest_known_one() -> None:
    with pytest.raises(Exception, match=r"budgt.*did you mean 'budget'"):
        compiled(Net(), budgt=0.5)(torch.ones(2, 8))


def test_unknown_mode_lists_the_known_ones() -> None:
    step = torch.compile(Net(), backend="remat", mode="fastest")
    with pytest.raises(Exception, match=r"fastest.*max-autotune"):
        step(torch.ones(2, 8))


def test_inductors_options_and_mode_reach_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def spy(module: Any, inputs: Any, patches: dict[str, Any], wrap: Any) -> Any:
        seen.update(patches)
        return module.forward

    monkeypatch.setattr("remat.torch_internals.compile_with_inductor", spy)
    options = {"epilogue_fusion": False, "budget": 0.5}
    torch.compile(Net(), backend="remat", options=options)(torch.ones(2, 8))
    assert seen["epilogue_fusion"] is False
    assert seen["custom_partitioner_fn"].settings.budget == 0.5
    assert "budget" not in seen
    torch.compile(Net(), backend="remat", mode="max-autotune-no-cudagraphs")(torch.ones(2, 8))
    assert seen["max_autotune"] is True


def test_environment_sets_what_options_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_BUDGET", "min")
    before = len(remat.summaries())
    compiled(Net())(torch.ones(2, 8)).backward()
    summary = remat.summaries()[before]
    assert summary.smallest_peak_bytes == summary.predicted_peak_bytes > 0


@pytest.mark.parametrize(("fraction", "option", "given"), [(0.5, None, 0.5), (0.0, None, "min"), (0.5, 0.9, 0.9)])
def test_torchs_own_budget_stands_for_ours_where_ours_is_not_set(
    monkeypatch: pytest.MonkeyPatch, fraction: float, option: float | None, given: Any
) -> None:
    import torch._functorch.config as functorch_config

    seen: dict[str, Any] = {}

    def spy(module: Any, inputs: Any, patches: dict[str, Any], wrap: Any) -> Any:
        seen.update(patches)
        return module.forward

    monkeypatch.setattr("remat.torch_internals.compile_with_inductor", spy)
    with functorch_config.patch(activation_memory_budget=fraction):
        torch.compile(Net(), backend="remat", options={} if option is None else {"budget": option})(torch.ones(2, 8))
    assert seen["custom_partitioner_fn"].settings.budget == given


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_equals_eager_and_plans_nothing(context: Any) -> None:
    model, x = Net().eval(), torch.randn(3, 8)
    step = compiled(model)
    before = len(remat.summaries())
    with context():
        torch.testing.assert_close(step(x), model(x))
    assert len(remat.summaries()) == before


def test_one_graph_gives_one_forward_and_one_backward_and_frees_what_it_saved() -> None:
    model = Net()
    step = compiled(model)
    for _ in range(3):
        step(torch.randn(2, 8)).backward()
    assert float(model.calls) == 3


# --- failing well --------------------------------------------------------------------------------------------------


def broken(*_: Any) -> Any:
    raise UnsupportedGraph("broken on purpose")


def test_strict_raises_the_error_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioner, "decide", broken)
    with pytest.raises(Exception, match="broken on purpose"):
        compiled(Net())(torch.ones(2, 8))


def test_fallback_warns_once_with_the_reason_and_trains_right(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._functorch.config as functorch_config

    monkeypatch.setattr(partitioner, "decide", broken)
    budgets = []
    original = remat.torch_internals.partitioners.choose_saved_values_set

    def spy(graph: Any, info: Any, memory_budget: float) -> Any:
        budgets.append(memory_budget)
        return original(graph, info, memory_budget)

    monkeypatch.setattr(remat.torch_internals.partitioners, "choose_saved_values_set", spy)
    model, x = Net(0.5), torch.randn(64, 8)
    with pytest.warns(remat.RematWarning, match="broken on purpose") as caught, functorch_config.patch(
        activation_memory_budget=0.1
    ):
        out = compiled(model, strict=False, fallback_random=True)(x)
    out.backward()
    assert len([w for w in caught if issubclass(w.category, remat.RematWarning)]) == 1
    assert budgets == [1], "torch's own budget recomputes random draws below 1"
    assert remat.summaries()[-1].origin == "fallback"
    assert model.first.weight.grad is not None


def test_fallback_sees_the_joint_graph_as_torch_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []

    def half_done(joint: Any, *_: Any) -> Any:
        texts.append(str(joint.module.graph))
        remat.passes.prepare(joint, remat.Settings())
        raise UnsupportedGraph("after the passes ran")

    def spy(module: Any, *_: Any) -> Any:
        texts.append(str(module.graph))
        raise RuntimeError("seen")

    monkeypatch.setattr(partitioner, "decide", half_done)
    monkeypatch.setattr("remat.torch_internals.partition_with_torch", spy)
    with pytest.warns(remat.RematWarning), pytest.raises(Exception, match="seen"):
        compiled(Net(), strict=False)(torch.ones(2, 8))
    assert texts[0] == texts[1]


# --- check and dump --------------------------------------------------------------------------------------------------


aten = torch.ops.aten


def wrong_product(a: Any, b: Any) -> Any:
    return 2 * torch.mm(a, b)


def corrupt(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """Make the partitioner's forward or backward compute something else, past the verifier."""
    original = partitioner.decide

    def decide(*arguments: Any) -> Any:
        decision = original(*arguments)
        graph = getattr(decision.partition, which).graph
        instead = {aten.erf.default: aten.sin.default, aten.add.Tensor: aten.sub.Tensor, aten.mm.default: wrong_product}
        node = next(n for n in graph.nodes if n.target in instead)
        node.target = instead[node.target]
        getattr(decision.partition, which).recompile()
        return decision

    monkeypatch.setattr(partitioner, "decide", decide)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_check_passes_a_right_plan_bit_for_bit(dropout: float) -> None:
    step = compiled(Net(dropout), check=True, check_tolerance=0.0, budget="min")
    for _ in range(2):
        step(torch.randn(4, 8)).backward()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_check_names_the_first_tensor_of_a_corrupted_plan(
    monkeypatch: pytest.MonkeyPatch, which: str, dropout: float
) -> None:
    corrupt(monkeypatch, which)
    step = compiled(Net(dropout), check=True)
    expected = "forward output|input primals" if which == "forward" else "gradient"
    with pytest.raises(remat.CheckFailed, match=expected):
        step(torch.randn(4, 8)).backward()


def test_check_compares_inputs_that_the_forward_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    original = partitioner.decide

    def decide(*arguments: Any) -> Any:
        decision = original(*arguments)
        graph = decision.partition.forward.graph
        write = next(n for n in graph.nodes if n.target is torch.ops.aten.copy_.default)
        with graph.inserting_before(write):
            wrong = graph.call_function(torch.ops.aten.mul.Tensor, (write.args[1], 2))
        write.args = (write.args[0], wrong)
        decision.partition.forward.recompile()
        return decision

    monkeypatch.setattr(partitioner, "decide", decide)
    with pytest.raises(remat.CheckFailed, match=r"input primals_\d+ after the forward"):
        compiled(Net(), check=True)(torch.randn(4, 8)).backward()


def test_check_waits_for_the_backward_of_the_step_it_recorded() -> None:
    step = compiled(Net(0.5), check=True, check_tolerance=0.0)
    first, second = step(torch.randn(4, 8)), step(torch.randn(4, 8))
    second.backward()
    first.backward()


def test_dump_writes_the_graphs_the_network_and_the_plan(tmp_path: Path) -> None:
    compiled(Net(), dump=str(tmp_path))(torch.ones(2, 8)).backward()
    names = sorted(path.name.split("_", 2)[2] for path in tmp_path.iterdir())
    assert names == ["backward.py", "forward.py", "joint.py", "network.json", "plan.json"]
    plan = json.loads(next(tmp_path.glob("*_plan.json")).read_text())
    assert plan["saved_bytes"] == remat.summaries()[-1].saved_bytes
    arcs = json.loads(next(tmp_path.glob("*_network.json")).read_text())
    assert {"from", "to", "capacity", "reason"} <= set(arcs[0])


def test_log_prints_a_line_for_each_plan_and_a_row_for_each_saved_value(capsys: pytest.CaptureFixture[str]) -> None:
    compiled(Net(), log="values")(torch.ones(2, 8)).backward()
    text = capsys.readouterr().err
    assert remat.summaries()[-1].line() in text
    assert all(value.name in text for value in remat.summaries()[-1].saved)


def test_graph_break_plans_each_part() -> None:
    class Broken(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x).exp()
            torch._dynamo.graph_break()
            return self.second(h.sin()).sum()

    before = len(remat.summaries())
    model = Broken()
    compiled(model)(torch.randn(2, 8)).backward()
    assert [s.origin for s in remat.summaries()[before:]] == ["planned", "planned"]
