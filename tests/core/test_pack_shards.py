"""Packs are divided among jobs by their names alone: all of them, each once, the same every time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt.core.units import MOST_SHARDS, PackShard, parse_shard
from cas_ckpt.errors import InvalidInputError
from cas_ckpt.objects.pack import PackKind
from cas_ckpt.transfer.pack_writer import pack_key

KEYS = st.builds(pack_key, st.binary(min_size=16, max_size=16), st.sampled_from(PackKind))


@given(st.lists(KEYS, unique=True, max_size=60), st.integers(1, 40))
def test_every_pack_is_in_one_part_and_in_one_alone(keys: list[str], parts: int) -> None:
    shards = [PackShard(part, parts) for part in range(1, parts + 1)]
    assert sorted(key for shard in shards for key in shard.of(keys)) == sorted(keys)


@given(st.lists(KEYS, unique=True, max_size=60), st.integers(1, 40), st.randoms())
def test_a_part_is_the_same_whatever_else_there_is(keys: list[str], parts: int, chance: object) -> None:
    shard = PackShard(parts, parts)
    assert shard.of(keys[:20]) == [key for key in shard.of(keys) if key in keys[:20]]
    assert shard.of(keys[::-1]) == shard.of(keys)[::-1]


def test_data_and_meta_pack_of_one_name_go_together_and_parts_are_about_equal() -> None:
    names = [number.to_bytes(16, "little") for number in range(10_000)]
    import hashlib

    keys = [pack_key(hashlib.md5(name).digest(), PackKind.DATA) for name in names]
    sizes = [len(PackShard(part, 7).of(keys)) for part in range(1, 8)]
    assert max(sizes) - min(sizes) < 300
    assert PackShard(3, 7).has(keys[0]) == PackShard(3, 7).has(keys[0].replace(".data", ".meta"))


def test_a_part_is_read_as_people_write_it() -> None:
    assert parse_shard("2/7") == PackShard(2, 7)
    assert str(parse_shard("16/16")) == "16/16"
    for text in ("", "0/7", "8/7", "7", "a/b", "1/0", "-1/7", "1/2/3", f"1/{MOST_SHARDS + 1}", "1 / 2"):
        with pytest.raises(InvalidInputError, match="give I/N"):
            parse_shard(text)
