"""Notebooks: run them, and show them on the site.

    python docs/tools/notebooks.py run docs/notebooks/*.ipynb

runs each from top to bottom, in a new kernel and an empty directory, and writes what it shows into the notebook,
without anything that depends on the machine. With `--into DIR`, the notebooks with their new outputs go to that
directory.
"""

import argparse
import html
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

_TIMEOUT = 120  # seconds a cell may take
_KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
_LANGUAGE = {"language_info": {"name": "python"}}


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with what it shows when it is run. A cell that raises is an error, unless it is tagged for it."""
    import nbformat
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory() as folder:
        here = os.path.realpath(folder)
        (Path(here) / "work").mkdir()
        os.environ |= {"IPYTHONDIR": f"{here}/ipython", "JUPYTER_RUNTIME_DIR": here}  # nothing of the user's own
        node = nbformat.reads(json.dumps(notebook), as_version=4)
        resources = {"metadata": {"path": f"{here}/work"}}
        ran = NotebookClient(node, kernel_name="python3", timeout=_TIMEOUT, resources=resources).execute()
        return clean(json.loads(nbformat.writes(ran)), f"{here}/work")


def clean(notebook: dict[str, Any], folder: str) -> dict[str, Any]:
    """A notebook with nothing in it that depends on the machine or on the program that edited it."""
    cells = [_clean_cell(number, cell, folder) for number, cell in enumerate(notebook["cells"])]
    return {"cells": cells, "metadata": {**_KERNEL, **_LANGUAGE}, "nbformat": 4, "nbformat_minor": 5}


def text_of(notebook: dict[str, Any]) -> str:
    """A notebook as the text of its file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _clean_cell(number: int, cell: dict[str, Any], folder: str) -> dict[str, Any]:
    kept = {"cell_type": cell["cell_type"], "id": f"cell-{number}", "metadata": {}, "source": _lines(_joined(cell))}
    if cell["cell_type"] != "code":
        return kept
    outputs = [_clean_output(output, folder) for output in cell["outputs"] if output["output_type"] != "stream"]
    for name in ("stdout", "stderr"):  # a kernel sends them in any order, and in parts
        text = "".join(_joined(part) for part in cell["outputs"] if part.get("name") == name)
        if text:
            shown = _lines(text.replace(folder, "…"))
            outputs.insert(0, {"output_type": "stream", "name": name, "text": shown})
    return {**kept, "execution_count": cell["execution_count"], "outputs": outputs}


def _clean_output(output: dict[str, Any], folder: str) -> dict[str, Any]:
    data = {kind: _lines("".join(text).replace(folder, "…")) for kind, text in output["data"].items()}
    return {**output, "data": data, "metadata": {}}


def _joined(part: dict[str, Any]) -> str:
    """The text of a cell, or of a part of what it printed: a file has it in lines."""
    return "".join(part["source" if "source" in part else "text"])


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def to_markdown(notebook: dict[str, Any], name: str) -> str:
    """A notebook as a page of the site: text, code, and what it shows as HTML where there is HTML."""
    parts = [_joined(cell) if cell["cell_type"] == "markdown" else _code(cell) for cell in notebook["cells"]]
    parts.append(f'<p><a href="../{html.escape(name)}" download>Download this notebook</a></p>')
    return "\n\n".join(part for part in parts if part) + "\n"


def _code(cell: dict[str, Any]) -> str:
    return "\n\n".join([_fenced(_joined(cell), "python"), *map(_shown, cell["outputs"])])


def _shown(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return _fenced("".join(output["text"]), "text")
    if "text/html" in output["data"]:
        shown = re.sub(r"\s*\n\s*", " ", "".join(output["data"]["text/html"]))  # an empty line would end the block
        return f'<div class="shown">{shown}</div>'
    return _fenced("".join(output["data"]["text/plain"]), "text")


def _fenced(text: str, kind: str) -> str:
    fence = "```" + "`" * max((len(found) - 2 for found in re.findall("`{3,}", text)), default=0)
    return f"{fence}{kind}\n{text.rstrip()}\n{fence}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run"])
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, help="the directory to write to; default: each in its place")
    arguments = parser.parse_args()
    for path in arguments.notebooks:
        notebook = run(json.loads(path.read_text("utf-8")))
        target = path if arguments.into is None else arguments.into / path.name
        target.write_text(text_of(notebook), "utf-8")


if __name__ == "__main__":
    main()
