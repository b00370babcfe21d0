"""Load whatever kind of model folder it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headrace_common.errors import InvalidRequest
from headrace_worker.model.damage import refusing_damage
from headrace_worker.model.hf_folder import load_hf_folder
from headrace_worker.model.prepared_folder import is_complete, load_prepared_folder
from headrace_worker.model.weights import LoadedModel
from headrace_worker.sampling_defaults import SamplingDefaults


def load_model(folder: Path) -> LoadedModel:
    """Load a prepared folder or a Hugging Face folder.

    Raises:
        InvalidRequest: it is neither, or damaged, or the model is of a kind that this engine does
            not compute.
    """
    loads = load_prepared_folder if is_complete(folder) else load_hf_folder
    if loads is load_hf_folder and not (folder / "config.json").is_file():
        raise InvalidRequest(
            f"{folder} is neither a prepared nor a Hugging Face model folder; "
            "make one with: python -m headrace_worker.prepare FILE.gguf FOLDER"
        )
    with refusing_damage(folder, "model folder"):
        loaded = loads(folder)
        defaults = SamplingDefaults.of_folder(folder).over(loaded.info.sampling_defaults)
    return replace(loaded, info=replace(loaded.info, sampling_defaults=defaults))
