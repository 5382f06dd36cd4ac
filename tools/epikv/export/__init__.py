"""`epikv export`: a Llama-family directory becomes one TorchScript file that the daemon serves."""

from epikv.export.errors import ExportError
from epikv.export.exporter import export, load
from epikv.export.synthetic import random_model

__all__ = ["ExportError", "export", "load", "random_model"]
