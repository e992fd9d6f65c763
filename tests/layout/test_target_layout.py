"""Target layouts: what people write, and where tensors go by their names."""

from __future__ import annotations

import pytest

from cas_ckpt.errors import InvalidInputError, MismatchError
from cas_ckpt.layout.target_layout import TargetLayout, check_splits, parse_layout
from cas_ckpt.objects.spec import Spec

MATRIX, VECTOR = Spec("float32", (64, 32)), Spec("float32", (64,))


def usual(mesh: str, key: str, spec: Spec = MATRIX) -> str:
    return " ".join(map(str, parse_layout(mesh).usual(key, spec)))


@pytest.mark.parametrize(
    ("mesh", "key", "expected"),
    [
        ("dp=4", "model/anything.weight", "S(0)"),
        ("fsdp=4", "model/norm.weight", "S(0)"),
        ("replicate=4", "model/norm.weight", "R"),
        ("replicate=2,shard=4", "model/layers.0.attention.wq.weight", "R S(0)"),
        ("dp=4,tp=2", "model/layers.0.attention.wq.weight", "SS(0,2) S(0)"),
        ("dp=4,tp=2", "optim/state/layers.0.attention.wq.weight/exp_avg", "SS(0,2) S(0)"),
        ("dp=4,tp=2", "model/layers.0.mlp.gate_proj.weight", "SS(0,2) S(0)"),
        ("dp=4,tp=2", "model/layers.0.feed_forward.w2.weight", "S(0) S(1)"),
        ("dp=4,tp=2", "model/layers.0.self_attn.o_proj.weight", "S(0) S(1)"),
        ("dp=4,tp=2", "model/tok_embeddings.weight", "SS(0,2) S(0)"),
        ("dp=4,tp=2", "model/layers.0.attention_norm.weight", "S(0) R"),
        ("dp=4,cp=2,tp=2", "model/layers.0.attention.wk.weight", "SS(0,2) SS(0,2) S(0)"),
        ("tp=2,dp=4", "model/layers.0.attention.wq.weight", "S(0) S(0)"),
        ("tp=8", "model/layers.0.attention.wo.weight", "S(1)"),
    ],
)
def test_tensors_go_where_their_names_say(mesh: str, key: str, expected: str) -> None:
    assert usual(mesh, key) == expected


def test_what_has_no_dimension_is_a_replica_and_a_bias_of_a_row_cut_is_one_over_tp() -> None:
    assert usual("dp=4,tp=2", "optim/state/wq.weight/step", Spec("float32", ())) == "R R"
    assert usual("dp=4,tp=2", "model/wo.bias", VECTOR) == "S(0) R"
    assert usual("dp=4,tp=2", "model/wq.bias", VECTOR) == "SS(0,2) S(0)"


def test_stacked_experts_are_divided_over_ep_and_within_when_they_are_too_few() -> None:
    experts = Spec("float32", (8, 64, 32))
    assert usual("dp=2,ep=4", "model/layers.0.moe.experts.w1", experts) == "SS(0,4) S(0)"
    assert usual("dp=8,ep=8", "model/layers.0.moe.experts.w1", experts) == "S(1) S(0)"
    assert usual("dp=8,ep=8", "model/layers.0.moe.gate.weight", MATRIX) == "SS(0,8) S(0)"


def test_a_mesh_dimension_that_says_nothing_needs_a_rule() -> None:
    with pytest.raises(InvalidInputError, match=r"'pp' says nothing .*shapes="):
        usual("pp=2", "model/w")


@pytest.mark.parametrize("mesh", ["", "dp", "dp=0", "dp=-1", "dp=2,,tp=2", "dp=2;tp=2", "dp=2,dp=4", "dp=4096,tp=4096"])
def test_a_mesh_that_is_none_is_refused(mesh: str) -> None:
    with pytest.raises(InvalidInputError, match="mesh"):
        parse_layout(mesh)


@pytest.mark.parametrize("splits", [["S(0)"], "S(0)", ["S(0)", 3], ["S(0)", "X"], {"a": 1}, None])
def test_a_rule_that_is_none_is_refused(splits: object) -> None:
    with pytest.raises(InvalidInputError):
        parse_layout("dp=2,tp=2", {"model/**": splits})  # type: ignore[dict-item]


def test_equal_layouts_have_equal_digests_and_others_do_not() -> None:
    layouts = [
        parse_layout("dp=4,tp=2"),
        parse_layout("tp=4,dp=2"),
        parse_layout("dp=8"),
        parse_layout("dp=4,tp=2", {"a": ["R", "R"]}),
        parse_layout("dp=4,tp=2", {"a": ["R", "S(0)"]}),
        parse_layout("dp=4,tp=2", {"a": ["R", "S(0)"], "b": ["R", "R"]}),
        parse_layout("dp=4,tp=2", {"b": ["R", "R"], "a": ["R", "S(0)"]}),
    ]
    assert len({layout.digest for layout in layouts}) == len(layouts)
    assert TargetLayout(("dp", "tp"), (4, 2)).digest == layouts[0].digest


def test_a_cut_of_a_dimension_that_is_not_there_names_key_and_region() -> None:
    splits = parse_layout("dp=2", {"w": ["S(2)"]}).rules[0][1]
    with pytest.raises(MismatchError, match=r"w: placement S\(2\) cuts dimension 2.*\[0:64, 0:32\]"):
        check_splits("w", MATRIX, splits)
