"""Who offers and who needs what, in one generation: each participant learns it of all the others.

What goes through the store grows with their number: a listing (``core.placement``) is put there
once, whoever has it too; of each participant come the digests of its own alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_ft.core.layouts.layout import Layout, ShardPlace
from elastic_ft.core.placement import HolderPart, Listing, list_parts, place_parts
from elastic_ft.core.sharding import Placement
from elastic_ft.core.typed import Undecodable, decoder
from elastic_ft.errors import GroupBroken
from elastic_ft.groups.groups import OTHERS_TIMEOUT_S, Groups
from elastic_ft.keeper.buffer import Schema, schema_of_parts
from elastic_ft.state.tensors import LocalState, tensor_name
from elastic_ft.transport.messages import MessageRefused, Packed, pack, unpack


@dataclass(frozen=True, slots=True)
class Listed:
    """Digests of one participant's listings.

    Attributes:
        offers: of each shard that it has of the source, with the shard's name.
        needs: of its part of the new layout; none for a donor.
        space: how what it offers is cut.
    """

    offers: tuple[tuple[str, str], ...]
    needs: str | None
    space: str = ""


@dataclass(frozen=True, slots=True)
class Placed:
    """Attributes:
    offered, needed: which participants, by number, have and want which boxes.
    itemsizes: bytes per element, by tensor.
    ranks: what each rank of the new layout has.
    """

    offered: Placement
    needed: Placement
    itemsizes: Mapping[str, int]
    ranks: Mapping[int, HolderPart]

    def schema_of(self, rank: int) -> Schema:
        """Of the snapshots that ``rank`` takes."""
        return schema_of_parts(
            (name, kind.dtype, kind.shape, box, kind.itemsize)
            for name, kind, box in self.ranks[rank].boxes()
        )


def exchange_placed(groups: Groups, offers: Sequence[LocalState], needs: LocalState) -> Placed:
    """Tells everyone what this participant offers, a state for each shard that the source has at
    it, and what it needs. Returns everyone's. Raises GroupBroken.
    """
    return tell(groups, offers, needs).placed()


@dataclass(frozen=True, slots=True)
class Told:
    """What all have told each other, ``own`` being what this one has."""

    groups: Groups
    own: Mapping[str, Listing]
    everyones: Sequence[Listed]

    def listings(self) -> dict[str, Listing]:
        """By digest: those that are not one's own are fetched. Raises GroupBroken."""
        offered = (digest for one in self.everyones for _, digest in one.offers)
        needed = (one.needs for one in self.everyones if one.needs is not None)
        return {
            digest: self.own.get(digest) or _fetch(self.groups, digest)
            for digest in dict.fromkeys((*offered, *needed))
        }

    def placed(self) -> Placed:
        """Raises GroupBroken."""
        found = self.listings()
        layout = self.groups.assignment.layout
        try:
            offering = [
                HolderPart(str(number), found[digest], _cut(listed.space), ShardPlace.parse(shard))
                for number, listed in enumerate(self.everyones)
                for shard, digest in listed.offers
            ]
            needing = {
                rank: HolderPart(str(rank), found[listed.needs], layout, layout.place_of(rank))
                for rank, listed in enumerate(self.everyones)
                if listed.needs is not None
            }
            itemsizes = {
                name: listing.kinds[kind].itemsize
                for listing in found.values()
                for name, kind in listing.tensors
            }
            offered, needed = place_parts(offering), place_parts(needing.values())
        except (IndexError, ValueError) as error:
            raise GroupBroken(f"what a participant says it has can't be: {error}") from None
        return Placed(offered, needed, itemsizes, needing)


def tell(groups: Groups, offers: Sequence[LocalState], needs: LocalState) -> Told:
    """The first half of ``exchange_placed``."""
    shards = dict(zip(sorted(groups.assignment.has), offers, strict=True))
    return tell_shards(groups, "listed", groups.assignment.source.space, shards, needs)


def tell_shards(
    groups: Groups, name: str, space: str, shards: Mapping[str, LocalState], needs: LocalState
) -> Told:
    """As ``tell``, of anything that is cut as ``space`` says. ``name``: of this, among others."""
    layout = groups.assignment.layout
    own: dict[str, Listing] = {}

    def publish(state: LocalState, of: Layout, place: ShardPlace) -> str:
        listing = _listing(state, of, place)
        digest = hashlib.blake2b(pack(listing), digest_size=16).hexdigest()
        if digest not in own:
            own[digest] = listing
            groups.publish(f"listings/{digest}", lambda: pack(Packed(listing)))
        return digest

    offered = tuple(
        (shard, publish(state, _cut(space), ShardPlace.parse(shard)))
        for shard, state in shards.items()
    )
    needed = None if groups.rank is None else publish(needs, layout, layout.place_of(groups.rank))
    listed = Listed(offered, needed, space)  # once what is offered was verified, large as it is
    return Told(groups, own, groups.exchange_values(name, listed, OTHERS_TIMEOUT_S))


def _fetch(groups: Groups, digest: str) -> Listing:
    try:
        found: Listing = decoder(Listing)(unpack(groups.published(f"listings/{digest}")))
    except (MessageRefused, Undecodable) as error:
        raise GroupBroken(f"a listing can't be read: {error}") from error
    return found


def _listing(state: LocalState, layout: Layout, place: ShardPlace) -> Listing:
    """In the order of a snapshot's schema."""
    parts = (
        (tensor_name(key), tensor.dtype, tensor.local.element_size(), tensor.shape, tensor.box)
        for key, tensor in sorted(state.items())
    )
    return list_parts(parts, layout, place)


def _cut(space: str) -> Layout:
    return Layout.of_shard_space(space) if space else Layout()
