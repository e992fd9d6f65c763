"""Names of tensors: those in a file, and those that the same tensors have in a live object.

    wrappers    torch.compile, DistributedDataParallel and Fabric put a name before those of the module in them. A
                commit of a live module leaves it out (training/stateful.py), so an import does, too.
    adapters    PEFT leaves the adapter's name out of its files: `q_proj.lora_A.weight` there is
                `q_proj.lora_A.default.weight` in a live PeftModel. An import puts it in, an export takes it out.

What PEFT writes was read from, and compared with, version 0.21.2 (`get_peft_model_state_dict` and
`set_peft_model_state_dict`): it goes by the modules of the live model, here it goes by `adapter_config.json`.

Invariant: different names stay different; what is not certain stays as it is. Must not know where tensors are stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.formats.models import read_json_object
from cas_ckpt.objects.state import CONTAINER_KINDS, ORDER, Container, Item, Name, Path, TensorItem, render_key

# --- wrappers -------------------------------------------------------------------------------

_MODULE = "module"
"""The one name of a wrapper that modules of users have, too: taken off where it is before all that is in a mapping."""


def without_wrappers(container: Container, wrappers: Set[str], told: list[str], path: Path = ()) -> Container:
    """`container` with the state of each module in it named as if no wrapper were around the module.

    A wrapper's name counts where it stands alone: no other name follows what is before it.

    Args:
        wrappers: The names.
        told: Gets a sentence for each state of which names are changed.
        path: Where the container is.
    """
    children = dict(container.children)
    for name, child in container.children.items():
        if isinstance(child, Container) and child.kind in CONTAINER_KINDS:
            children[name] = without_wrappers(child, wrappers, told, (*path, name))
    if any(children[name] is not child for name, child in container.children.items()):
        container = replace(container, children=children)
    names = [name for name in children if isinstance(name, str)]
    if len(names) < len(children) or not _is_module_state(container):
        return container
    followers = _followers(names)
    short = {name: _without(name, wrappers, followers) for name in names}
    longer = [name for name in names if short[name] != name]
    if not longer:
        return container
    gone = " and ".join(sorted({f"{part}." for name in longer for part in name.split(".") if part in wrappers}))
    count = f"{len(longer)} {'names' if len(longer) > 1 else 'name'}"
    told.append(f"{render_key(path) or 'the state'}: {gone} of a wrapper is left out of {count}")
    versions = container.versions
    if versions is not None:
        versions = {_without(f"{name}.", wrappers, followers).rstrip("."): each for name, each in versions.items()}
    return replace(renamed(container, short), versions=versions)


def _is_module_state(container: Container) -> bool:
    """Whether it may be what a module's `state_dict()` gave: tensors, and no containers beside them."""
    items = container.children.values()
    parts = [item for item in items if isinstance(item, Container)]
    return (
        container.kind in ("dict", "odict")
        and all(part.kind not in CONTAINER_KINDS for part in parts)
        and (bool(parts) or any(isinstance(item, TensorItem) for item in items))
    )


def _followers(names: Iterable[str]) -> dict[str, str | None]:
    """Beginning of a name, up to a dot -> the part that follows it; None: several do."""
    followers: dict[str, str | None] = {}
    for name in names:
        before = ""
        for part in name.split("."):
            if followers.setdefault(before, part) != part:
                followers[before] = None
            before += f"{part}."
    return followers


def _without(name: str, wrappers: Set[str], followers: Mapping[str, str | None]) -> str:
    kept: list[str] = []
    before = ""
    *parts, last = name.split(".")
    for part in parts:
        if part not in wrappers or followers.get(before) != part or (part == _MODULE and kept):
            kept.append(part)
        before += f"{part}."
    return ".".join([*kept, last])


def renamed(container: Container, names: Mapping[str, str]) -> Container:
    """`container` with other names for what is in it; all others stay.

    Raises:
        InvalidInputError: two would have one name.
    """
    new: Mapping[Any, str] = names
    children: dict[Name, Item] = {}
    for name, child in container.children.items():
        if children.setdefault(new.get(name, name), child) is not child:
            raise InvalidInputError(f"{name!r} and another name in the file stand for {new[name]!r}: keep the names")
    attrs = container.attrs
    if container.kind == "odict" and attrs:
        attrs = {ORDER: [new.get(name, name) for name in attrs[ORDER]]}
    return replace(container, children=children, attrs=attrs)


# --- adapters of PEFT -----------------------------------------------------------------------

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model"
"""The file of the weights, without its suffix."""

_PREFIXES = {
    "ADALORA": "lora_", "BOFT": "boft_", "C3A": "c3a_", "DELORA": "delora_", "FOURIERFT": "fourierft_",
    "GRALORA": "gralora_", "HRA": "hra_", "IA3": "ia3_", "LN_TUNING": "ln_tuning_", "LOHA": "hada_", "LOKR": "lokr_",
    "LORA": "lora_", "MISS": "miss_", "OFT": "oft_", "ROAD": "road_", "TRAINABLE_TOKENS": "trainable_tokens_",
    "WAVEFT": "waveft_",
}  # fmt: skip
"""The prefix of the names of an adapter's own parameters by `peft_type`; other types have rules of their own."""

_TOKENS = "trainable_tokens_"
_MAGNITUDE = "lora_magnitude_vector"
_SAVED = "modules_to_save"
_BASES = ("base_layer", "original_module")
_EMBEDDINGS = frozenset({"embed_tokens", "lm_head"})
"""Layers that PEFT writes whole where they are adapted."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of PEFT, as its configuration describes it.

    Attributes:
        name: Its name in the live model.
        prefixes: What the names of its own parameters begin with.
        modules_to_save: Ends of the names of the modules that it has a copy of.
        bias: Which biases of the model are its, too: "none", "all" or "..._only".
        embeddings: Layers of embeddings that are written whole.
    """

    name: str
    prefixes: tuple[str, ...]
    modules_to_save: tuple[str, ...]
    bias: str
    embeddings: frozenset[str]

    def live_name(self, name: str) -> str:
        """The name in the live model of a tensor of its file."""
        parts = name.split(".")
        at = self._own(parts)
        if at is not None:
            rest = parts[at + 1 :] or (["weight"] if parts[at] == _MAGNITUDE else [])
            return ".".join([*parts[: at + 1], self.name, *rest])
        if self._is_inside(parts):
            return name
        first = 3 if parts[:2] == ["base_model", "model"] else 1
        for end in range(first, len(parts)):
            if self.modules_to_save and ".".join(parts[:end]).endswith(self.modules_to_save):
                return ".".join([*parts[:end], _SAVED, self.name, *parts[end:]])
        return name

    def file_names(self, names: Collection[str]) -> dict[str, str]:
        """Name of a tensor in a module's state -> name in the adapter's file, of those that are the adapter's."""
        found, layers = {}, set()
        for name in names:
            parts = name.split(".")
            at = self._own(parts)
            if at is not None and parts[at + 1 : at + 2] == [self.name]:
                rest = [] if parts[at] == _MAGNITUDE else parts[at + 2 :]
                layers.add(".".join(parts[:at]))
                found[name] = ".".join([*parts[: at + 1], *rest])
            elif at is None and _SAVED in parts:
                at = parts.index(_SAVED)
                if parts[at + 1 : at + 2] == [self.name]:
                    layers.add(".".join(parts[:at]))
                    found[name] = ".".join([*parts[:at], *parts[at + 2 :]])
        bases = {layer for name in names if not name.endswith(".bias") for layer in _adapted_layers(name)}
        # A live model has the layer that was adapted beside the adapter. Where it has not (a bias may be written with
        # the adapter), it is what an import made: all of it was in the file.
        is_alone = not layers <= bases
        for name in names if found else ():
            parts = name.split(".")
            others = self._own(parts) is not None or _SAVED in parts
            if name not in found and not others and (is_alone or self._is_written(parts)):
                found[name] = name
        return found

    def names_in(self, names: Iterable[str]) -> set[str]:
        """Names of adapters of this type in a module's state."""
        found: set[str] = set()
        for name in names:
            parts = name.split(".")
            at = self._own(parts)
            found.update(parts[at + 1 : at + 2] if at is not None else ())
        return found - {"weight", "bias"}

    def _own(self, parts: Sequence[str]) -> int | None:
        """The place of the name of a parameter of the adapter; None: it is no such parameter."""
        return next((at for at in reversed(range(len(parts))) if parts[at].startswith(self.prefixes)), None)

    def _is_inside(self, parts: Sequence[str]) -> bool:
        return _SAVED in parts or not set(parts).isdisjoint(_BASES)

    def _is_written(self, parts: Sequence[str]) -> bool:
        """Whether a tensor of the model itself is written with the adapter."""
        if parts[-1] == "bias" and self.bias != "none":
            return parts[-2:-1] == ["base_layer"] or not self.bias.endswith("_only")
        return parts[-2:-1] == ["base_layer"] and not self.embeddings.isdisjoint(parts[-3:-2])


def _adapted_layers(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:at]) for at, part in enumerate(parts) if part in _BASES]


def read_adapter(config: bytes, name: str) -> Adapter | str:
    """The adapter called `name` that an `adapter_config.json` describes; or why its names cannot be told.

    Raises:
        InvalidInputError: no adapter can be called so.
    """
    if not name or not set(name).isdisjoint("./"):
        raise InvalidInputError(f"{name!r} is no name of an adapter: wanted one without . and /, e.g. default")
    try:
        found = read_json_object(config)
    except ValueError as error:
        return f"{ADAPTER_CONFIG} {error}"
    kind = str(found.get("peft_type"))[:40]
    if kind not in _PREFIXES:
        return f"how PEFT names what is of the type {kind} is not known"
    targets, tokens = found.get("target_modules"), found.get("trainable_token_indices")
    whole = frozenset(_texts(targets)) & _EMBEDDINGS if tokens is None and kind != "TRAINABLE_TOKENS" else frozenset()
    bias = found.get("bias")
    return Adapter(
        name, (_PREFIXES[kind], _TOKENS), _texts(found.get(_SAVED)), bias if isinstance(bias, str) else "none", whole
    )


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(each for each in value if isinstance(each, str) and each) if isinstance(value, list) else ()
