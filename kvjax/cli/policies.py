"""`kvjax policies`: what there is to choose from."""

import dataclasses

from .console import print_json, print_table
from .options import JsonOption


def policies(as_json: JsonOption = False) -> None:
    """List the cache policies.

    What each keeps, what becomes of the memory of the rest (freed, only not read, or held in fewer bits), whether it compresses
    the prompt, while decoding, or both, whether tokens stay at their original positions or take their place in the cache,
    and hyperparameters with their defaults.
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
