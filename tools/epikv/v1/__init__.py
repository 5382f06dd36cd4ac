"""The wire contract, generated from proto/epikv/v1 when the package is installed."""
