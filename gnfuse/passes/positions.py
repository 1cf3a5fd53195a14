"""Program order and regions of one graph: which nodes lie between two others, and in which mode they run."""

from __future__ import annotations

from torch.fx import Graph, Node

from gnfuse.passes import effects


class Positions:
    """The nodes of a graph as it was when this was made."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = list(graph.nodes)
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self._region: list[int] = []
        self._nesting: list[int] = []
        region = nesting = 0
        for node in self.nodes:
            nesting += effects.changes_nesting(node)
            region += effects.changes_mode(node)
            self._region.append(region)
            self._nesting.append(nesting)

    def same_region(self, a: Node, b: Node) -> bool:
        """Whether no mode (autocast, grad mode, functorch) changes between the two."""
        return self._region[self.index[a]] == self._region[self.index[b]]

    def in_transform(self, node: Node) -> bool:
        """Whether the node runs under a functorch transform."""
        return self._nesting[self.index[node]] > 0

    def between(self, a: Node, b: Node) -> list[Node]:
        """The nodes strictly between the two."""
        return self.nodes[self.index[a] + 1 : self.index[b]]
