"""The op-by-op executor: random numbers true to their seed, and nothing kept a moment longer than needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from remat.eager import SEED_TRUE, OpByOp, compile_op_by_op
from tests import checks, graphs

prims = torch.ops.prims


def program(build: Callable[[fx.Graph], Any], root: torch.nn.Module | None = None) -> OpByOp:
    graph = fx.Graph()
    graph.output(build(graph))
    return OpByOp(fx.GraphModule(root or torch.nn.Module(), graph))


# --- random numbers ----------------------------------------------------------------------------------------------


def draw(kind: str, seed: Any) -> tuple[Any, tuple[Any, ...]]:
    """The operator and its arguments, over a tensor or a node."""
    if kind == "randint":
        return prims.inductor_randint.default, (0, 1000, [64], seed)
    return prims.inductor_random.default, ([64], seed, kind)


@pytest.mark.parametrize("kind", ["rand", "randn", "randint"])
def test_same_seed_gives_the_same_numbers_and_another_seed_gives_others(kind: str):
    run = program(lambda graph: graph.call_function(*draw(kind, graph.placeholder("seed"))))
    first, again, other = (run([torch.tensor(seed)]) for seed in (11, 11, 12))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("kind", ["rand", "randn", "randint"])
def test_two_calls_in_one_graph_agree_though_the_global_generator_moves_between(kind: str):
    def build(graph: fx.Graph) -> Any:
        seed = graph.placeholder("seed")
        first = graph.call_function(*draw(kind, seed))
        graph.call_function(torch.ops.aten.rand.default, ([5],))
        return first, graph.call_function(*draw(kind, seed))

    first, second = program(build)([torch.tensor(-(2**62))])
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", ["rand", "randn", "randint"])
def test_stock_kernels_ignore_the_seed(kind: str):
    """The negative control: were torch to repair them, SEED_TRUE could go."""
    stock, arguments = draw(kind, torch.tensor(11))
    assert not torch.equal(stock(*arguments), stock(*arguments))


def test_seeded_numbers_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    for kind in ("rand", "randn", "randint"):
        target, arguments = draw(kind, torch.tensor(3))
        SEED_TRUE[target](*arguments)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeded_numbers_have_the_distribution_dtype_and_size_of_the_stock_kernels():
    seed = torch.tensor(5)
    uniform, normal = (SEED_TRUE[prims.inductor_random.default]([50, 100], seed, mode) for mode in ("rand", "randn"))
    integers = SEED_TRUE[prims.inductor_randint.default](-3, 4, [5000], seed)
    assert uniform.shape == normal.shape == (50, 100)
    assert uniform.dtype == normal.dtype == prims.inductor_random.default([2], seed, "rand").dtype
    assert integers.dtype == prims.inductor_randint.default(0, 4, [2], seed).dtype
    assert 0 <= uniform.min() < 0.01
    assert 0.99 < uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.02
    assert abs(normal.mean()) < 0.05
    assert abs(normal.std() - 1) < 0.05
    assert set(integers.tolist()) == set(range(-3, 4))


def test_dropout_keeps_its_mask_from_forward_to_backward():
    """In y = dropout(x) the gradient of sum(y) is y / x: read the mask off both."""

    def run(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(torch.exp(x), 0.5)

    joint = graphs.joint_of(run, graphs.leaf(16, 16))
    results = checks.run_joint(joint)
    (tangent,) = checks.examples(joint.tangents, 1001)
    dropped, no_gradient = results.outputs[0] == 0, results.gradients[0] == 0
    assert 0.3 < dropped.float().mean() < 0.7
    assert torch.equal(dropped, no_gradient)
    assert torch.allclose(results.gradients[0], results.outputs[0] * tangent)


# --- lifetimes ---------------------------------------------------------------------------------------------------


class Watch:
    """Operators that note which tensors are alive when they run."""

    def __init__(self) -> None:
        self.made: dict[str, weakref.ref[Tensor]] = {}
        self.alive: dict[str, set[str]] = {}

    def input(self, name: str) -> Tensor:
        value = torch.ones(3)
        self.made[name] = weakref.ref(value)
        return value

    def operator(self, name: str) -> Callable[..., Tensor]:
        def run(*arguments: Tensor) -> Tensor:
            self.alive[name] = {other for other, reference in self.made.items() if reference() is not None}
            result = sum(arguments, torch.zeros(3))
            self.made[name] = weakref.ref(result)
            return result

        run.__name__ = name
        return run


def test_each_value_is_freed_right_after_its_last_use():
    watch = Watch()

    def build(graph: fx.Graph) -> Any:
        x, y = graph.placeholder("x"), graph.placeholder("y")
        a = graph.call_function(watch.operator("a"), (x,))
        b = graph.call_function(watch.operator("b"), (a, y))
        c = graph.call_function(watch.operator("c"), (b, a))
        d = graph.call_function(watch.operator("d"), (c,))
        return [d, b]

    result = program(build)([watch.input("x"), watch.input("y")])
    assert watch.alive == {"a": {"x", "y"}, "b": {"a", "y"}, "c": {"a", "b"}, "d": {"b", "c"}}
    assert {name for name, reference in watch.made.items() if reference() is not None} == {"b", "d"}
    assert len(result) == 2


def test_results_that_nothing_uses_are_freed_at_once():
    watch = Watch()

    def build(graph: fx.Graph) -> Any:
        x = graph.placeholder("x")
        graph.call_function(watch.operator("unused"), (x,))
        return graph.call_function(watch.operator("last"), (x,))

    program(build)([watch.input("x")])
    assert watch.alive["last"] == {"x"}


def test_inputs_that_nothing_uses_are_freed_before_anything_runs():
    watch = Watch()

    def build(graph: fx.Graph) -> Any:
        graph.placeholder("unused")
        return graph.call_function(watch.operator("first"), (graph.placeholder("x"),))

    program(build)([watch.input("unused"), watch.input("x")])
    assert watch.alive["first"] == {"x"}


def test_items_of_a_tuple_live_on_after_the_tuple_and_the_others_die_with_it():
    watch = Watch()

    def pair(x: Tensor) -> tuple[Tensor, Tensor]:
        return watch.operator("left")(x), watch.operator("right")(x)

    def build(graph: fx.Graph) -> Any:
        both = graph.call_function(pair, (graph.placeholder("x"),))
        left = graph.call_function(lambda values: values[0], (both,))
        return graph.call_function(watch.operator("last"), (left,))

    program(build)([watch.input("x")])
    assert watch.alive["last"] == {"left"}


def test_argument_list_is_emptied_and_the_callers_own_references_are_respected():
    watch = Watch()

    def build(graph: fx.Graph) -> Any:
        x = graph.placeholder("x")
        return graph.call_function(watch.operator("b"), (graph.call_function(watch.operator("a"), (x,)),))

    kept = watch.input("x")
    arguments = [kept]
    program(build)(arguments)
    assert arguments == []
    assert watch.alive["b"] == {"x", "a"}


def test_program_keeps_nothing_between_runs():
    watch = Watch()
    run = program(lambda graph: graph.call_function(watch.operator("a"), (graph.placeholder("x"),)))
    for _ in range(2):
        run([watch.input("x")])
        assert {name for name, reference in watch.made.items() if reference() is not None} == set()


def test_constants_of_the_module_are_read_by_their_path_and_survive_the_run():
    root = torch.nn.Module()
    root.inner = torch.nn.Module()
    root.inner.register_buffer("scale", torch.full((3,), 2.0))

    def build(graph: fx.Graph) -> Any:
        scale = graph.get_attr("inner.scale")
        product = graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("x"), scale))
        return [product, scale, graph.call_function(torch.ops.aten.neg.default, (scale,))]

    run = program(build, root)
    for _ in range(2):
        product, scale, negated = run([torch.ones(3)])
        assert product.tolist() == [2, 2, 2]
        assert scale is root.inner.scale
        assert negated.tolist() == [-2, -2, -2]


def test_outputs_may_be_inputs_none_numbers_or_one_value_twice():
    def build(graph: fx.Graph) -> Any:
        x = graph.placeholder("x")
        y = graph.call_function(torch.ops.aten.neg.default, (x,))
        return [y, None, x, 3, y]

    given = torch.ones(2)
    y, nothing, x, three, again = program(build)([given])
    assert y is again
    assert x is given
    assert (nothing, three) == (None, 3)


def test_wrong_number_of_arguments_is_an_error():
    run = program(lambda graph: graph.placeholder("x"))
    for arguments in ([], [torch.ones(1), torch.ones(1)]):
        with pytest.raises(ValueError, match="zip"):
            run(list(arguments))


@pytest.mark.parametrize("name", ["multi_output", "views", "convnet", "loss"])
def test_results_are_those_of_torchs_own_interpreter(name: str):
    joint = graphs.joint(name)
    placeholders = [node for node in joint.nodes if node.op == "placeholder"]
    theirs, mine = checks.examples(placeholders, 4), checks.examples(placeholders, 4)
    with torch.no_grad():
        expected = fx.Interpreter(joint.module).run(*theirs, enable_io_processing=False)
        got = OpByOp(joint.module)(list(mine))
    assert [checks.same_bits(a, b) for a, b in zip(got, expected, strict=True)] == [True] * len(expected)
    assert [checks.same_bits(a, b) for a, b in zip(mine, theirs, strict=True)] == [True] * len(mine)  # written inputs


def test_compiled_graph_is_boxed_and_records_no_gradients():
    graph = fx.Graph()
    graph.output([graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("x"),))])
    run = compile_op_by_op(fx.GraphModule(torch.nn.Module(), graph))
    assert run._boxed_call is True
    arguments = [torch.ones(3, requires_grad=True)]
    (result,) = run(arguments)
    assert not result.requires_grad
    assert arguments == []
