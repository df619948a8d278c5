"""What remat believes of operators, against what they do: who shares memory, draws, fuses, and whose line it is."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from remat import ops
from remat.ops import Kind
from tests import checks, graphs

aten, prims = torch.ops.aten, torch.ops.prims


@torch.library.custom_op("rematops::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x + 1


@torch.library.custom_op("rematops::scribble", mutates_args=("x",))
def scribble(x: Tensor) -> None:
    x.add_(1)


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node that runs an operator, its tensor arguments placeholders, its value what it really returns."""
    graph = fx.Graph()

    def placed(value: Any) -> Any:
        if isinstance(value, Tensor):
            node = graph.placeholder(f"primals_{len(graph.nodes)}")
            node.meta["val"] = value
            return node
        return [placed(item) for item in value] if isinstance(value, list) else value

    node = graph.call_function(target, tuple(map(placed, args)), {key: placed(value) for key, value in kwargs.items()})
    node.meta["val"] = target(*args, **kwargs)
    return node


def silent(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node over an operator that is not run here (another device's, or a collective)."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"primals_{n}") if value is Tensor else value for n, value in enumerate(args)]
    return graph.call_function(target, tuple(inputs), kwargs)


def item(node: fx.Node, index: int) -> fx.Node:
    made = node.graph.call_function(operator.getitem, (node, index))
    made.meta["val"] = node.meta["val"][index]
    return made


X = torch.randn(4, 6)
CONVOLUTION = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)  # stride, padding, dilation and the rest
N = torch.randint(4, (3,))
VIEWS = [
    (aten.view.default, X, [24]), (aten.permute.default, X, [1, 0]), (aten.t.default, X),
    (aten.transpose.int, X, 0, 1), (aten.expand.default, X[:1], [4, 6]), (aten.slice.Tensor, X, 0, 1, 3),
    (aten.select.int, X, 0, 1), (aten.unsqueeze.default, X, 0), (aten.squeeze.dims, X[:1], [0]),
    (aten.as_strided.default, X, [3, 2], [2, 1]), (aten.diagonal.default, X), (aten.alias.default, X),
    (aten.detach.default, X), (aten._unsafe_view.default, X, [6, 4]), (aten.reshape.default, X, [2, 12]),
    (aten.unfold.default, X, 1, 2, 2), (aten.view.dtype, X, torch.int32), (aten.split.Tensor, X, 2),
    (aten.unbind.int, X), (aten.split_with_sizes.default, X, [1, 3]), (aten.narrow.default, X, 0, 1, 2),
]  # fmt: skip
COPIES = [
    (aten.clone.default, X), (aten.exp.default, X), (aten.cat.default, [X, X]), (aten.repeat.default, X, [2, 1]),
    (aten.index.Tensor, X, [N]), (aten.slice_scatter.default, X, X[:2], 0, 0, 2),
    (aten.permute_copy.default, X, [1, 0]), (aten.view_copy.default, X, [24]), (aten._to_copy.default, X),
    (aten.select_scatter.default, X, X[0], 0, 1),
    (aten.topk.default, X, 2), (aten.var_mean.correction, X, [1]), (aten.flip.default, X, [0]),
    (aten.constant_pad_nd.default, X, [0, 0]), (aten.relu.default, X), (aten.mm.default, X, X.t()),
]  # fmt: skip


def shares_memory(node: fx.Node) -> bool:
    value = node.meta["val"]
    results = list(value) if isinstance(value, list | tuple) else [value]
    inputs = {n.meta["val"].untyped_storage().data_ptr() for n in node.all_input_nodes}
    return all(result.untyped_storage().data_ptr() in inputs for result in results)


@pytest.mark.parametrize("made", VIEWS, ids=lambda made: str(made[0]))
def test_operator_that_shares_its_arguments_memory_is_a_view_of_it(made: tuple[Any, ...]):
    node = call(*made)
    assert shares_memory(node)
    assert ops.is_view(node)
    assert ops.kind(node) is Kind.VIEW
    assert ops.view_base(node) is node.all_input_nodes[0]
    if isinstance(node.meta["val"], list | tuple):
        assert ops.is_view(item(node, 0))
        assert ops.view_base(item(node, 1)) is node.all_input_nodes[0]


@pytest.mark.parametrize("made", COPIES, ids=lambda made: str(made[0]))
def test_operator_with_memory_of_its_own_is_no_view(made: tuple[Any, ...]):
    node = call(*made)
    assert not shares_memory(node)
    assert not ops.is_view(node)
    assert ops.view_base(node) is node
    if isinstance(node.meta["val"], list | tuple):
        assert not ops.is_view(item(node, 0))
        assert ops.view_base(item(node, 0)).target is operator.getitem


def test_base_of_a_view_of_a_view_of_an_item_is_the_operator_that_made_the_memory():
    joint = graphs.joint("views")
    for node in joint.nodes:
        base = ops.view_base(node)
        assert not ops.is_view(base)
        assert ops.is_view(node) == (base is not node)
    deep = [node for node in joint.nodes if ops.is_view(node) and ops.is_view(node.all_input_nodes[0])]
    assert len(deep) >= 5


def test_views_of_every_test_model_share_memory_when_run():
    for name in ("views", "attention", "multi_output", "convnet"):
        joint = graphs.joint(name)
        values: dict[fx.Node, Any] = {}
        placeholders = [node for node in joint.nodes if node.op == "placeholder"]
        values.update(zip(placeholders, checks.examples(placeholders, 0), strict=True))
        for node in joint.nodes:
            if node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
            if isinstance(values[node], Tensor) and values[node].numel():
                base = values[ops.view_base(node)]
                shared = base.untyped_storage().data_ptr() == values[node].untyped_storage().data_ptr()
                assert shared, f"{node.name} is no view of {ops.view_base(node).name}"


# --- purity ------------------------------------------------------------------------------------------------------

DRAWS = [
    (aten.rand.default, [8]), (aten.randn.default, [8]), (aten.randint.default, 1000, [8]), (aten.randperm.default, 99),
    (aten.rand_like.default, X), (aten.randn_like.default, X), (aten.randint_like.default, X, 1000),
    (aten.bernoulli.default, X.sigmoid()), (aten.bernoulli.p, X, 0.5), (aten.native_dropout.default, X, 0.5, True),
    (aten.multinomial.default, torch.ones(500), 9), (aten.normal_functional.default, X), (aten.uniform.default, X),
    (aten.exponential.default, X), (aten.geometric.default, X, 0.01), (aten.poisson.default, 100 * X.abs()),
    (aten._standard_gamma.default, X.abs() + 1),
    (aten.rrelu_with_noise_functional.default, -X.abs(), X, 0.1, 0.9, True),
    (prims.inductor_seeds.default, 3, torch.device("cpu")),
]  # fmt: skip
REPEATS = [
    *VIEWS, *COPIES, (aten.sum.default, X), (aten.native_layer_norm.default, X, [6], None, None, 1e-5),
    (aten.convolution.default, X.view(1, 1, 4, 6), torch.ones(1, 1, 3, 3), None, *CONVOLUTION),
    (aten.full.default, [3], 1.0), (aten.sort.default, X), (prims.inductor_lookup_seed.default, N, 0),
]  # fmt: skip


def twice_differs(target: Any, args: tuple[Any, ...]) -> bool:
    first, second = (torch.utils._pytree.tree_leaves(target(*args)) for _ in range(2))
    return any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("made", DRAWS, ids=lambda made: str(made[0]))
def test_operator_that_gives_other_numbers_the_second_time_draws(made: tuple[Any, ...]):
    assert twice_differs(made[0], made[1:])
    node = call(*made)
    assert ops.draws_random_numbers(node)
    assert ops.impurity(node) == "draws random numbers"
    # and the user cannot vouch for it
    assert ops.impurity(node, (ops.name(node),)) == "draws random numbers"


@pytest.mark.parametrize("made", REPEATS, ids=lambda made: str(made[0]))
def test_operator_that_repeats_itself_is_pure(made: tuple[Any, ...]):
    assert not twice_differs(made[0], made[1:])
    assert ops.impurity(call(*made)) is None


@pytest.mark.parametrize("target", [prims.inductor_random.default, prims.inductor_randint.default])
def test_numbers_computed_from_a_seed_that_is_an_argument_are_no_draw(target: Any):
    seed = torch.tensor(7)
    args = ([4], seed, "rand") if target is prims.inductor_random.default else (0, 9, [4], seed)
    assert ops.impurity(call(target, *args)) is None


def test_dropout_of_a_model_draws_its_seeds_and_nothing_else():
    joint = graphs.joint("dropout")
    drawing = [ops.name(node) for node in joint.nodes if ops.draws_random_numbers(node)]
    assert drawing == ["prims.inductor_seeds.default"]
    seeded = [ops.name(n) for n in joint.nodes if ops.name(n).startswith("prims.inductor")]
    assert {"prims.inductor_lookup_seed.default", "prims.inductor_random.default"} <= set(seeded)


FLASH_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
WHOLE = aten.scaled_dot_product_attention.default


@pytest.mark.parametrize(
    ("node", "draws"),
    [
        (silent(FLASH_CPU, Tensor, Tensor, Tensor), False),
        (silent(FLASH_CPU, Tensor, Tensor, Tensor, 0.0, True), False),
        (silent(FLASH_CPU, Tensor, Tensor, Tensor, 0.1, True), True),
        (silent(FLASH_CPU, Tensor, Tensor, Tensor, dropout_p=0.1), True),
        (silent(FLASH, Tensor, Tensor, Tensor, 0.0, True), False),
        (silent(FLASH, Tensor, Tensor, Tensor, 0.2, True), True),
        (silent(FLASH, Tensor, Tensor, Tensor), False),
        (silent(EFFICIENT, Tensor, Tensor, Tensor, None, True), False),
        (silent(EFFICIENT, Tensor, Tensor, Tensor, None, True, 0.3), True),
        (silent(WHOLE, Tensor, Tensor, Tensor), False),
        (silent(WHOLE, Tensor, Tensor, Tensor, None, 0.5), True),
        (silent(WHOLE, Tensor, Tensor, Tensor, dropout_p=0.0), False),
    ],
    ids=lambda value: str(value.args[3:]) + ops.name(value) if isinstance(value, fx.Node) else str(value),
)
def test_attention_draws_only_with_a_dropout_probability(node: fx.Node, draws: bool):
    assert ops.draws_random_numbers(node) is draws
    assert (ops.impurity(node) is None) is not draws


@pytest.mark.parametrize(
    "node",
    [
        silent(aten.add_.Tensor, Tensor, Tensor), silent(aten.copy_.default, Tensor, Tensor),
        silent(aten.relu_.default, Tensor), silent(aten.add.out, Tensor, Tensor, out=None),
        silent(aten.index_put_.default, Tensor, [None], Tensor), silent(torch.ops.rematops.scribble.default, Tensor),
    ],
    ids=ops.name,
)  # fmt: skip
def test_operator_that_writes_an_argument_is_impure_whatever_the_user_says(node: fx.Node):
    assert ops.is_mutating(node)
    assert ops.impurity(node) == "writes its argument"
    assert ops.impurity(node, (ops.name(node),)) == "writes its argument"


def test_custom_operator_is_impure_until_declared():
    node = call(torch.ops.rematops.opaque.default, X)
    assert "unknown purity" in str(ops.impurity(node))
    assert "recompute_ops" in str(ops.impurity(node))
    assert "unknown purity" in str(ops.impurity(node, ("rematops.other", "aten.mm", "opaque")))
    assert ops.impurity(node, ("rematops.opaque",)) is None
    assert ops.impurity(node, ("rematops.opaque.default",)) is None


COLLECTIVES = [
    "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast", "wait_tensor",
]  # fmt: skip


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no collectives")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collective_is_never_run_twice(name: str):
    import torch.distributed._functional_collectives  # registers the operators

    node = silent(getattr(torch.ops._c10d_functional, name).default, Tensor)
    assert "collective" in str(ops.impurity(node))
    assert ops.impurity(node, (ops.name(node),)) is not None


def test_operator_whose_size_depends_on_data_is_impure():
    node = call(aten.nonzero.default, X)
    assert ops.impurity(node) is None
    node.meta["unbacked_bindings"] = {"u0": ()}
    assert ops.impurity(node) == "its size depends on data"


def test_higher_order_operator_is_impure_until_declared():
    node = silent(torch.ops.higher_order.cond, Tensor)
    assert ops.impurity(node) == "higher-order operator"
    assert ops.impurity(node, (ops.name(node),)) is None


def test_items_inputs_and_arithmetic_on_sizes_are_pure():
    node = call(aten.topk.default, X, 2)
    assert ops.impurity(item(node, 1)) is None
    assert ops.impurity(node.all_input_nodes[0]) is None
    assert ops.impurity(node.graph.call_function(operator.mul, (3, 4))) is None


# --- kinds -------------------------------------------------------------------------------------------------------

Q = torch.randn(1, 2, 4, 8)
IMAGE = torch.randn(1, 2, 6, 6)
KINDS = [
    (Kind.CONTRACTION, (aten.mm.default, X, X.t())), (Kind.CONTRACTION, (aten.addmm.default, X[0], X[:, :4], X)),
    (Kind.CONTRACTION, (aten.bmm.default, Q[0], Q[0].mT)), (Kind.CONTRACTION, (FLASH_CPU, Q, Q, Q)),
    (Kind.CONTRACTION, (aten.convolution.default, IMAGE, torch.ones(1, 2, 3, 3), None, *CONVOLUTION)),
    (Kind.REDUCTION, (aten.sum.dim_IntList, X, [1])), (Kind.REDUCTION, (aten.amax.default, X, [1])),
    (Kind.REDUCTION, (aten.var_mean.correction, X, [1])), (Kind.REDUCTION, (aten.max.dim, X, 1)),
    (Kind.REDUCTION, (aten._softmax.default, X, 1, False)), (Kind.REDUCTION, (aten.any.dim, X > 0, 1)),
    (Kind.POINTWISE, (aten.add.Tensor, X, X)), (Kind.POINTWISE, (aten.tanh.default, X)),
    (Kind.POINTWISE, (aten.gt.Scalar, X, 0)), (Kind.POINTWISE, (aten.where.self, X > 0, X, X)),
    (Kind.POINTWISE, (aten.max.other, X, X)), (Kind.POINTWISE, (aten.gelu.default, X)),
    (Kind.POINTWISE, (prims.convert_element_type.default, X, torch.float64)), (Kind.POINTWISE, (aten.clone.default, X)),
    (Kind.POINTWISE, (aten.embedding.default, X, N)), (Kind.POINTWISE, (aten.bitwise_not.default, X > 0)),
    (Kind.FACTORY, (aten.full.default, [3], 0)), (Kind.FACTORY, (aten.arange.start_step, 0, 4, 1)),
    (Kind.VIEW, (aten.permute.default, X, [1, 0])), (Kind.VIEW, (aten.split.Tensor, X, 2)),
    (Kind.EXTERN, (aten.topk.default, X, 2)), (Kind.EXTERN, (aten.sort.default, X)),
    (Kind.EXTERN, (torch.ops.rematops.opaque.default, X)),
    (Kind.EXTERN, (aten._upsample_bilinear2d_aa.default, IMAGE, [9, 9], False)),
]  # fmt: skip


def kind_or_operator(value: Any) -> str:
    return value.name if isinstance(value, Kind) else str(value[0])


@pytest.mark.parametrize(("kind", "made"), KINDS, ids=kind_or_operator)
def test_kind_says_how_inductor_makes_an_operator(kind: Kind, made: tuple[Any, ...]):
    node = call(*made)
    assert ops.kind(node) is kind
    if isinstance(node.meta["val"], tuple | list):
        assert ops.kind(item(node, 0)) is kind


def test_kind_of_inputs_constants_and_sizes():
    graph = fx.Graph()
    assert ops.kind(graph.placeholder("primals_1")) is Kind.INPUT
    assert ops.kind(graph.get_attr("weight")) is Kind.CONSTANT

    def run(x: Tensor) -> Tensor:
        return torch.sin(x) * x.shape[0] * (x.shape[0] + x.shape[1])

    joint = graphs.joint_of(run, graphs.leaf(4, 6), dynamic=True)
    symbolic = [node for node in joint.nodes if isinstance(node.meta.get("val"), torch.SymInt)]
    assert any(node.op == "call_function" for node in symbolic)
    assert {ops.kind(node) for node in symbolic if node.op == "call_function"} == {Kind.SYMBOLIC}


@pytest.mark.parametrize(
    ("exponent", "costly"), [(2, False), (3, False), (0.5, False), (-1, False), (2.7, True), (X, True)],
    ids=["square", "cube", "root", "inverse", "odd", "tensor"],
)
def test_power_is_costly_unless_its_exponent_is_simple(exponent: Any, costly: bool):
    target = aten.pow.Tensor_Tensor if isinstance(exponent, Tensor) else aten.pow.Tensor_Scalar
    assert ops.is_transcendental(call(target, X.abs(), exponent)) is costly


def test_only_loops_are_computed_inside_the_kernel_of_their_reader():
    graph = fx.Graph()
    x = graph.placeholder("primals_1")
    exp, tanh = (graph.call_function(target, (x,)) for target in (aten.exp.default, aten.tanh.default))
    total, product = graph.call_function(aten.sum.default, (exp,)), graph.call_function(aten.mm.default, (exp, tanh))
    assert ops.is_fusible(exp, tanh)
    assert ops.is_fusible(exp, total)
    assert not ops.is_fusible(exp, product)
    assert not ops.is_fusible(product, exp)
    assert not ops.is_fusible(total, exp)
    assert not ops.is_fusible(x, exp)


# --- names and source lines --------------------------------------------------------------------------------------


def test_operator_is_named_with_its_overload_or_without_and_not_by_a_part():
    node = call(aten.add.Tensor, X, X)
    assert ops.name(node) == "aten.add.Tensor"
    assert ops.is_named(node, ("aten.add",))
    assert ops.is_named(node, ("aten.mm", "aten.add.Tensor"))
    assert not ops.is_named(node, ("aten.add.Scalar", "add", "aten", "aten.add_", "aten.ad"))


def test_source_of_a_node_is_the_users_line():
    def run(x: Tensor, w: Tensor) -> Tensor:
        y = torch.exp(x @ w)  # line of exp
        return torch.sigmoid(
            y * 3
        )

    joint = graphs.joint_of(run, graphs.leaf(4, 4), graphs.leaf(4, 4))
    text = Path(__file__).read_text().splitlines()
    (line,) = (n for n, code in enumerate(text, start=1) if code.endswith("# line of exp"))
    for name in ("mm", "exp"):
        assert ops.user_source(joint.by_name[name]) == f"{Path(__file__)}:{line}, {text[line - 1].strip()}"
    assert ops.user_source(joint.by_name["mul"]).startswith(f"{Path(__file__)}:{line + 2}, y * 3")
    assert ops.user_source(joint.by_name["sigmoid"]).startswith(f"{Path(__file__)}:")


def test_source_of_a_node_inside_a_module_is_the_innermost_line_of_the_user():
    joint = graphs.joint("residual")
    sources = {ops.user_source(n) for n in joint.nodes if n.target is aten.addmm.default}
    assert any("self.down(F.silu(self.up(self.norm(x))))" in s or "F.linear" in s for s in sources)


def test_source_of_a_node_in_a_called_function_is_the_line_in_that_function():
    def inner(x: Tensor) -> Tensor:
        return torch.exp(x)  # innermost line

    def run(x: Tensor) -> Tensor:
        return inner(torch.sin(x))

    source = ops.user_source(graphs.joint_of(run, graphs.leaf(4)).by_name["exp"])
    assert source.endswith("return torch.exp(x)  # innermost line")


def test_source_of_a_node_without_a_trace_is_empty():
    assert ops.user_source(call(aten.exp.default, X)) == ""
