"""`kvjax policies`: list the cache policies."""

import dataclasses

from .console import print_json, print_table
from .options import JsonOption


def policies(as_json: JsonOption = False) -> None:
    """List the cache policies.

    For each policy: what it keeps, the memory of the other tokens (freed, kept but not read, or quantised), and when it
    compresses (the prompt, while decoding, or both). Also whether tokens keep their original positions or are
    renumbered within the cache, and the hyperparameters with their defaults.
    """
    from kvjax.policies import policies as registered

    known = registered()
    if as_json:
        print_json(
            [
                {
                    "name": cls.about.name,
                    "paper": cls.about.paper,
                    "summary": cls.about.summary,
                    "memory": cls.about.memory,
                    "stage": cls.about.stage,
                    "positions": cls.about.positions,
                    "hyperparameters": {field.name: field.default for field in dataclasses.fields(cls)},
                }
                for cls in known.values()
            ]
        )
        return
    print_table(
        ["Policy", "Paper", "Keeps", "Memory", "Stage", "Positions", "Hyperparameters"],
        [
            [
                cls.about.name,
                cls.about.paper,
                cls.about.summary,
                cls.about.memory,
                cls.about.stage,
                cls.about.positions,
                ", ".join(f"{field.name}={field.default}" for field in dataclasses.fields(cls)) or "none",
            ]
            for cls in known.values()
        ],
    )
