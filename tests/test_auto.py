"""budget="auto": what is free, what is kept of it, how it is rounded, and that ranks agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat import auto
from remat.errors import SettingError

CPU = torch.device("cpu")
GIB = 2**30


@pytest.mark.parametrize(
    ("count", "kept"),
    [(0, 0), (-5, 0), (1, 1), (31, 31), (33, 32), (63, 62), (GIB, GIB), (GIB - 1, GIB // 32 * 31), (3 * GIB, 3 * GIB)],
)
def test_rounded_down_by_less_than_a_sixteenth(count: int, kept: int) -> None:
    assert auto.rounded(count) == kept
    assert count <= 0 or 15 / 16 * count < kept <= count


def test_readings_that_differ_a_little_give_one_budget() -> None:
    assert len({auto.rounded(int(20.3 * GIB) + shift * 2**20) for shift in range(100)}) == 1


def test_the_machine_tells_what_it_has_free() -> None:
    free = auto.free_bytes(CPU)
    assert free is not None
    assert 2**20 < free < 2**50


def test_a_container_s_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(auto, "_CGROUP", tmp_path)
    machine = auto.free_bytes(CPU)
    (tmp_path / "memory.max").write_text("max\n")
    assert abs((auto.free_bytes(CPU) or 0) - (machine or 0)) < GIB
    (tmp_path / "memory.max").write_text(f"{100 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{70 * 2**20}\n")
    (tmp_path / "memory.stat").write_text(f"anon {60 * 2**20}\ninactive_file {10 * 2**20}\n")
    assert auto.free_bytes(CPU) == 40 * 2**20


def test_room_is_left_for_the_optimizer_and_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "free_bytes", lambda device: 1000)
    trained = nn.Parameter(torch.zeros(50))  # 200 bytes, 400 of moments
    others = [nn.Parameter(torch.zeros(50), requires_grad=False), torch.zeros(50), 3]
    assert auto.budget_bytes(CPU, [trained, *others]) == auto.rounded(900 - 400)
    with pytest.raises(SettingError, match="no memory free"):
        auto.budget_bytes(CPU, [trained] * 3)
    monkeypatch.setattr(auto, "free_bytes", lambda device: None)
    with pytest.raises(SettingError, match="does not tell"):
        auto.budget_bytes(CPU, [trained])


def test_the_plan_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(32, 32, bias=False), nn.Tanh())))
    data = torch.randn(256, 32)
    parameters = sum(p.numel() * 4 for p in model.parameters())
    monkeypatch.setattr(auto, "free_bytes", lambda device: int((2 * parameters + 200_000) / (1 - auto.MARGIN)))
    compiled = torch.compile(model, backend="remat", options={"budget": "auto", "inner": "eager", "strict": True})
    compiled(data).sum().backward()
    summary = remat.summaries()[-1]
    assert summary.budget_bytes == auto.rounded(200_000)
    assert summary.predicted_peak_bytes <= summary.budget_bytes < summary.torch_predicted_peak_bytes


def test_partitioner_torch_and_dry_runs_refuse_it() -> None:
    def cube(x: torch.Tensor) -> torch.Tensor:
        return (x**3).sum()

    data = torch.randn(4, requires_grad=True)
    with pytest.raises(Exception, match="partitioner=torch takes no budget in bytes"):
        torch.compile(cube, backend="remat", options={"budget": "auto", "partitioner": "torch"})(data)
    with pytest.raises(SettingError, match="not allowed in a dry run"):
        remat.dry_run(cube, data, options={"budget": "auto"})


RANK = """
import json, sys, torch, torch.distributed as dist
from torch import nn
import remat
from remat import auto
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
auto.free_bytes = lambda device: (1 + rank) * 2**20  # the other rank has twice as much
torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(32, 32, bias=False), nn.Tanh())))
compiled = torch.compile(model, backend="remat", options={"budget": "auto", "inner": "eager", "strict": True})
compiled(torch.randn(512, 32)).sum().backward()
summary = remat.summaries()[-1]
print(json.dumps([summary.budget_bytes, [value.name for value in summary.saved]]))
dist.destroy_process_group()
"""


def test_ranks_take_what_rank_0_finds(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    found: list[Any] = [json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in ranks]
    assert found[0] == found[1]
    parameters = 8 * 32 * 32 * 4
    assert found[0][0] == auto.rounded(int(0.9 * 2**20) - 2 * parameters)
