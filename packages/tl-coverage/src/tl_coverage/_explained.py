"""What has been explained so far: missing parameters, and the optimizers' tensors that stand for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tl_core import Finding
from tl_coverage._inventory import Entry, Inventory

CALLED_WITH = "in place of its own parameters (torch.func.functional_call)"


@dataclass
class Explained:
    """Hold the missing parameters that foreign tensors account for."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    claimed: set[int] = field(default_factory=set)

    def claim(self, names: Iterable[str], entries: Iterable[Entry]) -> None:
        """Settle missing parameters and the tensors that stand for them."""
        self.names.update(names)
        self.claimed.update(id(entry.tensor) for entry in entries)

    def open_entries(self, inventory: Inventory) -> list[Entry]:
        """List the foreign tensors that are not claimed."""
        return [entry for entry in inventory.foreign if id(entry.tensor) not in self.claimed]

    def open_names(self, inventory: Inventory) -> list[str]:
        """List the missing parameters that are not settled."""
        return [name for name in inventory.missing if name not in self.names]
