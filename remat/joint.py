"""The joint forward/backward graph as AOTAutograd hands it over, with the facts that every later stage asks for."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from remat import ops, torch_internals
from remat.errors import UnsupportedGraph

Node = fx.Node


@dataclass(frozen=True, eq=False)
class JointGraph:
    """A joint graph and how it divides.

    module: the graph; placeholders are primals, then tangents; its output is the forward outputs, then the
        gradients.
    num_fwd_outputs: how many of the outputs belong to the forward.
    static_indices: the primals (by position) that are parameters or buffers, whose memory lives on anyway.

    Everything else is derived once and never written. Passes return a new JointGraph.
    """

    module: fx.GraphModule
    num_fwd_outputs: int
    static_indices: tuple[int, ...] = ()

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes but the output, in graph order."""
        return tuple(node for node in self.module.graph.nodes if node.op != "output")

    @cached_property
    def index(self) -> dict[Node, int]:
        """Position of each node in graph order: the tie-breaker everywhere."""
        return {node: position for position, node in enumerate(self.nodes)}

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """Nodes by name; names survive the split."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def output(self) -> Node:
        """The output node."""
        return self.module.graph.output_node()

    @cached_property
    def outputs(self) -> tuple[object, ...]:
        """Forward outputs, then gradients; None and constants stand among them."""
        (results,) = self.output.args
        return tuple(results) if isinstance(results, tuple | list) else (results,)

    @cached_property
    def forward_outputs(self) -> tuple[Node, ...]:
        """The forward outputs that are nodes."""
        return tuple(value for value in self.outputs[: self.num_fwd_outputs] if isinstance(value, Node))

    @cached_property
    def backward_outputs(self) -> tuple[Node, ...]:
        """The backward outputs that are nodes."""
        return tuple(value for value in self.outputs[self.num_fwd_outputs :] if isinstance(value, Node))

    @cached_property
    def primals(self) -> tuple[Node, ...]:
        """Inputs of the forward."""
        return tuple(n for n in self.nodes if n.op == "placeholder" and torch_internals.is_primal(n))

    @cached_property
    def tangents(self) -> tuple[Node, ...]:
        """Gradients that come in from outside."""
        return tuple(node for node in self.nodes if torch_internals.is_tangent(node))

    @cached_property
    def device(self) -> torch.device:
        """Where it runs: the device of the first accelerator tensor, else the CPU."""
        values = (node.meta.get("val") for node in self.nodes)
        devices = [value.device for value in values if isinstance(value, torch.Tensor)]
        accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
        return (accelerators or devices or [torch.device("cpu")])[0]

    @cached_property
    def has_symbolic_sizes(self) -> bool:
        """Whether sizes are among the inputs, so that one graph serves many."""
        return any(torch_internals.is_sym_node(node) for node in self.primals)

    @property
    def held_tangents(self) -> tuple[Node, ...]:
        """Incoming gradients of scalars: a loss, whose gradient `torch.autograd.backward` holds till it returns."""
        values = [(node, node.meta.get("val")) for node in self.tangents if node.users]
        return tuple(node for node, value in values if isinstance(value, torch.Tensor) and value.ndim == 0)

    @cached_property
    def tangent_closure(self) -> frozenset[Node]:
        """Nodes that can only run in the backward: they depend on a tangent, or must run there."""
        found: set[Node] = set()
        for node in self.nodes:
            starts = (
                torch_internals.is_tangent(node)
                or torch_internals.is_backward_seed(node)
                or torch_internals.must_be_in_backward(node)
            )
            if starts or any(argument in found for argument in node.all_input_nodes):
                found.add(node)
        return frozenset(found)

    @cached_property
    def required_forward(self) -> frozenset[Node]:
        """Nodes that the forward runs whatever is saved: what its outputs and its writes hang on."""
        roots = [n for n in self.forward_outputs if n not in self.tangent_closure]
        roots += [
            node
            for node in self.nodes
            if node not in self.tangent_closure
            and node.op == "call_function"
            and torch_internals.must_be_in_forward(node)
        ]
        return frozenset(self.ancestors(roots))

    def ancestors(self, roots: list[Node], stop: Set[Node] = frozenset()) -> set[Node]:
        """The roots and everything they are computed from, not going past `stop` (which is not included)."""
        found: set[Node] = set()
        pending = [root for root in roots if root not in stop]
        while pending:
            node = pending.pop()
            if node in found:
                continue
            found.add(node)
            pending += [a for a in node.all_input_nodes if a not in found and a not in stop]
        return found

    @cached_property
    def needed_by_backward(self) -> tuple[Node, ...]:
        """Values outside the tangent closure that the backward reads, or returns as gradients, in order."""
        outputs = set(self.backward_outputs)
        return tuple(
            node
            for node in self.nodes
            if node not in self.tangent_closure
            and (node in outputs or any(user in self.tangent_closure for user in node.users))
        )

    @cached_property
    def written_in_backward(self) -> frozenset[Node]:
        """Values of the forward whose memory the backward writes: the caller holds it, so no copy will do."""
        writes = [n for n in self.nodes if n in self.tangent_closure and n.op == "call_function" and ops.is_mutating(n)]
        bases = {ops.view_base(argument) for node in writes for argument in written_arguments(node)}
        return frozenset(base for base in bases if base not in self.tangent_closure and base.op != "placeholder")

    @cached_property
    def written_primals(self) -> dict[Node, Node | None]:
        """Primals that the forward writes, each with the node that writes it (None: AOTAutograd, afterwards).

        Under Inductor the write is a trailing `copy_`; where AOTAutograd keeps it outside the graph, only the
        description of a forward output tells.
        """
        written: dict[Node, Node | None] = {}
        for node in self.nodes:
            if ops.is_mutating(node) and node not in self.tangent_closure:
                for argument in written_arguments(node):
                    base = ops.view_base(argument)
                    if base.op == "placeholder":
                        written[base] = node
        inputs = {id(node.meta["desc"]): node for node in self.primals if node.meta.get("desc") is not None}
        for description in list(self.output.meta.get("desc") or ())[: self.num_fwd_outputs]:
            replaced = torch_internals.written_input(description)
            if replaced is not None:
                equal = [n for n in inputs.values() if n.meta["desc"] == replaced]
                written.update((node, None) for node in equal if node not in written)
        return written

    @property
    def num_written_inputs(self) -> int:
        """How many of the forward outputs, the first ones, replace inputs after the call: no user sees them."""
        descriptions = list(self.output.meta.get("desc") or ())[: self.num_fwd_outputs]
        return sum(torch_internals.written_input(description) is not None for description in descriptions)

    def only_written_by_backward(self, primal: Node) -> bool:
        """Whether the backward needs this input as the target of its writes and for nothing else."""
        users = [user for user in primal.users if user in self.tangent_closure]
        targets = [ops.is_mutating(u) and u.args[0] is primal and u.args.count(primal) == 1 for u in users]
        return bool(targets) and all(targets)

    def check(self) -> None:
        """Raise UnsupportedGraph for what remat cannot partition, naming the node and the user's line."""
        if self.num_fwd_outputs > len(self.outputs):
            raise UnsupportedGraph(
                f"{self.num_fwd_outputs} forward outputs announced, the joint graph returns {len(self.outputs)}"
            )
        for node in self.nodes:
            if node.op not in ("placeholder", "get_attr", "call_function"):
                raise UnsupportedGraph(f"node {node.name} has the unknown kind {node.op!r}")
            if node.op == "call_function" and "val" not in node.meta and not _returns_nothing(node):
                raise UnsupportedGraph(f"node {node.name} ({ops.name(node)}) carries no value to size it by")
        for node in self.forward_outputs:
            if node in self.tangent_closure and not ops.is_mutating(node):
                raise UnsupportedGraph(
                    f"forward output {node.name} ({ops.user_source(node)}) depends on a gradient"
                )


def written_arguments(node: Node) -> list[Node]:
    """The arguments that a writing operator writes."""
    assert isinstance(node.target, torch._ops.OpOverload)
    written = []
    for position, declared in enumerate(node.target._schema.arguments):
        if declared.alias_info is None or not declared.alias_info.is_write:
            continue
        given = node.args[position] if position < len(node.args) else node.kwargs.get(declared.name)
        values = given if isinstance(given, list | tuple) else [given]
        written += [value for value in values if isinstance(value, Node)]
    return written


def _returns_nothing(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns
