"""kvjax's weights by tunix's names and in its layouts."""

from typing import Any

from kvjax.integrations.tunix_weights import tunix_names
from kvjax.models import Params
from kvjax.models.params import tree_map_named


def theirs(params: Params) -> dict[str, Any]:
    """Weights by tunix's names and in its layouts, as nested dicts."""
    config, tree, names = params.config, {}, tunix_names(params.config)

    def put(name: str, array: Any) -> None:
        last = name.rpartition(".")[2]
        if last in ("q", "k", "v"):
            array = array.T.reshape(config.hidden_size, -1, config.head_dim)
        elif last == "o":
            array = array.T.reshape(config.num_heads, config.head_dim, config.hidden_size)
        elif array.ndim == 2 and name != "embed":
            array = array.T
        *folders, leaf = names[name].split(".")
        place = tree
        for folder in folders:
            place = place.setdefault(int(folder) if folder.isdigit() else folder, {})
        place[leaf] = array

    tree_map_named(put, params)
    return tree
