"""Configurations: from a preset, a file and settings to one checked :class:`Config`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.config import readers, schema
from shoal.config.presets import PRESETS
from shoal.config.schema import Cluster, Config, Timeouts
from shoal.errors import ConfigError, Mistake

__all__ = ["PRESETS", "Cluster", "Config", "Timeouts", "load"]


def load(source: str, overrides: Sequence[str] = ()) -> Config:
    """Reads and checks a configuration.

    Args:
        source: the name of a preset, or the path of a file in protobuf text (.conf, .prototxt,
            .pbtxt), YAML (.yaml, .yml) or TOML (.toml).
        overrides: settings such as ``cluster.nworker_groups=3``, applied in order.

    Raises:
        ConfigError: carries every mistake, each with its place.
    """
    document = _document(source)
    readers.override(document, overrides)
    checked = schema.mistakes(document.values, document.place, whole=not document.mistakes)
    if document.mistakes or checked:
        raise ConfigError([*document.mistakes, *checked])
    return Config.model_validate(document.values)


def _document(source: str) -> readers.Document:
    if source in PRESETS:
        return readers.read(source, ".conf", PRESETS[source])
    path, document = Path(source), readers.Document(source)
    try:
        return readers.read(source, path.suffix, path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        document.wrong(source, f"byte {error.start} is not UTF-8", "must be a text file")
    except (OSError, ValueError) as error:
        what = (getattr(error, "strerror", None) or str(error)).lower()
        expected = f"must be a file or one of the presets {', '.join(PRESETS)}"
        document.mistakes.append(Mistake(source, what, expected, schema.close(source.lower(), PRESETS)))
    return document
