"""Components of a pipeline that run on other devices than its first one, or on several."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from sd_ort.core.errors import InputError
from sd_ort.runtime.component_opener import ComponentOpener, Cut, runs_every_step
from sd_ort.runtime.partitioned import PartitionedModel, PlacedPartition

Peer = TypeVar("Peer")  # components of another device


@dataclass
class ComponentPlacement(Generic[Peer]):
    """Components of other devices by their use.

    `peers`: the same components on the other devices of one image; `splits_image`: between its rows, too, and not only
    between the halves of guidance. `placed`: components that run on another device than the rest. `partitioned`:
    openers of the devices that each run a partition of a component's graph, and the function that cuts it.
    """

    peers: list[Peer] = field(default_factory=list)
    splits_image: bool = False
    placed: dict[str, Peer] = field(default_factory=dict)
    partitioned: dict[str, tuple[list[ComponentOpener], Cut]] = field(default_factory=dict)

    def open_partitions(self, name: str, own: ComponentOpener) -> PartitionedModel:
        """Open a component of `partitioned` with the weights of `own`, the opener of its first device."""
        own.overrides.finish()
        openers, cut = self.partitioned[name]
        placed = []
        for opener, partition in zip(openers, cut(own.files.model(name), len(openers)), strict=True):
            opener.overrides = replace(opener.overrides, weights=own.overrides.weights)
            model = opener.open(name, opener.overrides.of(name, partition))
            placed.append(PlacedPartition(model, opener.target.name, opener.target.stream))
        return PartitionedModel(placed)

    def check_assignable(self, name: str) -> None:
        """Raise InputError for a component that several devices run."""
        if (self.peers and runs_every_step(name)) or name in self.partitioned:
            raise InputError(f"{name} is open on two devices: load the pipeline on one to replace it.")
