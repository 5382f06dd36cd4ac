"""`epikv export`: a Hugging Face directory becomes one TorchScript file that the daemon serves; with
`save`, so does a module of one's own."""

from epikv.export.errors import ExportError
from epikv.export.exporter import export, load, save
from epikv.export.manifest import Layer, Manifest, Rope
from epikv.export.synthetic import random_model

__all__ = [
    "ExportError",
    "Layer",
    "Manifest",
    "Rope",
    "export",
    "load",
    "random_model",
    "save",
]
