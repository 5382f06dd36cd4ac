"""Dashboards of epikvd for Grafana: written as JSON, asked of a Prometheus, and drawn without Grafana."""
