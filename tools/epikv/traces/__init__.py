"""Spans of OpenTelemetry from the daemon's access log: see `epikv traces`."""
