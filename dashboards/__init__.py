"""Grafana boards for the metrics, written as code so that they are consistent and can be tested."""
