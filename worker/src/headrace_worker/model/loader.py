"""Load whatever kind of model folder it is."""

from __future__ import annotations

from pathlib import Path

from headrace_common.errors import InvalidRequest
from headrace_worker.model.hf_folder import load_hf_folder
from headrace_worker.model.prepared_folder import is_complete, load_prepared_folder
from headrace_worker.model.weights import LoadedModel


def load_model(folder: Path) -> LoadedModel:
    """Load a prepared folder or a Hugging Face folder.

    Raises:
        InvalidRequest: it is neither, or the model is of a kind that this engine does not compute.
    """
    if is_complete(folder):
        return load_prepared_folder(folder)
    if (folder / "config.json").is_file():
        return load_hf_folder(folder)
    raise InvalidRequest(
        f"{folder} is neither a prepared nor a Hugging Face model folder; "
        "make one with: python -m headrace_worker.prepare FILE.gguf FOLDER"
    )
