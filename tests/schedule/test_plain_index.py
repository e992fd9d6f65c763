"""The index in plain dicts answers as the real one does, after any history of packs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cas_ckpt.core.packs import read_pack
from cas_ckpt.index import contents, garbage, history
from cas_ckpt.index.garbage import PackLiveness
from cas_ckpt.objects.pack import PACK_PREFIX
from tests.index.building import empty
from tests.schedule.plain_index import PlainIndex
from tests.schedule.scenarios import play_random
from tests.schedule.soundness import Shelf
from tests.schedule.world import IndexPool, fixed_chance, world
from tests.searches import tries


def _answers(index: Any, digests: list[bytes], chance: random.Random) -> dict[str, object]:
    links = index.read(history.read_links)
    commits = set(chance.sample(sorted(links), chance.randint(0, len(links))))
    keeping = set(chance.sample(sorted(commits), chance.randint(0, len(commits))))
    roots = {node for digest in keeping for node in (links[digest].root, links[digest].layout)}
    packs = sorted(index.packs())
    condemned = chance.sample(packs, chance.randint(0, len(packs)))
    with garbage.living(index, commits=commits, roots=roots, published=commits) as living:
        alive = {
            "missing": sorted(living.missing()),
            "packs": sorted(map(_sizes, living.packs())),
            "entries": living.live_entries(packs),
            "needed": living.needed(condemned),
            "names": living.pack_names(),
            "summary": living.summary(),
        }
    return alive | {
        "sizes": index.packs(),
        "located": {digest: sorted(places) for digest, places in index.read(contents.locate, digests).items()},
        "chunks": index.read(contents.chunk_digests),
        "links": links,
        "prefix": [index.read(contents.resolve_prefix, digest.hex()[:6]) for digest in sorted(links)],
        "in parts": index.read(contents.packs_in_parts),
    }


def _sizes(pack: PackLiveness) -> tuple[object, ...]:
    """Without its age, and whether it was published: those decide what is spared, not what is safe."""
    sizes = pack.size_bytes, pack.num_entries, pack.dead_entries, pack.dead_bytes, pack.duplicate_bytes
    return pack.name, pack.kind, *sizes


@pytest.mark.parametrize("seed", range(tries(8, 25)))
def test_both_give_the_same_answers(seed: int) -> None:
    chance = random.Random(seed)
    shelves = [play_random(number, sql=False).before_quiet for number in range(10 * seed, 10 * seed + 4)]
    everything = Shelf()
    for shelf in shelves:  # packs of several repositories: duplicates, and nodes whose children are not there
        everything.values.update({key: data for key, data in shelf.values.items() if key.startswith(PACK_PREFIX)})
    records = [read_pack(everything, key) for key in sorted(everything.values)]
    digests = sorted({entry.digest for record in records for entry in record.entries})
    place = world("plain")
    with IndexPool() as indexes, fixed_chance(seed):
        real, plain = indexes.copy(place), PlainIndex(place.config.store_id)
        empty(real)
        for _ in range(4):
            added = chance.sample(records, chance.randint(1, min(5, len(records))))
            dropped = [record.name for record in chance.sample(records, chance.randint(0, 3))]
            for index in (real, plain):
                with fixed_chance(seed):
                    for record in added:
                        index.add_packs([record])
                    index.drop_packs(dropped)
            same = chance.random()
            assert _answers(plain, digests, random.Random(same)) == _answers(real, digests, random.Random(same))
