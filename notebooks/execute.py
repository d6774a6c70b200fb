"""Runs the notebooks, each in a fresh kernel, and keeps their outputs: `python notebooks/execute.py [NOTEBOOK ...]`.

It fails where a reader would see an error or a warning. With `--check`, outputs are looked at and not kept.
"""

import argparse
import base64
import io
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).parent

FEW_LAYERS = """
def _keep_few_layers():
    import dataclasses

    import kvjax
    from kvjax.policies import profile
    from kvjax.runtime import absent_tpu

    whole_load, whole_shipped, configs, kept = kvjax.load, profile.shipped, [], slice(1, 3)

    def load(*arguments, **options):
        params = whole_load(*arguments, **options)
        configs.append(params.config)
        return params.replace(layers=params.layers[kept], config=params.config.with_depth(2))

    def shipped(method, config, *kind):
        found = whole_shipped(method, configs[-1], *kind) if configs else None
        if found is None:
            return None
        tables = {name: getattr(found, name)[kept] for name in found.tables}
        return dataclasses.replace(found, model=profile.fingerprint(config), **tables)

    def mesh(chips):
        raise RuntimeError("no TPU compiler here")

    kvjax.load, profile.shipped, absent_tpu.mesh = load, shipped, mesh


_keep_few_layers()
"""
"""A cell that replaces `kvjax.load` by a function that keeps two layers of a model, which has the profiles of these, and hides the TPU
compiler. Most of a notebook's time is compilation, which takes longer the more layers there are. Layers 1 and 2 of the default model
have heads of every kind.
"""


def execute(path: Path, timeout: int = 900, *, few_layers: bool = False) -> Any:
    """The notebook at `path` with the outputs of a run from top to bottom, in its folder.

    Args:
        timeout: seconds that a cell may take.
        few_layers: whether models that `kvjax.load` loads keep two of their layers, and no program is compiled for absent TPUs.
            All cells run, in a fraction of the time, but their outputs are not for readers.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    if few_layers:
        notebook.cells.insert(0, nbformat.v4.new_code_cell(FEW_LAYERS))
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    # The kernel's exact version would change with every machine.
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    return notebook


def shrink(notebook: Any) -> None:
    """Store its pictures in 256 colours, which is a fraction of their size and looks the same."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if picture := output.get("data", {}).get("image/png"):
                small = io.BytesIO()
                whole = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
                whole.quantize(256, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
                output["data"]["image/png"] = base64.b64encode(small.getvalue()).decode()


def complaints(notebook: Any) -> list[str]:
    """All that cells wrote to the error stream, warnings among it."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]


def main() -> None:
    """Run what the command line names, by default all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(FOLDER.glob("*.ipynb")))
    parser.add_argument("--check", action="store_true", help="leave the files as they are")
    arguments = parser.parse_args()
    for path in arguments.notebooks:
        notebook = execute(path)
        if found := complaints(notebook):
            raise SystemExit(f"{path.name} complains:\n{''.join(found)}")
        if not arguments.check:
            shrink(notebook)
            nbformat.write(notebook, path)
        print(f"{path.name}: no complaints")


if __name__ == "__main__":
    main()
